"""The reindex assets: each reads its inputs, calls one step of `rag_pipeline.reindex` and tells what it did."""

import dagster as dg
import pandas as pd

from rag_pipeline import reindex as steps
from rag_pipeline.defs.checks import check_results, check_specs
from rag_pipeline.defs.resources import WorkspaceResource
from rag_pipeline.index.changes import Changes, documents_digest
from rag_pipeline.index.manifest import digest_of
from rag_pipeline.plots import inline_image, token_histogram
from rag_pipeline.tables import indexed_documents, issues_from

GROUP = "knowledge"
OWNERS = ["team:knowledge"]
TABLE = dg.PythonObjectDagsterType(pd.DataFrame, name="Table")
_LISTED = 50
_SLOWEST = 5


class ReindexConfig(dg.Config):
    """What this run may do beyond a plain reindex."""

    full: bool = False
    allow_mass_deletion: bool = False
    take_over: bool = False


class EmbeddingConfig(dg.Config):
    """How this run embeds."""

    refresh: bool = False


def _watch(context: dg.AssetExecutionContext) -> steps.Watch:
    said = {"part": -1}

    def progress(step: str, done: int, total: int) -> None:
        part = done * 10 // max(total, 1)
        if part != said["part"]:
            said["part"] = part
            context.log.info(f"{step}: {done} of {total}")

    return steps.Watch(say=context.log.info, progress=progress)


def _listing(names: tuple[str, ...]) -> str:
    more = f"\n- … and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return "\n".join(f"- `{name}`" for name in names[:_LISTED]) + more


def _changes_markdown(changes: Changes) -> str:
    renamed = tuple(f"{before} → {after}" for before, after in changes.renamed)
    parts = {"added": changes.added, "edited": changes.edited, "removed": changes.removed, "renamed": renamed}
    text = "\n\n".join(f"**{name}** ({len(names)})\n{_listing(names)}" for name, names in parts.items() if names)
    return text or "nothing changed since the promoted version"


@dg.asset(
    group_name=GROUP,
    owners=OWNERS,
    dagster_type=TABLE,
    kinds={"markdown", "pandas"},
    check_specs=check_specs("documents"),
)
def raw_documents(
    context: dg.AssetExecutionContext, config: ReindexConfig, workspace: WorkspaceResource
) -> dg.MaterializeResult:
    """Every Markdown file of the knowledge folders, decoded, with its front matter; rejected files too."""
    ws = workspace.open(allow_mass_deletion=config.allow_mass_deletion, take_over=config.take_over)
    documents, changes = steps.read_documents(ws, full=config.full, watch=_watch(context))
    issues = issues_from(documents)
    return dg.MaterializeResult(
        value=documents,
        data_version=dg.DataVersion(documents_digest(documents)),
        check_results=check_results(steps.check_documents(ws, documents)),
        metadata={
            "documents": len(indexed_documents(documents)),
            "rejected": int(documents["rejected"].sum()),
            "added": len(changes.added),
            "edited": len(changes.edited),
            "removed": len(changes.removed),
            "renamed": len(changes.renamed),
            "changes": dg.MetadataValue.md(_changes_markdown(changes)),
            "issues": dg.MetadataValue.md(
                "\n".join(f"- `{issue.source}` line {issue.line}: {issue.reason}" for issue in issues[:_LISTED])
                or "none"
            ),
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
    context: dg.AssetExecutionContext, config: ReindexConfig, workspace: WorkspaceResource, raw_documents: pd.DataFrame
) -> dg.MaterializeResult:
    """Heading-aware chunks with breadcrumbs, cut to the embedding model's own tokens; nothing is lost."""
    ws = workspace.open(take_over=config.take_over)
    watch = _watch(context)
    table = steps.chunk_documents(ws, raw_documents, full=config.full, watch=watch)
    picture = token_histogram(table["token_count"].tolist(), limit=ws.budget.hard_tokens)
    return dg.MaterializeResult(
        value=table,
        data_version=dg.DataVersion(digest_of(*table["id"], *table["content_digest"])),
        check_results=check_results(steps.check_chunks(ws, raw_documents, table)),
        metadata={
            "chunks": len(table),
            "tokens": int(table["token_count"].sum()),
            "largest_chunk_tokens": int(table["token_count"].max()) if len(table) else 0,
            "token_histogram": dg.MetadataValue.md(inline_image(picture, alternative="chunk sizes in tokens")),
            "slowest_documents": dg.MetadataValue.md(_slowest_markdown(watch.slowest("chunk", _SLOWEST))),
        },
    )


def _slowest_markdown(slowest: list[tuple[str, float]]) -> str:
    rows = "\n".join(f"| `{source}` | {seconds * 1000:.0f} |" for source, seconds in slowest)
    return f"| document | ms |\n|---|---|\n{rows}" if rows else "no document was chunked"


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
        data_version=dg.DataVersion(digest_of(*table["kind"], *table["term"], *table["source"])),
        metadata={"terms": len(table), **kinds},
    )


@dg.asset(
    group_name=GROUP,
    owners=OWNERS,
    dagster_type=TABLE,
    kinds={"pytorch", "pandas"},
    check_specs=check_specs("embeddings"),
)
def breadcrumb_embeddings(
    context: dg.AssetExecutionContext, config: EmbeddingConfig, workspace: WorkspaceResource, chunks: pd.DataFrame
) -> dg.MaterializeResult:
    """One unit vector a chunk, of title, breadcrumb and content; texts seen before come from the cache."""
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


@dg.asset(
    group_name=GROUP,
    owners=OWNERS,
    dagster_type=TABLE,
    kinds={"milvus"},
    check_specs=check_specs("collection"),
)
def milvus_collection(
    context: dg.AssetExecutionContext,
    config: ReindexConfig,
    workspace: WorkspaceResource,
    raw_documents: pd.DataFrame,
    chunks: pd.DataFrame,
    breadcrumb_embeddings: pd.DataFrame,
    knowledge_index: pd.DataFrame,
) -> dg.MaterializeResult:
    """A new version of the collection beside the promoted one, complete and verified, with its artefacts."""
    ws = workspace.open(take_over=config.take_over)
    manifest, results = steps.stage(
        ws, raw_documents, chunks, breadcrumb_embeddings, knowledge_index, full=config.full, watch=_watch(context)
    )
    return dg.MaterializeResult(
        value=pd.DataFrame([{"collection": manifest.collection, "fingerprint": manifest.fingerprint}]),
        data_version=dg.DataVersion(manifest.fingerprint),
        check_results=check_results(result for result in results if result.table == "collection"),
        metadata={
            "collection": manifest.collection,
            "rows": manifest.chunks,
            "documents": manifest.documents,
            "index_type": manifest.index_type,
            "applied_by": manifest.applied_by,
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
    context: dg.AssetExecutionContext,
    config: ReindexConfig,
    workspace: WorkspaceResource,
    milvus_collection: pd.DataFrame,
) -> dg.MaterializeResult:
    """The version that the alias points to: what every lookup reads. Moved only past all ERROR checks."""
    ws = workspace.open(take_over=config.take_over)
    manifest = steps.promote(ws, milvus_collection["collection"].iloc[0], watch=_watch(context))
    return dg.MaterializeResult(
        data_version=dg.DataVersion(manifest.fingerprint),
        metadata={
            "alias": manifest.alias,
            "collection": manifest.collection,
            "promoted_at": manifest.promoted_at,
            "documents": manifest.documents,
            "chunks": manifest.chunks,
            "gate": manifest.gate,
            "model": manifest.model.name,
        },
    )
