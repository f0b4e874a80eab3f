"""The real server of these tests keeps to itself."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from rag_pipeline_tests.contract.milvus_server import MilvusServer

pytestmark = pytest.mark.milvus_server


def test_nothing_but_one_loopback_port_is_reachable_from_outside(milvus_server: MilvusServer) -> None:
    (server,) = psutil.Process(milvus_server.pid).children()
    assert Path(f"/proc/{server.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    ours = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {c.laddr.ip for c in ours if c.laddr.port == milvus_server.port} == {"127.0.0.1"}
    assert {c.laddr.port for c in ours if c.pid in (milvus_server.pid, server.pid)} == {milvus_server.port}


@pytest.mark.fault
def test_it_ends_with_its_keeper_and_comes_back(milvus_server: MilvusServer) -> None:
    (server,) = psutil.Process(milvus_server.pid).children()
    os.kill(milvus_server.pid, signal.SIGKILL)
    server.wait(10)
    milvus_server.kill()
    milvus_server.start()
