"""The sidecar: what it tells when it works, and that nothing of it reaches the answer, however it is broken."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.vector_search import VectorSearch
from rag_pipeline_tests.conftest import PROJECT
from rag_pipeline_tests.retrieval.small_base import SettingsOf, comparable, recorded

ANSWERING = """
import os, sys
from pathlib import Path
from rag_pipeline.retrieval import snapshot
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline_tests.retrieval.small_base import WordEmbedder, settings_of

snapshot.Embedder = WordEmbedder
state, knowledge, model, query = sys.argv[1:]
settings = settings_of(Path(state), Path(knowledge), Path(model), retrieval__sidecar__enabled=True)
lookup = KnowledgeLookup(settings)
while True:
    result = lookup.lookup(query)
    os.write(1, result.invocation_id.encode() + b"\\n")  # from here on it was answered
"""

LookUp = Callable[..., KnowledgeLookup]
QUERY = "When maxclients is reached, close idle sockets of the checkout pool"


def raises(*_: object, **__: object) -> Any:
    raise RuntimeError("the sidecar is broken")


def hangs(*_: object, **__: object) -> Any:
    threading.Event().wait(30)


def broken_only_for(mode: str, method: str, how: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Break a method of the facade in one mode: the main path has another."""

    def breaking(patch: pytest.MonkeyPatch) -> None:
        real = getattr(VectorSearch, method)

        def maybe(self: VectorSearch, *arguments: Any, **options: Any) -> Any:
            return (how if self.mode == mode else real)(self, *arguments, **options)

        patch.setattr(VectorSearch, method, maybe)

    return breaking


def without_langchain(patch: pytest.MonkeyPatch) -> None:
    import sys

    patch.setitem(sys.modules, "langchain_milvus", None)


def cannot_be_built(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("rag_pipeline.retrieval.sidecar.Sidecar.__init__", raises)


def without_result(patch: pytest.MonkeyPatch) -> None:
    broken_only_for("langchain", "search", lambda *_, **__: None)(patch)


BROKEN = {
    "not installed": (without_langchain, "unavailable", "cannot be imported"),
    "cannot be built": (cannot_be_built, "unavailable", "the sidecar is broken"),
    "raises": (broken_only_for("langchain", "search", raises), "unavailable", "the sidecar is broken"),
    "hangs": (broken_only_for("langchain", "_path", hangs), "unavailable", "has not answered within"),
    "gives nonsense": (without_result, "unavailable", "candidates"),
}


def test_a_working_sidecar_leaves_its_top_list_in_the_record_and_the_answer_alone(look_up: LookUp) -> None:
    plain = look_up().lookup(QUERY)
    lookup = look_up(retrieval__sidecar__enabled=True)
    result = lookup.lookup(QUERY)
    assert comparable(result) == comparable(plain)
    sidecar = recorded(lookup, result.invocation_id).retrieval_details["sidecar"]
    assert (sidecar["status"], sidecar["mode"]) == ("available", "langchain")
    first = sidecar["candidates"][0]
    assert set(first) == {
        "rank", "id", "source", "title", "breadcrumb", "category", "preview", "score", "raw_score", "score_label",
    }  # fmt: skip
    assert (first["rank"], first["score_label"]) == (1, "similarity")
    assert first["raw_score"] == pytest.approx(1 - first["score"] / 2)
    attempt = result.retrieval_trace["attempts"][0]
    by_distance = sorted(attempt["candidates"], key=lambda item: (item["score"], item["id"]))
    assert [item["id"] for item in sidecar["candidates"][:3]] == [item["id"] for item in by_distance[:3]]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sidecar_changes_no_byte_of_the_answer(
    look_up: LookUp, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    breaking, status, reason = BROKEN[name]
    expected = comparable(look_up().lookup(QUERY))
    breaking(monkeypatch)
    monkeypatch.setattr("rag_pipeline.retrieval.sidecar._IMPORT_S", 5.0)
    lookup = look_up(retrieval__sidecar__enabled=True, retrieval__sidecar__timeout_s=1.0)
    started = time.monotonic()
    result = lookup.lookup(QUERY)
    assert time.monotonic() - started < 20  # it does not wait for the sidecar
    assert comparable(result) == expected
    sidecar = recorded(lookup, result.invocation_id).retrieval_details["sidecar"]
    assert sidecar["status"] == status
    assert reason in sidecar["reason"]


def test_a_lookup_is_recorded_before_the_sidecar_has_answered(look_up: LookUp, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    real = VectorSearch.search

    def slow(*arguments: Any, **options: Any) -> Any:
        let_go.wait(60)
        return real(*arguments, **options)

    broken_only_for("langchain", "search", slow)(monkeypatch)
    lookup = look_up(retrieval__sidecar__enabled=True, retrieval__sidecar__timeout_s=60.0)
    result = lookup.lookup(QUERY)
    assert lookup._recorder is not None
    assert lookup._recorder.flush(60.0)
    store = InvocationStore(lookup._database)
    before = store.get(result.invocation_id)
    assert before is not None
    assert before.retrieval_details["sidecar"] == {"status": "pending", "mode": "langchain"}
    let_go.set()
    after = recorded(lookup, result.invocation_id)
    sidecar = after.retrieval_details["sidecar"]
    assert sidecar["status"] == "available"
    assert after == replace(before, retrieval_details={**before.retrieval_details, "sidecar": sidecar})


@pytest.mark.fault
def test_killed_with_the_sidecar_on_no_answered_lookup_is_missing(small_index: SettingsOf, look_up: LookUp) -> None:
    """``kill -9`` while comparisons wait: what was answered is in the record, if only as pending."""
    settings = small_index()
    arguments = [settings.state, settings.path(settings.knowledge.roots[0].path), settings.embedding.model, QUERY]
    told: list[str] = []
    for pause in (0.0, 0.3, 1.5):
        process = subprocess.Popen(
            [sys.executable, "-c", ANSWERING, *map(str, arguments)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        own = [process.stdout.readline() for _ in range(30)]
        time.sleep(pause)
        process.kill()
        rest, _ = process.communicate(timeout=60)
        told += [line.strip() for line in [*own, *rest.splitlines(keepends=True)] if line.endswith("\n")]
    lookup = look_up()
    lookup.lookup("the next process")
    statuses = {recorded(lookup, key).retrieval_details["sidecar"]["status"] for key in told}
    assert len(told) >= 90
    assert "pending" in statuses
    assert statuses <= {"pending", "available", "skipped"}


def test_a_lookup_that_is_closed_while_the_sidecar_hangs_is_recorded(
    look_up: LookUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_only_for("langchain", "search", hangs)(monkeypatch)
    lookup = look_up(retrieval__sidecar__enabled=True)
    result = lookup.lookup(QUERY)
    lookup.close(2.0)
    other = look_up()
    other.lookup(QUERY)
    row = recorded(other, result.invocation_id)
    assert row.retrieval_details["sidecar"]["status"] == "skipped"


def test_lookups_beyond_what_may_wait_are_recorded_as_skipped(look_up: LookUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_pipeline.retrieval.sidecar._WAITING", 1)
    let_go = threading.Event()
    broken_only_for("langchain", "search", lambda *_, **__: let_go.wait(60) and None)(monkeypatch)
    lookup = look_up(retrieval__sidecar__enabled=True)
    results = [lookup.lookup(f"{QUERY} {n}") for n in range(4)]
    let_go.set()
    statuses = [recorded(lookup, item.invocation_id).retrieval_details["sidecar"]["status"] for item in results]
    assert "skipped" in statuses
    assert len(statuses) == 4
