"""Write a staging version beside the promoted one, and verify with strong consistency that all of it is there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rag_pipeline.errors import CheckFailedError
from rag_pipeline.index.milvus import CATEGORY_BYTES, CONTENT_BYTES, MilvusStore

_ROWS_A_WRITE = 500
_SAMPLES = 20
_NEIGHBOURS = 10
_SELF_DISTANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Verification:
    """What a collection holds, as the store itself says.

    Attributes:
        stored_ids: Every id found; one that is stored twice appears once here and twice in ``stored_count``.
        stored_count: Rows by ``count(*)``.
        sampled: How many vectors were searched for.
        self_retrieval_misses: Ids of sampled chunks that their own vector did not find.
    """

    stored_ids: frozenset[str]
    stored_count: int
    sampled: int
    self_retrieval_misses: tuple[str, ...]


def index_type_for(store: MilvusStore, *, rows: int, flat_max_rows: int) -> str:
    """``FLAT`` on small Milvus Lite collections (exact, equal answers every time), else ``HNSW``."""
    return "FLAT" if store.is_lite and rows <= flat_max_rows else "HNSW"


def write_rows(
    store: MilvusStore,
    collection: str,
    chunks: pd.DataFrame,
    embeddings: pd.DataFrame,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Upsert every chunk with its vector, then flush and load.

    Raises:
        CheckFailedError: A content or category is longer than the collection's field, in bytes.
    """
    total = len(chunks)
    sections = chunks.groupby("section_id", sort=False)["chunk_index"]
    placed = chunks.assign(
        section_part=sections.rank(method="first").astype("int64"), section_parts=sections.transform("size")
    )
    for start in range(0, total, _ROWS_A_WRITE):
        rows = list(_rows(placed.iloc[start : start + _ROWS_A_WRITE], embeddings.iloc[start : start + _ROWS_A_WRITE]))
        store.upsert(collection, rows)
        if progress:
            progress(min(start + _ROWS_A_WRITE, total), total)
    store.seal(collection)


def _rows(chunks: pd.DataFrame, embeddings: pd.DataFrame) -> Iterator[dict[str, object]]:
    vectors = dict(zip(embeddings["id"], embeddings["vector"], strict=True))
    for chunk in chunks.to_dict("records"):
        for name, limit in (("content", CONTENT_BYTES), ("category", CATEGORY_BYTES)):
            size = len(str(chunk[name]).encode())
            if size > limit:
                raise CheckFailedError(
                    f"{chunk['source']} line {chunk['line_start']}: the {name} has {size} bytes, the collection takes "
                    f"{limit}. Shorten it."
                )
        yield {
            "id": chunk["id"],
            "content": chunk["content"],
            "vector": np.asarray(vectors[chunk["id"]], dtype=np.float32).tolist(),
            "category": chunk["category"],
            "metadata": {
                "source": chunk["source"],
                "title": chunk["title"],
                "breadcrumb": list(chunk["breadcrumb"]),
                "chunk_index": int(chunk["chunk_index"]),
                "line_start": int(chunk["line_start"]),
                "line_end": int(chunk["line_end"]),
                "section": chunk["section_id"],
                "section_part": int(chunk["section_part"]),
                "section_parts": int(chunk["section_parts"]),
                "prev_id": chunk["prev_id"],
                "next_id": chunk["next_id"],
                "keywords": list(chunk["keywords"]),
                "language": chunk["language"],
            },
        }


def verify(store: MilvusStore, collection: str, embeddings: pd.DataFrame) -> Verification:
    """Count, list and search the collection; the sample is spread evenly over the chunks."""
    misses = []
    sample = np.unique(np.linspace(0, len(embeddings) - 1, num=min(_SAMPLES, len(embeddings)), dtype=int))
    for position in sample if len(embeddings) else []:
        row = embeddings.iloc[int(position)]
        vector = np.asarray(row["vector"], dtype=np.float32)
        if not np.isfinite(vector).all():
            misses.append(str(row["id"]))
            continue
        found = store.search(collection, vector, limit=_NEIGHBOURS, strong=True)
        near = [hit.id for hit in found if hit.score < _SELF_DISTANCE]
        # Equal texts have equal vectors: with more of them than were asked for, the chunk itself may be left out.
        if row["id"] not in near and len(near) < _NEIGHBOURS:
            misses.append(str(row["id"]))
    return Verification(
        stored_ids=frozenset(store.ids(collection)),
        stored_count=store.count(collection),
        sampled=len(sample) if len(embeddings) else 0,
        self_retrieval_misses=tuple(misses),
    )
