"""The reindex assets: each reads its inputs, calls one step and tells what it did."""

import dagster as dg
import pandas as pd
from pydantic import Field

from rag_pipeline import release, steps
from rag_pipeline.defs.checks import check_results, check_specs, guard_lineage, recorded_results
from rag_pipeline.defs.metadata import change_counts, changes_markdown, data_version, issues_listing, slowest_table
from rag_pipeline.defs.resources import WorkspaceResource
from rag_pipeline.index.manifest import digest_of
from rag_pipeline.plots import inline_image, token_histogram
from rag_pipeline.tables import indexed_documents, issues_from
from rag_pipeline.watch import Watch

GROUP = "knowledge"
OWNERS = ["team:knowledge"]
TABLE = dg.PythonObjectDagsterType(pd.DataFrame, name="Table")
_SLOWEST = 10


class RebuildConfig(dg.Config):
    """Whether this run may build upon the promoted version."""

    full: bool = Field(default=False, description="Do it all anew, as if there were no promoted version.")


class EmbeddingConfig(dg.Config):
    """How this run embeds."""

    refresh: bool = Field(default=False, description="Embed every text again and replace what the cache has.")


def _watch(context: dg.AssetExecutionContext) -> Watch:
    tenths: dict[str, int] = {}

    def progress(step: str, done: int, total: int) -> None:
        tenth = done * 10 // max(total, 1)
        if tenths.get(step) != tenth:
            tenths[step] = tenth
            context.log.info(f"{step}: {done} of {total}")

    return Watch(say=context.log.info, progress=progress)


@dg.asset(
    group_name=GROUP,
    owners=OWNERS,
    dagster_type=TABLE,
    kinds={"markdown", "pandas"},
    check_specs=check_specs("documents"),
)
def raw_documents(
    context: dg.AssetExecutionContext, config: RebuildConfig, workspace: WorkspaceResource
) -> dg.MaterializeResult:
    """Every Markdown file of the knowledge folders, decoded, with its front matter; rejected files too.

    `changes` in the metadata says what was added, edited, removed and renamed since the promoted version; `issues`
    lists what a person should mend, by file and line. If suspiciously many documents are gone the run stops; if that
    is meant, set `allow_mass_deletion` of the resource `workspace` in the run's config.
    """
    ws = workspace.open()
    documents, changes = steps.read_documents(ws, full=config.full, watch=_watch(context))
    parent = steps.parent_of(ws)
    return dg.MaterializeResult(
        value=documents,
        data_version=data_version(documents),
        check_results=check_results(steps.check_documents(ws, documents)),
        metadata={
            "documents": len(indexed_documents(documents)),
            "rejected": len({issue.source for issue in issues_from(documents) if issue.rejected}),
            **change_counts(changes),
            "changes": changes_markdown(changes, since=f"`{parent.collection}`" if parent else "an empty index"),
            "issues": issues_listing(issues_from(documents)),
        },
    )


@dg.asset(
    group_name=GROUP,
    owners=OWNERS,
    dagster_type=TABLE,
    kinds={"markdown", "pandas"},
    check_specs=check_specs("chunks"),
)
def chunks(
    context: dg.AssetExecutionContext, config: RebuildConfig, workspace: WorkspaceResource, raw_documents: pd.DataFrame
) -> dg.MaterializeResult:
    """Heading-aware chunks with breadcrumbs, cut to the embedding model's own tokens; nothing is lost.

    Chunks of unchanged documents come from the promoted version (`documents_chunked` counts the others). Open
    `token_histogram` in the metadata to see the chunk sizes: what lies beyond the hard limit would be cut off by the
    model, and fails a check.
    """
    ws, watch = workspace.open(), _watch(context)
    table = steps.chunk_documents(ws, raw_documents, full=config.full, watch=watch)
    counts, budget = table["token_count"], ws.budget
    picture = token_histogram(counts.tolist(), soft=budget.soft_tokens, hard=budget.hard_tokens)
    return dg.MaterializeResult(
        value=table,
        data_version=data_version(table),
        check_results=check_results(steps.check_chunks(ws, raw_documents, table)),
        metadata={
            "chunks": len(table),
            "documents_chunked": len(watch.documents.get("chunk", {})),
            "tokens": int(counts.sum()),
            "median_chunk_tokens": float(counts.median()) if len(table) else 0.0,
            "largest_chunk_tokens": int(counts.max()) if len(table) else 0,
            "token_histogram": dg.MetadataValue.md(inline_image(picture, alternative="chunk sizes in tokens")),
            "slowest_documents": slowest_table(watch.slowest("chunk", _SLOWEST)),
        },
    )


@dg.asset(
    group_name=GROUP,
    owners=OWNERS,
    dagster_type=TABLE,
    kinds={"pandas"},
)
def knowledge_index(
    context: dg.AssetExecutionContext, raw_documents: pd.DataFrame, chunks: pd.DataFrame
) -> dg.MaterializeResult:
    """L0 hints: titles, keywords, alerts, headings and identifiers by which a query is understood."""
    table = steps.index_knowledge(raw_documents, chunks, watch=_watch(context))
    kinds = {f"terms_{kind}": int(count) for kind, count in table["kind"].value_counts().items()}
    return dg.MaterializeResult(
        value=table,
        data_version=data_version(table),
        metadata={"terms": len(table), **kinds},
    )


@dg.asset(
    group_name=GROUP,
    owners=OWNERS,
    dagster_type=TABLE,
    kinds={"huggingface", "pandas"},
    check_specs=check_specs("embeddings"),
)
def breadcrumb_embeddings(
    context: dg.AssetExecutionContext, config: EmbeddingConfig, workspace: WorkspaceResource, chunks: pd.DataFrame
) -> dg.MaterializeResult:
    """One unit vector a chunk, of title, breadcrumb and content.

    Texts seen before come from the cache (`from_cache`); only new or edited ones are embedded (`re_embedded`). A
    renamed or moved document embeds nothing unless its title or headings change.
    """
    ws = workspace.open()
    result = steps.embed_chunks(ws, chunks, refresh=config.refresh, watch=_watch(context))
    return dg.MaterializeResult(
        value=result.table,
        data_version=dg.DataVersion(
            digest_of(ws.model.fingerprint, *result.table["id"], *result.table["embedding_digest"])
        ),
        check_results=check_results(steps.check_embeddings(ws, chunks, result.table)),
        metadata={
            "vectors": len(result.table),
            "re_embedded": result.embedded,
            "from_cache": result.reused,
            "truncated": result.truncated,
            "tokens_per_s": result.tokens_per_s,
            "model": ws.model.name,
            "model_fingerprint": ws.model.fingerprint,
        },
    )


def _measured_rate(context: dg.AssetExecutionContext) -> float:
    """Tokens a second of the latest embedding, 0 when it embedded too little to tell."""
    event = context.instance.get_latest_materialization_event(dg.AssetKey("breadcrumb_embeddings"))
    made = event.asset_materialization if event else None
    rate = made.metadata.get("tokens_per_s") if made else None
    return float(rate.value) if isinstance(rate, dg.FloatMetadataValue) and rate.value else 0.0


@dg.asset(
    group_name=GROUP,
    owners=OWNERS,
    dagster_type=TABLE,
    kinds={"milvus"},
    check_specs=check_specs("collection"),
)
def milvus_collection(
    context: dg.AssetExecutionContext,
    config: RebuildConfig,
    workspace: WorkspaceResource,
    raw_documents: pd.DataFrame,
    chunks: pd.DataFrame,
    breadcrumb_embeddings: pd.DataFrame,
    knowledge_index: pd.DataFrame,
) -> dg.MaterializeResult:
    """A new version of the collection beside the promoted one, complete and verified, with its artefacts.

    Equal knowledge gives the version that is there already: nothing is written. No reader sees a new version before
    `promoted_collection` moves the alias, so a failed check here costs nothing but this run.
    """
    ws = workspace.open()
    guard_lineage(context, {"raw_documents": data_version(raw_documents), "chunks": data_version(chunks)})
    staged = release.stage(
        ws,
        raw_documents,
        chunks,
        breadcrumb_embeddings,
        knowledge_index,
        full=config.full,
        tokens_per_s=_measured_rate(context),
        watch=_watch(context),
    )
    manifest = staged.manifest
    found = [result for result in staged.results if result.table == "collection"] or recorded_results(manifest)
    return dg.MaterializeResult(
        value=pd.DataFrame([{"collection": manifest.collection, "fingerprint": manifest.fingerprint}]),
        data_version=dg.DataVersion(manifest.fingerprint),
        check_results=check_results(found),
        metadata={
            "collection": manifest.collection,
            "rows": manifest.chunks,
            "documents": manifest.documents,
            "index_type": manifest.index_type,
            "applied_by": manifest.applied_by if staged.results else "nothing to do",
            "parent": manifest.parent or "none",
            "store": ws.store.description,
            "gate": manifest.gate,
        },
    )


@dg.asset(
    group_name=GROUP,
    owners=OWNERS,
    kinds={"milvus"},
)
def promoted_collection(
    context: dg.AssetExecutionContext, workspace: WorkspaceResource, milvus_collection: pd.DataFrame
) -> dg.MaterializeResult:
    """The version that the alias points to: what every lookup reads.

    The alias moves only to a version whose manifest holds a pass of every ERROR check, whichever run made it. The job
    `rollback_job` moves it back to `before`.
    """
    ws = workspace.open()
    before = ws.store.alias_target(ws.settings.index.alias)
    manifest = release.promote(ws, milvus_collection["collection"].iloc[0], watch=_watch(context))
    if no_database := release.prepare_database(ws):
        context.log.warning(no_database)
    return dg.MaterializeResult(
        data_version=dg.DataVersion(manifest.fingerprint),
        metadata={
            "alias": manifest.alias,
            "collection": manifest.collection,
            "before": before or "none",
            "moved": before != manifest.collection,
            "promoted_at": manifest.promoted_at,
            "documents": manifest.documents,
            "chunks": manifest.chunks,
            "gate": manifest.gate,
            "model": manifest.model.name,
        },
    )
