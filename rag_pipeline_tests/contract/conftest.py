"""The stores under contract: Milvus Lite by the project's shared server, and a real Milvus server."""

import contextlib
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from rag_pipeline.errors import UnavailableError
from rag_pipeline.index import lite_server
from rag_pipeline.index.milvus import MilvusStore
from rag_pipeline.setting_groups import MilvusSettings
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.conftest import PROJECT
from rag_pipeline_tests.contract.milvus_server import CannotStartError, MilvusServer

STORES = ["lite", pytest.param("server", marks=pytest.mark.milvus_server)]


class Backend(Protocol):
    """What a fault test does to a store's process."""

    @property
    def uri(self) -> str: ...

    def kill(self) -> None: ...

    def start(self) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...


class LiteBackend:
    """Milvus Lite's shared server; whoever needs it starts it, so `start` has nothing to do."""

    uri = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._frozen = 0

    def kill(self) -> None:
        os.kill(lite_server.running(self._folder).pid, signal.SIGKILL)

    def start(self) -> None:
        pass

    def freeze(self) -> None:
        self._frozen = lite_server.running(self._folder).pid
        os.kill(self._frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._frozen, signal.SIGCONT)


@dataclass
class ServerBackend:
    """The real server; started again on the same data, without waiting until it is healthy."""

    server: MilvusServer

    @property
    def uri(self) -> str:
        return self.server.uri

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start(wait=False)

    def freeze(self) -> None:
        self.server.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.server.signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def milvus_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    data = tmp_path_factory.mktemp("milvus-server")
    server = MilvusServer(PROJECT / ".rag" / "tools" / "milvus-server", data)
    try:
        server.start()
    except CannotStartError as error:
        pytest.skip(f"no real Milvus server: {error}")
    yield server
    server.kill()
    shutil.rmtree(data, ignore_errors=True)


@pytest.fixture(scope="session", params=STORES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusStore]:
    folder = tmp_path_factory.mktemp("contract")
    uri = "" if request.param == "lite" else request.getfixturevalue("milvus_server").uri
    opened = MilvusStore(MilvusSettings(uri=uri, lite_idle_s=60), lite_folder=folder)
    yield opened
    opened.close()
    lite_server.stop(folder)


@pytest.fixture
def collection(store: MilvusStore) -> Iterator[str]:
    """An empty collection of dimension 4, dropped at the end."""
    name = f"c_{uuid.uuid4().hex}"
    store.create(name, dimension=4, index_type="FLAT", manifest='{"名": "值"}')
    yield name
    if store.exists(name) and not store.aliases(name):
        store.drop(name)


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "lite":
        return LiteBackend(tmp_path / "state" / "milvus")
    return ServerBackend(request.getfixturevalue("milvus_server"))


@pytest.fixture
def flags(backend: Backend) -> dict[str, object]:
    """Settings of a workspace on the backend, under an alias of this test's own."""
    return {"retrieval__milvus__uri": backend.uri, "index__alias": f"kb_{uuid.uuid4().hex[:12]}"}


@pytest.fixture
def ws(
    flags: dict[str, object], open_workspace: Callable[..., Workspace], request: pytest.FixtureRequest
) -> Iterator[Workspace]:
    workspace = open_workspace(**flags)
    yield workspace
    if not workspace.store.is_lite:  # the state folder of Lite goes with the test
        with contextlib.suppress(UnavailableError):
            alias = workspace.settings.index.alias
            workspace.store._call("drop_alias", alias)
            for name in workspace.store.collections():
                if name.startswith(alias):
                    workspace.store.drop(name)
    workspace.store.close()
