"""The store's connection without a real store: limits, types of failures, threads, settings.

What the stores themselves do is in `rag_pipeline_tests/contract`.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from pymilvus.exceptions import MilvusException

from rag_pipeline.errors import ConfigurationError, StoreUnavailableError
from rag_pipeline.index.milvus import MilvusStore, literal
from rag_pipeline.index.milvus_connection import StoreCallError
from rag_pipeline.setting_groups import MilvusSettings

VECTOR = np.array([1, 0, 0, 0], np.float32)


class RpcFailure(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "details"


class FakeClients:
    """Stands in for `pymilvus.MilvusClient`: clients that give the outcomes listed, one a call.

    Attributes:
        made: Keyword arguments of each client made.
        open: How many clients were made and not closed.
        calls: Verb, first argument and time limit of each call.
    """

    def __init__(self, *outcomes: object, takes_s: float = 0.0) -> None:
        self.outcomes = list(outcomes)
        self.takes_s = takes_s
        self.made: list[dict[str, object]] = []
        self.open = 0
        self.calls: list[tuple[str, object, float]] = []

    def __call__(self, **options: object) -> Any:
        self.made.append(options)
        self.open += 1
        return _FakeClient(self)


class _FakeClient:
    def __init__(self, all_clients: FakeClients) -> None:
        self._all = all_clients

    def close(self) -> None:
        self._all.open -= 1

    def __getattr__(self, verb: str) -> Callable[..., object]:
        def call(*arguments: object, timeout: float, **_: object) -> object:
            self._all.calls.append((verb, arguments[0] if arguments else None, timeout))
            time.sleep(self._all.takes_s)
            outcome = self._all.outcomes.pop(0) if self._all.outcomes else "2.0"
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return call


@pytest.fixture
def store_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., MilvusStore]:
    def build(clients: FakeClients, **settings: object) -> MilvusStore:
        monkeypatch.setattr("pymilvus.MilvusClient", clients)
        values = {"uri": "http://milvus:19530", "timeout_s": 1.0, **settings}
        return MilvusStore(MilvusSettings.model_validate(values), lite_folder=tmp_path / "unused")

    return build


@pytest.fixture
def silent_uri() -> Iterator[str]:
    """A port that takes connections and never says a word, like a frozen server's."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_literals_keep_chinese_as_it_is() -> None:
    assert literal('数据"库\\') == '"数据\\"库\\\\"'


def test_a_closed_port_is_a_typed_error(tmp_path: Path) -> None:
    away = MilvusStore(MilvusSettings(uri="http://127.0.0.1:9", timeout_s=2), lite_folder=tmp_path)
    with pytest.raises(StoreUnavailableError, match=r"Milvus at http://127\.0\.0\.1:9 does not answer"):
        away.check()


def test_opening_a_store_touches_nothing(tmp_path: Path) -> None:
    MilvusStore(MilvusSettings(), lite_folder=tmp_path / "unused")
    assert not (tmp_path / "unused").exists()


def test_a_server_that_is_frozen_when_asked_first_costs_one_limit_however_many_ask(
    tmp_path: Path, silent_uri: str
) -> None:
    store = MilvusStore(MilvusSettings(uri=silent_uri, timeout_s=1), lite_folder=tmp_path)

    def ask(_: int) -> float:
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError, match="does not answer"):
            store.search("any", VECTOR, limit=1)
        return time.monotonic() - began

    ask(0)  # imports pymilvus
    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(ask, range(8))) < 2.5


@pytest.mark.parametrize(
    "setting",
    [
        {"uri": "nonsense"},
        {"uri": "https://localhost:1", "server_pem_path": "/no/such/file.pem"},
    ],
)
def test_a_wrong_uri_or_certificate_is_a_configuration_error(tmp_path: Path, setting: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"retrieval\.milvus"):
        MilvusStore(MilvusSettings(**setting), lite_folder=tmp_path).check()


def test_token_database_and_tls_reach_the_client(store_of: Callable[..., MilvusStore]) -> None:
    clients = FakeClients()
    given = {
        "token": "root:Milvus",
        "secure": True,
        "server_pem_path": "server.pem",
        "ca_pem_path": "ca.pem",
        "client_pem_path": "client.pem",
        "client_key_path": "client.key",
    }
    store_of(clients, database="runbooks", **given).check()
    own = {"uri": "http://milvus:19530", "timeout": 1.0, "dedicated": True, "db_name": "runbooks"}
    assert clients.made == [{**own, **given}]


def test_settings_that_are_blank_are_not_handed_on(store_of: Callable[..., MilvusStore]) -> None:
    clients = FakeClients()
    store_of(clients).check()
    assert clients.made == [{"uri": "http://milvus:19530", "timeout": 1.0, "dedicated": True}]


LOST = [
    RpcFailure(grpc.StatusCode.UNAVAILABLE),
    RpcFailure(grpc.StatusCode.CANCELLED),
    ValueError("Cannot invoke RPC on closed channel!"),
    ValueError("Cannot invoke RPC: Channel closed!"),
    MilvusException(message="Unexpected error, message=<Cannot invoke RPC: Channel closed!>"),
    MilvusException(2, "Fail connecting to server on host:1, illegal connection params or server unavailable"),
    MilvusException(grpc.StatusCode.INTERNAL, "[search] Retry timeout: 5s, StatusCode.INTERNAL"),
]


@pytest.mark.parametrize("failure", LOST, ids=str)
def test_a_lost_connection_is_made_anew_and_none_stays_open(
    store_of: Callable[..., MilvusStore], failure: Exception
) -> None:
    clients = FakeClients(failure, "2.6.1")
    store = store_of(clients)
    assert store.check() == "2.6.1"
    assert (len(clients.made), clients.open) == (2, 1)
    store.close()
    assert clients.open == 0


@pytest.mark.parametrize(
    ("failure", "kind", "calls"),
    [
        (RpcFailure(grpc.StatusCode.DEADLINE_EXCEEDED), StoreUnavailableError, 1),
        (RpcFailure(grpc.StatusCode.UNAUTHENTICATED), StoreUnavailableError, 1),
        (RpcFailure(grpc.StatusCode.UNAVAILABLE), StoreUnavailableError, 3),
        (RpcFailure(grpc.StatusCode.RESOURCE_EXHAUSTED), StoreCallError, 1),
        (MilvusException(503, "channel not available"), StoreUnavailableError, 3),
        (MilvusException(1, "service not ready"), StoreUnavailableError, 3),
        (MilvusException(1, "wait for loading collection timeout, collection: c"), StoreUnavailableError, 1),
        (MilvusException(100, "collection not found"), StoreCallError, 1),
        (MilvusException(100, "collection 'c' does not exist"), StoreCallError, 1),
        (MilvusException(65535, "alias service is on fire"), StoreCallError, 1),
    ],
    ids=str,
)
def test_no_failure_is_taken_for_a_missing_alias(
    store_of: Callable[..., MilvusStore], failure: Exception, kind: type[Exception], calls: int
) -> None:
    clients = FakeClients(*[failure] * 3)
    with pytest.raises(kind):
        store_of(clients).alias_target("knowledge")
    assert len(clients.calls) == calls


@pytest.mark.parametrize(
    "failure",
    [
        MilvusException(1600, "alias not found[database=default][alias=knowledge]"),
        MilvusException(100, "alias 'knowledge' does not exist"),
    ],
)
def test_a_missing_alias_is_none_and_is_created_when_pointed(
    store_of: Callable[..., MilvusStore], failure: Exception
) -> None:
    assert store_of(FakeClients(failure)).alias_target("knowledge") is None
    clients = FakeClients(failure)
    store_of(clients).point_alias("knowledge", "c")
    assert [verb for verb, _, _ in clients.calls] == ["alter_alias", "create_alias"]


@pytest.mark.parametrize("failure", [MilvusException(101, "collection not loaded"), MilvusException(101, "x")])
def test_a_collection_that_is_not_loaded_is_loaded_within_the_same_limit(
    store_of: Callable[..., MilvusStore], failure: Exception
) -> None:
    clients = FakeClients(failure, None, [[]])
    assert store_of(clients).search("c", VECTOR, limit=1) == []
    assert [(verb, name) for verb, name, _ in clients.calls] == [
        ("search", "c"), ("load_collection", "c"), ("search", "c"),
    ]  # fmt: skip
    assert max(limit for _, _, limit in clients.calls) <= 1.0
    slow = FakeClients(failure, MilvusException(1, "wait for loading collection timeout, collection: c"))
    with pytest.raises(StoreUnavailableError, match=f"search: {failure.message}"):
        store_of(slow).search("c", VECTOR, limit=1)
    broken = FakeClients(failure, MilvusException(700, "index not found"))
    with pytest.raises(StoreCallError, match="refuses load_collection: index not found"):
        store_of(broken).search("c", VECTOR, limit=1)


def test_tries_after_a_loss_share_one_limit(store_of: Callable[..., MilvusStore]) -> None:
    clients = FakeClients(*[RpcFailure(grpc.StatusCode.UNAVAILABLE)] * 3, takes_s=0.4)
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="UNAVAILABLE"):
        store_of(clients).search("c", VECTOR, limit=1, limit_s=0.7)
    assert time.monotonic() - began < 1.1
    assert [round(limit, 1) for _, _, limit in clients.calls] == [0.7, 0.3]


def test_a_page_that_fails_half_way_is_a_typed_error(store_of: Callable[..., MilvusStore]) -> None:
    class Pages:
        closed = 0

        def __init__(self, *pages: object) -> None:
            self._pages = list(pages)

        def next(self) -> object:
            page = self._pages.pop(0)
            if isinstance(page, Exception):
                raise page
            return page

        def close(self) -> None:
            Pages.closed += 1

    found: list[str] = []
    lost = store_of(FakeClients(Pages([{"id": "a"}], RpcFailure(grpc.StatusCode.UNAVAILABLE))))
    with pytest.raises(StoreUnavailableError, match="query_iterator: UNAVAILABLE"):
        found.extend(lost.ids("c"))
    with pytest.raises(StoreCallError, match="collection not found"):
        store_of(FakeClients(Pages(MilvusException(100, "collection not found")))).rows("c")
    assert (found, Pages.closed) == (["a"], 2)


def test_threads_that_lose_one_connection_make_one_new_one(store_of: Callable[..., MilvusStore]) -> None:
    clients = FakeClients(*[RpcFailure(grpc.StatusCode.UNAVAILABLE)] * 8, takes_s=0.05)
    store = store_of(clients)
    store._connection._connected()
    together = threading.Barrier(8)

    def ask(_: int) -> str:
        together.wait()
        return store.check()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {"2.0"}
    assert (len(clients.made), clients.open) == (2, 1)
