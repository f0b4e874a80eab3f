"""What the command line shows: records for ``--json``, text for people, progress on standard error."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, SecretStr

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.printable import printable
from rag_pipeline.records import Candidate, Chunk
from rag_pipeline.settings import masked

if TYPE_CHECKING:
    from rag_pipeline.index.manifest import Manifest
    from rag_pipeline.reindex import Outcome
    from rag_pipeline.retrieval.rerank import Ranked
    from rag_pipeline.watch import Watch
    from rag_pipeline.workspace import Workspace

_PREVIEW = 240


def note(line: str) -> None:
    """One line on standard error, passwords in URIs masked."""
    print(printable(masked(line)), file=sys.stderr, flush=True)


@contextmanager
def watching() -> Iterator["Watch"]:
    """A watch that shows progress bars on a terminal and plain lines elsewhere."""
    from rag_pipeline.watch import Watch

    if not sys.stderr.isatty():
        yield Watch(say=note)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, no_color="NO_COLOR" in os.environ)
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def progress(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield Watch(say=lambda line: console.print(printable(line), markup=False, highlight=False), progress=progress)


def outcome_record(outcome: "Outcome") -> dict[str, object]:
    """A reindex as JSON."""
    changes = outcome.changes
    return {
        "result": outcome.result,
        "collection": outcome.manifest.collection,
        "fingerprint": outcome.manifest.fingerprint,
        "applied_by": outcome.manifest.applied_by,
        "documents": outcome.manifest.documents,
        "chunks": outcome.manifest.chunks,
        "changes": {
            "added": changes.added,
            "edited": changes.edited,
            "removed": changes.removed,
            "renamed": changes.renamed,
            "kept": changes.kept,
        },
        "embedded": outcome.embedded,
        "reused": outcome.reused,
        "truncated": outcome.truncated,
        "pruned": outcome.pruned,
        "gate": outcome.manifest.gate,
        "warnings": outcome.warnings,
        "seconds": {name: round(seconds, 3) for name, seconds in outcome.seconds.items()},
    }


def outcome_text(outcome: "Outcome") -> str:
    """A reindex for people."""
    manifest = outcome.manifest
    if outcome.result == "unchanged":
        return f"Nothing changed: {manifest.alias} stays at {manifest.collection} ({_size(manifest)})."
    verb = "now points to" if outcome.result == "promoted" else "was not moved; staged is"
    steps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.seconds.items() if seconds >= 0.05)
    return (
        f"{manifest.alias} {verb} {manifest.collection} ({_size(manifest)}, by {manifest.applied_by}).\n"
        f"Changes: {outcome.changes}. Embedded {outcome.embedded}, from cache {outcome.reused}, "
        f"truncated {outcome.truncated}. Gate: {manifest.gate}.\nTime: {steps}."
    )


def _size(manifest: "Manifest") -> str:
    return f"{manifest.documents} documents, {manifest.chunks} chunks"


def status_record(ws: "Workspace", *, live: bool) -> dict[str, object]:
    """What is promoted and kept, from the manifest copies or (live) from the store."""
    alias = ws.settings.index.alias
    if live:
        ws = ws.of_alias()
        manifests = ws.versions.all()
        name = ws.store.alias_target(alias) or ""
    else:
        name = ws.artifacts.read_promoted(alias)
        manifests = [manifest for manifest in ws.artifacts.manifests() if manifest.alias == alias]
    current = next((manifest for manifest in manifests if manifest.collection == name), None)
    return {
        "alias": alias,
        "promoted": name or None,
        "source": "store" if live else "manifest copies",
        "store": masked(ws.store.description),
        "state": str(ws.state),
        "knowledge_base_id": current.knowledge_base_id if current else None,
        "roots": [root.path for root in current.roots] if current else [],
        "fingerprint": current.fingerprint if current else None,
        "documents": current.documents if current else 0,
        "chunks": current.chunks if current else 0,
        "rows": ws.store.count(name) if live and current else None,
        "model": current.model.name if current else None,
        "gate": current.gate if current else None,
        "warnings": sorted(key for key, v in current.checks.items() if not v.passed) if current else [],
        "versions": [_version_record(manifest, name) for manifest in reversed(manifests)],
    }


def _version_record(manifest: "Manifest", promoted: str) -> dict[str, object]:
    standing = (
        "promoted" if manifest.collection == promoted
        else "building" if manifest.state == "building"
        else f"failed: {', '.join(manifest.failed)}" if manifest.failed
        else "held" if manifest.held
        else "kept" if manifest.promoted_at
        else "staged"
    )  # fmt: skip
    return {
        "collection": manifest.collection,
        "standing": standing,
        "created_at": manifest.created_at,
        "promoted_at": manifest.promoted_at or None,
        "documents": manifest.documents,
        "chunks": manifest.chunks,
        "model": manifest.model.name,
        "applied_by": manifest.applied_by,
        "gate": manifest.gate,
    }


def status_text(record: dict[str, Any]) -> str:
    """`status_record` for people."""
    lines = [f"alias: {record['alias']}"]
    if record["promoted"]:
        lines += [
            f"promoted: {record['promoted']}",
            f"documents: {record['documents']}  chunks: {record['chunks']}"
            + (f"  rows in the store: {record['rows']}" if record["rows"] is not None else ""),
            f"model: {record['model']}",
            f"fingerprint: {record['fingerprint']}",
            f"knowledge: {', '.join(record['roots'])} ({record['knowledge_base_id']})",
            f"gate: {record['gate']}",
            f"warnings: {', '.join(record['warnings']) or 'none'}",
        ]
    else:
        lines.append("promoted: none yet; run `rag-pipeline reindex`")
    lines.append(f"store: {record['store']}")
    lines += [f"  {item['collection']}  {item['standing']}  {item['chunks']} chunks" for item in record["versions"]]
    return printable("\n".join(lines))


def chunk_text(chunk: Chunk) -> str:
    """A chunk for people."""
    head = f"[{chunk.chunk_index}] {chunk.breadcrumb_text or chunk.title}"
    place = f"lines {chunk.line_start}-{chunk.line_end}, {chunk.token_count} tokens, {chunk.id}"
    return printable(f"{head}\n    {place}\n{chunk.content}")


def ranked_record(rank: int, item: "Ranked") -> dict[str, object]:
    """A search result as JSON."""
    candidate = item.candidate
    return {
        "rank": rank,
        "id": candidate.id,
        "content": candidate.content,
        "category": candidate.category,
        "score": candidate.score,
        "raw_score": candidate.raw_score,
        "score_label": candidate.score_label,
        "similarity": item.evidence.similarity,
        "evidence_score": item.evidence.value,
        "final_score": item.final,
        "contributions": dict(item.contributions),
        "hit_reasons": list(item.reasons),
        "metadata": candidate.metadata,
    }


def ranking_record(candidate: Candidate) -> dict[str, object]:
    """A candidate as a line of a run file wants it."""
    return {
        "doc": candidate.metadata["source"],
        "breadcrumb": _breadcrumb(candidate),
        "chunk_id": candidate.id,
        "score": candidate.score,
        "raw_score": candidate.raw_score,
        "score_label": candidate.score_label,
    }


def ranked_text(rank: int, item: "Ranked") -> str:
    """A search result for people."""
    candidate, metadata = item.candidate, item.candidate.metadata
    preview = " ".join(candidate.content.split())
    shown = preview if len(preview) <= _PREVIEW else f"{preview[:_PREVIEW]} …"
    place = f"{metadata['source']}:{metadata['line_start']}-{metadata['line_end']}"
    return printable(
        f"{rank}. {_breadcrumb(candidate) or metadata['title']}\n   {place}  "
        f"{candidate.score_label} {candidate.raw_score:.4f}  {'; '.join(item.reasons)}\n   {shown}"
    )


def _breadcrumb(candidate: Candidate) -> str:
    breadcrumb = candidate.metadata.get("breadcrumb")
    return " > ".join(str(part) for part in breadcrumb) if isinstance(breadcrumb, list) else ""


def read_queries(file: Path) -> list[tuple[str, str]]:
    """The ``id`` and ``query`` of each line of a JSON lines file.

    Raises:
        ConfigurationError: The file cannot be read, or a line has no such fields; the message names the line.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The queries file {file} cannot be read: {error}.") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            found.append((str(record["id"]), str(record["query"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigurationError(
                f'{file}, line {number}: expected an object with "id" and "query", found {line[:80]!r}.'
            ) from None
    return found


def plain(value: object) -> object:
    """A setting's value as JSON can hold it; secrets are masked, also those in a URI."""
    if isinstance(value, SecretStr):
        return "********" if value.get_secret_value() else ""
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return masked(str(value)) if isinstance(value, str | Path) else value
