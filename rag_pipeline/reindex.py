"""Reindex: every step in a row, or none when nothing changed; what the command calls."""

from dataclasses import dataclass, field
from typing import Literal

from rag_pipeline import release, steps
from rag_pipeline.index.changes import Changes
from rag_pipeline.index.manifest import Manifest
from rag_pipeline.tables import issues_from
from rag_pipeline.watch import Watch
from rag_pipeline.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reindex did.

    Attributes:
        result: ``promoted`` (the alias moved), ``unchanged`` (nothing to do) or ``staged`` (not asked to promote).
        changes: Since the version that was promoted before.
        pruned: Collections dropped.
        seconds: Wall seconds by step.
        warnings: What a person should mend, a line each, with file and line.
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


def reindex(
    ws: Workspace, *, full: bool = False, refresh: bool = False, promote_it: bool = True, watch: Watch | None = None
) -> Outcome:
    """Bring the alias up to the knowledge folders.

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
        documents, change = steps.read_documents(ws, full=full, watch=watch)
        no_database = release.prepare_database(ws)
        warnings = (
            *(
                f"{issue.source or 'the root folder'}{f', line {issue.line}' if issue.line else ''}: {issue.reason}"
                for issue in issues_from(documents)
            ),
            *([no_database] if no_database else []),
        )
        parent = steps.parent_of(ws)
        same = parent is not None and parent.fingerprint == steps.fingerprint_of(ws, documents)
        if parent is not None and same and not full and ws.artifacts.intact(parent):
            pruned = tuple(release.prune(ws, watch=watch))
            return Outcome("unchanged", parent, change, pruned=pruned, seconds=watch.seconds, warnings=warnings)
        if change.any:
            watch.say(f"Documents: {change}.")
        chunks = steps.chunk_documents(ws, documents, full=full, watch=watch)
        embedded = steps.embed_chunks(ws, chunks, refresh=refresh, watch=watch)
        index = steps.index_knowledge(documents, chunks, watch=watch)
        staged = release.stage(
            ws, documents, chunks, embedded.table, index, full=full, tokens_per_s=embedded.tokens_per_s, watch=watch
        )
        release.refuse_failed(ws, staged.results)
        manifest = staged.manifest
        if promote_it:
            manifest = release.promote(ws, manifest.collection, watch=watch)
    return Outcome(
        "promoted" if promote_it else "staged",
        manifest,
        change,
        embedded=embedded.embedded,
        reused=embedded.reused,
        truncated=embedded.truncated,
        pruned=staged.pruned,
        seconds=watch.seconds,
        warnings=warnings,
    )
