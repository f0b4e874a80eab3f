"""What one lookup reads: the version that the alias points to, and the model that this version was embedded with.

A reader resolves the alias once a lookup and then searches the physical collection, so that a promotion or rollback in
between never lets a query meet the other model's vectors. A resolved alias is used for at most one second.
"""

import threading
import time
from dataclasses import dataclass

from rag_pipeline.errors import StoreUnavailableError
from rag_pipeline.index.embedding import Embedder
from rag_pipeline.index.manifest import Manifest
from rag_pipeline.workspace import Workspace

_ALIAS_AGE_S = 1.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version, held for the length of one lookup.

    Attributes:
        manifest: Says which collection to search.
        embedder: Embeds queries with the version's own model.
    """

    manifest: Manifest
    embedder: Embedder


class SnapshotResolver:
    """Resolves the alias; safe to use from many threads."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        self._lock = threading.Lock()
        self._embedders: dict[str, Embedder] = {}
        self._current: Snapshot | None = None
        self._resolved_at = float("-inf")

    def resolve(self) -> Snapshot:
        """The version that the alias points to now, or pointed to less than a second ago.

        Raises:
            StoreUnavailableError: No store, no promoted version, or one that this code cannot read.
            ModelUnavailableError: The version's model is not on this machine.
        """
        with self._lock:
            if self._current is None or time.monotonic() - self._resolved_at >= _ALIAS_AGE_S:
                asked_at = time.monotonic()
                self._current = self._resolve()
                self._resolved_at = asked_at
            return self._current

    def forget(self) -> None:
        """Ask the store at the next `resolve`, however young the last answer is."""
        with self._lock:
            self._resolved_at = float("-inf")

    def _resolve(self) -> Snapshot:
        ws = self._ws
        alias = ws.settings.index.alias
        if not ws.has_store:
            raise StoreUnavailableError(
                f"There is no index in the state folder {ws.state}. Run `rag-pipeline reindex`, or set --state."
            )
        target = ws.store.alias_target(alias)
        if target is None:
            raise StoreUnavailableError(
                f"No version is promoted under the alias {alias!r} in {ws.store.description}: reindex needed "
                "(`rag-pipeline reindex`)."
            )
        if self._current is not None and self._current.manifest.collection == target:
            return self._current
        manifest = ws.versions.read(target)
        return Snapshot(manifest, self._embedder(manifest))

    def _embedder(self, manifest: Manifest) -> Embedder:
        wanted = manifest.model.fingerprint
        if wanted not in self._embedders:
            model = self._ws.model_named(manifest.model.name)
            if model.fingerprint != wanted:
                raise StoreUnavailableError(
                    f"{manifest.collection} was embedded with another revision of {manifest.model.name} "
                    f"({wanted}, here {model.fingerprint}): reindex needed."
                )
            threads = self._ws.settings.embedding.query_threads
            self._embedders[wanted] = Embedder(model, threads=threads or None)
        return self._embedders[wanted]
