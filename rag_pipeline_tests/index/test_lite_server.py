"""One Milvus Lite for many processes: start, share, crash, races, stale addresses, idling."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from rag_pipeline.errors import RefusedError, StoreUnavailableError
from rag_pipeline.index import lite_server
from rag_pipeline.index.milvus import MilvusStore
from rag_pipeline.setting_groups import MilvusSettings

Stop = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path, stop_lite: Stop) -> Path:
    stop_lite(tmp_path / "milvus")
    return tmp_path / "milvus"


def store_in(folder: Path, **settings: float) -> MilvusStore:
    return MilvusStore(MilvusSettings(lite_idle_s=settings.pop("lite_idle_s", 60.0), **settings), lite_folder=folder)


def fill(store: MilvusStore, rows: int = 4) -> None:
    store.create("knowledge__1", dimension=4, index_type="FLAT")
    vectors = np.eye(4, dtype=np.float32)
    store.upsert(
        "knowledge__1",
        [
            {"id": f"{n}", "content": "text", "vector": vectors[n].tolist(), "category": "", "metadata": {}}
            for n in range(rows)
        ],
    )
    store.seal("knowledge__1")


def nearest(store: MilvusStore) -> str:
    return store.search("knowledge__1", np.eye(4, dtype=np.float32)[2], limit=1)[0].id


OTHER_PROCESS = """
import sys
from pathlib import Path
import numpy as np
from rag_pipeline.index.milvus import MilvusStore
from rag_pipeline.setting_groups import MilvusSettings
store = MilvusStore(MilvusSettings(lite_idle_s=60), lite_folder=Path(sys.argv[1]))
print(store.search("knowledge__1", np.eye(4, dtype=np.float32)[2], limit=1)[0].id)
"""


def test_two_processes_use_one_store_at_once(folder: Path) -> None:
    store = store_in(folder)
    fill(store)
    other = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(folder)], capture_output=True, text=True, check=False
    )
    assert (other.stdout.strip(), other.returncode) == ("2", 0), other.stderr
    assert nearest(store) == "2"


def test_nothing_listens_on_the_network_and_only_the_owner_reaches_the_socket(folder: Path) -> None:
    server = lite_server.attach(folder, idle_s=60)
    assert psutil.Process(server.pid).net_connections(kind="inet") == []
    assert stat.S_IMODE(Path(server.socket).parent.stat().st_mode) == 0o700


def test_processes_that_race_to_start_it_get_the_same_server(folder: Path) -> None:
    script = "import sys; from pathlib import Path; from rag_pipeline.index import lite_server\n"
    script += "print(lite_server.attach(Path(sys.argv[1]), idle_s=60).pid)"
    racers = [
        subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    pids = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert len(pids) == 1
    assert int(pids.pop()) == lite_server.running(folder).pid


def test_a_search_survives_the_death_of_the_server(folder: Path) -> None:
    store = store_in(folder)
    fill(store)
    first = lite_server.running(folder)
    os.kill(first.pid, signal.SIGKILL)
    assert nearest(store) == "2"
    assert lite_server.running(folder).pid != first.pid
    assert store.count("knowledge__1") == 4


def test_searches_in_flight_while_the_server_dies_get_right_answers(folder: Path) -> None:
    store = store_in(folder)
    fill(store)

    def many(_: int) -> set[str]:
        return {nearest(store) for _ in range(60)}

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(many, number) for number in range(4)]
        time.sleep(0.3)
        os.kill(lite_server.running(folder).pid, signal.SIGKILL)
        assert [answer.result(timeout=60) for answer in answers] == [{"2"}] * 4


@pytest.mark.parametrize(
    "address",
    [
        pytest.param(lambda: {"pid": 2**22 - 3, "created": 1.0, "socket": "/nowhere.sock"}, id="dead pid"),
        pytest.param(lambda: {"pid": os.getpid(), "created": 1.0, "socket": "/nowhere.sock"}, id="reused pid"),
        pytest.param(
            lambda: {"pid": os.getpid(), "created": psutil.Process().create_time(), "socket": "/nowhere.sock"},
            id="living process without socket",
        ),
        pytest.param(lambda: {"pid": "x"}, id="broken"),
        pytest.param(lambda: {"pid": -5, "created": 1.0, "socket": "x"}, id="no pid"),
        pytest.param(lambda: {"pid": os.getpid(), "created": None, "socket": "x"}, id="no time"),
    ],
)
def test_a_stale_address_leads_to_a_new_server(folder: Path, address: Callable[[], dict[str, object]]) -> None:
    folder.mkdir()
    (folder / "server.json").write_text(json.dumps(address()))
    store = store_in(folder)
    fill(store)
    assert nearest(store) == "2"


def test_a_frozen_server_gives_a_typed_error_within_the_limit_and_recovers(folder: Path) -> None:
    store = store_in(folder, timeout_s=1.0)
    fill(store)
    pid = lite_server.running(folder).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=r"does not answer.*DEADLINE_EXCEEDED"):
            nearest(store)
        assert time.monotonic() - began < 10
    finally:
        os.kill(pid, signal.SIGCONT)
    assert nearest(store) == "2"


def test_down_ends_even_a_frozen_server(folder: Path) -> None:
    fill(store_in(folder))
    pid = lite_server.running(folder).pid
    os.kill(pid, signal.SIGSTOP)
    assert lite_server.stop(folder, limit_s=1.0).pid == pid
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert nearest(store_in(folder)) == "2"


HOLD_DIRECTLY = """
import sys, time
from milvus_lite.db import MilvusLite
held = MilvusLite(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_a_process_that_holds_the_data_itself_is_named(folder: Path) -> None:
    folder.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_DIRECTLY, str(folder / "lite.db")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RefusedError, match=f"Process {holder.pid} holds"):
            store_in(folder).check()
    finally:
        holder.kill()
        holder.wait()
    assert "milvus_lite" in store_in(folder).check()


def test_it_ends_after_its_last_user_and_not_before(folder: Path) -> None:
    script = "import sys; from pathlib import Path; from rag_pipeline.index import lite_server\n"
    script += "print(lite_server.attach(Path(sys.argv[1]), idle_s=1).pid, flush=True); sys.stdin.read()"
    user = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid = int(user.stdout.readline())
    socket = Path(lite_server.running(folder).socket)
    time.sleep(3)
    assert lite_server.running(folder).pid == pid
    user.kill()
    user.communicate()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)
    assert not (folder / "server.json").exists()
    assert not socket.exists()


def test_a_deep_state_folder_is_no_obstacle(tmp_path: Path, stop_lite: Stop) -> None:
    folder = tmp_path / ("deep" * 20) / ("deeper" * 10) / "milvus"
    stop_lite(folder)
    fill(store_in(folder))
    assert nearest(store_in(folder)) == "2"
