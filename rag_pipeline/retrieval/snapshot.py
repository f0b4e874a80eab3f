"""What one lookup reads: the version that the alias points to, with its model and its L0 index.

A reader resolves the alias once a lookup and then searches the physical collection, so that a promotion or rollback in
between never lets a query meet the other model's vectors. A resolved alias is used for at most one second.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_pipeline.errors import RagPipelineError, StoreUnavailableError
from rag_pipeline.index import lite_server
from rag_pipeline.index.embedding import Embedder, TextEmbedder, Vectors
from rag_pipeline.index.manifest import Manifest
from rag_pipeline.index.models import load_token_counter
from rag_pipeline.records import TokenCounter
from rag_pipeline.workspace import Workspace

if TYPE_CHECKING:
    from rag_pipeline.retrieval.l0_hints import HintMatcher

_ALIAS_AGE_S = 1.0
_KEPT_QUERIES = 256


class QueryVectors:
    """Vectors of queries by one model; the last 256 are kept, so that retries and a second path embed nothing again.

    Safe to use from many threads.

    Args:
        embedder: Embeds queries.
        counter: Counts tokens of the same model.
    """

    def __init__(self, embedder: TextEmbedder, counter: TokenCounter) -> None:
        self.embedder = embedder
        self.counter = counter
        self._kept: OrderedDict[str, Vectors] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, query: str) -> Vectors:
        """The float32 unit vector of a query, shape (dimension,).

        Raises:
            ModelUnavailableError: The model cannot be loaded.
        """
        with self._lock:
            if (kept := self._kept.get(query)) is not None:
                self._kept.move_to_end(query)
                return kept
        vector = self.embedder.embed_query(query)
        with self._lock:
            self._kept[query] = vector
            while len(self._kept) > _KEPT_QUERIES:
                self._kept.popitem(last=False)
        return vector


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version, held for the length of one lookup.

    Attributes:
        manifest: Says which collection to search.
        queries: Embeds queries with the version's own model.
        matcher: Finds L0 hints; ``None`` when the version's index cannot be read.
        matcher_failure: Why not; blank otherwise.
    """

    manifest: Manifest
    queries: QueryVectors
    matcher: "HintMatcher | None" = None
    matcher_failure: str = ""

    @property
    def collection(self) -> str:
        """The physical collection."""
        return self.manifest.collection


class SnapshotResolver:
    """Resolves the alias; safe to use from many threads.

    Args:
        ws: Where the store and the models are.
        version: A collection to read instead of the alias's target; blank for the alias.

    Attributes:
        loading: Whether something is being started just now that is not the store's to answer for: a model is loaded,
            or Milvus Lite's server is started.
    """

    def __init__(self, ws: Workspace, *, version: str = "") -> None:
        self._ws = ws
        self._version = version
        self._lock = threading.Lock()
        self._models: dict[str, QueryVectors] = {}
        self._current: Snapshot | None = None
        self._resolved_at = float("-inf")
        self._failure: Exception | None = None
        self._failed_at = float("-inf")
        self.loading = False

    def resolve(self) -> Snapshot:
        """The version that the alias points to now, or pointed to less than a second ago; its model is loaded.

        Raises:
            StoreUnavailableError: No store, no promoted version, or one that this code cannot read.
            ModelUnavailableError: The version's model is not on this machine.
        """
        waiting_since = time.monotonic()
        with self._lock:
            if (fresh := self.fresh()) is not None:
                return fresh
            # Those who waited while it failed share the outcome, or each would wait out a limit in turn.
            if self._failure is not None and self._failed_at > waiting_since:
                raise self._failure
            asked_at = time.monotonic()
            try:
                self._current = self._resolve()
            except Exception as error:
                self._failure, self._failed_at = error, time.monotonic()
                raise
            self._failure, self._resolved_at = None, asked_at
            return self._current

    def fresh(self) -> Snapshot | None:
        """The version resolved less than a second ago, without asking or waiting for anybody."""
        current = self._current
        return current if time.monotonic() - self._resolved_at < _ALIAS_AGE_S else None

    def forget(self) -> None:
        """Ask the store at the next `resolve`, however young the last answer is."""
        self._resolved_at = float("-inf")

    def _resolve(self) -> Snapshot:
        ws = self._ws
        alias = ws.settings.index.alias
        if not ws.has_store:
            raise StoreUnavailableError(
                f"There is no index in the state folder {ws.state}. Run `rag-pipeline reindex`, or set --state."
            )
        if ws.store.is_lite and lite_server.running(ws.lite_folder) is None:
            with self._starting():
                ws.store.check()
        target = self._version if self._version else ws.store.alias_target(alias)
        if target is None:
            raise StoreUnavailableError(
                f"No version is promoted under the alias {alias!r} in {ws.store.description}: reindex needed "
                "(`rag-pipeline reindex`)."
            )
        if self._current is not None and self._current.collection == target:
            return self._current
        if self._version and not ws.store.exists(target):
            raise StoreUnavailableError(
                f"The version {target} is not in {ws.store.description} any more: it was pruned, or never built here."
            )
        manifest = ws.versions.read(target)
        matcher, failure = self._matcher(manifest)
        return Snapshot(manifest, self._queries(manifest), matcher, failure)

    @contextmanager
    def _starting(self) -> Iterator[None]:
        self.loading = True
        try:
            yield
        finally:
            self.loading = False

    def _matcher(self, manifest: Manifest) -> "tuple[HintMatcher | None, str]":
        """Hints help; a lookup does without them rather than not at all."""
        from rag_pipeline.index.artifacts import KNOWLEDGE_INDEX
        from rag_pipeline.retrieval.l0_hints import HintMatcher

        try:
            return HintMatcher.from_json(self._ws.artifacts.read(manifest, KNOWLEDGE_INDEX)), ""
        except RagPipelineError as error:
            return None, str(error)

    def _queries(self, manifest: Manifest) -> QueryVectors:
        wanted = manifest.model.fingerprint
        if wanted not in self._models:
            model = self._ws.model_named(manifest.model.name)
            if model.fingerprint != wanted:
                raise StoreUnavailableError(
                    f"{manifest.collection} was embedded with another revision of {manifest.model.name} "
                    f"({wanted}, here {model.fingerprint}): reindex needed."
                )
            threads = self._ws.settings.embedding.query_threads
            with self._starting():
                queries = QueryVectors(Embedder(model, threads=threads or None), load_token_counter(model))
                queries.of("warm-up")
            self._models[wanted] = queries
        return self._models[wanted]
