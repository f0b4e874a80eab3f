"""The first lookup of a process: within its limit when the store hangs, and with what starting takes left out."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rag_pipeline.index import lite_server
from rag_pipeline.index.models import ResolvedModel
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.results import LookupResult
from rag_pipeline_tests.retrieval.small_base import DOCUMENTS, EMBEDDERS, WordEmbedder, indexed, settings_of

LookUp = Callable[..., KnowledgeLookup]
QUERY = "When maxclients is reached, close idle sockets of the checkout pool"


@pytest.fixture
def black_hole() -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def timed(lookup: KnowledgeLookup) -> tuple[LookupResult, float]:
    started = time.monotonic()
    result = lookup.lookup(QUERY)
    return result, time.monotonic() - started


def test_a_store_that_never_answers_costs_each_lookup_its_limit_only(
    black_hole: str, tmp_path: Path, word_model: Path
) -> None:
    settings = settings_of(
        tmp_path / "state", tmp_path, word_model,
        retrieval__milvus__uri=black_hole, retrieval__timeout_s=1.0, retrieval__milvus__timeout_s=5.0,
    )  # fmt: skip
    with KnowledgeLookup(settings, record=False) as lookup:
        answers: list[tuple[LookupResult, float]] = []
        for count in (1, 6):
            threads = [threading.Thread(target=lambda: answers.append(timed(lookup))) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert [result.evidence_status for result, _ in answers] == ["retrieval_unavailable"] * 7
    importing = answers[0][1]  # may import pymilvus, which does not count
    assert importing < 15
    assert max(seconds for _, seconds in answers[1:]) < 3.5


def test_starting_the_server_and_loading_the_model_are_not_counted(
    word_model: Path, word_ranking: None, monkeypatch: pytest.MonkeyPatch, open_lookup: Callable[..., KnowledgeLookup]
) -> None:
    class Slow(WordEmbedder):
        def __init__(self, model: ResolvedModel, **options: object) -> None:
            time.sleep(1.0)
            super().__init__(model, **options)

    with indexed(DOCUMENTS, model=word_model) as settings:
        monkeypatch.setattr(EMBEDDERS[0], Slow)
        assert lite_server.stop(settings().state / "milvus") is not None
        lookup = open_lookup(settings(retrieval__timeout_s=0.8))
        first, seconds = timed(lookup)
        assert first.found, first.message
        assert seconds > 1.0
        again, seconds = timed(lookup)
        assert again.found
        assert seconds < 0.8 + 0.5


def test_a_model_that_is_gone_later_stops_no_lookup(look_up: LookUp, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = look_up()
    lookup.search(QUERY)

    def gone(*_: object, **__: object) -> None:
        raise AssertionError("the model was read again")

    monkeypatch.setattr("rag_pipeline.index.models.load_token_counter", gone)
    monkeypatch.setattr("rag_pipeline.retrieval.snapshot.load_token_counter", gone)
    result = lookup.lookup(QUERY)
    assert result.found
    assert result.context_pack.unit == "tokens"
    assert result.context_pack.used > 0


def test_a_fault_of_ours_after_retrieval_is_a_degraded_answer_with_a_record(
    look_up: LookUp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rag_pipeline_tests.retrieval.small_base import recorded

    lookup = look_up()

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of the packer")

    monkeypatch.setattr("rag_pipeline.retrieval.pipeline.pack_context", broken)
    result = lookup.lookup(QUERY)
    assert (result.evidence_status, result.found) == ("retrieval_unavailable", False)
    assert "ZeroDivisionError: of the packer" in result.message
    assert "a lookup failed after retrieval" in caplog.text
    assert not recorded(lookup, result.invocation_id).success


def test_search_refuses_a_senseless_number(look_up: LookUp) -> None:
    from rag_pipeline.errors import ConfigurationError

    for number in (0, -5):
        with pytest.raises(ConfigurationError, match=f"at least 1; found {number}"):
            look_up().search(QUERY, top_k=number)
    assert len(look_up().search(QUERY, top_k=2).ranked) == 2
