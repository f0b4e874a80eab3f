"""What changed between the knowledge folders and the promoted version, and what may be reused of it.

A file is compared by the digest of its bytes; only files that changed are decoded, parsed and chunked again. A file
that is there but cannot be read keeps its last good version: nothing is deleted because something could not be read.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from rag_pipeline.errors import ConfigurationError, RefusedError
from rag_pipeline.index.manifest import digest_of
from rag_pipeline.ingest.chunking import chunk_document
from rag_pipeline.ingest.documents import Root, discover, read_document
from rag_pipeline.records import Chunk, ChunkBudget, Document, Issue, TokenCounter
from rag_pipeline.tables import (
    CHUNK_COLUMNS,
    chunks_table,
    documents_from,
    documents_table,
    indexed_documents,
    issues_from,
)

_SHOWN = 20
_KEPT = "The version indexed before is kept until the file can be read again."


@dataclass(frozen=True, slots=True)
class Changes:
    """Sources by what happened to them since the promoted version, each sorted.

    Attributes:
        renamed: ``(old source, new source)`` of documents with equal bytes.
        kept: Documents whose file could not be read and whose last good version stays.
    """

    added: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether the documents differ at all."""
        return bool(self.added or self.edited or self.removed or self.renamed)

    def __str__(self) -> str:
        """One line for people."""
        counts = {name: len(getattr(self, name)) for name in ("added", "edited", "removed", "renamed", "kept")}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing changed"


def read_knowledge(
    roots: Sequence[Root], *, parent: pd.DataFrame | None, max_bytes: int, reparse: bool = False
) -> pd.DataFrame:
    """The knowledge folders as a documents table.

    Args:
        roots: Folders to read.
        parent: Documents table of the promoted version, ``None`` when there is none.
        max_bytes: Larger files are skipped with an issue.
        reparse: Decode and parse unchanged files too (another parser made ``parent``).

    Raises:
        ConfigurationError: A root is missing, or no Markdown was found and nothing was indexed before.
        RefusedError: The same, but documents are indexed: they are not deleted because of it.
    """
    known = {} if parent is None else {document.source: document for document in documents_from(parent)}
    raw = {} if parent is None else dict(zip(parent["source"], parent["raw_digest"], strict=True))
    old_issues: dict[str, list[Issue]] = {}
    if parent is not None and not reparse:
        for issue in issues_from(parent):
            old_issues.setdefault(issue.source, []).append(issue)
    try:
        files, issues = discover(roots, max_bytes=max_bytes)
    except ConfigurationError as error:
        if known:
            raise RefusedError(f"{error} {len(known)} documents are indexed from it; none is deleted.") from None
        raise
    if not files and not known:
        folders = ", ".join(str(root.path) for root in roots)
        raise ConfigurationError(f"No Markdown file (*.md, *.markdown) was found in {folders}.")
    documents: dict[str, Document] = {}
    for number, file in enumerate(files):
        if not reparse and raw.get(file.source) == file.digest:
            if file.source in known:
                documents[file.source] = known[file.source]
            issues.extend(old_issues.get(file.source, ()))
            continue
        document, found = read_document(file)
        issues.extend(found)
        if document is not None:
            documents[file.source] = document
            # The file may have been edited since it was found.
            files[number] = replace(file, digest=document.digest)
    issues.extend(_keep_unreadable(documents, known, issues))
    return documents_table(documents.values(), files, issues)


def _keep_unreadable(
    documents: dict[str, Document], known: dict[str, Document], issues: Sequence[Issue]
) -> list[Issue]:
    """Put the last good version of documents that could not be read into ``documents``; returns a word on each."""
    kept = []
    for source in unreadable_among(known, issues):
        if source not in documents:
            documents[source] = known[source]
            kept.append(Issue(source=source, line=0, reason=_KEPT, rejected=True))
    return kept


def unreadable_among(sources: Iterable[str], issues: Sequence[Issue]) -> list[str]:
    """Those documents that are there but could not be read: themselves, or a folder above them (blank: the root)."""
    unreadable = {issue.source for issue in issues if issue.rejected}
    found = []
    for source in sources:
        parts = source.split("/")
        above = {"", *("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))}
        if above & unreadable:
            found.append(source)
    return found


def documents_digest(documents: pd.DataFrame) -> str:
    """Digest of which documents are in the index with which bytes and category (a root's name can decide it)."""
    return digest_of(*(part for source, identity in _identities(documents).items() for part in (source, *identity)))


def compare(documents: pd.DataFrame, parent: pd.DataFrame | None) -> Changes:
    """What changed from the promoted version's documents to these."""
    new = _digests(documents)
    old = {} if parent is None else _digests(parent)
    raw = dict(zip(documents["source"], documents["raw_digest"], strict=True))
    gone = {source for source in old if source not in new}
    come = {source for source in new if source not in old}
    by_digest: dict[str, list[str]] = {}
    for source in sorted(gone):
        by_digest.setdefault(old[source], []).append(source)
    renamed = []
    for source in sorted(come):
        if before := by_digest.get(new[source]):
            renamed.append((before.pop(0), source))
    moved = {source for pair in renamed for source in pair}
    return Changes(
        added=tuple(sorted(come - moved)),
        edited=tuple(sorted(source for source in new if source in old and new[source] != old[source])),
        removed=tuple(sorted(gone - moved)),
        renamed=tuple(renamed),
        kept=tuple(sorted(source for source in new if raw[source] != new[source])),
    )


def _digests(documents: pd.DataFrame) -> dict[str, str]:
    indexed = indexed_documents(documents)
    return dict(zip(indexed["source"], indexed["digest"], strict=True))


def documents_of(sources: Iterable[str]) -> pd.DataFrame:
    """A documents table that knows no more than which documents there are."""
    return documents_table((Document(source=source, digest="unknown", text="") for source in sources), (), ())


def refuse_unkept(documents: pd.DataFrame, before: pd.DataFrame, *, collection: str) -> None:
    """Refuse to go on when a document cannot be read and its last good version cannot be had either.

    Raises:
        RefusedError: There are such documents; the message lists them.
    """
    now = set(indexed_documents(documents)["source"])
    missing = [source for source in before["source"] if source not in now]
    if lost := unreadable_among(missing, issues_from(documents)):
        raise RefusedError(
            f"{len(lost)} documents cannot be read now, and the artefacts of {collection}, which hold their last good "
            f"version, cannot be read either; nothing was changed. Mend the files or index.artifacts_uri, or take the "
            f"files away:\n{_listing(lost)}"
        )


def _identities(documents: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Digest and category of each document: what decides its chunks, besides its source."""
    indexed = indexed_documents(documents)
    pairs = zip(indexed["digest"], indexed["category"], strict=True)
    return dict(zip(indexed["source"], pairs, strict=True))


def guard_mass_deletion(gone: Sequence[str], *, before: int, allowed: bool) -> None:
    """Refuse a change that takes away suspiciously much.

    Refused are: nothing left; more than half of the documents gone; more than 10 documents and more than 10 % gone.

    Args:
        gone: Documents that would leave the index; a renamed one is not gone.
        before: How many there were.
        allowed: Refuse nothing.

    Raises:
        RefusedError: The change is that large and not allowed; the message lists the documents.
    """
    many = len(gone) > before / 2 or (len(gone) > 10 and len(gone) > before / 10)
    if allowed or not gone or not many:
        return
    raise RefusedError(
        f"{len(gone)} of {before} documents are gone or empty; nothing was changed. If that is meant, pass "
        f"--allow-mass-deletion (in Dagster: allow_mass_deletion of the resource workspace) for this run. Gone:\n"
        f"{_listing(gone)}"
    )


def guard_roots(names: Sequence[str], documents: pd.DataFrame, before: pd.DataFrame | None) -> None:
    """Refuse a change that takes away all documents of one of several roots.

    Raises:
        RefusedError: A root that had documents has none.
    """
    if before is None:
        return
    for name in names:
        had, has = (
            int(indexed_documents(table)["source"].str.startswith(f"{name}/").sum()) for table in (before, documents)
        )
        if had and not has:
            raise RefusedError(
                f"All {had} documents of the root {name!r} are gone; nothing was changed. If that is meant, pass "
                "--allow-mass-deletion (in Dagster: allow_mass_deletion of the resource workspace) for this run."
            )


def _listing(sources: Sequence[str]) -> str:
    shown = "\n".join(f"  {source}" for source in sources[:_SHOWN])
    return f"{shown}\n  … and {len(sources) - _SHOWN} more" if len(sources) > _SHOWN else shown


def chunk_knowledge(
    documents: pd.DataFrame,
    *,
    tokens: Callable[[], TokenCounter],
    budget: ChunkBudget,
    recipe: str,
    parent_documents: pd.DataFrame | None = None,
    parent_chunks: pd.DataFrame | None = None,
    progress: Callable[[int, int], None] | None = None,
    timed: Callable[[str, float], None] | None = None,
) -> pd.DataFrame:
    """The chunks of all indexed documents.

    Args:
        documents: The documents table.
        tokens: Gives the model's token counter; called only when something must be chunked.
        budget: How large a chunk may become.
        recipe: See `rag_pipeline.tables.chunks_table`.
        parent_documents: Documents of a version made by the same parser, chunker, budget and tokenizer.
        parent_chunks: Its chunks; those of unchanged documents are taken over.
        progress: Called with documents chunked and documents to chunk.
        timed: Called with each chunked document's source and the wall seconds it took.
    """
    old = {} if parent_documents is None or parent_chunks is None else _identities(parent_documents)
    same = {source for source, identity in _identities(documents).items() if old.get(source) == identity}
    todo = [document for document in documents_from(documents) if document.source not in same]
    chunks: list[Chunk] = []
    for number, document in enumerate(todo, start=1):
        counter = tokens()
        start = time.monotonic()
        chunks.extend(chunk_document(document, tokens=counter, budget=budget))
        if timed:
            timed(document.source, time.monotonic() - start)
        if progress:
            progress(number, len(todo))
    fresh = chunks_table(chunks, recipe=recipe)
    if parent_chunks is None or not same:
        return fresh
    taken = parent_chunks[parent_chunks["source"].isin(same)]
    table = pd.concat([taken, fresh], ignore_index=True) if len(fresh) else taken
    return table[list(CHUNK_COLUMNS)].sort_values(["source", "chunk_index"], kind="stable", ignore_index=True)
