"""What a materialization promotes, and that a second one does nothing, whether Dagster or the command did the first."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pandas as pd
import pytest

from rag_pipeline import steps
from rag_pipeline.definitions import defs
from rag_pipeline.index.embedding import Embedder
from rag_pipeline.reindex import reindex
from rag_pipeline.tables import from_parquet
from rag_pipeline_tests.defs.conftest import Project

ASSETS = [
    "breadcrumb_embeddings", "chunks", "knowledge_index", "milvus_collection", "promoted_collection", "raw_documents",
]  # fmt: skip


def tables(project: Project) -> dict[str, Path]:
    return {path.stem: path for path in sorted((project.home / "state/tables/knowledge").glob("*.parquet"))}


def rows(table: object) -> list[dict[str, object]]:
    assert isinstance(table, list)
    return table


def stamps(project: Project) -> dict[str, tuple[int, int]]:
    return {name: (path.stat().st_mtime_ns, path.stat().st_ino) for name, path in tables(project).items()}


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the model embeds during the test."""
    texts: list[str] = []
    embed = Embedder.embed_documents

    def listen(self: Embedder, batch: Sequence[str], **options: object) -> object:
        texts.extend(batch)
        return embed(self, batch, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Embedder, "embed_documents", listen)
    return texts


def test_all_six_assets_end_in_a_promoted_version(project: Project) -> None:
    run = project.run()

    assert sorted(run.metadata) == ASSETS
    assert run.failed_checks == []
    promoted = project.promoted()
    assert run.metadata["promoted_collection"]["collection"] == promoted
    assert promoted is not None
    chunks = from_parquet(tables(project)["chunks"].read_bytes())
    assert {row["id"] for row in project.workspace().store.rows(promoted)} == set(chunks["id"])
    assert sorted(tables(project)) == [name for name in ASSETS if name != "promoted_collection"]


def test_a_second_run_is_recorded_as_a_no_op(project: Project, embedded: list[str]) -> None:
    first = project.run()
    before, collections = stamps(project), project.collections()

    second = project.run()

    assert second.success, second.reason
    assert second.versions == first.versions
    assert sorted(second.versions) == ASSETS
    assert second.checks == first.checks  # the collection's verdicts too, from its manifest
    assert stamps(project) == before
    assert project.collections() == collections
    assert embedded == []
    assert second.metadata["breadcrumb_embeddings"]["re_embedded"] == 0
    assert second.metadata["chunks"]["documents_chunked"] == 0
    assert second.metadata["milvus_collection"]["applied_by"] == "nothing to do"
    assert second.metadata["promoted_collection"]["moved"] is False


def test_the_command_after_a_run_finds_nothing_to_do(project: Project) -> None:
    run = project.run()

    outcome = reindex(project.workspace())

    assert outcome.result == "unchanged"
    assert outcome.manifest.collection == run.metadata["promoted_collection"]["collection"]


def test_a_run_after_the_command_finds_nothing_to_do(project: Project, embedded: list[str]) -> None:
    project.edit("cache/redis-1.md", "# Redis 1\n\nEdited for the command.\n")
    outcome = reindex(project.workspace())
    assert outcome.result == "promoted"
    assert len(embedded) == 1
    collections = project.collections()

    run = project.run()

    assert run.success, run.reason
    assert len(embedded) == 1
    assert run.metadata["promoted_collection"]["collection"] == outcome.manifest.collection
    assert run.metadata["breadcrumb_embeddings"]["re_embedded"] == 0
    assert project.collections() == collections
    assert run.metadata["raw_documents"]["edited"] == 0


def test_the_pages_tell_what_changed(project: Project) -> None:
    project.run()
    parent = project.promoted()
    project.edit("cache/new.md", "# New\n\nA new one.\n")
    project.edit("cache/redis-2.md", "# Redis 2\n\nEdited text.\n\n## Check 2\n\nRun `INFO 2`.\n")
    (project.docs / "cache/redis-3.md").rename(project.docs / "cache/redis-three.md")
    (project.docs / "cache/redis-4.md").unlink()
    project.edit("kubernetes/broken.md", "---\ntitle: [\n---\n# Broken\n\nIts front matter is.\n")

    run = project.run()

    assert run.success, run.reason
    documents = run.metadata["raw_documents"]
    assert {name: documents[name] for name in ("added", "edited", "removed", "renamed", "rejected")} == {
        "added": 2, "edited": 1, "removed": 1, "renamed": 1, "rejected": 0,
    }  # fmt: skip
    assert documents["changes"] == (
        f"Compared with `{parent}`:\n\n"
        "**added** (2)\n\n- `cache/new.md`\n- `kubernetes/broken.md`\n\n"
        "**edited** (1)\n\n- `cache/redis-2.md`\n\n"
        "**removed** (1)\n\n- `cache/redis-4.md`\n\n"
        "**renamed** (1)\n\n- `cache/redis-3.md → cache/redis-three.md`"
    )
    assert [issue["document"] for issue in rows(documents["issues"])] == ["kubernetes/broken.md"]
    chunks = run.metadata["chunks"]
    assert chunks["documents_chunked"] == 4  # added, edited, and the renamed one, whose chunks get other ids
    assert sorted(str(row["document"]) for row in rows(chunks["slowest_documents"])) == [
        "cache/new.md", "cache/redis-2.md", "cache/redis-three.md", "kubernetes/broken.md",
    ]  # fmt: skip
    picture = str(chunks["token_histogram"]).partition("base64,")[2].rstrip(")")
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    # The renamed document's texts and the unchanged section of the edited one come from the cache.
    assert run.metadata["breadcrumb_embeddings"]["re_embedded"] == 3
    assert run.metadata["milvus_collection"]["applied_by"] == "sync"
    assert run.metadata["milvus_collection"]["parent"] == parent
    assert run.metadata["promoted_collection"]["before"] == parent


def test_a_change_of_metadata_only_changes_the_data_versions(project: Project) -> None:
    first = project.run()
    text = "---\ntitle: OOMKilled\nkeywords: [oom]\ncategory: memory\n---\n# OOM\n\nExit code 137.\n"
    project.edit("kubernetes/oom.md", text)

    second = project.run()

    assert second.success, second.reason
    changed = {name for name in second.versions if second.versions[name] != first.versions[name]}
    assert changed == {"raw_documents", "chunks", "knowledge_index", "milvus_collection", "promoted_collection"}


def test_the_manifest_remembers_how_fast_texts_were_embedded(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = steps.embed_chunks
    monkeypatch.setattr(
        steps, "embed_chunks", lambda *args, **options: replace(embed(*args, **options), tokens_per_s=1234.5)
    )

    run = project.rebuild()

    assert run.success, run.reason
    promoted = project.workspace().versions.promoted()
    assert promoted is not None
    assert promoted.tokens_per_s == 1234.5


def test_tables_tell_dagster_their_rows_and_columns(project: Project) -> None:
    metadata = project.run().metadata["chunks"]

    assert metadata["dagster/row_count"] == metadata["chunks"]
    schema = metadata["columns"]
    assert isinstance(schema, dg.TableSchema)
    described = {column.name: column.description for column in schema.columns}
    assert described["token_count"] == "Tokens of the model's whole input: prefix, embedding_text and special tokens."
    assert described["source"] is not None
    assert described["source"].startswith("POSIX path relative to its root, prefixed with the root's name when there")


@pytest.fixture(scope="module")
def spare(make_project: Callable[[], Project]) -> Project:
    """A second project, for what the others would not survive."""
    project = make_project()
    assert project.run().success
    return project


def test_many_documents_gone_stop_the_run_unless_allowed(spare: Project) -> None:
    before = spare.promoted()
    for number in range(5):
        (spare.docs / f"cache/redis-{number}.md").unlink()

    refused = spare.run()

    assert not refused.success
    assert "5 of 8 documents are gone or empty; nothing was changed." in refused.reason
    assert "allow_mass_deletion of the resource workspace" in refused.reason
    assert "  cache/redis-4.md" in refused.reason
    assert not refused.metadata
    assert spare.promoted() == before

    allowed = spare.run(allow_mass_deletion=True)

    assert allowed.success, allowed.reason
    assert allowed.metadata["raw_documents"]["removed"] == 5
    assert spare.promoted() not in (None, before)


def test_another_knowledge_base_must_take_the_alias_over(spare: Project) -> None:
    before = spare.promoted()
    other = spare.config.read_text(encoding="utf-8").replace('roots = ["docs"]', 'roots = ["docs"]\nid = "other"')
    spare.config.write_text(other, encoding="utf-8")

    refused = spare.run()

    assert not refused.success
    assert f"The alias 'knowledge' points to {before}, which holds another knowledge base" in refused.reason
    assert not refused.metadata
    assert spare.promoted() == before

    taken = spare.run(take_over=True)

    assert taken.success, taken.reason
    assert spare.promoted() not in (None, before)


def test_aliases_of_one_state_folder_keep_their_tables_apart(project: Project) -> None:
    assert project.run().success
    before, stamp = project.promoted(), stamps(project)

    run = project.run(alias="second")

    assert run.success, run.reason
    assert run.metadata["promoted_collection"]["alias"] == "second"
    assert str(project.promoted("second")).startswith("second__")
    assert project.promoted() == before
    assert stamps(project) == stamp


def test_the_jobs_run_as_the_definitions_give_them(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.home)
    definitions = defs()
    first = project.promoted()

    rebuild = definitions.resolve_job_def("weekly_rebuild_job").execute_in_process(instance=project.instance)

    second = project.promoted()
    assert rebuild.success
    assert second not in (None, first)
    assert from_parquet(tables(project)["milvus_collection"].read_bytes())["collection"].tolist() == [second]

    back = definitions.resolve_job_def("rollback_job").execute_in_process(instance=project.instance)

    assert back.success
    assert project.promoted() == first
    again = definitions.resolve_job_def("reindex_job").execute_in_process(
        instance=project.instance, raise_on_error=False
    )
    assert not again.success
    assert project.promoted() == first
    to = {"ops": {"roll_back": {"config": {"to": second}}}}
    forth = definitions.resolve_job_def("rollback_job").execute_in_process(instance=project.instance, run_config=to)
    assert forth.success
    assert project.promoted() == second
    assert isinstance(from_parquet(tables(project)["chunks"].read_bytes()), pd.DataFrame)
