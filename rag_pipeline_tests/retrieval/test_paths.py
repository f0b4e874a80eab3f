"""Both paths to the store: what ``auto`` does when LangChain is broken, and that both find the same."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.vector_search import VectorSearch
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.retrieval.small_base import SettingsOf, indexed

LookUp = Callable[..., KnowledgeLookup]
Break = Callable[[str], None]

QUERY = "close idle sockets of the checkout pool, then count descriptors by lsof"
TIMEOUT_S = 4.0

# How LangChain is broken, and what the reason has to say.
BREAKAGES = {
    "not installed": "langchain-milvus",
    "raises": "RuntimeError: the framework lost its way",
    "hangs": "has not answered within",
    "wrong field": "body",
}

ODD_CATEGORIES = (
    'a "quoted" name',
    "it's",
    "back\\slash",
    "ends in a backslash\\",
    '\\"',
    'x" or category != "',
    "100% _like_",
    "磁盘 / 存储",
)
BODIES = ("red green blue", "red green", "green blue yellow", "red", "violet", "red green blue yellow violet")


@pytest.fixture
def break_langchain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Break]:
    """A function that breaks LangChain in one of the ways of `BREAKAGES`."""
    import langchain_milvus

    at_the_end = threading.Event()

    def hanging(*_: object, **__: object) -> list[object]:
        at_the_end.wait(60.0)
        return []

    def raising(*_: object, **__: object) -> list[object]:
        raise RuntimeError("the framework lost its way")

    class OtherField(langchain_milvus.Milvus):
        def __init__(self, **options: object) -> None:
            super().__init__(**{**options, "text_field": "body"})

    def break_it(way: str) -> None:
        if way == "not installed":
            monkeypatch.setitem(sys.modules, "langchain_milvus", None)
        elif way == "wrong field":
            monkeypatch.setattr(langchain_milvus, "Milvus", OtherField)
        else:
            search = hanging if way == "hangs" else raising
            monkeypatch.setattr(langchain_milvus.Milvus, "similarity_search_with_score", search)

    yield break_it
    at_the_end.set()


@pytest.mark.parametrize("way", BREAKAGES)
def test_auto_answers_through_the_sdk_in_time_when_langchain_is_broken(
    look_up: LookUp, break_langchain: Break, way: str
) -> None:
    by_sdk = look_up().lookup(QUERY)
    break_langchain(way)
    lookup = look_up(retrieval__vector_store__mode="auto", retrieval__timeout_s=TIMEOUT_S)
    lookup.warm_up()
    started = time.monotonic()
    result = lookup.lookup(QUERY)
    assert time.monotonic() - started < TIMEOUT_S
    assert (result.evidence_status, result.retrieval_trace["path"]) == ("evidence", "sdk")
    assert result.context_pack == by_sdk.context_pack
    langchain, sdk = result.retrieval_trace["attempts"][0]["paths"]
    assert (langchain["path"], langchain["outcome"]) == ("langchain", "failed")
    assert BREAKAGES[way] in langchain["reason"]
    assert (sdk["path"], sdk["outcome"], sdk["reason"]) == ("sdk", "answered", "")
    assert result.retrieval_trace["attempts"][0]["candidates"] == by_sdk.retrieval_trace["attempts"][0]["candidates"]

    again = lookup.lookup("broker partitions drain slowly")
    first = again.retrieval_trace["attempts"][0]["paths"][0]
    # Nobody waits again at once for a path that did not answer in time.
    assert (first["path"], first["outcome"]) == ("langchain", "skipped" if way == "hangs" else "failed")
    assert BREAKAGES[way] in first["reason"]
    assert again.retrieval_trace["path"] == "sdk"


@pytest.mark.parametrize("way", BREAKAGES)
def test_mode_langchain_says_clearly_that_it_is_broken(look_up: LookUp, break_langchain: Break, way: str) -> None:
    break_langchain(way)
    lookup = look_up(retrieval__vector_store__mode="langchain", retrieval__timeout_s=2.0)
    lookup.warm_up()
    started = time.monotonic()
    wire = lookup.lookup(QUERY).to_dict()
    assert time.monotonic() - started < 2.0 + 1.0  # the deadline, and what a busy machine adds to it
    assert (wire["found"], wire["evidenceStatus"], wire["evidenceBlocks"]) == (False, "retrieval_unavailable", [])
    assert "langchain" in wire["message"].lower()
    assert BREAKAGES[way] in wire["message"]
    paths = [(trial["path"], trial["outcome"]) for trial in wire["retrievalTrace"]["attempts"][0]["paths"]]
    assert paths == [("langchain", "failed")]


@pytest.fixture(scope="module")
def generated(word_model: Path) -> Iterator[SettingsOf]:
    """Many documents with few different texts, so that most distances are shared; some in odd categories."""
    random = Random(4711)
    documents = {
        f"{random.choice(('north', 'south', 'west'))}/{number:03}.md": f"# Colours\n\n{random.choice(BODIES)}\n"
        for number in range(91)
    }
    for number, category in enumerate(ODD_CATEGORIES):
        documents[f"odd/{number}.md"] = f"---\ncategory: {json.dumps(category)}\n---\n# Colours\n\nred green {number}\n"
    with indexed(documents, model=word_model) as settings:
        yield settings


def both(settings: SettingsOf) -> tuple[VectorSearch, VectorSearch]:
    return VectorSearch(Workspace(settings()), mode="langchain"), VectorSearch(Workspace(settings()), mode="sdk")


@pytest.mark.usefixtures("word_ranking")
@pytest.mark.parametrize("top_k", [1, 7, 30, 99])
def test_both_paths_give_the_same_ids_in_the_same_order_with_ties_by_id(generated: SettingsOf, top_k: int) -> None:
    langchain, sdk = both(generated)
    shared = 0
    for query in (*BODIES, "colours", "green yellow", "nothing of it"):
        for category in ("", "south"):
            one = langchain.nearest(query, top_k=top_k, category=category)
            other = sdk.nearest(query, top_k=top_k, category=category)
            assert [hit.id for hit in one] == [hit.id for hit in other]
            assert [hit.score for hit in one] == [hit.score for hit in other]
            assert [(hit.content, hit.category, hit.metadata) for hit in one] == [
                (hit.content, hit.category, hit.metadata) for hit in other
            ]
            keys = [(hit.score, hit.id) for hit in one]
            assert keys == sorted(keys)
            assert len(one) == top_k if not category else 0 < len(one) <= top_k
            shared += len(one) - len({hit.score for hit in one})
    assert shared > 0 or top_k == 1
    langchain.close()


@pytest.mark.usefixtures("word_ranking")
def test_a_filter_with_quotes_and_backslashes_means_the_same_on_both_paths(generated: SettingsOf) -> None:
    langchain, sdk = both(generated)
    for number, category in enumerate(ODD_CATEGORIES):
        for path in (langchain, sdk):
            found = path.nearest("red green", top_k=50, category=category)
            assert [(hit.metadata["source"], hit.category) for hit in found] == [(f"odd/{number}.md", category)]
    for absent in ('"', "\\", "x", 'it"s', "ends in a backslash"):
        assert langchain.nearest("red", top_k=50, category=absent) == []
        assert sdk.nearest("red", top_k=50, category=absent) == []
    langchain.close()


def _of_the_runbooks(data_dir: Path) -> list[str]:
    lines = (data_dir / "k8s_runbooks_en" / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["query"] for line in lines]


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.usefixtures("word_ranking")
def test_both_paths_agree_on_real_runbooks(data_dir: Path, word_model: Path) -> None:
    queries = _of_the_runbooks(data_dir)
    assert len(queries) == 114
    with indexed(data_dir / "k8s_runbooks_en" / "docs", model=word_model) as settings:
        langchain, sdk = both(settings)
        for query in queries:
            one, other = (path.nearest(query, top_k=30) for path in (langchain, sdk))
            assert [hit.id for hit in one] == [hit.id for hit in other]
            assert len(one) == 30
        langchain.close()
