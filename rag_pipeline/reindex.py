"""Reindex: plan, read, chunk, embed, stage, check, promote; what the Dagster assets and the command both call.

`reindex` runs the steps in order. Each step is also a function of its own, which the assets call with the tables that
Dagster kept between them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import pandas as pd

from rag_pipeline import contracts
from rag_pipeline.contracts import CheckResult
from rag_pipeline.errors import CheckFailedError, RefusedError, StoreUnavailableError
from rag_pipeline.index import changes, staging
from rag_pipeline.index.artifacts import CHUNKS, DOCUMENTS, KNOWLEDGE_INDEX
from rag_pipeline.index.changes import Changes
from rag_pipeline.index.embedding import EmbeddingCache, embed_texts, embedding_digest
from rag_pipeline.index.manifest import SCHEMA_VERSION, Manifest, ModelEntry, Verdict, digest_of, now_text, version_name
from rag_pipeline.index.versions import me
from rag_pipeline.ingest.chunking import CHUNKER_VERSION
from rag_pipeline.ingest.knowledge_index import KNOWLEDGE_INDEX_VERSION, build_knowledge_index, to_json
from rag_pipeline.tables import embeddings_table, from_parquet, indexed_documents, issues_from, issues_table, to_parquet
from rag_pipeline.workspace import Workspace

Progress = Callable[[str, int, int], None]
"""Called with the step's name, what is done and what there is to do."""

STEPS = ("prune", "read", "chunk", "embed", "index", "create", "write", "verify", "publish", "check", "promote")


@dataclass(slots=True)
class Watch:
    """Tells about the steps of a run and times them.

    Attributes:
        say: Takes one line for people.
        progress: See `Progress`.
        at_step: Called with a step's name when it begins; the fault tests kill the process here.
        seconds: Wall seconds by step.
        documents: Wall seconds by step and document, where a step goes document by document.
    """

    say: Callable[[str], None] = lambda _line: None
    progress: Progress = lambda _step, _done, _total: None
    at_step: Callable[[str], None] = lambda _step: None
    seconds: dict[str, float] = field(default_factory=dict)
    documents: dict[str, dict[str, float]] = field(default_factory=dict)

    def document(self, step: str, source: str, seconds: float) -> None:
        """Note how long a step took for one document."""
        self.documents.setdefault(step, {})[source] = seconds

    def slowest(self, step: str, number: int) -> list[tuple[str, float]]:
        """The documents that a step took longest for, slowest first."""
        return sorted(self.documents.get(step, {}).items(), key=lambda item: (-item[1], item[0]))[:number]

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Time a step; gives the callback for its progress."""
        self.at_step(name)
        start = time.monotonic()
        try:
            yield lambda done, total: self.progress(name, done, total)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


@dataclass(frozen=True, slots=True)
class Embedded:
    """Embeddings and what they cost.

    Attributes:
        table: See `rag_pipeline.tables.embeddings_table`.
        embedded: Texts that the model had to embed.
        reused: Texts whose vector was in the cache.
        truncated: Texts longer than the model takes; always 0 for chunks of this project.
    """

    table: pd.DataFrame
    embedded: int
    reused: int
    truncated: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reindex did.

    Attributes:
        result: ``promoted`` (the alias moved), ``unchanged`` (nothing to do) or ``staged`` (not asked to promote).
        changes: Since the version that was promoted before.
        pruned: Collections dropped.
        seconds: Wall seconds by step.
    """

    result: Literal["promoted", "unchanged", "staged"]
    manifest: Manifest
    changes: Changes
    embedded: int = 0
    reused: int = 0
    truncated: int = 0
    pruned: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def fingerprint_of(ws: Workspace, documents: pd.DataFrame) -> str:
    """Digest of everything that decides a version's contents."""
    budget = ws.budget
    return digest_of(
        f"schema {SCHEMA_VERSION}",
        f"knowledge index {KNOWLEDGE_INDEX_VERSION}",
        f"chunker {CHUNKER_VERSION}",
        f"soft {budget.soft_tokens}",
        f"hard {budget.hard_tokens}",
        f"model {ws.model.fingerprint}",
        f"documents {changes.documents_digest(documents)}",
    )


def parent_of(ws: Workspace) -> Manifest | None:
    """The promoted version that this run builds upon, ``None`` without one."""
    return ws.versions.parent(take_over=ws.settings.index.take_over)


def parent_table(ws: Workspace, parent: Manifest | None, name: str) -> pd.DataFrame | None:
    """A table of the promoted version, ``None`` when it cannot be had (then nothing of it is reused)."""
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
    with watch.step("read"):
        parent = parent_of(ws)
        before = parent_table(ws, parent, DOCUMENTS)
        documents = changes.read_knowledge(
            ws.roots,
            parent=before,
            max_bytes=ws.settings.knowledge.max_file_bytes,
            reparse=full or parent is None or parent.chunker_version != CHUNKER_VERSION,
        )
        change = changes.compare(documents, before)
        after = len(indexed_documents(documents))
        changes.guard_mass_deletion(
            change,
            before=0 if before is None else len(indexed_documents(before)),
            after=after,
            allowed=ws.settings.knowledge.allow_mass_deletion,
        )
        for root in ws.roots if len(ws.roots) > 1 else ():
            _guard_root(root.name, documents, before, allowed=ws.settings.knowledge.allow_mass_deletion)
    return documents, change


def _guard_root(name: str, documents: pd.DataFrame, before: pd.DataFrame | None, *, allowed: bool) -> None:
    if before is None or allowed:
        return
    prefix = f"{name}/"
    had = indexed_documents(before)["source"].str.startswith(prefix).sum()
    has = indexed_documents(documents)["source"].str.startswith(prefix).sum()
    if had and not has:
        raise RefusedError(
            f"All {had} documents of the root {name!r} are gone; nothing was changed. If that is meant, pass "
            "--allow-mass-deletion (knowledge.allow_mass_deletion) for this run."
        )


def chunk_documents(
    ws: Workspace, documents: pd.DataFrame, *, full: bool = False, watch: Watch | None = None
) -> pd.DataFrame:
    """Step ``chunk``: the chunks table; chunks of unchanged documents come from the promoted version."""
    watch = watch or Watch()
    with watch.step("chunk") as progress:
        parent = None if full else parent_of(ws)
        if parent is not None and not _may_sync(ws, parent):
            _announce(ws, parent, watch)
            parent = None
        return changes.chunk_knowledge(
            documents,
            tokens=lambda: ws.token_counter,
            budget=ws.budget,
            parent_documents=parent_table(ws, parent, DOCUMENTS),
            parent_chunks=parent_table(ws, parent, CHUNKS),
            progress=progress,
            timed=lambda source, seconds: watch.document("chunk", source, seconds),
        )


def _may_sync(ws: Workspace, parent: Manifest) -> bool:
    budget = ws.budget
    return (
        parent.model.fingerprint == ws.model.fingerprint
        and parent.chunker_version == CHUNKER_VERSION
        and (parent.soft_tokens, parent.hard_tokens) == (budget.soft_tokens, budget.hard_tokens)
    )


def _announce(ws: Workspace, parent: Manifest, watch: Watch) -> None:
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
    rate = parent.tokens_per_s
    old = parent_table(ws, parent, CHUNKS)
    estimate = ""
    if rate and old is not None:
        estimate = f"; about {int(old['token_count'].sum()) / rate / 60:.1f} minutes at the rate measured before"
    watch.say(f"All {parent.documents} documents are chunked anew, since {' and '.join(what)}{estimate}.")


def embed_chunks(ws: Workspace, chunks: pd.DataFrame, *, refresh: bool = False, watch: Watch | None = None) -> Embedded:
    """Step ``embed``: one vector a chunk; texts seen before come from the cache.

    Args:
        refresh: Embed every text again and replace what the cache has.
    """
    watch = watch or Watch()
    texts = chunks["embedding_text"].tolist()
    counts = [int(count) for count in chunks["token_count"]]
    with watch.step("embed") as progress:
        dimension = ws.model.profile.dimension
        folder = ws.state / "cache" / "embeddings"
        start = time.monotonic()
        with EmbeddingCache(folder, fingerprint=ws.model.fingerprint, dimension=dimension) as cache:
            result = embed_texts(
                texts, token_counts=counts, embedder=ws.embedder, cache=cache, refresh=refresh, progress=progress
            )
        seconds = time.monotonic() - start
    table = embeddings_table(chunks, [embedding_digest(text) for text in texts], result.vectors)
    tokens = sum(counts) * result.embedded / max(1, result.embedded + result.reused)
    return Embedded(
        table=table,
        embedded=result.embedded,
        reused=result.reused,
        truncated=result.truncated,
        tokens_per_s=round(tokens / seconds, 1) if result.embedded >= 50 else 0.0,
    )


def index_knowledge(documents: pd.DataFrame, chunks: pd.DataFrame, *, watch: Watch | None = None) -> pd.DataFrame:
    """Step ``index``: the L0 knowledge index, see `rag_pipeline.ingest.knowledge_index`."""
    with (watch or Watch()).step("index"):
        return build_knowledge_index(indexed_documents(documents), chunks)


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
) -> tuple[Manifest, list[CheckResult]]:
    """Steps ``create`` to ``check``: a complete staging version with every verdict in its manifest.

    An equal version that is complete and has passed its checks is taken as it is, with no new verdicts.

    Returns:
        The version's manifest and the checks run on it, failed ones included: promotion refuses those.
    """
    watch = watch or Watch()
    fingerprint = fingerprint_of(ws, documents)
    with ws.writing():
        prune(ws, watch=watch)
        if not full and (ready := ws.versions.reusable(fingerprint, required=contracts.ERROR_CHECKS)):
            return ready, []
        parent = parent_of(ws)
        budget = ws.budget
        index_type = staging.index_type_for(ws.store, rows=len(chunks), flat_max_rows=ws.settings.index.flat_max_rows)
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
            soft_tokens=budget.soft_tokens,
            hard_tokens=budget.hard_tokens,
            documents_digest=changes.documents_digest(documents),
            documents=len(indexed_documents(documents)),
            chunks=len(chunks),
            index_type=index_type,
            created_at=now_text(),
            parent=parent.collection if parent else "",
            applied_by="sync" if parent and not full and _may_sync(ws, parent) else "rebuild",
            owner=me(),
            tokens_per_s=tokens_per_s or (parent.tokens_per_s if parent else 0.0),
        )
        results = _check_tables(ws, documents, chunks, embeddings, watch=watch)
        if failed := contracts.failed_errors(results):
            raise CheckFailedError(_failure(failed, ws.settings.index.alias))
        with watch.step("create"):
            ws.artifacts.write_manifest(manifest)
            ws.store.create(
                manifest.collection,
                dimension=manifest.model.dimension,
                index_type=index_type,
                manifest=manifest.to_json(),
            )
        with watch.step("write") as progress:
            staging.write_rows(ws.store, manifest.collection, chunks, embeddings, progress=progress)
        with watch.step("verify"):
            found = staging.verify(ws.store, manifest.collection, embeddings)
        with watch.step("publish"):
            digests = ws.artifacts.publish(
                manifest.collection,
                {
                    DOCUMENTS: to_parquet(documents),
                    CHUNKS: to_parquet(chunks),
                    KNOWLEDGE_INDEX: to_json(knowledge_index),
                },
            )
        with watch.step("check"):
            results += contracts.check_collection(
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
            manifest = ws.versions.record(
                manifest.model_copy(update={"state": "built", "checks": verdicts, "artifacts": digests})
            )
    return manifest, results


def _check_tables(
    ws: Workspace, documents: pd.DataFrame, chunks: pd.DataFrame, embeddings: pd.DataFrame, *, watch: Watch
) -> list[CheckResult]:
    with watch.step("check"):
        return [
            *check_documents(ws, documents),
            *check_chunks(ws, documents, chunks),
            *check_embeddings(ws, chunks, embeddings),
        ]


def check_documents(ws: Workspace, documents: pd.DataFrame) -> list[CheckResult]:
    """The checks of the documents table."""
    return contracts.check_documents(
        indexed_documents(documents), issues_table(issues_from(documents)), taxonomy=ws.settings.knowledge.taxonomy
    )


def check_chunks(ws: Workspace, documents: pd.DataFrame, chunks: pd.DataFrame) -> list[CheckResult]:
    """The checks of the chunks table."""
    return contracts.check_chunks(chunks, indexed_documents(documents), max_tokens=ws.budget.hard_tokens)


def check_embeddings(ws: Workspace, chunks: pd.DataFrame, embeddings: pd.DataFrame) -> list[CheckResult]:
    """The checks of the embeddings table."""
    return contracts.check_embeddings(embeddings, chunks, dimension=ws.model.profile.dimension)


def _failure(failed: Sequence[CheckResult], alias: str) -> str:
    said = "\n".join(f"  {result.name}: {result.description}" for result in failed)
    return f"Nothing was promoted, the alias {alias!r} stays where it is. Failed checks:\n{said}"


def promote(ws: Workspace, collection: str, *, watch: Watch | None = None) -> Manifest:
    """Step ``promote``: move the alias, if the version's manifest has a pass of every ERROR check.

    Raises:
        RefusedError: It lacks one, see `rag_pipeline.index.versions.Versions.promote`.
    """
    with (watch or Watch()).step("promote"), ws.writing():
        return ws.versions.promote(collection, required=contracts.ERROR_CHECKS, take_over=ws.settings.index.take_over)


def rollback(ws: Workspace, *, to: str = "") -> Manifest:
    """Move the alias to the version before, or to the one named."""
    with ws.writing():
        return ws.versions.rollback(to=to, required=contracts.ERROR_CHECKS)


def prune(ws: Workspace, *, watch: Watch | None = None) -> list[str]:
    """Step ``prune``: drop debris and versions past their grace; returns their names."""
    with (watch or Watch()).step("prune"), ws.writing():
        index = ws.settings.index
        return ws.versions.prune(keep=index.keep_versions, grace_s=index.grace_s)


def reindex(
    ws: Workspace, *, full: bool = False, refresh: bool = False, promote_it: bool = True, watch: Watch | None = None
) -> Outcome:
    """Bring the alias up to the knowledge folders: every step, or none when nothing changed.

    Args:
        full: Parse and chunk everything again and build a new version even from equal knowledge.
        refresh: Also embed everything again; implies ``full``.
        promote_it: Move the alias at the end.
        watch: Is told about the steps.

    Raises:
        CheckFailedError: An ERROR check failed; the alias stays.
        RefusedError: A mass deletion, a lock held by another process, or an alias of another knowledge base.
    """
    watch = watch or Watch()
    full = full or refresh
    with ws.writing():
        documents, change = read_documents(ws, full=full, watch=watch)
        warnings = tuple(
            f"{issue.source}{f', line {issue.line}' if issue.line else ''}: {issue.reason}"
            for issue in issues_from(documents)
        )
        parent = parent_of(ws)
        if not full and parent and parent.fingerprint == fingerprint_of(ws, documents):
            pruned = prune(ws, watch=watch)
            # A run that was killed right after it moved the alias has not said so yet.
            ws.artifacts.write_promoted(parent.alias, parent.collection)
            return Outcome("unchanged", parent, change, pruned=tuple(pruned), seconds=watch.seconds, warnings=warnings)
        pruned = prune(ws, watch=watch)
        if change.any:
            watch.say(f"Documents: {change}.")
        chunks = chunk_documents(ws, documents, full=full, watch=watch)
        embedded = embed_chunks(ws, chunks, refresh=refresh, watch=watch)
        index = index_knowledge(documents, chunks, watch=watch)
        manifest, results = stage(
            ws, documents, chunks, embedded.table, index, full=full, tokens_per_s=embedded.tokens_per_s, watch=watch
        )
        if failed := contracts.failed_errors(results):
            raise CheckFailedError(_failure(failed, ws.settings.index.alias))
        if promote_it:
            manifest = promote(ws, manifest.collection, watch=watch)
    return Outcome(
        "promoted" if promote_it else "staged",
        manifest,
        change,
        embedded=embedded.embedded,
        reused=embedded.reused,
        truncated=embedded.truncated,
        pruned=tuple(pruned),
        seconds=watch.seconds,
        warnings=warnings,
    )
