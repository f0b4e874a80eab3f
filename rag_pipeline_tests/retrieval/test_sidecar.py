"""The sidecar: what it tells when it works, and that nothing of it reaches the answer, however it is broken."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.vector_search import VectorSearch
from rag_pipeline_tests.retrieval.small_base import comparable, recorded

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
