"""The vector store: one class over Milvus Lite (shared by its own server) and any Milvus server.

Every call has a time limit: a frozen server would hang a caller for ever. A lost connection is made anew once, since
a server may have been restarted. Milvus's ``L2`` is the squared distance: 0 to 4 between unit vectors.
"""

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rag_pipeline.errors import RefusedError, StoreUnavailableError
from rag_pipeline.index import lite_server
from rag_pipeline.records import Candidate
from rag_pipeline.settings import MilvusSettings

ID_BYTES = 64
CONTENT_BYTES = 65_535
CATEGORY_BYTES = 512
OUTPUT_FIELDS = ("id", "content", "category", "metadata")
MANIFEST_PROPERTY = "rag.manifest"

_UPSERT_ROWS = 500
_HNSW = {"M": 16, "efConstruction": 200}
_EF = 64
# pymilvus pings every 10 s; Milvus Lite's server takes that for abuse and hangs up. A Unix socket needs no pings.
_NO_KEEPALIVE = {"grpc.keepalive_time_ms": 2**31 - 1, "grpc.keepalive_permit_without_calls": 0}


class MilvusStore:
    """Collections, rows and aliases of one Milvus.

    Args:
        settings: Where it is, and the limits.
        lite_folder: Where Milvus Lite lives when no URI is set.
    """

    def __init__(self, settings: MilvusSettings, *, lite_folder: Path) -> None:
        self._settings = settings
        self._lite_folder = lite_folder
        self._client: Any = None
        self._connecting = threading.Lock()

    @property
    def is_lite(self) -> bool:
        """Whether the store is the project's own Milvus Lite."""
        return not self._settings.uri

    @property
    def description(self) -> str:
        """What to call the store in a message."""
        return f"Milvus Lite in {self._lite_folder}" if self.is_lite else f"Milvus at {self._settings.uri}"

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def check(self) -> str:
        """The server's version.

        Raises:
            StoreUnavailableError: It does not answer.
        """
        return str(self._call("get_server_version"))

    # Collections

    def collections(self) -> list[str]:
        """Names of all collections, sorted."""
        return sorted(self._call("list_collections"))

    def exists(self, collection: str) -> bool:
        """Whether a collection of this real name (not an alias) exists."""
        return collection in self.collections()

    def create(self, collection: str, *, dimension: int, index_type: str, manifest: str = "") -> None:
        """Make an empty collection with the schema that both retrieval paths read.

        Args:
            dimension: Of the vectors.
            index_type: ``FLAT`` or ``HNSW``; the metric is L2.
        """
        from pymilvus import DataType, MilvusClient

        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=ID_BYTES)
        schema.add_field("content", DataType.VARCHAR, max_length=CONTENT_BYTES)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
        schema.add_field("category", DataType.VARCHAR, max_length=CATEGORY_BYTES)
        schema.add_field("metadata", DataType.JSON)
        index = MilvusClient.prepare_index_params()
        index.add_index("vector", index_type=index_type, metric_type="L2", params=_HNSW if index_type == "HNSW" else {})
        self._call(
            "create_collection",
            collection,
            schema=schema,
            index_params=index,
            consistency_level="Bounded",
            properties={MANIFEST_PROPERTY: manifest},
            limit_s=self._settings.write_timeout_s,
        )

    def drop(self, collection: str) -> None:
        """Drop a collection by its real name.

        Raises:
            RefusedError: An alias points to it (Milvus Lite would drop the alias silently), or it is an alias.
        """
        if not self.exists(collection):
            raise RefusedError(f"{collection} is not a collection of {self.description}; nothing was dropped.")
        if aliases := self.aliases(collection):
            raise RefusedError(f"{collection} is what {', '.join(aliases)} points to; it is not dropped.")
        self._call("drop_collection", collection, limit_s=self._settings.write_timeout_s)

    def manifest_json(self, collection: str) -> str:
        """The manifest that travels with a collection, blank when it has none."""
        described = self._call("describe_collection", collection)
        return str(dict(described.get("properties") or {}).get(MANIFEST_PROPERTY, ""))

    def set_manifest_json(self, collection: str, manifest: str) -> None:
        """Replace the manifest that travels with a collection."""
        self._call("alter_collection_properties", collection, properties={MANIFEST_PROPERTY: manifest})

    def dimension(self, collection: str) -> int:
        """The dimension of a collection's vectors."""
        described = self._call("describe_collection", collection)
        return next(int(field["params"]["dim"]) for field in described["fields"] if field["name"] == "vector")

    # Aliases

    def alias_target(self, alias: str) -> str | None:
        """The collection that an alias points to, ``None`` without the alias."""
        from pymilvus.exceptions import MilvusException

        try:
            return str(self._call("describe_alias", alias)["collection_name"])
        except MilvusException:
            return None

    def aliases(self, collection: str) -> list[str]:
        """The aliases that point to a collection."""
        return sorted(self._call("list_aliases", collection)["aliases"])

    def point_alias(self, alias: str, collection: str) -> None:
        """Let ``alias`` point to ``collection``; readers see the old or the new target, never none."""
        verb = "create_alias" if self.alias_target(alias) is None else "alter_alias"
        self._call(verb, collection, alias)

    # Rows

    def upsert(self, collection: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Write rows; a row with a known id replaces it (``insert`` would store it twice on a server)."""
        for start in range(0, len(rows), _UPSERT_ROWS):
            batch = [dict(row) for row in rows[start : start + _UPSERT_ROWS]]
            self._call("upsert", collection, batch, limit_s=self._settings.write_timeout_s)

    def seal(self, collection: str) -> None:
        """Flush and load, so that every row is stored and found."""
        self._call("flush", collection, limit_s=self._settings.write_timeout_s)
        self._call("load_collection", collection, limit_s=self._settings.write_timeout_s)

    def count(self, collection: str) -> int:
        """Rows by a query with Strong consistency (a server's entity statistics lag behind)."""
        answer = self._call(
            "query", collection, filter="", output_fields=["count(*)"], consistency_level="Strong",
            limit_s=self._settings.write_timeout_s,
        )  # fmt: skip
        return int(answer[0]["count(*)"])

    def ids(self, collection: str) -> Iterator[str]:
        """All ids with Strong consistency, in the store's order; a stored-twice row gives its id twice."""
        pages = self._call(
            "query_iterator", collection, batch_size=1000, output_fields=["id"], consistency_level="Strong",
            limit_s=self._settings.write_timeout_s,
        )  # fmt: skip
        try:
            while page := pages.next():
                yield from (str(row["id"]) for row in page)
        finally:
            pages.close()

    def rows(self, collection: str, *, vectors: bool = False) -> list[dict[str, Any]]:
        """All rows, ordered by id; meant for tests and comparisons."""
        fields = [*OUTPUT_FIELDS, *(["vector"] if vectors else [])]
        pages = self._call(
            "query_iterator", collection, batch_size=500, output_fields=fields, consistency_level="Strong",
            limit_s=self._settings.write_timeout_s,
        )  # fmt: skip
        found: list[dict[str, Any]] = []
        while page := pages.next():
            found.extend(dict(row) for row in page)
        pages.close()
        return sorted(found, key=lambda row: str(row["id"]))

    def search(
        self,
        collection: str,
        vector: np.ndarray,
        *,
        limit: int,
        category: str = "",
        strong: bool = False,
        limit_s: float | None = None,
    ) -> list[Candidate]:
        """The nearest rows, nearest first; ties in the store's order.

        Args:
            vector: float32 of shape (dimension,), unit length.
            category: Only rows of exactly this category; blank for all.
            strong: See every acknowledged write (verification) instead of a bounded-stale view (serving).
            limit_s: Time limit; ``None`` takes the settings' read limit.
        """
        answer = self._call(
            "search",
            collection,
            [vector.tolist()],
            anns_field="vector",
            limit=limit,
            filter=f"category == {literal(category)}" if category else "",
            output_fields=list(OUTPUT_FIELDS),
            search_params={"metric_type": "L2", "params": {"ef": max(_EF, limit)}},
            consistency_level="Strong" if strong else "Bounded",
            limit_s=limit_s,
        )
        return [_candidate(hit) for hit in answer[0]]

    # The connection

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> Any:
        from pymilvus import MilvusClient

        # Importing pymilvus sets its loggers to print a traceback for each failed call; callers get an error instead.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        settings = self._settings
        if self.is_lite:
            uri = lite_server.attach(self._lite_folder, idle_s=settings.lite_idle_s).uri
            return MilvusClient(uri=uri, timeout=settings.timeout_s, dedicated=True, grpc_options=_NO_KEEPALIVE)
        options: dict[str, object] = {
            "token": settings.token.get_secret_value(),
            "db_name": settings.database,
            "secure": settings.secure,
            "server_pem_path": settings.server_pem_path,
            "ca_pem_path": settings.ca_pem_path,
            "client_pem_path": settings.client_pem_path,
            "client_key_path": settings.client_key_path,
        }
        given = {name: value for name, value in options.items() if value}
        return MilvusClient(uri=settings.uri, timeout=settings.timeout_s, dedicated=True, **given)

    def _call(self, verb: str, *arguments: object, limit_s: float | None = None, **options: object) -> Any:
        """One call of the client, connected anew once when the connection is lost."""
        import grpc
        from pymilvus.exceptions import MilvusException

        failure: Exception | None = None
        for _ in range(2):
            try:
                if self._client is None:
                    self._client = self._connect()
                return getattr(self._client, verb)(*arguments, timeout=limit_s or self._settings.timeout_s, **options)
            except grpc.RpcError as error:
                failure = error
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    break
                self._forget_client()
            except MilvusException as error:
                if _is_not_loaded(error) and arguments:
                    failure = error
                    self._connected().load_collection(arguments[0], timeout=self._settings.write_timeout_s)
                    continue
                if not _is_connection_loss(error):
                    raise
                failure = error
                self._forget_client()
            except ValueError as error:
                if "closed channel" not in str(error):
                    raise
                failure = error
                self._forget_client()
        raise StoreUnavailableError(
            f"{self.description} does not answer ({verb}: {_last_words(failure)}). "
            + (
                f"`rag-pipeline doctor` looks into it, `rag-pipeline down milvus` stops a stuck server, "
                f"its log is {self._lite_folder / 'server.log'}."
                if self.is_lite
                else "Check that the server runs, then the settings retrieval.milvus.uri, token and TLS."
            )
        ) from failure

    def _forget_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            try:
                client.close()
            except Exception:
                logging.getLogger(__name__).debug("a lost connection could not be closed", exc_info=True)


def literal(text: str) -> str:
    r"""``text`` as a string literal of a Milvus filter.

    Milvus Lite and servers before 2.4 refuse filter templates and ``\uXXXX`` escapes: so JSON quoting, characters kept.
    """
    return json.dumps(text, ensure_ascii=False)


def _candidate(hit: Mapping[str, Any]) -> Candidate:
    row = hit["entity"]
    distance = float(hit["distance"])
    return Candidate(
        id=str(hit["id"]),
        content=str(row["content"]),
        category=str(row["category"]),
        score=distance,
        raw_score=distance,
        score_label="l2_distance",
        metadata=dict(row["metadata"]),
    )


def _is_connection_loss(error: Exception) -> bool:
    text = str(error)
    return any(
        words in text
        for words in (
            "Fail connecting",
            "server unavailable",
            "UNAVAILABLE",
            "should create connection",
            "closed channel",
            "Retry run out",
        )
    )


def _is_not_loaded(error: Exception) -> bool:
    text = str(error).lower()
    return "not loaded" in text or "not fully loaded" in text


def _last_words(error: Exception | None) -> str:
    import grpc

    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"[:300]
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
