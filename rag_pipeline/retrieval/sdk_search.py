"""The SDK path: embed the query, search the snapshot's collection with pymilvus, map the hits to candidates."""

from rag_pipeline.index.milvus import MilvusStore
from rag_pipeline.index.milvus_connection import StoreCallError
from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.snapshot import Snapshot, SnapshotResolver
from rag_pipeline.workspace import Workspace

_ATTEMPTS = 3


class SdkSearch:
    """Searches the promoted version; safe to use from many threads.

    Args:
        ws: Where the store and the models are.
    """

    def __init__(self, ws: Workspace) -> None:
        self._store: MilvusStore = ws.store
        self._snapshots = SnapshotResolver(ws)

    def search(self, query: str, *, top_k: int, category: str = "") -> list[Candidate]:
        """The nearest chunks to a query.

        Args:
            query: Any text; an empty one finds nothing.
            top_k: How many chunks at most.
            category: Only chunks of this category; blank for all.

        Returns:
            Candidates, nearest first.

        Raises:
            StoreUnavailableError: The store does not answer, or has no promoted version that can be read.
            ModelUnavailableError: The version's model is not on this machine.
        """
        # A query may come from anywhere; half a surrogate pair is no text that a tokenizer or a store takes.
        query, category = (text.encode("utf-8", "replace").decode() for text in (query, category))
        if not query.strip():
            return []
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._search(self._snapshots.resolve(), query, top_k=top_k, category=category)
            except StoreCallError:
                # A version may be dropped under a reader who slept past its grace: look where the alias points now.
                self._snapshots.forget()
        return self._search(self._snapshots.resolve(), query, top_k=top_k, category=category)

    def _search(self, snapshot: Snapshot, query: str, *, top_k: int, category: str) -> list[Candidate]:
        vector = snapshot.embedder.embed_query(query)
        return self._store.search(snapshot.manifest.collection, vector, limit=top_k, category=category)
