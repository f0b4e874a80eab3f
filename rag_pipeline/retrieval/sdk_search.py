"""The SDK path: search a version's collection with pymilvus, map the hits to candidates."""

from rag_pipeline.index.milvus import MilvusStore
from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.snapshot import Snapshot


class SdkSearch:
    """Searches with pymilvus; safe to use from many threads.

    Candidates carry the squared L2 distance as ``score`` and ``raw_score``, with the label ``l2_distance``.

    Args:
        store: The vector store.
    """

    name = "sdk"

    def __init__(self, store: MilvusStore) -> None:
        self._store = store

    def search(
        self, snapshot: Snapshot, query: str, *, top_k: int, category: str, limit_s: float | None
    ) -> list[Candidate]:
        """The nearest chunks to a query, nearest first; equal distances by id.

        Args:
            snapshot: The version to search.
            query: A nonblank text.
            top_k: How many chunks at most.
            category: Only chunks of this category; blank for all.
            limit_s: Time limit of the call; ``None``: that of the settings.

        Raises:
            StoreUnavailableError: The store does not answer in time.
            StoreCallError: It refuses, as when the collection was dropped.
        """
        vector = snapshot.queries.of(query)
        return self._store.search(snapshot.collection, vector, limit=top_k, category=category, limit_s=limit_s)

    def close(self) -> None:
        """Nothing to do: the store's connection is its owner's to close."""
