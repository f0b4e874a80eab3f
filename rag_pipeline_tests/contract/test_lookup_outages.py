"""Lookups while the store dies, freezes, restarts or changes: a typed answer in time, then recovery by itself."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rag_pipeline import reindex
from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.results import LookupResult
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.contract.conftest import Backend

pytestmark = [pytest.mark.fault, pytest.mark.slow]

LIMIT_S = 3.0
RECOVERY_S = 200.0
QUERY = "Exit code 137."


@pytest.fixture(params=["auto", "sdk", "langchain"])
def flags(flags: dict[str, object], request: pytest.FixtureRequest) -> dict[str, object]:
    return {
        **flags,
        "retrieval__vector_store__mode": request.param,
        "retrieval__timeout_s": LIMIT_S,
        "retrieval__milvus__timeout_s": LIMIT_S,
        "retrieval__normalization__reference_threshold": 0.0,  # the tiny model's distances mean nothing
        "retrieval__session__timeout_ms": 5000,
    }


@pytest.fixture
def lookup(ws: Workspace) -> Iterator[KnowledgeLookup]:
    reindex.reindex(ws)
    with KnowledgeLookup(ws.settings) as opened:
        yield opened


def asked(lookup: KnowledgeLookup) -> tuple[LookupResult, float]:
    started = time.monotonic()
    result = lookup.lookup(QUERY)
    return result, time.monotonic() - started


def sources(result: LookupResult) -> list[str]:
    return [block.source for block in result.evidence_blocks]


def until_found(lookup: KnowledgeLookup) -> tuple[LookupResult, list[tuple[LookupResult, float]]]:
    """The first answer with evidence, and those before it with how long each took."""
    began, before = time.monotonic(), []
    while time.monotonic() - began < RECOVERY_S:
        result, seconds = asked(lookup)
        if result.found:
            return result, before
        before.append((result, seconds))
        time.sleep(0.2)
    raise AssertionError(f"no evidence within {RECOVERY_S} s: {before[-1]}")


def assert_degraded(result: LookupResult, seconds: float) -> None:
    assert (result.evidence_status, result.found, result.evidence_blocks) == ("retrieval_unavailable", False, ())
    assert "unavailable just now" in result.message
    assert result.retrieval_trace["unavailable"]
    assert seconds < LIMIT_S + 1.5


def test_a_killed_store_degrades_in_time_and_the_same_process_recovers(
    lookup: KnowledgeLookup, backend: Backend
) -> None:
    first, _ = until_found(lookup)
    backend.kill()
    if backend.uri:  # Milvus Lite is started anew by the lookup itself
        for _ in range(3):
            assert_degraded(*asked(lookup))
    backend.start()
    again, before = until_found(lookup)
    assert sources(again) == sources(first)
    for result, seconds in before:
        assert_degraded(result, seconds)
    assert_recorded(lookup, before)


def test_a_frozen_store_degrades_in_time_and_the_same_process_recovers(
    lookup: KnowledgeLookup, backend: Backend
) -> None:
    first, _ = until_found(lookup)
    backend.freeze()
    frozen = []
    try:
        for _ in range(4):
            frozen.append(asked(lookup))
            assert_degraded(*frozen[-1])
            time.sleep(0.3)  # beyond the second that a resolved alias is used for
    finally:
        backend.thaw()
    again, before = until_found(lookup)
    assert sources(again) == sources(first)
    for result, seconds in before:
        assert_degraded(result, seconds)
    assert_recorded(lookup, frozen)


def assert_recorded(lookup: KnowledgeLookup, degraded: list[tuple[LookupResult, float]]) -> None:
    assert lookup.flush(60.0)
    database = Database(lookup.settings.database, state=lookup.settings.state)
    store = InvocationStore(database)
    for result, _ in degraded:
        row = store.get(result.invocation_id)
        assert row is not None
        assert (row.success, row.evidence_status) == (False, "retrieval_unavailable")
    database.close()


@pytest.mark.parametrize("backend", ["lite"], indirect=True)
def test_a_dropped_collection_or_alias_is_unavailable_never_no_evidence(lookup: KnowledgeLookup, ws: Workspace) -> None:
    until_found(lookup)
    manifest = ws.versions.promoted()
    assert manifest is not None
    ws.store._call("drop_alias", ws.settings.index.alias)
    ws.store.drop(manifest.collection)
    for _ in range(2):
        result, seconds = asked(lookup)
        assert_degraded(result, seconds)
        time.sleep(1.1)
    assert "reindex needed" in result.message
    assert reindex.reindex(ws).result == "promoted"
    assert until_found(lookup)[0].found


@pytest.mark.parametrize("backend", ["lite"], indirect=True)
def test_a_collection_of_another_dimension_is_unavailable(
    lookup: KnowledgeLookup, ws: Workspace, open_workspace: Callable[..., Workspace], tmp_path: Path
) -> None:
    until_found(lookup)
    manifest = ws.versions.promoted()
    assert manifest is not None
    other = f"{manifest.collection[:-12]}{'0' * 12}"
    ws.store.create(other, dimension=8, index_type="FLAT")
    ws.store.seal(other)
    ws.store.set_manifest_json(other, manifest.model_copy(update={"collection": other}).to_json())
    ws.store.point_alias(ws.settings.index.alias, other)
    time.sleep(1.1)
    assert_degraded(*asked(lookup))
    ws.store.point_alias(ws.settings.index.alias, manifest.collection)
    time.sleep(1.1)
    assert until_found(lookup)[0].found
