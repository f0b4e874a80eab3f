"""The main job on a real store: what a change costs, that sync equals rebuild, what blocks, what is kept."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rag_pipeline import reindex, release, steps, verdicts
from rag_pipeline.errors import CheckFailedError, ConfigurationError, RefusedError, StoreUnavailableError
from rag_pipeline.index import lite_server
from rag_pipeline.index.artifacts import CHUNKS
from rag_pipeline.index.manifest import SCHEMA_VERSION, Manifest
from rag_pipeline.retrieval.vector_search import VectorSearch
from rag_pipeline.tables import from_parquet
from rag_pipeline.watch import Watch
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.conftest import write

Open = Callable[..., Workspace]


def contents(ws: Workspace) -> list[dict[str, object]]:
    """Every row of the promoted version, with its vector as stored."""
    return ws.store.rows(ws.versions.promoted().collection, vectors=True)


def without_vectors(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{name: value for name, value in row.items() if name != "vector"} for row in rows]


def sources(ws: Workspace) -> set[str]:
    return {row["metadata"]["source"] for row in ws.store.rows(ws.versions.promoted().collection)}


def test_the_first_run_promotes_and_the_second_does_nothing(open_workspace: Open) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws)
    assert (first.result, first.manifest.documents, first.embedded, first.truncated) == (
        "promoted", 4, first.manifest.chunks, 0,
    )  # fmt: skip
    assert ws.store.alias_target("knowledge") == first.manifest.collection
    before = _tree(ws.state)
    again = reindex.reindex(open_workspace())
    assert (again.result, again.embedded, again.manifest.collection) == ("unchanged", 0, first.manifest.collection)
    assert _tree(ws.state) == before


def _tree(state: Path) -> dict[str, tuple[int, int]]:
    """Inode and change time of every file that holds results (not locks, nor the server's own files)."""
    kept = [path for name in ("artifacts", "cache") for path in sorted((state / name).rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept if path.suffix != ".lock"}


def add(root: Path) -> None:
    write(root / "cache/new.md", "# New\n\nA new runbook.\n\n## Steps\n\nDo it.\n")


def edit_one_section(root: Path) -> None:
    file = root / "cache/redis-memory.md"
    file.write_text(file.read_text().replace("Run `INFO memory`.", "Run `MEMORY DOCTOR`."))


def delete(root: Path) -> None:
    (root / "cache/redis-clients.md").unlink()


def rename(root: Path) -> None:
    (root / "kubernetes/oom.md").rename(root / "kubernetes/pod-oomkilled.md")


def rename_without_front_matter_title_but_with_heading(root: Path) -> None:
    (root / "cache/redis-clients.md").rename(root / "cache/connections.md")


def duplicate(root: Path) -> None:
    shutil.copy(root / "kubernetes/oom.md", root / "kubernetes/oom-again.md")


def move_to_another_category(root: Path) -> None:
    (root / "host").mkdir()
    (root / "kubernetes/disk.md").rename(root / "host/disk.md")


def change_keywords_only(root: Path) -> None:
    file = root / "kubernetes/oom.md"
    file.write_text(file.read_text().replace("[oom, '137']", "[oom, '137', sigkill]"))


def change_title_only(root: Path) -> None:
    file = root / "kubernetes/oom.md"
    file.write_text(file.read_text().replace("title: OOMKilled", "title: Out of memory"))


def change_line_ends(root: Path) -> None:
    file = root / "cache/redis-memory.md"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))


@pytest.mark.parametrize(
    ("change", "counts", "embedded"),
    [
        pytest.param(add, {"added": 1}, 2, id="add"),
        pytest.param(edit_one_section, {"edited": 1}, 1, id="edit one section"),
        pytest.param(delete, {"removed": 1}, 0, id="delete"),
        pytest.param(rename, {"renamed": 1}, 0, id="rename"),
        pytest.param(
            rename_without_front_matter_title_but_with_heading, {"renamed": 1}, 0, id="rename, title by heading"
        ),
        pytest.param(duplicate, {"added": 1}, 0, id="duplicate"),
        pytest.param(move_to_another_category, {"renamed": 1}, 0, id="category change"),
        pytest.param(change_keywords_only, {"edited": 1}, 0, id="metadata only"),
        pytest.param(change_title_only, {"edited": 1}, 1, id="title only"),
        pytest.param(change_line_ends, {"edited": 1}, 0, id="line ends"),
    ],
)
def test_sync_equals_a_full_rebuild_and_embeds_the_minimum(
    open_workspace: Open,
    knowledge: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    counts: dict[str, int],
    embedded: int,
) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws)
    change(knowledge)
    outcome = reindex.reindex(ws)
    seen = {name: len(getattr(outcome.changes, name)) for name in ("added", "edited", "removed", "renamed")}
    assert {name: count for name, count in seen.items() if count} == counts
    assert (outcome.result, outcome.manifest.applied_by, outcome.embedded) == ("promoted", "sync", embedded)
    assert outcome.manifest.parent == first.manifest.collection

    elsewhere = open_workspace(state_dir=tmp_path / "rebuilt")
    rebuilt = reindex.reindex(elsewhere, full=True)
    synced, fresh = contents(ws), contents(elsewhere)
    assert without_vectors(synced) == without_vectors(fresh)
    # Embedded in other batches, a vector may differ in its last bits.
    np.testing.assert_allclose([row["vector"] for row in synced], [row["vector"] for row in fresh], atol=1e-5)
    assert rebuilt.manifest.fingerprint == outcome.manifest.fingerprint
    assert [ws.artifacts.read(outcome.manifest, name) for name in sorted(outcome.manifest.artifacts)] == [
        elsewhere.artifacts.read(rebuilt.manifest, name) for name in sorted(rebuilt.manifest.artifacts)
    ]
    reindex.reindex(ws, full=True)
    assert contents(ws) == synced


def test_there_and_back_again_gives_the_first_contents(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace()
    reindex.reindex(ws)
    before = contents(ws)
    add(knowledge)
    reindex.reindex(ws)
    (knowledge / "cache/new.md").unlink()
    assert reindex.reindex(ws).embedded == 0
    assert contents(ws) == before


def test_full_builds_anew_from_cached_vectors_and_no_cache_embeds_again(open_workspace: Open) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws)
    full = reindex.reindex(ws, full=True)
    assert (full.result, full.embedded, full.manifest.applied_by) == ("promoted", 0, "rebuild")
    assert full.manifest.collection != first.manifest.collection
    refreshed = reindex.reindex(ws, refresh=True)
    assert refreshed.embedded == refreshed.manifest.chunks


def test_staging_leaves_the_alias_and_the_next_run_promotes_what_was_staged(
    open_workspace: Open, knowledge: Path
) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws)
    add(knowledge)
    staged = reindex.reindex(ws, promote_it=False)
    assert staged.result == "staged"
    assert ws.store.alias_target("knowledge") == first.manifest.collection
    assert reindex.reindex(ws).manifest.collection == staged.manifest.collection


# Checks block


def _break_table(monkeypatch: pytest.MonkeyPatch, step: str, breaks: Callable[..., object]) -> None:
    real = getattr(steps, step)

    def broken(*arguments: object, **options: object) -> object:
        return breaks(real(*arguments, **options))

    monkeypatch.setattr(steps, step, broken)


def _duplicate_id(chunks: object) -> object:
    chunks.loc[1, "id"] = chunks.loc[0, "id"]
    return chunks


def _blank_content(chunks: object) -> object:
    chunks.loc[1, "content"] = " "
    return chunks


def _too_many_tokens(chunks: object) -> object:
    chunks.loc[1, "token_count"] = 1_000
    return chunks


def _lose_a_document(chunks: object) -> object:
    return chunks[chunks["source"] != "kubernetes/disk.md"].reset_index(drop=True)


def _vector(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[object], object]:
    def breaks(embedded: object) -> object:
        embedded.table.at[1, "vector"] = change(embedded.table.at[1, "vector"].copy())
        return embedded

    return breaks


def _with_nan(vector: np.ndarray) -> np.ndarray:
    vector[0] = np.nan
    return vector


def _lose_a_vector(embedded: object) -> object:
    return replace(embedded, table=embedded.table.drop(index=1).reset_index(drop=True))


@pytest.mark.parametrize(
    ("step", "breaks", "check"),
    [
        pytest.param("chunk_documents", _duplicate_id, "chunk_ids_unique", id="duplicate id"),
        pytest.param("chunk_documents", _blank_content, "chunk_content_present", id="blank content"),
        pytest.param("chunk_documents", _too_many_tokens, "chunk_tokens_within_limit", id="too many tokens"),
        pytest.param("chunk_documents", _lose_a_document, "documents_have_chunks", id="document without chunk"),
        pytest.param("embed_chunks", _vector(lambda vector: vector[:-1]), "embedding_dimension", id="wrong dimension"),
        pytest.param("embed_chunks", _vector(_with_nan), "embeddings_finite", id="NaN"),
        pytest.param("embed_chunks", _vector(lambda vector: vector * 2), "embeddings_unit_norm", id="not normalised"),
        pytest.param("embed_chunks", _lose_a_vector, "embeddings_complete", id="missing vector"),
    ],
)
def test_a_defect_fails_its_check_alone_and_the_alias_stays(
    open_workspace: Open,
    knowledge: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    breaks: Callable[..., object],
    check: str,
) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws)
    add(knowledge)
    _break_table(monkeypatch, step, breaks)
    with pytest.raises(CheckFailedError) as caught:
        reindex.reindex(ws)
    named = [spec.name for spec in verdicts.CHECKS if f"  {spec.name}:" in str(caught.value)]
    assert named == [check]
    assert ws.store.alias_target("knowledge") == first.manifest.collection
    monkeypatch.undo()
    assert reindex.reindex(ws).result == "promoted"


def _drop_a_row(store: object, collection: str) -> None:
    store._call("delete", collection, ids=[next(iter(store.ids(collection)))])
    store.seal(collection)


def _swap_vectors(store: object, collection: str) -> None:
    rows = store.rows(collection, vectors=True)
    vectors = [row["vector"] for row in rows]
    for row, vector in zip(rows, vectors[1:] + vectors[:1], strict=True):
        row["vector"] = vector
    store.upsert(collection, rows)
    store.seal(collection)


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        pytest.param(_drop_a_row, "collection_parity", id="row lost"),
        pytest.param(_swap_vectors, "collection_self_retrieval", id="vectors of others"),
    ],
)
def test_a_damaged_staging_version_is_refused_now_and_later(
    open_workspace: Open, knowledge: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[..., None], check: str
) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws)
    add(knowledge)
    real = release.staging.write_rows

    def write_and_damage(store: object, collection: str, *arguments: object, **options: object) -> None:
        real(store, collection, *arguments, **options)
        damage(store, collection)

    monkeypatch.setattr(release.staging, "write_rows", write_and_damage)
    with pytest.raises(CheckFailedError, match=f"  {check}:"):
        reindex.reindex(ws)
    monkeypatch.undo()
    failed = ws.versions.all()[-1]
    assert [name for name, verdict in failed.checks.items() if not verdict.passed] == [check]
    with pytest.raises(RefusedError, match=f"lacks a pass of {check}"):
        release.promote(ws, failed.collection)
    with pytest.raises(RefusedError, match=f"No version {failed.collection}"):
        release.rollback(ws, to=failed.collection)
    assert ws.store.alias_target("knowledge") == first.manifest.collection
    assert reindex.reindex(ws).result == "promoted"
    assert not ws.store.exists(failed.collection)


def test_documents_without_any_text_are_not_promoted(open_workspace: Open, knowledge: Path) -> None:
    texts = {path: path.read_text() for path in knowledge.rglob("*.md")}
    for path in texts:
        path.write_text("<!-- nothing -->\n")
    ws = open_workspace()
    with pytest.raises(CheckFailedError, match="  chunks_present: None of 4 documents has any text"):
        reindex.reindex(ws)
    assert ws.store.alias_target("knowledge") is None
    for path, text in texts.items():
        path.write_text(text)
    first = reindex.reindex(ws).manifest
    for path in texts:
        path.write_text("")
    with pytest.raises(RefusedError, match="4 of 4 documents are gone or empty"):
        reindex.reindex(ws)
    assert ws.store.alias_target("knowledge") == first.collection


# Faulty documents


def test_a_faulty_document_neither_stops_the_others_nor_disappears(open_workspace: Open, knowledge: Path) -> None:
    (knowledge / "cache/binary.md").write_bytes(bytes(range(256)) * 40)
    fixture = Path(__file__).parent / "fixtures" / "broken-front-matter.md"
    shutil.copy(fixture, knowledge / "cache/broken.md")
    ws = open_workspace()
    outcome = reindex.reindex(ws)
    assert outcome.result == "promoted"
    assert "cache/broken.md" in sources(ws)
    assert "cache/binary.md" not in sources(ws)
    assert any(warning.startswith("cache/broken.md, line 8:") for warning in outcome.warnings)
    assert any(warning.startswith("cache/binary.md") for warning in outcome.warnings)
    assert not outcome.manifest.checks["documents_not_rejected"].passed


def test_a_document_that_became_undecodable_keeps_its_last_good_version(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace()
    reindex.reindex(ws)
    before = contents(ws)
    (knowledge / "kubernetes/disk.md").write_bytes(bytes(range(256)) * 40)
    outcome = reindex.reindex(ws)
    assert outcome.result == "unchanged"
    assert any("kubernetes/disk.md" in warning and "kept" in warning for warning in outcome.warnings)
    add(knowledge)
    outcome = reindex.reindex(ws, full=True)
    assert not outcome.manifest.checks["documents_not_rejected"].passed
    assert [row for row in contents(ws) if row["metadata"]["source"] != "cache/new.md"] == before


def test_a_file_that_cannot_be_read_keeps_its_last_good_version(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace()
    reindex.reindex(ws)
    file = knowledge / "kubernetes/disk.md"
    file.unlink()
    file.symlink_to(file)  # too many levels of symbolic links, for root too
    outcome = reindex.reindex(ws)
    assert outcome.result == "unchanged"
    assert any("kubernetes/disk.md" in warning and "kept" in warning for warning in outcome.warnings)
    assert "kubernetes/disk.md" in sources(ws)


def test_the_knowledge_files_are_never_written(open_workspace: Open, knowledge: Path) -> None:
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(knowledge.rglob("*"))}
    reindex.reindex(open_workspace())
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(knowledge.rglob("*"))} == before


# Refusals


def test_a_mass_deletion_is_refused_with_the_list_and_can_be_allowed(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws)
    shutil.rmtree(knowledge / "cache")
    (knowledge / "kubernetes/oom.md").unlink()
    with pytest.raises(RefusedError, match=r"3 of 4 documents are gone(.|\n)*cache/redis-clients.md"):
        reindex.reindex(ws)
    assert ws.store.alias_target("knowledge") == first.manifest.collection
    assert reindex.reindex(open_workspace(knowledge__allow_mass_deletion=True)).manifest.documents == 1


@pytest.mark.parametrize("emptied", [True, False], ids=["empty root", "missing root"])
def test_a_root_that_is_empty_or_gone_deletes_nothing(open_workspace: Open, knowledge: Path, emptied: bool) -> None:
    ws = open_workspace()
    reindex.reindex(ws)
    shutil.rmtree(knowledge)
    if emptied:
        knowledge.mkdir()
    with pytest.raises(RefusedError, match=r"4 (of 4 )?documents are"):
        reindex.reindex(ws)
    assert len(sources(ws)) == 4


def test_one_empty_root_of_two_deletes_nothing(open_workspace: Open, knowledge: Path, tmp_path: Path) -> None:
    write(tmp_path / "more/a.md", "# A\n\nText.\n")
    roots = [{"name": "docs", "path": str(knowledge)}, {"name": "more", "path": str(tmp_path / "more")}]
    ws = open_workspace(knowledge__roots=roots)
    assert sources_after(ws) >= {"docs/cache/redis-memory.md", "more/a.md"}
    (tmp_path / "more/a.md").unlink()
    with pytest.raises(RefusedError, match="All 1 documents of the root 'more' are gone"):
        reindex.reindex(ws)


def sources_after(ws: Workspace) -> set[str]:
    reindex.reindex(ws)
    return sources(ws)


def test_no_markdown_at_all_is_wrong_usage(open_workspace: Open, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="absent"):
        reindex.reindex(open_workspace(knowledge__roots=[str(tmp_path / "absent")]))
    assert not (tmp_path / "state/milvus").exists()
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigurationError, match="No Markdown file"):
        reindex.reindex(open_workspace(knowledge__roots=[str(tmp_path / "nothing")]))


def test_another_knowledge_base_does_not_get_the_alias_without_take_over(open_workspace: Open, tmp_path: Path) -> None:
    mine = reindex.reindex(open_workspace()).manifest
    write(tmp_path / "theirs/a.md", "# A\n\nText.\n")
    theirs = open_workspace(knowledge__roots=[str(tmp_path / "theirs")])
    with pytest.raises(RefusedError, match="holds another knowledge base"):
        reindex.reindex(theirs)
    assert theirs.store.alias_target("knowledge") == mine.collection
    with_alias = open_workspace(knowledge__roots=[str(tmp_path / "theirs")], index__alias="knowledge_b")
    assert reindex.reindex(with_alias).result == "promoted"
    assert with_alias.store.alias_target("knowledge") == mine.collection
    taken = open_workspace(knowledge__roots=[str(tmp_path / "theirs")], index__take_over=True)
    assert reindex.reindex(taken).result == "promoted"
    assert sources(taken) == {"a.md"}


def test_the_identity_of_a_knowledge_base_does_not_depend_on_the_working_directory(
    open_workspace: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = set()
    for folder in (tmp_path, tmp_path / "docs", Path("/")):
        monkeypatch.chdir(folder)
        ids.add(open_workspace().knowledge_base_id)
    assert len(ids) == 1


def test_every_clone_of_a_project_has_the_same_knowledge_base(open_workspace: Open, tmp_path: Path) -> None:
    for clone, name in (("one", "shop-runbooks"), ("two", "shop-runbooks"), ("three", "other-runbooks")):
        write(tmp_path / clone / "pyproject.toml", f'[project]\nname = "{name}"\n')
        write(tmp_path / clone / "knowledge/a.md", "# A\n")
    one, two, three = (
        open_workspace(knowledge__roots=[str(tmp_path / clone / "knowledge")]).knowledge_base_id
        for clone in ("one", "two", "three")
    )
    assert (one, two, three) == ("shop-runbooks:knowledge", "shop-runbooks:knowledge", "other-runbooks:knowledge")


def test_an_alias_that_is_a_prefix_of_another_touches_only_its_own(open_workspace: Open, knowledge: Path) -> None:
    longer = open_workspace(index__alias="knowledge__b", index__keep_versions=1)
    shorter = open_workspace(index__alias="knowledge", index__keep_versions=1)
    kept = reindex.reindex(longer).manifest.collection
    for number in range(3):
        write(knowledge / f"cache/{number}.md", f"# {number}\n\nText.\n")
        reindex.reindex(shorter)
    release.prune(shorter)
    assert longer.store.exists(kept)
    assert [name for name in shorter.store.collections() if name != kept] == [shorter.versions.promoted().collection]


def test_a_second_reindex_at_once_is_refused_and_names_the_first(open_workspace: Open) -> None:
    ws = open_workspace()
    other = open_workspace()
    with ws.writing():
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                reindex.reindex(other)
            except RefusedError as error:
                code = 42 if f"Process {os.getppid()}" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    assert reindex.reindex(ws).result == "promoted"


# Rollback and retention


def test_rollback_goes_back_and_the_version_left_is_not_promoted_again(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws)
    add(knowledge)
    second = reindex.reindex(ws)
    back = release.rollback(ws)
    assert back.collection == first.manifest.collection
    assert sources(ws) == {"cache/redis-memory.md", "cache/redis-clients.md", "kubernetes/oom.md", "kubernetes/disk.md"}
    with pytest.raises(RefusedError, match=f"{second.manifest.collection} is not promoted again: it was rolled back"):
        reindex.reindex(ws)
    assert ws.store.alias_target("knowledge") == first.manifest.collection
    assert release.rollback(ws, to=second.manifest.collection).collection == second.manifest.collection
    assert reindex.reindex(ws).result == "unchanged"


def test_rollback_without_an_earlier_version_is_refused(open_workspace: Open) -> None:
    ws = open_workspace()
    with pytest.raises(RefusedError, match="points nowhere"):
        release.rollback(ws)
    reindex.reindex(ws)
    with pytest.raises(RefusedError, match="No earlier version"):
        release.rollback(ws)


def test_old_versions_go_with_their_artefacts_after_their_grace(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace(index__grace_s=3600.0)
    names = []
    for number in range(4):
        write(knowledge / f"cache/{number}.md", f"# {number}\n\nText.\n")
        names.append(reindex.reindex(ws).manifest.collection)
    assert ws.store.collections() == names
    patient = open_workspace(index__grace_s=0.0)
    assert release.prune(patient) == names[:2]
    assert patient.store.collections() == names[2:]
    assert patient.artifacts.collections() == names[2:]


# Readers


def test_a_reader_elsewhere_needs_only_store_and_artefacts(open_workspace: Open, tmp_path: Path) -> None:
    shared = tmp_path / "shared-artifacts"
    writer = open_workspace(index__artifacts_uri=f"file://{shared}")
    manifest = reindex.reindex(writer).manifest
    uri = lite_server.running(writer.lite_folder).uri
    reader = open_workspace(
        state_dir=tmp_path / "other-host", retrieval__milvus__uri=uri, index__artifacts_uri=f"file://{shared}"
    )
    found = VectorSearch(reader, mode="sdk").nearest("Exit code 137.", top_k=3)
    assert len(found) == 3
    assert len(from_parquet(reader.artifacts.read(manifest, CHUNKS))) == manifest.chunks
    (shared / manifest.collection / CHUNKS).unlink()
    with pytest.raises(StoreUnavailableError, match=r"chunks\.parquet.*cannot be read"):
        reader.artifacts.read(manifest, CHUNKS)


def of_a_later_schema(manifest: Manifest) -> str:
    return manifest.to_json().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99')


def test_a_manifest_of_a_later_schema_is_reindex_needed_and_is_built_beside(open_workspace: Open) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws).manifest
    ws.store.set_manifest_json(first.collection, of_a_later_schema(first))
    with pytest.raises(StoreUnavailableError, match=r"schema version 99.*reindex needed"):
        VectorSearch(open_workspace(), mode="sdk").nearest("anything", top_k=1)
    second = reindex.reindex(ws).manifest
    assert second.collection != first.collection
    assert ws.store.exists(first.collection)
    assert VectorSearch(open_workspace(), mode="sdk").nearest("anything", top_k=1)


def test_a_search_without_a_promoted_version_says_reindex_needed(open_workspace: Open) -> None:
    ws = open_workspace()
    with pytest.raises(StoreUnavailableError, match="There is no index in the state folder"):
        VectorSearch(ws, mode="sdk").nearest("anything", top_k=1)
    assert not ws.state.exists()  # a reader makes nothing
    ws.store.check()
    with pytest.raises(StoreUnavailableError, match=r"No version is promoted.*reindex needed"):
        VectorSearch(ws, mode="sdk").nearest("anything", top_k=1)


def test_an_empty_query_finds_nothing(open_workspace: Open) -> None:
    ws = open_workspace()
    reindex.reindex(ws)
    assert VectorSearch(ws, mode="sdk").nearest("  \n", top_k=3) == []


def test_a_query_is_never_answered_with_the_other_models_vector(
    open_workspace: Open, tiny_models: tuple[Path, Path]
) -> None:
    """Two models of one dimension swap under a reader; each answer must be the one of a single model."""
    text = "Redis memory\nRedis memory\n# Redis memory\n\nEvictions start at maxmemory."
    first = open_workspace()
    second = open_workspace(embedding__model=str(tiny_models[1]))
    reader = VectorSearch(open_workspace(), mode="sdk")
    reindex.reindex(first)
    answers = {0: [hit.id for hit in reader.nearest(text, top_k=4)]}
    reindex.reindex(second)
    reader._resolver.forget()
    scores = [hit.score for hit in reader.nearest(text, top_k=4)]
    expected = second.store.search(second.versions.promoted().collection, second.embedder.embed_query(text), limit=4)
    assert scores == pytest.approx([hit.score for hit in expected], abs=1e-5)
    release.rollback(first)
    reader._resolver.forget()
    assert [hit.id for hit in reader.nearest(text, top_k=4)] == answers[0]


def test_a_changed_model_and_budget_are_announced_before_they_start(
    open_workspace: Open, tiny_models: tuple[Path, Path]
) -> None:
    reindex.reindex(open_workspace())
    said: list[str] = []
    changed = open_workspace(embedding__model=str(tiny_models[1]), chunking__soft_tokens=60)
    reindex.reindex(changed, watch=Watch(say=said.append))
    assert any(
        "the model changes from" in line and "the chunk budget changes from 80/120 to 60/120" in line for line in said
    )


# What the alias may move to


def stage_only(ws: Workspace) -> str:
    return reindex.reindex(ws, promote_it=False).manifest.collection


def test_a_version_staged_before_the_alias_moved_on_is_not_promoted(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace()
    reindex.reindex(ws)
    add(knowledge)
    staged = stage_only(ws)
    edit_one_section(knowledge)
    newer = reindex.reindex(ws).manifest.collection
    with pytest.raises(RefusedError, match=f"{staged} is not promoted: it was staged upon"):
        release.promote(ws, staged)
    assert ws.store.alias_target("knowledge") == newer


def test_a_version_of_another_alias_is_not_promoted(open_workspace: Open) -> None:
    other = reindex.reindex(open_workspace(index__alias="other")).manifest.collection
    ws = open_workspace()
    mine = reindex.reindex(ws).manifest.collection
    with pytest.raises(RefusedError, match=f"{other} is a version of 'other'"):
        release.promote(ws, other)
    assert ws.store.alias_target("knowledge") == mine


def test_tables_made_with_another_model_or_budget_are_not_staged(
    open_workspace: Open, tiny_models: tuple[Path, Path]
) -> None:
    ws = open_workspace()
    documents, _ = steps.read_documents(ws)
    chunks = steps.chunk_documents(ws, documents)
    vectors = steps.embed_chunks(ws, chunks).table
    index = steps.index_knowledge(documents, chunks)
    for changed in (open_workspace(embedding__model=str(tiny_models[1])), open_workspace(chunking__soft_tokens=60)):
        with pytest.raises(RefusedError, match="The chunks were cut for another model, chunk budget or chunker"):
            release.stage(changed, documents, chunks, vectors, index)
    other = open_workspace(embedding__model=str(tiny_models[1]))
    with pytest.raises(RefusedError, match="The embeddings were made by another model"):
        release.stage(other, documents, steps.chunk_documents(other, documents), vectors, index)
    assert ws.store.collections() == []


def test_rollback_goes_to_the_version_that_served_last_and_never_to_a_bad_one(
    open_workspace: Open, knowledge: Path
) -> None:
    ws = open_workspace()
    good = reindex.reindex(ws).manifest.collection
    add(knowledge)
    bad = reindex.reindex(ws).manifest.collection
    release.rollback(ws)
    edit_one_section(knowledge)
    fixed = reindex.reindex(ws).manifest.collection
    release.prune(ws)
    assert ws.store.collections() == sorted([good, bad, fixed])
    assert release.rollback(ws).collection == good


def test_knowledge_that_was_rolled_back_stays_so_in_a_rebuild(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace(index__keep_versions=1)
    good = reindex.reindex(ws).manifest.collection
    add(knowledge)
    ws_two = open_workspace(index__keep_versions=2)
    reindex.reindex(ws_two)
    release.rollback(ws_two)
    for full in (False, True):
        release.prune(ws)
        with pytest.raises(RefusedError, match="is not promoted again: it was rolled back"):
            reindex.reindex(ws, full=full)
    assert ws.store.alias_target("knowledge") == good


def test_back_to_earlier_knowledge_and_on_again_keeps_what_served_last(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws).manifest.collection
    add(knowledge)
    second = reindex.reindex(ws).manifest.collection
    (knowledge / "cache/new.md").unlink()
    assert reindex.reindex(ws).manifest.collection == first
    assert release.rollback(ws).collection == second
    release.rollback(ws, to=first)
    edit_one_section(knowledge)
    reindex.reindex(ws)
    assert release.rollback(ws).collection == first


def test_a_version_that_another_alias_holds_is_left_alone(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace(index__keep_versions=1)
    first = reindex.reindex(ws).manifest.collection
    ws.store.point_alias("pinned", first)
    for number in range(3):
        write(knowledge / f"cache/{number}.md", f"# {number}\n\nText.\n")
        reindex.reindex(ws)
    release.prune(ws)
    assert ws.store.exists(first)
    assert len(ws.store.collections()) == 2


# Artefacts that are lost


def test_lost_artefacts_are_built_anew_and_nothing_is_deleted_meanwhile(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws).manifest
    shutil.rmtree(ws.state / "artifacts")
    for name in ("cache/redis-memory.md", "cache/redis-clients.md", "kubernetes/oom.md"):
        (knowledge / name).rename(knowledge.parent / Path(name).name)
    with pytest.raises(RefusedError, match="3 of 4 documents are gone"):
        reindex.reindex(ws)
    for name in ("cache/redis-memory.md", "cache/redis-clients.md", "kubernetes/oom.md"):
        (knowledge.parent / Path(name).name).rename(knowledge / name)
    (knowledge / "kubernetes/disk.md").rename(knowledge.parent / "disk.md")
    (knowledge / "kubernetes/disk.md").write_bytes(bytes(range(256)) * 40)
    with pytest.raises(RefusedError, match=f"1 documents cannot be read now, and the artefacts of {first.collection}"):
        reindex.reindex(ws)
    (knowledge.parent / "disk.md").rename(knowledge / "kubernetes/disk.md")
    again = reindex.reindex(ws)
    assert (again.result, again.embedded, again.manifest.applied_by) == ("promoted", 0, "rebuild")
    assert again.manifest.collection != first.collection
    assert reindex.reindex(ws).result == "unchanged"


def test_a_schema_of_another_time_does_not_switch_the_deletion_guard_off(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace()
    first = reindex.reindex(ws).manifest
    ws.store.set_manifest_json(first.collection, of_a_later_schema(first))
    shutil.rmtree(knowledge / "cache")
    (knowledge / "kubernetes/oom.md").unlink()
    with pytest.raises(RefusedError, match="3 of 4 documents are gone"):
        reindex.reindex(ws)


def test_two_stores_with_one_artefact_folder_leave_each_others_alone(open_workspace: Open, tmp_path: Path) -> None:
    shared = f"file://{tmp_path / 'shared'}"
    one = open_workspace(state_dir=tmp_path / "one", index__artifacts_uri=shared)
    two = open_workspace(state_dir=tmp_path / "two", index__artifacts_uri=shared)
    first = reindex.reindex(one).manifest
    reindex.reindex(two)
    release.prune(two)
    assert one.artifacts.intact(first)


def test_a_build_of_another_state_folder_is_not_debris(open_workspace: Open, tmp_path: Path) -> None:
    one = open_workspace(state_dir=tmp_path / "one")
    first = reindex.reindex(one).manifest
    uri = lite_server.running(one.lite_folder).uri
    two = open_workspace(state_dir=tmp_path / "two", retrieval__milvus__uri=uri)
    growing = first.model_copy(update={"collection": f"{first.collection[:-4]}aaaa", "state": "building"})
    one.store.create(growing.collection, dimension=32, index_type="FLAT", manifest=growing.to_json())
    assert release.prune(two) == []
    assert release.prune(one) == [growing.collection]


# Roots


def test_another_set_of_roots_gives_what_a_rebuild_gives(open_workspace: Open, tmp_path: Path) -> None:
    for name in ("a", "z"):
        write(tmp_path / f"all/{name}/b/{name}.md", f"# {name}\n\nText of {name}.\n")
    one = {"knowledge__id": "same", "knowledge__roots": [str(tmp_path / "all")]}
    two = {
        "knowledge__id": "same",
        "knowledge__roots": [{"name": name, "path": str(tmp_path / "all" / name)} for name in ("a", "z")],
    }
    reindex.reindex(open_workspace(**one))
    ws = open_workspace(**two)
    assert reindex.reindex(ws).result == "promoted"
    assert {row["category"] for row in contents(ws)} == {"b"}


def test_a_rollback_that_was_killed_after_the_move_goes_no_further_when_asked_again(
    open_workspace: Open, knowledge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws = open_workspace(index__keep_versions=3)
    names = []
    for number in range(3):
        write(knowledge / f"cache/{number}.md", f"# {number}\n\nText.\n")
        names.append(reindex.reindex(ws).manifest.collection)
    move = ws.store.point_alias

    def die(alias: str, collection: str) -> None:
        move(alias, collection)
        raise KeyboardInterrupt

    monkeypatch.setattr(ws.store, "point_alias", die)
    with pytest.raises(KeyboardInterrupt):
        release.rollback(ws)
    monkeypatch.undo()
    assert release.rollback(ws).collection == names[1]
    assert ws.artifacts.read_promoted("knowledge") == names[1]
    assert release.rollback(ws).collection == names[0]


def test_a_query_that_is_no_unicode_is_answered(open_workspace: Open) -> None:
    ws = open_workspace()
    reindex.reindex(ws)
    assert VectorSearch(ws, mode="sdk").nearest("Redis \udcc4 memory", top_k=1)
    assert VectorSearch(ws, mode="sdk").nearest("Redis", top_k=1, category="\udcff") == []
