"""Lookups while versions change under them: no error, nothing lost, each record names the version that served it."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_pipeline import reindex
from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.results import LookupResult
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.conftest import write
from rag_pipeline_tests.retrieval.small_base import DOCUMENTS, indexed

pytestmark = [pytest.mark.slow, pytest.mark.fault]

THREADS, EACH = 8, 500
QUERY = "When maxclients is reached, close idle sockets of the checkout pool"


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("word_ranking")
def test_eight_threads_look_up_through_promotions_and_all_is_recorded_once(word_model: Path) -> None:
    with indexed(DOCUMENTS, model=word_model, index__grace_s=30.0) as settings:
        ws = Workspace(settings())
        versions = [ws.versions.promoted()]
        results: list[LookupResult] = []
        errors: list[BaseException] = []
        with KnowledgeLookup(settings()) as lookup:
            lookup.lookup(QUERY)

            def work(number: int) -> None:
                for turn in range(EACH):
                    try:
                        results.append(lookup.lookup(f"{QUERY} {turn}", session_id=f"s{number}-{turn % 7}"))
                    except BaseException as error:
                        errors.append(error)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
            for thread in threads:
                thread.start()
            generation = 0
            while any(thread.is_alive() for thread in threads):
                write(ws.roots[0].path / "cache/new.md", f"# New\n\nGeneration {generation}.\n")
                assert reindex.reindex(Workspace(settings())).result == "promoted"
                versions.append(ws.versions.promoted())
                generation += 1
            for thread in threads:
                thread.join()
            assert lookup.flush(120.0)

        assert errors == []
        assert len(results) == THREADS * EACH
        assert Counter(result.evidence_status for result in results).keys() <= {"evidence", "already_provided"}
        fingerprints = {version.collection: version.fingerprint for version in versions if version}
        served = Counter(result.index_fingerprint for result in results)
        assert len(served) >= 3, "no promotion happened while lookups ran"
        assert set(served) <= set(fingerprints.values())
        for result in results:
            assert fingerprints[result.retrieval_trace["collection"]] == result.index_fingerprint

        database = Database(settings().database, state=settings().state)
        rows = {row.id: row for row in InvocationStore(database).list(limit=10_000)}
        database.close()
        assert len(rows) == THREADS * EACH + 1
        for result in results:
            row = rows[result.invocation_id]
            assert (row.success, row.index_fingerprint) == (True, result.index_fingerprint)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("word_ranking")
def test_the_framework_path_alone_serves_threads_through_promotions_and_lost_connections(word_model: Path) -> None:
    with indexed(
        DOCUMENTS, model=word_model, index__grace_s=30.0, retrieval__vector_store__mode="langchain"
    ) as settings:
        ws = Workspace(settings())
        results: list[LookupResult] = []
        with KnowledgeLookup(settings(), record=False) as lookup:
            lookup.lookup(QUERY)
            done = threading.Event()

            def work() -> None:
                while not done.is_set():
                    results.append(lookup.lookup(QUERY))

            threads = [threading.Thread(target=work) for _ in range(6)]
            for thread in threads:
                thread.start()
            for generation in range(4):
                write(ws.roots[0].path / "cache/new.md", f"# New\n\nGeneration {generation}.\n")
                assert reindex.reindex(Workspace(settings())).result == "promoted"
                lookup._retriever._search._langchain.close()  # type: ignore[union-attr]
            done.set()
            for thread in threads:
                thread.join()
        assert {result.evidence_status for result in results} == {"evidence"}
        assert len({result.index_fingerprint for result in results}) >= 3


@pytest.mark.usefixtures("word_ranking")
def test_a_lookup_goes_on_when_its_version_is_dropped_under_it(
    word_model: Path, open_lookup: Callable[..., KnowledgeLookup]
) -> None:
    for mode in ("sdk", "langchain", "auto"):
        with indexed(DOCUMENTS, model=word_model, retrieval__vector_store__mode=mode) as settings:
            ws = Workspace(settings())
            lookup = open_lookup(settings())
            assert lookup.lookup(QUERY).found
            old = ws.versions.promoted()
            write(ws.roots[0].path / "cache/new.md", f"# New\n\nIn mode {mode}.\n")
            new = reindex.reindex(ws).manifest
            assert old is not None
            ws.store.drop(old.collection)
            result = lookup.lookup(QUERY)  # within the second that a resolved alias is used for
            assert (result.found, result.retrieval_trace["collection"]) == (True, new.collection)
