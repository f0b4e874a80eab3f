"""A store that dies, freezes or comes back under its readers: typed errors in time, then recovery by itself."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pymilvus.client.connection_manager import ConnectionManager

from rag_pipeline import reindex, release
from rag_pipeline.errors import StoreUnavailableError
from rag_pipeline.index.milvus import MilvusStore
from rag_pipeline.retrieval.vector_search import VectorSearch
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.conftest import write
from rag_pipeline_tests.contract.conftest import Backend

pytestmark = [pytest.mark.fault, pytest.mark.slow]

LIMIT_S = 2.0
# After kill -9 the real server takes 35 s on an idle machine until its collections are loaded again.
RECOVERY_S = 200.0
QUERY = "Exit code 137."


@pytest.fixture
def flags(flags: dict[str, object]) -> dict[str, object]:
    return {**flags, "retrieval__milvus__timeout_s": LIMIT_S}


def ids(search: VectorSearch) -> list[str]:
    return [hit.id for hit in search.nearest(QUERY, top_k=20)]


def until_it_answers(search: VectorSearch) -> tuple[list[str], list[float]]:
    """The first answer, and how long each search before it took to fail with the typed error."""
    began, failures = time.monotonic(), []
    while time.monotonic() - began < RECOVERY_S:
        asked = time.monotonic()
        try:
            return ids(search), failures
        except StoreUnavailableError:
            failures.append(time.monotonic() - asked)
            time.sleep(0.2)
    raise AssertionError(f"no answer within {RECOVERY_S} s")


def test_a_reader_outlives_a_killed_store(ws: Workspace, backend: Backend) -> None:
    reindex.reindex(ws)
    search = VectorSearch(ws, mode="sdk")
    before = ids(search)
    assert before
    backend.kill()
    if backend.uri:  # Milvus Lite is started anew by the search itself
        for _ in range(3):
            asked = time.monotonic()
            with pytest.raises(StoreUnavailableError, match="does not answer"):
                ids(search)
            assert time.monotonic() - asked < LIMIT_S + 1
    backend.start()
    answer, failures = until_it_answers(search)
    assert answer == before
    assert max(failures, default=0.0) < 2 * LIMIT_S + 1
    manifest = ws.versions.promoted()
    assert ws.store.count(manifest.collection) == manifest.chunks
    assert reindex.reindex(ws).result == "unchanged"


def test_a_frozen_store_is_a_typed_error_in_time_and_the_reader_recovers(ws: Workspace, backend: Backend) -> None:
    reindex.reindex(ws)
    search = VectorSearch(ws, mode="sdk")
    before = ids(search)
    newcomer = MilvusStore(ws.settings.retrieval.milvus, lite_folder=ws.lite_folder)
    backend.freeze()
    try:
        for ask in (lambda: ids(search), lambda: ids(search), newcomer.check):
            asked = time.monotonic()
            with pytest.raises(StoreUnavailableError, match="does not answer"):
                ask()
            assert time.monotonic() - asked < LIMIT_S + 1
    finally:
        backend.thaw()
    answer, failures = until_it_answers(search)
    assert answer == before
    assert max(failures, default=0.0) < 2 * LIMIT_S + 1
    assert newcomer.check()
    newcomer.close()


def test_eight_threads_through_a_kill_get_right_answers_or_the_typed_error(ws: Workspace, backend: Backend) -> None:
    reindex.reindex(ws)
    search = VectorSearch(ws, mode="sdk")
    before = ids(search)
    open_before = ConnectionManager.get_instance().get_stats()["dedicated_connections"]
    ended = time.monotonic() + 12

    def read(_: int) -> tuple[int, int, list[list[str]]]:
        right, typed, wrong = 0, 0, []
        while time.monotonic() < ended or not right:
            try:
                answer = ids(search)
            except StoreUnavailableError:
                typed += 1
                time.sleep(0.05)
                continue
            right += answer == before
            wrong += [answer] if answer != before else []
        return right, typed, wrong

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read, number) for number in range(8)]
        for _ in range(2):
            time.sleep(2)
            backend.kill()
            time.sleep(0.5)
            backend.start()
        results = [reader.result(timeout=RECOVERY_S) for reader in readers]
    assert [wrong for *_, wrong in results] == [[]] * 8
    assert min(right for right, *_ in results) > 0
    assert until_it_answers(search)[0] == before
    assert ConnectionManager.get_instance().get_stats()["dedicated_connections"] == open_before


def test_a_listing_that_the_store_dies_under_is_a_typed_error(ws: Workspace, backend: Backend) -> None:
    reindex.reindex(ws)
    manifest = ws.versions.promoted()
    pages = ws.store._pages(manifest.collection, ["id"], rows=2)
    next(pages)
    backend.kill()
    with pytest.raises(StoreUnavailableError, match="query_iterator"):
        list(pages)
    backend.start()
    until_it_answers(VectorSearch(ws, mode="sdk"))
    assert len(set(ws.store.ids(manifest.collection))) == manifest.chunks


@pytest.mark.parametrize("backend", ["lite"], indirect=True)
def test_a_manifest_that_cannot_be_fetched_is_never_taken_for_a_missing_version(
    ws: Workspace, knowledge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a rollback would go one version too far, and a reindex would forget its parent and its guards."""
    names = []
    for number in range(3):
        write(knowledge / "cache/new.md", f"# New {number}\n")
        names.append(reindex.reindex(ws).manifest.collection)
    call = ws.store._call

    def failing(verb: str, *arguments: object, **options: object) -> object:
        if verb == "describe_collection" and arguments[0] == away:
            raise StoreUnavailableError("gone for a moment")
        return call(verb, *arguments, **options)

    monkeypatch.setattr(ws.store, "_call", failing)
    for away in (names[1], names[2]):
        with pytest.raises(StoreUnavailableError, match="gone for a moment"):
            release.rollback(ws)
        with pytest.raises(StoreUnavailableError, match="gone for a moment"):
            ws.versions._move_alias(ws.versions.read(names[0])) if away == names[2] else release.prune(ws)
    with pytest.raises(StoreUnavailableError, match="gone for a moment"):
        reindex.reindex(ws)
    assert ws.store.alias_target(ws.settings.index.alias) == names[2]
