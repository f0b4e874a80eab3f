"""Each seeded defect fails its check and only that one; the run fails, and the alias stays where it is."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from rag_pipeline import steps
from rag_pipeline.index import staging
from rag_pipeline.verdicts import CHECKS, ERROR_CHECKS
from rag_pipeline_tests.defs.conftest import Project

Table = pd.DataFrame
Seed = Callable[[Table], Table]
TABLE_OF = {spec.name: spec.table for spec in CHECKS}
ASSET_OF = {"documents": "raw_documents", "chunks": "chunks", "embeddings": "breadcrumb_embeddings"}


def no_documents(table: Table) -> Table:
    return table.iloc[:0]


def same_id_twice(table: Table) -> Table:
    ids = table["id"].tolist()
    return table.assign(id=[ids[1], *ids[1:]])


def blank_content(table: Table) -> Table:
    return table.assign(content=[" \n", *table["content"][1:]])


def too_many_tokens(table: Table) -> Table:
    return table.assign(token_count=[121, *table["token_count"][1:]])


def lost_document(table: Table) -> Table:
    return table[table["source"] != "kubernetes/oom.md"].reset_index(drop=True)


def with_vector(change: Callable[[np.ndarray], np.ndarray]) -> Seed:
    def seed(table: Table) -> Table:
        return table.assign(vector=[change(table["vector"].iloc[0]), *table["vector"][1:]])

    return seed


def not_a_number(vector: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(vector)) == 3, np.float32("nan"), vector)


def of_another_text(table: Table) -> Table:
    digests = table["embedding_digest"].tolist()
    return table.assign(embedding_digest=["0" * 64, *digests[1:]])


def lost_vector(table: Table) -> Table:
    return table.iloc[1:].reset_index(drop=True)


SEEDS: dict[str, Seed] = {
    "documents_present": no_documents,
    "chunk_ids_unique": same_id_twice,
    "chunk_content_present": blank_content,
    "chunk_tokens_within_limit": too_many_tokens,
    "documents_have_chunks": lost_document,
    "embedding_dimension": with_vector(lambda vector: vector[:-1]),
    "embeddings_finite": with_vector(not_a_number),
    "embeddings_unit_norm": with_vector(lambda vector: vector * np.float32(1.5)),
    "embeddings_complete": lost_vector,
    "embeddings_current": of_another_text,
}


def seed_table(monkeypatch: pytest.MonkeyPatch, table: str, seed: Seed) -> None:
    """Let the pure step that makes the table give a broken one."""
    if table == "documents":
        read = steps.read_documents

        def broken_read(*args: object, **options: object) -> object:
            documents, changes = read(*args, **options)  # type: ignore[arg-type]
            return seed(documents), changes

        monkeypatch.setattr(steps, "read_documents", broken_read)
    elif table == "chunks":
        cut = steps.chunk_documents
        monkeypatch.setattr(steps, "chunk_documents", lambda *args, **options: seed(cut(*args, **options)))
    else:
        embed = steps.embed_chunks

        def broken_embed(*args: object, **options: object) -> object:
            embedded = embed(*args, **options)  # type: ignore[arg-type]
            return replace(embedded, table=seed(embedded.table))

        monkeypatch.setattr(steps, "embed_chunks", broken_embed)


def lose_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the staging collection lose a row after it was written."""
    write_rows = staging.write_rows

    def broken(store: object, collection: str, chunks: Table, embeddings: Table, **options: object) -> None:
        write_rows(store, collection, chunks, embeddings, **options)  # type: ignore[arg-type]
        store._call("delete", collection, ids=[chunks["id"].iloc[0]])  # type: ignore[attr-defined]

    monkeypatch.setattr(staging, "write_rows", broken)


def write_another_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one row of the staging collection hold the opposite of its vector."""
    write_rows = staging.write_rows

    def broken(store: object, collection: str, chunks: Table, embeddings: Table, **options: object) -> None:
        write_rows(store, collection, chunks, with_vector(lambda v: -v)(embeddings), **options)  # type: ignore[arg-type]

    monkeypatch.setattr(staging, "write_rows", broken)


def test_every_error_check_has_a_seeded_defect() -> None:
    # Once something is promoted, the guard against mass deletion stops a run without chunks before its check does.
    assert {*SEEDS, "chunks_present", "collection_parity", "collection_self_retrieval"} == ERROR_CHECKS


@pytest.mark.parametrize("check", SEEDS)
def test_a_broken_table_fails_its_check_alone(project: Project, monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    before, collections = project.promoted(), project.collections()
    seed_table(monkeypatch, TABLE_OF[check], SEEDS[check])

    run = project.rebuild()

    assert not run.success
    assert run.failed_checks == [check]
    assert check in run.reason
    assert ASSET_OF[TABLE_OF[check]] in run.metadata  # the broken table is kept, to be looked at
    assert "milvus_collection" not in run.metadata
    assert "promoted_collection" not in run.metadata
    assert project.promoted() == before
    assert project.collections() == collections


@pytest.mark.parametrize(
    ("check", "break_it"),
    [("collection_parity", lose_a_row), ("collection_self_retrieval", write_another_vector)],
)
def test_a_broken_collection_is_never_promoted(
    project: Project, monkeypatch: pytest.MonkeyPatch, check: str, break_it: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = project.promoted()
    break_it(monkeypatch)

    run = project.rebuild()

    assert not run.success
    assert run.failed_checks == [check]
    assert "promoted_collection" not in run.metadata
    staged = run.metadata["milvus_collection"]["collection"]
    assert staged != before
    assert project.promoted() == before

    monkeypatch.undo()
    later = project.run(["promoted_collection"])

    assert not later.success
    assert f"{staged} is not promoted, the alias 'knowledge' stays: it lacks a pass of {check}" in later.reason
    assert not later.metadata
    assert project.promoted() == before


@pytest.mark.parametrize(
    ("selection", "reason"),
    [
        (["milvus_collection", "promoted_collection"], "breadcrumb_embeddings was made from other chunks"),
        (["breadcrumb_embeddings+", "knowledge_index"], "chunk_content_present: 1 of"),
    ],
)
def test_chunks_that_failed_their_check_are_not_promoted_by_a_later_run(
    project: Project, monkeypatch: pytest.MonkeyPatch, selection: list[str], reason: str
) -> None:
    before = project.promoted()
    project.edit("cache/redis-0.md", f"# Redis 0\n\nEdited before the defect, then {reason}.\n")
    seed_table(monkeypatch, "chunks", blank_content)
    assert project.run().failed_checks == ["chunk_content_present"]

    monkeypatch.undo()
    later = project.run(selection)

    assert not later.success
    assert reason in later.reason
    assert later.failed_checks == []  # the verdict is that of the run before
    assert "milvus_collection" not in later.metadata
    assert project.promoted() == before
    mended = project.run()
    assert mended.success, mended.reason
    assert project.promoted() not in (None, before)


def test_a_run_after_failed_ones_needs_no_hand(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_a_row(monkeypatch)
    failed = project.rebuild().metadata["milvus_collection"]["collection"]
    monkeypatch.undo()
    before = project.promoted()

    run = project.rebuild()

    assert run.success, run.reason
    assert project.promoted() not in (None, before, failed)
    assert failed not in project.collections()


@pytest.mark.parametrize(
    ("again", "stale", "upstream"),
    [
        (["raw_documents"], "chunks", "raw_documents"),
        (["raw_documents", "chunks", "knowledge_index"], "breadcrumb_embeddings", "chunks"),
        (["raw_documents", "chunks", "breadcrumb_embeddings"], "knowledge_index", "chunks"),
    ],
)
def test_tables_of_different_runs_are_not_mixed(project: Project, again: list[str], stale: str, upstream: str) -> None:
    assert project.run().success
    before, collections = project.promoted(), project.collections()
    project.edit("cache/redis-5.md", f"# Redis 5\n\nEdited, but {stale} is not made again.\n")

    run = project.run([*again, "milvus_collection", "promoted_collection"])

    assert not run.success
    assert f"The table {stale} was made from other {upstream} than there are now" in run.reason
    assert run.failed_checks == []
    assert sorted(run.metadata) == sorted(again)
    assert project.promoted() == before
    assert project.collections() == collections
