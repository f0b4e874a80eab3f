"""The vector search facade: one call whichever path answers, and a note of which one did and why another did not.

Modes: ``auto`` asks LangChain first and falls back to the SDK when LangChain is unavailable or fails, ``langchain`` and
``sdk`` ask that path only. Both paths search the same collection with the same parameters and sort by distance, then
id, so that they give the same candidates in the same order as long as the index is exact or unchanged.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar

from rag_pipeline.errors import RagPipelineError, StoreUnavailableError
from rag_pipeline.index.milvus_connection import StoreCallError
from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.deadline import Deadline, call_within
from rag_pipeline.retrieval.sdk_search import SdkSearch
from rag_pipeline.retrieval.snapshot import Snapshot, SnapshotResolver
from rag_pipeline.setting_groups import VectorStoreMode
from rag_pipeline.workspace import Workspace

# What is kept of the time for the SDK when LangChain is asked first.
_SDK_SHARE = 0.4
# A path that did not answer in time is left alone for so long, or every lookup would wait for it again.
_REST_S = 10.0
_ATTEMPTS = 3
_WHAT = {"langchain": "LangChain's vector store", "sdk": "The store"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PathTrial:
    """What became of one path in one search.

    Attributes:
        path: ``langchain`` or ``sdk``.
        outcome: ``answered``, ``failed`` or ``skipped``.
        reason: Why it failed or was skipped; blank when it answered.
        ms: How long it took.
    """

    path: str
    outcome: Literal["answered", "failed", "skipped"]
    reason: str = ""
    ms: float = 0.0


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """Candidates, nearest first, and how they were come by.

    Attributes:
        path: The path that answered.
        trials: Every path that was considered, in order.
    """

    candidates: tuple[Candidate, ...]
    path: str
    trials: tuple[PathTrial, ...]


class SearchFailedError(StoreUnavailableError):
    """No path answered.

    Attributes:
        trials: What became of each.
        store_refused: Whether the store itself works and refused, as it does when a version was dropped meanwhile.
    """

    def __init__(self, message: str, *, trials: tuple[PathTrial, ...], store_refused: bool) -> None:
        super().__init__(message)
        self.trials = trials
        self.store_refused = store_refused


class SearchPath(Protocol):
    """One way to ask the store."""

    name: str

    def search(
        self, snapshot: Snapshot, query: str, *, top_k: int, category: str, limit_s: float | None
    ) -> list[Candidate]:
        """The nearest chunks to a query, nearest first; equal distances by id."""
        ...

    def close(self) -> None:
        """Let go of connections of its own."""
        ...


class VectorSearch:
    """Searches versions by the configured mode; safe to use from many threads.

    Args:
        ws: Where the store is.
        mode: See the module; ``None`` takes the setting ``retrieval.vector_store.mode``.
        resolver: Says which version `nearest` searches.
    """

    def __init__(
        self, ws: Workspace, *, mode: VectorStoreMode | None = None, resolver: SnapshotResolver | None = None
    ) -> None:
        self.mode: VectorStoreMode = mode or ws.settings.retrieval.vector_store.mode
        self._resolver = resolver or SnapshotResolver(ws)
        self._timeout_s = ws.settings.retrieval.timeout_s
        self._read_limit_s = ws.settings.retrieval.milvus.timeout_s
        self._store = ws.store
        self._sdk = SdkSearch(ws.store)
        self._langchain: SearchPath | None = None
        self._lock = threading.Lock()
        self._resting_until = float("-inf")
        self._rest_reason = ""

    def nearest(self, query: str, *, top_k: int, category: str = "") -> list[Candidate]:
        """The nearest chunks of the promoted version to a query, by distance alone.

        Args:
            query: Any text; a blank one finds nothing.
            top_k: How many chunks at most.
            category: Only chunks of this category; blank for all.

        Returns:
            Candidates, nearest first; equal distances by id.

        Raises:
            StoreUnavailableError: The store does not answer, or has no promoted version that can be read.
            ModelUnavailableError: The version's model is not on this machine.
        """
        # A query may come from anywhere; half a surrogate pair is no text that a tokenizer or a store takes.
        query, category = (text.encode("utf-8", "replace").decode() for text in (query, category))
        if not query.strip():
            return []

        def search(snapshot: Snapshot) -> list[Candidate]:
            snapshot.queries.of(query)
            deadline = Deadline(self._timeout_s)
            return list(self.search(snapshot, query, top_k=top_k, category=category, deadline=deadline).candidates)

        return on_current(self._resolver, search)

    def search(
        self, snapshot: Snapshot, query: str, *, top_k: int, category: str = "", deadline: Deadline
    ) -> SearchOutcome:
        """The nearest chunks of a version to a query.

        Args:
            query: A nonblank text.
            category: Only chunks of this category; blank for all.
            deadline: In mode ``auto`` LangChain gets 60 % of what is left of it.

        Raises:
            SearchFailedError: No path answered in time.
        """
        trials: list[PathTrial] = []
        refused = False
        for name in ("langchain", "sdk") if self.mode == "auto" else (self.mode,):
            falls_back = self.mode == "auto" and name == "langchain"
            if falls_back and time.monotonic() < self._resting_until:
                trials.append(PathTrial(name, "skipped", f"it failed a moment ago: {self._rest_reason}"))
                continue
            limit_s = min(deadline.left() * (1.0 - _SDK_SHARE if falls_back else 1.0), self._read_limit_s)
            started = time.monotonic()
            try:
                path = self._path(name)
                # A little less for the call itself: it knows better what went wrong than the one who waits for it.
                ask = partial(path.search, snapshot, query, top_k=top_k, category=category, limit_s=0.95 * limit_s)
                found = call_within(limit_s, _WHAT[name], ask)
                _refuse_silence(snapshot, found, category)
            except Exception as error:
                # Whatever a framework raises must not reach an agent.
                ms = (time.monotonic() - started) * 1000.0
                reason = _reason(name, error)
                trials.append(PathTrial(name, "failed", reason, ms))
                refused = isinstance(error, StoreCallError)
                if falls_back and ms >= limit_s * 900.0:
                    self._resting_until, self._rest_reason = time.monotonic() + _REST_S, reason
                continue
            trials.append(PathTrial(name, "answered", ms=(time.monotonic() - started) * 1000.0))
            return SearchOutcome(tuple(found), name, tuple(trials))
        raise SearchFailedError(
            " ".join(f"{trial.path}: {trial.reason}" for trial in trials),
            trials=tuple(trials),
            store_refused=refused,
        )

    def fetch(self, snapshot: Snapshot, ids: list[str], *, deadline: Deadline) -> dict[str, Candidate]:
        """Chunks of a version by id, without scores; those that are not there are left out.

        Raises:
            StoreUnavailableError: The store does not answer in time.
        """
        limit_s = min(deadline.left(), self._read_limit_s)
        rows = call_within(
            limit_s, "The store", lambda: self._store.get(snapshot.collection, ids, limit_s=0.95 * limit_s)
        )
        return {
            key: Candidate(
                id=key,
                content=str(row["content"]),
                category=str(row["category"]),
                score=float("nan"),
                raw_score=float("nan"),
                score_label="",
                metadata=dict(row["metadata"]),
            )
            for key, row in rows.items()
        }

    def close(self) -> None:
        """Close LangChain's connection, if there is one."""
        if self._langchain is not None:
            self._langchain.close()

    def warm_up(self) -> None:
        """Import what the mode needs, so that the first lookup's time is not spent on it; failures are told there."""
        import pymilvus  # noqa: F401

        if self.mode != "sdk":
            with contextlib.suppress(Exception):
                import langchain_milvus  # noqa: F401

    def _path(self, name: str) -> SearchPath:
        if name == "sdk":
            return self._sdk
        with self._lock:
            if self._langchain is None:
                from rag_pipeline.retrieval.langchain_search import LangChainSearch

                self._langchain = LangChainSearch(self._store)
            return self._langchain


def on_current(
    resolver: SnapshotResolver, use: Callable[[Snapshot], T], *, resolve: Callable[[], Snapshot] | None = None
) -> T:
    """Call ``use`` with the current version, and again with the next one when that was dropped under it.

    A version may be dropped under a reader who slept past its grace: then the alias has a new target by now.

    Args:
        resolve: Called instead of ``resolver.resolve``.
    """
    resolve = resolve or resolver.resolve
    for _ in range(_ATTEMPTS - 1):
        try:
            return use(resolve())
        except SearchFailedError as error:
            if not error.store_refused:
                raise
        except StoreCallError:
            pass
        resolver.forget()
    return use(resolve())


def _refuse_silence(snapshot: Snapshot, found: list[Candidate], category: str) -> None:
    """No candidates without a filter is no answer of a version that has chunks: its rows are lost or not loaded."""
    if not found and not category and snapshot.manifest.chunks:
        raise StoreUnavailableError(
            f"{snapshot.collection} gives no candidates although it was built with {snapshot.manifest.chunks} chunks. "
            "Run `rag-pipeline reindex --full`."
        )


def _reason(path: str, error: Exception) -> str:
    if isinstance(error, RagPipelineError):
        return str(error)
    if path == "langchain" and isinstance(error, ImportError):
        return f"LangChain's Milvus vector store cannot be imported ({error}): pip install langchain-milvus."
    text = " ".join(str(getattr(error, "message", "") or error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
