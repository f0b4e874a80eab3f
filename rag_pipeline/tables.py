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

from rag_pipeline.records import Chunk, Document, Issue

DOCUMENT_COLUMNS = tuple(field.name for field in fields(Document))
CHUNK_COLUMNS = tuple(field.name for field in fields(Chunk))
ISSUE_COLUMNS = tuple(field.name for field in fields(Issue))
EMBEDDING_COLUMNS = ("id", "source", "embedding_digest", "vector")
KNOWLEDGE_INDEX_COLUMNS = ("term", "surface", "kind", "source", "title", "category")

_LISTS = {"keywords", "alerts", "breadcrumb"}


def _table(rows: Iterable[dict[str, Any]], columns: Sequence[str], order: list[str]) -> pd.DataFrame:
    table = pd.DataFrame(list(rows), columns=list(columns))
    return table.sort_values(order, kind="stable", ignore_index=True)


def documents_table(documents: Iterable[Document]) -> pd.DataFrame:
    """Documents as a table with `DOCUMENT_COLUMNS`, ordered by source."""
    return _table((_row(asdict(document)) for document in documents), DOCUMENT_COLUMNS, ["source"])


def chunks_table(chunks: Iterable[Chunk]) -> pd.DataFrame:
    """Chunks as a table with `CHUNK_COLUMNS`, ordered by source and chunk_index."""
    return _table((_row(asdict(chunk)) for chunk in chunks), CHUNK_COLUMNS, ["source", "chunk_index"])


def issues_table(issues: Iterable[Issue]) -> pd.DataFrame:
    """Issues as a table with `ISSUE_COLUMNS`, ordered by source, line and reason."""
    return _table((asdict(issue) for issue in issues), ISSUE_COLUMNS, ["source", "line", "reason"])


def embeddings_table(chunks: pd.DataFrame, digests: Sequence[str], vectors: np.ndarray) -> pd.DataFrame:
    """One row a chunk in the chunks' order; ``vector`` holds float32 arrays of shape (dimension,)."""
    return pd.DataFrame(
        {"id": chunks["id"], "source": chunks["source"], "embedding_digest": list(digests), "vector": list(vectors)},
        columns=list(EMBEDDING_COLUMNS),
    )


def documents_from(table: pd.DataFrame) -> list[Document]:
    """The records of a documents table, in its order."""
    return [Document(**_values(row)) for row in table.to_dict("records")]


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
