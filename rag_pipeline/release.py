"""From checked tables to the version that readers see: stage, promote, roll back, prune."""

from dataclasses import dataclass
from datetime import UTC, datetime

import pandas as pd

from rag_pipeline import contracts
from rag_pipeline.errors import CheckFailedError, RefusedError, UnavailableError
from rag_pipeline.index import changes, retention, staging
from rag_pipeline.index.artifacts import CHUNKS, DOCUMENTS, KNOWLEDGE_INDEX
from rag_pipeline.index.manifest import Manifest, ModelEntry, Verdict, now_text, version_name
from rag_pipeline.ingest.chunking import CHUNKER_VERSION
from rag_pipeline.ingest.knowledge_index import to_json
from rag_pipeline.steps import check_chunks, check_documents, check_embeddings, fingerprint_of, may_sync, recipe_of
from rag_pipeline.tables import indexed_documents, to_parquet
from rag_pipeline.verdicts import ERROR_CHECKS, CheckResult, failed_errors
from rag_pipeline.watch import Watch
from rag_pipeline.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Staged:
    """A staging version.

    Attributes:
        manifest: Says what the checks found.
        results: The checks run on it; none when an equal version was there already.
        pruned: Collections that were dropped before.
    """

    manifest: Manifest
    results: tuple[CheckResult, ...]
    pruned: tuple[str, ...]


def stage(
    ws: Workspace,
    documents: pd.DataFrame,
    chunks: pd.DataFrame,
    embeddings: pd.DataFrame,
    knowledge_index: pd.DataFrame,
    *,
    full: bool = False,
    tokens_per_s: float = 0.0,
    watch: Watch | None = None,
) -> Staged:
    """Steps ``prune`` to ``record``: a complete staging version with every verdict in its manifest.

    An equal version that is complete and has passed its checks is taken as it is.

    Returns:
        The version, failed checks of its collection included: promotion refuses those.

    Raises:
        CheckFailedError: An ERROR check of a table failed; no version was made.
        RefusedError: The tables were made with another model or chunk budget than is set now.
    """
    watch = watch or Watch()
    _refuse_other_recipe(ws, chunks, embeddings)
    fingerprint = fingerprint_of(ws, documents)
    with ws.writing():
        target = ws.versions.own_target(take_over=ws.settings.index.take_over)
        pruned = tuple(prune(ws, watch=watch))
        parent = target[0] if target else ""
        if not full and (ready := ws.versions.reusable(fingerprint, required=ERROR_CHECKS)):
            if parent not in (ready.parent, ready.collection):
                ready = ws.versions.record(ready.model_copy(update={"parent": parent}))
            return Staged(ready, (), pruned)
        with watch.step("check"):
            results = [
                *check_documents(ws, documents),
                *check_chunks(ws, documents, chunks),
                *check_embeddings(ws, chunks, embeddings),
            ]
        refuse_failed(ws, results)
        before = target[1] if target else None
        synced = before is not None and not full and may_sync(ws, before) and ws.artifacts.intact(before)
        manifest = Manifest(
            collection=version_name(ws.settings.index.alias, fingerprint, datetime.now(UTC)),
            alias=ws.settings.index.alias,
            knowledge_base_id=ws.knowledge_base_id,
            roots=ws.root_entries,
            fingerprint=fingerprint,
            model=ModelEntry(
                name=ws.model.name, fingerprint=ws.model.fingerprint, dimension=ws.model.profile.dimension
            ),
            chunker_version=CHUNKER_VERSION,
            soft_tokens=ws.budget.soft_tokens,
            hard_tokens=ws.budget.hard_tokens,
            documents_digest=changes.documents_digest(documents),
            documents=len(indexed_documents(documents)),
            chunks=len(chunks),
            index_type=staging.index_type_for(
                ws.store, rows=len(chunks), flat_max_rows=ws.settings.index.flat_max_rows
            ),
            created_at=now_text(),
            store=ws.store.identity,
            parent=parent,
            applied_by="sync" if synced else "rebuild",
            owner=ws.versions.owner,
            tokens_per_s=tokens_per_s or (before.tokens_per_s if before else 0.0),
        )
        tables = {
            DOCUMENTS: to_parquet(documents),
            CHUNKS: to_parquet(chunks),
            KNOWLEDGE_INDEX: to_json(knowledge_index),
        }
        return Staged(*_build(ws, manifest, chunks, embeddings, tables=tables, results=results, watch=watch), pruned)


def _build(
    ws: Workspace,
    manifest: Manifest,
    chunks: pd.DataFrame,
    embeddings: pd.DataFrame,
    *,
    tables: dict[str, bytes],
    results: list[CheckResult],
    watch: Watch,
) -> tuple[Manifest, tuple[CheckResult, ...]]:
    with watch.step("create"):
        ws.artifacts.write_manifest(manifest)
        ws.store.create(
            manifest.collection,
            dimension=manifest.model.dimension,
            index_type=manifest.index_type,
            manifest=manifest.to_json(),
        )
    with watch.step("write") as progress:
        staging.write_rows(ws.store, manifest.collection, chunks, embeddings, progress=progress)
    with watch.step("verify"):
        found = staging.verify(ws.store, manifest.collection, embeddings)
    with watch.step("publish"):
        digests = ws.artifacts.publish(manifest.collection, tables)
    with watch.step("record"):
        results = results + contracts.check_collection(
            expected_ids=set(chunks["id"]),
            stored_ids=found.stored_ids,
            stored_count=found.stored_count,
            self_retrieval_misses=found.self_retrieval_misses,
            sampled=found.sampled,
        )
        verdicts = {
            result.name: Verdict(severity=result.severity, passed=result.passed, description=result.description)
            for result in results
        }
        built = manifest.model_copy(update={"state": "built", "checks": verdicts, "artifacts": digests})
        return ws.versions.record(built), tuple(results)


def _refuse_other_recipe(ws: Workspace, chunks: pd.DataFrame, embeddings: pd.DataFrame) -> None:
    if set(chunks["recipe"]) - {recipe_of(ws)}:
        raise RefusedError(
            "The chunks were cut for another model, chunk budget or chunker than is set now; nothing was written. "
            "Materialize chunks and what follows it too, or run reindex_job."
        )
    if set(embeddings["model_fingerprint"]) - {ws.model.fingerprint}:
        raise RefusedError(
            f"The embeddings were made by another model than {ws.model.name}, which is set now; nothing was written. "
            "Materialize breadcrumb_embeddings and what follows it too, or run reindex_job."
        )


def refuse_failed(ws: Workspace, results: list[CheckResult] | tuple[CheckResult, ...]) -> None:
    """Raise `CheckFailedError` if an ERROR check failed, naming each."""
    if failed := failed_errors(results):
        said = "\n".join(f"  {result.name}: {result.description}" for result in failed)
        raise CheckFailedError(
            f"Nothing was promoted, the alias {ws.settings.index.alias!r} stays where it is. Failed checks:\n{said}"
        )


def promote(ws: Workspace, collection: str, *, watch: Watch | None = None) -> Manifest:
    """Step ``promote``: move the alias, see `rag_pipeline.index.versions.Versions.promote`."""
    with (watch or Watch()).step("promote"), ws.writing():
        return ws.versions.promote(collection, required=ERROR_CHECKS, take_over=ws.settings.index.take_over)


def prepare_database(ws: Workspace) -> str:
    """Bring the database of lookups to this version's schema; returns what kept it from that, blank otherwise.

    Lookups never do this themselves, and without it they spool their records: so it is no reason to stop a reindex.
    """
    from rag_pipeline.invocations.database import Database

    database = Database(ws.settings.database, state=ws.state)
    try:
        database.upgrade()
    except UnavailableError as error:
        return f"lookups cannot be recorded yet and are spooled: {error}"
    finally:
        database.close()
    return ""


def rollback(ws: Workspace, *, to: str = "") -> Manifest:
    """Move the alias back, whatever folders its knowledge base was built from; see `Versions.rollback`."""
    with ws.writing():
        return ws.of_alias().versions.rollback(to=to, required=ERROR_CHECKS)


def prune(ws: Workspace, *, watch: Watch | None = None) -> list[str]:
    """Step ``prune``: drop debris and versions past their grace; returns their names, see `index.retention`."""
    with (watch or Watch()).step("prune"), ws.writing():
        index = ws.settings.index
        return retention.prune(ws.versions, keep=index.keep_versions, grace_s=index.grace_s)
