"""Scenarios on the two ways to the vector store: the framework's VectorStore (LangChain) and the SDK."""

import sys

import pytest

from rag_pipeline.index.milvus import MilvusStore
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.results import LookupResult
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.retrieval.scenarios.conftest import LookUp
from rag_pipeline_tests.retrieval.small_base import WordEmbedder, comparable

SOCKETS = "close idle sockets of the checkout pool, then count descriptors by lsof"
CLIENTS = "maxclients is reached: close idle sockets of the checkout pool"


def paths(result: LookupResult) -> list[tuple[str, str]]:
    """What became of each path in the first attempt."""
    return [(trial["path"], trial["outcome"]) for trial in result.retrieval_trace["attempts"][0]["paths"]]


def candidates(result: LookupResult) -> list[dict[str, object]]:
    return list(result.retrieval_trace["attempts"][0]["candidates"])


def distances(lookup: KnowledgeLookup, query: str) -> dict[str, float]:
    """Squared L2 distance of each stored vector to the query's, worked out here."""
    ws = Workspace(lookup.settings)
    vector = WordEmbedder(ws.model).embed_query(query)
    rows = ws.store.rows(ws.versions.promoted().collection, vectors=True)
    return {row["id"]: float(((vector - row["vector"]) ** 2).sum()) for row in rows}


@pytest.fixture
def sdk_searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The collections that the SDK path searched."""
    seen: list[str] = []
    search = MilvusStore.search

    def watched(self: MilvusStore, collection: str, *args: object, **options: object) -> object:
        seen.append(collection)
        return search(self, collection, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MilvusStore, "search", watched)
    return seen


def test_vectorstore_mode_uses_spring_ai(
    look_up: LookUp, framework_calls: list[dict[str, object]], sdk_searches: list[str]
) -> None:
    """Scenario: VectorStore mode uses Spring AI.

    The framework here is LangChain, and ``spring-ai`` is accepted for its mode.
    """
    lookup = look_up(retrieval__vector_store__mode="spring-ai")
    assert lookup.settings.retrieval.vector_store.mode == "langchain"
    found = lookup.lookup(CLIENTS)
    assert paths(found) == [("langchain", "answered")]
    assert [(call["query"], call["expr"]) for call in framework_calls] == [(CLIENTS, 'category == "cache"')]
    assert sdk_searches == []
    by_sdk = look_up().lookup(CLIENTS)
    assert [set(one) for one in candidates(found)] == [set(one) for one in candidates(by_sdk)]
    assert [one["id"] for one in candidates(found)] == [one["id"] for one in candidates(by_sdk)]
    assert found.evidence_blocks[0].content == by_sdk.evidence_blocks[0].content
    assert set(found.to_dict()) == set(by_sdk.to_dict())


def test_auto_mode_prefers_vectorstore(
    look_up: LookUp, framework_calls: list[dict[str, object]], sdk_searches: list[str]
) -> None:
    """Scenario: Auto mode prefers VectorStore."""
    result = look_up(retrieval__vector_store__mode="auto").lookup(SOCKETS)
    assert paths(result) == [("langchain", "answered")]
    assert result.retrieval_trace["path"] == "langchain"
    assert (len(framework_calls), sdk_searches) == (1, [])


def test_sdk_mode_bypasses_vectorstore(
    look_up: LookUp, framework_calls: list[dict[str, object]], sdk_searches: list[str]
) -> None:
    """Scenario: SDK mode bypasses VectorStore."""
    result = look_up(retrieval__vector_store__mode="sdk").lookup(SOCKETS)
    assert result.found
    assert paths(result) == [("sdk", "answered")]
    assert (framework_calls, sdk_searches) == ([], [result.retrieval_trace["collection"]])


def test_auto_fallback_uses_sdk(look_up: LookUp, sdk_searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: Auto fallback uses SDK.

    First the framework fails, then it is not installed.
    """
    import langchain_milvus

    by_sdk = look_up(retrieval__vector_store__mode="sdk").lookup(SOCKETS)

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("the framework lost its way")

    with monkeypatch.context() as patch:
        patch.setattr(langchain_milvus.Milvus, "similarity_search_with_score", failing)
        failed = look_up(retrieval__vector_store__mode="auto").lookup(SOCKETS)
    monkeypatch.setitem(sys.modules, "langchain_milvus", None)
    absent = look_up(retrieval__vector_store__mode="auto").lookup(SOCKETS)
    assert len(sdk_searches) == 3
    for result, reason in ((failed, "the framework lost its way"), (absent, "langchain-milvus")):
        assert paths(result) == [("langchain", "failed"), ("sdk", "answered")]
        assert reason in result.retrieval_trace["attempts"][0]["paths"][0]["reason"]
        assert comparable(result)["evidenceBlocks"] == comparable(by_sdk)["evidenceBlocks"]
        assert candidates(result) == candidates(by_sdk)


def test_sdk_score_remains_l2_distance(look_up: LookUp) -> None:
    """Scenario: SDK score remains L2 distance."""
    lookup = look_up(retrieval__vector_store__mode="sdk")
    found = candidates(lookup.lookup(SOCKETS))
    expected = distances(lookup, SOCKETS)
    assert len(found) == len(expected) == 9
    for one in found:
        assert one["score"] == one["raw_score"] == pytest.approx(expected[str(one["id"])], abs=1e-4)
        assert one["score_label"] == "l2_distance"
        assert one["similarity"] == pytest.approx(1.0 - float(one["score"]) / 2.0, abs=1e-5)


def test_vectorstore_score_is_mapped_without_changing_tool_contract(look_up: LookUp) -> None:
    """Scenario: VectorStore score is mapped without changing tool contract."""
    lookup = look_up(retrieval__vector_store__mode="langchain")
    result, by_sdk = lookup.lookup(SOCKETS), look_up(retrieval__vector_store__mode="sdk").lookup(SOCKETS)
    expected = distances(lookup, SOCKETS)
    for one in candidates(result):
        assert one["score"] == pytest.approx(expected[str(one["id"])], abs=1e-4)
        assert one["raw_score"] == pytest.approx(1.0 - expected[str(one["id"])] / 2.0, abs=1e-4)
        assert one["score_label"] == "similarity"

    def of_the_tool(found: LookupResult) -> list[dict[str, object]]:
        own = {"score", "rawScore", "scoreLabel"}
        return [{name: value for name, value in block.items() if name not in own}
                for block in found.to_dict()["evidenceBlocks"]]  # fmt: skip

    assert of_the_tool(result) == of_the_tool(by_sdk) != []
    assert result.context_pack == by_sdk.context_pack
    assert [block.score_label for block in result.evidence_blocks] == ["similarity"]
    assert [block.score_label for block in by_sdk.evidence_blocks] == ["l2_distance"]


def test_existing_field_mapping(look_up: LookUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: Existing field mapping."""
    import langchain_milvus

    made: list[tuple[dict[str, object], object]] = []

    class Watched(langchain_milvus.Milvus):
        def __init__(self, **options: object) -> None:
            super().__init__(**options)
            made.append((options, self))

    monkeypatch.setattr(langchain_milvus, "Milvus", Watched)
    lookup = look_up(retrieval__vector_store__mode="langchain")
    ws = Workspace(lookup.settings)
    collection = ws.versions.promoted().collection
    before = ws.store.collections(), ws.store.rows(collection, vectors=True)
    result = lookup.lookup(SOCKETS)
    assert result.found
    ((options, vector_store),) = made
    assert options["collection_name"] == collection
    assert {name: options[name] for name in ("primary_field", "text_field", "vector_field")} == {
        "primary_field": "id",
        "text_field": "content",
        "vector_field": "vector",
    }
    assert options["index_params"]["metric_type"] == ws.store.index_params(collection)["metric_type"] == "L2"
    assert len(vector_store.embeddings.embed_query("x")) == ws.store.dimension(collection) == 512
    assert set(vector_store.fields) <= {"id", "content", "category", "metadata", "vector"}
    best = result.evidence_blocks[0]
    row = ws.store.get(collection, best.chunk_ids)[best.chunk_ids[0]]
    assert (best.content, best.category) == (row["content"], row["category"])
    assert (best.source, best.section) == (row["metadata"]["source"], row["metadata"]["section"])
    assert (ws.store.collections(), ws.store.rows(collection, vectors=True)) == before
