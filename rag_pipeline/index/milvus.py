"""The vector store: one class over Milvus Lite (shared by its own server) and any Milvus server.

Every failure is a `StoreUnavailableError` or a `StoreCallError`, within the call's time limit. Milvus's ``L2`` is the
squared distance: 0 to 4 between unit vectors.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_pipeline.errors import RefusedError
from rag_pipeline.index.milvus_connection import MilvusConnection, StoreCallError
from rag_pipeline.records import Candidate
from rag_pipeline.setting_groups import MilvusSettings

if TYPE_CHECKING:
    import numpy as np

ID_BYTES = 64
CONTENT_BYTES = 65_535
CATEGORY_BYTES = 512
OUTPUT_FIELDS = ("id", "content", "category", "metadata")
MANIFEST_PROPERTY = "rag.manifest"
SERVING_CONSISTENCY = "Bounded"

# A server keeps it in etcd, which takes 1.5 MB a request: with 1 MB the collection cannot even be dropped.
_MANIFEST_BYTES = 512 * 1024
_UPSERT_ROWS = 500
_HNSW = {"M": 16, "efConstruction": 200}
_EF = 64


class MilvusStore:
    """Collections, rows and aliases of one Milvus.

    Args:
        settings: Where it is, and the limits.
        lite_folder: Where Milvus Lite lives when no URI is set.
    """

    def __init__(self, settings: MilvusSettings, *, lite_folder: Path) -> None:
        self._settings = settings
        self._connection = MilvusConnection(settings, lite_folder=lite_folder)
        self._call = self._connection.call

    @property
    def is_lite(self) -> bool:
        """Whether the store is the project's own Milvus Lite."""
        return self._connection.is_lite

    @property
    def description(self) -> str:
        """What to call the store in a message."""
        return self._connection.description

    @property
    def identity(self) -> str:
        """Which store this is, for artefacts that several stores share."""
        return self._connection.identity

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._connection.close()

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

        _check_manifest(manifest)
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
        _check_manifest(manifest)
        self._call("alter_collection_properties", collection, properties={MANIFEST_PROPERTY: manifest})

    def dimension(self, collection: str) -> int:
        """The dimension of a collection's vectors."""
        described = self._call("describe_collection", collection)
        return next(int(field["params"]["dim"]) for field in described["fields"] if field["name"] == "vector")

    def index_params(self, collection: str) -> dict[str, object]:
        """Type and metric of a collection's vector index, in the words of `pymilvus`; empty when it has none."""
        if not self._call("list_indexes", collection):
            return {}
        described = self._call("describe_index", collection, index_name="vector")
        return {name: described[name] for name in ("index_type", "metric_type")}

    # Aliases

    def alias_target(self, alias: str) -> str | None:
        """The collection that an alias points to, ``None`` without the alias."""
        try:
            return str(self._call("describe_alias", alias)["collection_name"])
        except StoreCallError as error:
            if error.no_such_alias:
                return None
            raise

    def aliases(self, collection: str) -> list[str]:
        """The aliases that point to a collection."""
        return sorted(self._call("list_aliases", collection)["aliases"])

    def point_alias(self, alias: str, collection: str) -> None:
        """Let ``alias`` point to ``collection``; readers see the old or the new target, never none."""
        try:
            # Asked for first, since a server shows no alias whose target was dropped, yet refuses to create it again.
            self._call("alter_alias", collection, alias)
        except StoreCallError as error:
            if not error.no_such_alias:
                raise
            self._call("create_alias", collection, alias)

    # Rows

    def upsert(self, collection: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Write rows; a row with a known id replaces it (``insert`` would store it twice on a server)."""
        for start in range(0, len(rows), _UPSERT_ROWS):
            batch = [dict(row) for row in rows[start : start + _UPSERT_ROWS]]
            self._call("upsert", collection, batch, limit_s=self._settings.write_timeout_s)

    def seal(self, collection: str) -> None:
        """Flush and load, so that every row is stored and found."""
        self._call("flush", collection, limit_s=self._settings.write_timeout_s)
        self.load(collection)

    def load(self, collection: str) -> None:
        """Load, so that the first search finds it ready (a restarted server has nothing loaded)."""
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
        for page in self._pages(collection, ["id"], rows=1000):
            yield from (str(row["id"]) for row in page)

    def sources(self, collection: str) -> set[str]:
        """The documents that the rows come from, with Strong consistency."""
        pages = self._pages(collection, ["metadata"], rows=1000)
        return {str(row["metadata"]["source"]) for page in pages for row in page}

    def get(self, collection: str, ids: Sequence[str], *, limit_s: float | None = None) -> dict[str, Mapping[str, Any]]:
        """Rows by id (content, category, metadata); ids that are not there are left out."""
        if not ids:
            return {}
        found = self._call("get", collection, ids=list(ids), output_fields=list(OUTPUT_FIELDS), limit_s=limit_s)
        return {str(row["id"]): dict(row) for row in found}

    def rows(self, collection: str, *, vectors: bool = False) -> list[dict[str, Any]]:
        """All rows, ordered by id; meant for tests and comparisons."""
        fields = [*OUTPUT_FIELDS, *(["vector"] if vectors else [])]
        found = [dict(row) for page in self._pages(collection, fields, rows=500) for row in page]
        return sorted(found, key=lambda row: str(row["id"]))

    def _pages(self, collection: str, fields: list[str], *, rows: int) -> Iterator[list[Mapping[str, Any]]]:
        pages = self._call(
            "query_iterator", collection, batch_size=rows, output_fields=fields, consistency_level="Strong",
            limit_s=self._settings.write_timeout_s,
        )  # fmt: skip
        try:
            while True:
                with self._connection.translated("query_iterator"):
                    page = pages.next()
                if not page:
                    return
                yield page
        finally:
            pages.close()

    def search(
        self,
        collection: str,
        vector: "np.ndarray",
        *,
        limit: int,
        category: str = "",
        strong: bool = False,
        limit_s: float | None = None,
    ) -> list[Candidate]:
        """The nearest rows, nearest first; equal distances by id.

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
            search_params=search_params(limit),
            consistency_level="Strong" if strong else SERVING_CONSISTENCY,
            limit_s=limit_s,
        )
        return sorted((_candidate(hit) for hit in answer[0]), key=nearest_first)

    def client_options(self) -> dict[str, Any]:
        """Arguments for a `pymilvus.MilvusClient` of one's own to this store; starts Milvus Lite when it is not up.

        Raises:
            StoreUnavailableError: Milvus Lite does not start.
        """
        return self._connection.client_options()


def search_params(limit: int) -> dict[str, object]:
    """Parameters of a search for ``limit`` rows, the same on every retrieval path."""
    return {"metric_type": "L2", "params": {"ef": max(_EF, limit)}}


def nearest_first(candidate: Candidate) -> tuple[float, str]:
    """Sort key of candidates: distance, then id, so that equal distances come in the same order on every path."""
    return candidate.score, candidate.id


def literal(text: str) -> str:
    r"""``text`` as a string literal of a Milvus filter.

    Milvus Lite and servers before 2.4 refuse filter templates and ``\uXXXX`` escapes: so quotes, backslashes and line
    ends are escaped, and every other character stays as it is.
    """
    for sign, escaped in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"), ("\r", r"\r"), ("\t", r"\t")):
        text = text.replace(sign, escaped)
    return f'"{text}"'


def _check_manifest(manifest: str) -> None:
    if (size := len(manifest.encode())) > _MANIFEST_BYTES:
        raise RefusedError(f"A manifest has {size} bytes, a collection takes {_MANIFEST_BYTES}; nothing was written.")


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
