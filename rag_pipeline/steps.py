"""The steps from Markdown to checked tables, each a function: read, chunk, embed, index, check.

The Dagster assets call them one by one with the tables that Dagster kept in between; `rag_pipeline.reindex` calls them
in a row. `rag_pipeline.release` makes a version of the tables.
"""

import time
from dataclasses import dataclass

import pandas as pd

from rag_pipeline import contracts
from rag_pipeline.errors import StoreUnavailableError
from rag_pipeline.index import changes
from rag_pipeline.index.artifacts import CHUNKS, DOCUMENTS
from rag_pipeline.index.changes import Changes
from rag_pipeline.index.embedding import embed_texts, embedding_digest
from rag_pipeline.index.embedding_cache import EmbeddingCache
from rag_pipeline.index.manifest import SCHEMA_VERSION, Manifest, RootEntry, digest_of
from rag_pipeline.ingest.chunking import CHUNKER_VERSION
from rag_pipeline.ingest.documents import discover
from rag_pipeline.ingest.knowledge_index import build_knowledge_index
from rag_pipeline.ingest.terms import KNOWLEDGE_INDEX_VERSION
from rag_pipeline.tables import embeddings_table, from_parquet, indexed_documents, issues_from, issues_table
from rag_pipeline.verdicts import CheckResult
from rag_pipeline.watch import Watch
from rag_pipeline.workspace import Workspace

_RATE_MIN_TEXTS = 50


@dataclass(frozen=True, slots=True)
class Embedded:
    """Embeddings and what they cost.

    Attributes:
        table: See `rag_pipeline.tables.embeddings_table`.
        embedded: Texts that the model had to embed.
        reused: Texts whose vector was in the cache, or equal to one before.
        truncated: Texts longer than the model takes; always 0 for chunks of this project.
        tokens_per_s: How fast; 0 when too few were embedded to tell.
    """

    table: pd.DataFrame
    embedded: int
    reused: int
    truncated: int
    tokens_per_s: float


def recipe_of(ws: Workspace) -> str:
    """With which chunker, budget and tokenizer chunks are cut: 64 hex digits."""
    budget = ws.budget
    return digest_of(CHUNKER_VERSION, str(budget.soft_tokens), str(budget.hard_tokens), ws.model.fingerprint)


def fingerprint_of(ws: Workspace, documents: pd.DataFrame) -> str:
    """Digest of everything that decides a version's contents."""
    flat = f"flat up to {ws.settings.index.flat_max_rows}" if ws.store.is_lite else "hnsw"
    return digest_of(
        f"schema {SCHEMA_VERSION}",
        f"knowledge index {KNOWLEDGE_INDEX_VERSION}",
        f"chunks {recipe_of(ws)}",
        f"index {flat}",
        f"documents {changes.documents_digest(documents)}",
    )


def parent_of(ws: Workspace) -> Manifest | None:
    """The promoted version that this run builds upon; ``None`` without one, or with one of another schema."""
    target = ws.versions.own_target(take_over=ws.settings.index.take_over)
    return target[1] if target else None


def parent_table(ws: Workspace, parent: Manifest | None, name: str) -> pd.DataFrame | None:
    """A table of the promoted version, ``None`` when it cannot be had: then nothing of it is reused."""
    if parent is None:
        return None
    try:
        return from_parquet(ws.artifacts.read(parent, name))
    except StoreUnavailableError:
        return None


def read_documents(ws: Workspace, *, full: bool = False, watch: Watch | None = None) -> tuple[pd.DataFrame, Changes]:
    """Step ``read``: the documents table, and what changed since the promoted version.

    Raises:
        RefusedError: The alias belongs to another knowledge base, or too many documents are gone.
    """
    watch = watch or Watch()
    settings = ws.settings.knowledge
    with watch.step("read"):
        if not ws.has_store:
            discover(ws.roots, max_bytes=settings.max_file_bytes)  # a wrong folder is told before a store is made
        target = ws.versions.own_target(take_over=ws.settings.index.take_over)
        parent = target[1] if target else None
        before = parent_table(ws, parent, DOCUMENTS)
        same_parser = parent is not None and parent.chunker_version == CHUNKER_VERSION
        same_roots = parent is not None and _names(parent.roots) == _names(ws.root_entries)
        documents = changes.read_knowledge(
            ws.roots,
            parent=before,
            max_bytes=settings.max_file_bytes,
            reparse=full or not (same_parser and same_roots),
        )
        if target and before is None:
            # The artefacts are gone, or of another schema: what is indexed is known from the rows alone.
            before = changes.documents_of(ws.store.sources(target[0]))
            changes.refuse_unkept(documents, before, collection=target[0])
        change = changes.compare(documents, before)
        indexed = 0 if before is None else len(indexed_documents(before))
        changes.guard_mass_deletion(change.removed, before=indexed, allowed=settings.allow_mass_deletion)
        if len(ws.roots) > 1 and not settings.allow_mass_deletion:
            changes.guard_roots([root.name for root in ws.roots], documents, before)
    return documents, change


def _names(roots: tuple[RootEntry, ...]) -> list[str]:
    """What of the roots enters the sources and categories."""
    return [root.name for root in roots] if len(roots) > 1 else []


def chunk_documents(
    ws: Workspace, documents: pd.DataFrame, *, full: bool = False, watch: Watch | None = None
) -> pd.DataFrame:
    """Step ``chunk``: the chunks table; chunks of unchanged documents come from the promoted version.

    Raises:
        RefusedError: Too many documents that had chunks have none any more.
    """
    watch = watch or Watch()
    with watch.step("chunk") as progress:
        parent = parent_of(ws)
        old_chunks = parent_table(ws, parent, CHUNKS)
        old_documents = parent_table(ws, parent, DOCUMENTS)
        if parent is not None and not may_sync(ws, parent):
            _announce(ws, parent, old_chunks, watch)
        reuse = parent is not None and not full and may_sync(ws, parent)
        table = changes.chunk_knowledge(
            documents,
            tokens=lambda: ws.token_counter,
            budget=ws.budget,
            recipe=recipe_of(ws),
            parent_documents=old_documents if reuse else None,
            parent_chunks=old_chunks if reuse else None,
            progress=progress,
            timed=lambda source, seconds: watch.document("chunk", source, seconds),
        )
        if old_chunks is not None and old_documents is not None:
            had = set(old_chunks["source"]) - {old for old, _ in changes.compare(documents, old_documents).renamed}
            changes.guard_mass_deletion(
                sorted(had - set(table["source"])), before=len(had), allowed=ws.settings.knowledge.allow_mass_deletion
            )
    return table


def may_sync(ws: Workspace, parent: Manifest) -> bool:
    """Whether chunks of a version fit those that a run makes now."""
    budget = ws.budget
    return (
        parent.model.fingerprint == ws.model.fingerprint
        and parent.chunker_version == CHUNKER_VERSION
        and (parent.soft_tokens, parent.hard_tokens) == (budget.soft_tokens, budget.hard_tokens)
    )


def _announce(ws: Workspace, parent: Manifest, old_chunks: pd.DataFrame | None, watch: Watch) -> None:
    what = []
    if parent.model.fingerprint != ws.model.fingerprint:
        what.append(f"the model changes from {parent.model.name} to {ws.model.name}")
    if parent.chunker_version != CHUNKER_VERSION:
        what.append(f"the chunker changes from version {parent.chunker_version} to {CHUNKER_VERSION}")
    budget = ws.budget
    if (parent.soft_tokens, parent.hard_tokens) != (budget.soft_tokens, budget.hard_tokens):
        what.append(
            f"the chunk budget changes from {parent.soft_tokens}/{parent.hard_tokens} to "
            f"{budget.soft_tokens}/{budget.hard_tokens} tokens"
        )
    estimate = ""
    if parent.tokens_per_s and old_chunks is not None:
        minutes = int(old_chunks["token_count"].sum()) / parent.tokens_per_s / 60
        estimate = f"; about {minutes:.1f} minutes at the rate measured before"
    watch.say(f"All {parent.documents} documents are chunked anew, since {' and '.join(what)}{estimate}.")


def embed_chunks(ws: Workspace, chunks: pd.DataFrame, *, refresh: bool = False, watch: Watch | None = None) -> Embedded:
    """Step ``embed``: one vector a chunk; texts seen before come from the cache.

    Args:
        refresh: Embed every text again and replace what the cache has.
    """
    watch = watch or Watch()
    texts = chunks["embedding_text"].tolist()
    counts = [int(count) for count in chunks["token_count"]]
    model = ws.model
    with watch.step("embed") as progress:
        start = time.monotonic()
        cache_folder = ws.state / "cache" / "embeddings"
        with EmbeddingCache(cache_folder, fingerprint=model.fingerprint, dimension=model.profile.dimension) as cache:
            result = embed_texts(
                texts, token_counts=counts, embedder=ws.embedder, cache=cache, refresh=refresh, progress=progress
            )
        seconds = time.monotonic() - start
    digests = [embedding_digest(text) for text in texts]
    tokens = sum(counts) * result.embedded / max(1, len(texts))
    return Embedded(
        table=embeddings_table(chunks, digests, result.vectors, model_fingerprint=model.fingerprint),
        embedded=result.embedded,
        reused=result.reused,
        truncated=result.truncated,
        tokens_per_s=round(tokens / seconds, 1) if result.embedded >= _RATE_MIN_TEXTS else 0.0,
    )


def index_knowledge(documents: pd.DataFrame, chunks: pd.DataFrame, *, watch: Watch | None = None) -> pd.DataFrame:
    """Step ``index``: the L0 knowledge index, see `rag_pipeline.ingest.knowledge_index`."""
    with (watch or Watch()).step("index"):
        return build_knowledge_index(indexed_documents(documents), chunks)


def check_documents(ws: Workspace, documents: pd.DataFrame) -> list[CheckResult]:
    """The checks of the documents table."""
    issues = issues_table(issues_from(documents))
    return contracts.check_documents(indexed_documents(documents), issues, taxonomy=ws.settings.knowledge.taxonomy)


def check_chunks(ws: Workspace, documents: pd.DataFrame, chunks: pd.DataFrame) -> list[CheckResult]:
    """The checks of the chunks table; chunks that no earlier version had are counted again by the tokenizer."""
    known = parent_table(ws, parent_of(ws), CHUNKS)
    counted = set() if known is None else set(zip(known["recipe"], known["embedding_text"], strict=True))
    fresh = [pair not in counted for pair in zip(chunks["recipe"], chunks["embedding_text"], strict=True)]
    recount = chunks["token_count"].astype(int).tolist()
    texts = chunks["embedding_text"][fresh].tolist()
    places = [place for place, new in enumerate(fresh) if new]
    for place, count in zip(places, ws.token_counter.count_inputs(texts) if texts else [], strict=True):
        recount[place] = count
    return contracts.check_chunks(
        chunks, indexed_documents(documents), max_tokens=ws.budget.hard_tokens, recount=recount
    )


def check_embeddings(ws: Workspace, chunks: pd.DataFrame, embeddings: pd.DataFrame) -> list[CheckResult]:
    """The checks of the embeddings table."""
    return contracts.check_embeddings(embeddings, chunks, dimension=ws.model.profile.dimension)
