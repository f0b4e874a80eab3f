"""The pandas tables between the steps, and the records they are made of.

One row a record, one column a field, tuples as lists; rows are ordered by source (and chunk_index), so that equal
knowledge gives equal tables whatever changed on the way. They are stored as Parquet; `to_parquet` gives equal bytes
for equal tables.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pandas as pd

from rag_pipeline.records import Chunk, Document, Issue, SourceFile

DOCUMENT_COLUMNS = (*(field.name for field in fields(Document)), "raw_digest", "indexed", "issues")
CHUNK_COLUMNS = (*(field.name for field in fields(Chunk)), "recipe")
ISSUE_COLUMNS = tuple(field.name for field in fields(Issue))
EMBEDDING_COLUMNS = ("id", "source", "embedding_digest", "model_fingerprint", "vector")
KNOWLEDGE_INDEX_COLUMNS = ("term", "surface", "kind", "source", "title", "category")

_LISTS = {"keywords", "alerts", "breadcrumb"}


def _table(rows: Iterable[dict[str, Any]], columns: Sequence[str], order: list[str]) -> pd.DataFrame:
    table = pd.DataFrame(list(rows), columns=list(columns))
    return table.sort_values(order, kind="stable", ignore_index=True)


def documents_table(
    documents: Iterable[Document], files: Iterable[SourceFile], issues: Iterable[Issue]
) -> pd.DataFrame:
    """Every file that was found, one row each, ordered by source.

    Columns are those of `Document`, then ``raw_digest`` (SHA-256 of the file as it lies there, blank when it could not
    be read), ``indexed`` (False: not in the index, all other columns blank) and ``issues`` (list of ``line``,
    ``reason``, ``rejected``). ``digest`` differs from ``raw_digest`` where an unreadable file keeps its last good
    version.
    """
    digests = {file.source: file.digest for file in files}
    found: dict[str, list[dict[str, Any]]] = {}
    for issue in issues:
        entry = {"line": issue.line, "reason": issue.reason, "rejected": issue.rejected}
        found.setdefault(issue.source, []).append(entry)
    indexed = {document.source: document for document in documents}
    rows = []
    for source in indexed.keys() | digests.keys() | found.keys():
        document = indexed.get(source, Document(source=source, digest="", text="", encoding=""))
        row = _row(asdict(document))
        row |= {"raw_digest": digests.get(source, ""), "indexed": source in indexed}
        row["issues"] = sorted(found.get(source, []), key=lambda issue: (issue["line"], issue["reason"]))
        rows.append(row)
    return _table(rows, DOCUMENT_COLUMNS, ["source"])


def chunks_table(chunks: Iterable[Chunk], *, recipe: str) -> pd.DataFrame:
    """Chunks as a table with `CHUNK_COLUMNS`, ordered by source and chunk_index.

    ``recipe`` says with which chunker, budget and tokenizer they were cut: chunks of different recipes do not mix.
    """
    return _table(
        (_row(asdict(chunk)) | {"recipe": recipe} for chunk in chunks), CHUNK_COLUMNS, ["source", "chunk_index"]
    )


def issues_table(issues: Iterable[Issue]) -> pd.DataFrame:
    """Issues as a table with `ISSUE_COLUMNS`, ordered by source, line and reason."""
    return _table((asdict(issue) for issue in issues), ISSUE_COLUMNS, ["source", "line", "reason"])


def embeddings_table(
    chunks: pd.DataFrame, digests: Sequence[str], vectors: np.ndarray, *, model_fingerprint: str
) -> pd.DataFrame:
    """One row a chunk in the chunks' order; ``vector`` holds float32 arrays of shape (dimension,)."""
    return pd.DataFrame(
        {
            "id": chunks["id"],
            "source": chunks["source"],
            "embedding_digest": list(digests),
            "model_fingerprint": model_fingerprint,
            "vector": list(vectors),
        },
        columns=list(EMBEDDING_COLUMNS),
    )


def indexed_documents(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a documents table that are in the index."""
    return table[table["indexed"].astype(bool)].reset_index(drop=True)


def documents_from(table: pd.DataFrame) -> list[Document]:
    """The indexed documents of a documents table as records, in its order."""
    names = [field.name for field in fields(Document)]
    return [Document(**_values(row)) for row in indexed_documents(table)[names].to_dict("records")]


def issues_from(table: pd.DataFrame) -> list[Issue]:
    """The issues of a documents table as records, in its order."""
    return [
        Issue(source=source, line=int(issue["line"]), reason=issue["reason"], rejected=bool(issue["rejected"]))
        for source, issues in zip(table["source"], table["issues"], strict=True)
        for issue in issues
    ]


def _row(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _values(row: dict[Any, Any]) -> dict[str, Any]:
    return {str(name): tuple(value) if name in _LISTS else value for name, value in row.items()}


def to_parquet(table: pd.DataFrame) -> bytes:
    """The table as Parquet; equal tables give equal bytes."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False, compression="zstd")
    return buffer.getvalue()


def from_parquet(data: bytes) -> pd.DataFrame:
    """The table that `to_parquet` wrote; list columns come back as arrays of objects."""
    return pd.read_parquet(io.BytesIO(data))
