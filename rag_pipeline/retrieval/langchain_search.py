"""The framework path: the same collection through LangChain's Milvus vector store, read only.

What langchain-milvus 0.4 does otherwise than is wanted here, and how it is handled: it answers a missing collection
with no results and gives a collection without index one, so both are looked for first; its relevance function assumes
another metric, so the distance itself is taken; its connection has no time limit of its own at construction, so the
caller waits for it in a thread it can leave.
"""

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

from rag_pipeline.errors import StoreUnavailableError
from rag_pipeline.index.milvus import (
    OUTPUT_FIELDS,
    SERVING_CONSISTENCY,
    MilvusStore,
    literal,
    nearest_first,
    search_params,
)
from rag_pipeline.index.milvus_connection import StoreCallError
from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.snapshot import Snapshot

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_milvus import Milvus

_ATTEMPTS = 3
_KEPT = 3


class LangChainSearch:
    """Searches with LangChain's vector store; safe to use from many threads.

    Candidates carry the squared L2 distance d as ``score`` and the cosine ``1 - d / 2`` as ``raw_score``, with the
    label ``similarity``.

    Args:
        store: Says where the collection is; the connection is one of LangChain's own.
    """

    name = "langchain"

    def __init__(self, store: MilvusStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._opened: dict[str, Milvus] = {}

    def search(
        self, snapshot: Snapshot, query: str, *, top_k: int, category: str, limit_s: float | None
    ) -> list[Candidate]:
        """The nearest chunks to a query; see `SdkSearch.search`.

        Raises:
            StoreCallError: The collection was dropped.
            Exception: Whatever else LangChain, its driver or the store make of a failure.
        """
        for _ in range(_ATTEMPTS):
            vector_store = self._vector_store(snapshot)
            try:
                found = vector_store.similarity_search_with_score(
                    query,
                    k=top_k,
                    param=search_params(top_k),
                    expr=f"category == {literal(category)}" if category else "",
                    timeout=limit_s,
                    consistency_level=SERVING_CONSISTENCY,
                )
                return sorted((_candidate(document, float(score)) for document, score in found), key=nearest_first)
            except Exception as error:
                failure = error
                # A connection that another thread has closed meanwhile says nothing of the store: it is asked again.
                if self._forget(snapshot.collection, vector_store):
                    break
        if not self._store.exists(snapshot.collection):
            raise self._dropped(snapshot.collection) from failure
        raise failure

    def close(self) -> None:
        """Close LangChain's connections; the next search opens a new one."""
        for collection, vector_store in list(self._opened.items()):
            self._forget(collection, vector_store)

    def _forget(self, collection: str, vector_store: "Milvus") -> bool:
        """Close a connection (a restarted server has another address); False when another thread has done so."""
        current = self._opened.get(collection)
        if current is None or current is not vector_store:
            return False
        self._opened.pop(collection, None)
        with contextlib.suppress(Exception):
            current.client.close()
        return True

    def _dropped(self, collection: str) -> StoreCallError:
        return StoreCallError(f"{collection} is not in {self._store.description} any more.")

    def _vector_store(self, snapshot: Snapshot) -> "Milvus":
        if (opened := self._opened.get(snapshot.collection)) is not None:
            return opened
        with self._lock:
            if (opened := self._opened.get(snapshot.collection)) is None:
                opened = self._open(snapshot)
                # Lookups that began before a promotion still search the version before.
                for collection in list(self._opened)[: 1 - _KEPT]:
                    self._forget(collection, self._opened[collection])
                self._opened[snapshot.collection] = opened
            return opened

    def _open(self, snapshot: Snapshot) -> "Milvus":
        collection = snapshot.collection
        if not self._store.exists(collection):
            raise self._dropped(collection)
        index = self._store.index_params(collection)
        if (metric := index.get("metric_type")) != "L2":
            raise StoreUnavailableError(
                f"The vectors of {collection} have {f'an index for {metric}' if index else 'no index'}; an L2 index is "
                "needed: reindex needed."
            )
        dimension, wanted = self._store.dimension(collection), snapshot.manifest.model.dimension
        if dimension != wanted:
            raise StoreUnavailableError(
                f"The vectors of {collection} have {dimension} dimensions, its model gives {wanted}: reindex needed."
            )
        options = self._store.client_options()
        from langchain_core.embeddings import Embeddings
        from langchain_milvus import Milvus

        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        # It warns once an object that no event loop runs; nothing here is asynchronous.
        logging.getLogger("langchain_milvus").setLevel(logging.ERROR)

        class Queries(Embeddings):  # type: ignore[misc]
            """The version's own model, as LangChain wants it."""

            def embed_query(self, text: str) -> list[float]:
                return [float(value) for value in snapshot.queries.of(text)]

            def embed_documents(self, texts: list[str]) -> list[list[float]]:
                raise NotImplementedError("The framework path only reads.")

        vector_store = Milvus(
            embedding_function=Queries(),
            collection_name=collection,
            connection_args=options,
            consistency_level=SERVING_CONSISTENCY,
            index_params=index,
            search_params=search_params(1),
            primary_field="id",
            text_field="content",
            vector_field="vector",
            auto_id=False,
        )
        vector_store.fields = [name for name in vector_store.fields if name in OUTPUT_FIELDS]
        return vector_store


def _candidate(document: "Document", distance: float) -> Candidate:
    row: dict[str, Any] = document.metadata
    return Candidate(
        id=str(row["id"]),
        content=document.page_content,
        category=str(row["category"]),
        score=distance,
        raw_score=1.0 - distance / 2.0,
        score_label="similarity",
        metadata=dict(row["metadata"]),
    )
