"""The sidecar: a second retrieval path asked after each lookup, in the background, for comparison only.

It has a client, a thread and a time limit of its own. Whatever becomes of it is told as a status beside the recorded
lookup; the lookup's answer was given before it began.
"""

import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.deadline import Deadline, call_within
from rag_pipeline.retrieval.snapshot import Snapshot
from rag_pipeline.retrieval.vector_search import VectorSearch
from rag_pipeline.workspace import Workspace

_WAITING = 64
_TOP = 10
_PREVIEW_CHARS = 160
_AT_EXIT_S = 1.0
# What the first query may take longer: it imports a framework.
_IMPORT_S = 30.0

Done = Callable[[dict[str, Any]], None]


class _Comparison:
    """One query for the sidecar; its outcome is told once, whoever tells it first."""

    def __init__(self, snapshot: Snapshot, query: str, category: str, done: Done) -> None:
        self.snapshot = snapshot
        self.query = query
        self.category = category
        self._done = done
        self._lock = threading.Lock()
        self._told = False

    def tell(self, outcome: dict[str, Any]) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told:
            self._done(outcome)


class Sidecar:
    """Asks the second path, one query after the other.

    Args:
        ws: Its settings say which path and how long; it gets a store client of its own.
    """

    def __init__(self, ws: Workspace) -> None:
        settings = ws.settings.retrieval
        self._settings = settings.sidecar
        self._top_k = min(_TOP, settings.candidates)
        self._own = Workspace(ws.settings)
        self._search: VectorSearch | None = None
        self._waiting: queue.Queue[_Comparison] = queue.Queue(_WAITING)
        self._untold: set[_Comparison] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="sidecar", daemon=True)
        self._thread.start()
        atexit.register(self.close, _AT_EXIT_S)

    def compare(self, snapshot: Snapshot, query: str, *, category: str, done: Done) -> None:
        """Ask for a query later; ``done`` gets the status then, or at once when too many are waiting.

        Args:
            category: The filter of the attempt that was selected; blank for none.
        """
        comparison = _Comparison(snapshot, query, category, done)
        self._untold.add(comparison)
        try:
            if self._closed:
                raise queue.Full
            self._waiting.put_nowait(comparison)
        except queue.Full:
            self._tell(comparison, self._status("skipped", reason="too many comparisons are waiting already"))

    def wait(self, timeout_s: float) -> bool:
        """Wait until every outcome is told; False when that takes longer."""
        deadline = Deadline(timeout_s)
        while self._untold and not deadline.passed:
            time.sleep(0.005)
        return not self._untold

    def close(self, timeout_s: float) -> None:
        """Finish what is waiting while there is time, tell the rest as skipped, and let go of the connections."""
        if self._closed:
            return
        self._closed = True
        self.wait(timeout_s)
        for comparison in list(self._untold):
            self._tell(comparison, self._status("skipped", reason="the lookup was closed before it answered"))
        atexit.unregister(self.close)
        if self._search is not None:
            self._search.close()
        self._own.store.close()

    def _tell(self, comparison: _Comparison, outcome: dict[str, Any]) -> None:
        try:
            comparison.tell(outcome)
        finally:
            self._untold.discard(comparison)

    def _work(self) -> None:
        while not self._closed or not self._waiting.empty():
            try:
                comparison = self._waiting.get(timeout=1.0)
            except queue.Empty:
                continue
            self._tell(comparison, self._outcome(comparison))

    def _outcome(self, comparison: _Comparison) -> dict[str, Any]:
        started = time.monotonic()
        limit_s = self._settings.timeout_s + (_IMPORT_S if self._search is None else 0.0)
        try:
            candidates = call_within(limit_s, "The sidecar", lambda: self._ask(comparison))
        except Exception as error:  # whatever it is, it is the sidecar's, not the lookup's
            return self._status("unavailable", reason=str(error) or type(error).__name__, started=started)
        return {**self._status("available", started=started), "candidates": candidates}

    def _ask(self, comparison: _Comparison) -> list[dict[str, Any]]:
        if self._search is None:
            search = VectorSearch(self._own, mode=self._settings.mode)
            search.warm_up()
            self._search = search
        found = self._search.search(
            comparison.snapshot,
            comparison.query,
            top_k=self._top_k,
            category=comparison.category,
            deadline=Deadline(self._settings.timeout_s),
        )
        return [_comparable(rank, item) for rank, item in enumerate(found.candidates, 1)]

    def _status(self, status: str, *, reason: str = "", started: float | None = None) -> dict[str, Any]:
        ms = 0.0 if started is None else round((time.monotonic() - started) * 1000.0, 3)
        return {"status": status, "mode": self._settings.mode, "reason": reason, "ms": ms}


def _comparable(rank: int, candidate: Candidate) -> dict[str, Any]:
    """A candidate in the shape that both paths are compared in; its score is to be read by its label."""
    metadata = candidate.metadata
    return {
        "rank": rank,
        "id": candidate.id,
        "source": metadata.get("source", ""),
        "title": metadata.get("title", ""),
        "breadcrumb": metadata.get("breadcrumb", []),
        "category": candidate.category,
        "preview": candidate.content[:_PREVIEW_CHARS],
        "score": candidate.score,
        "raw_score": candidate.raw_score,
        "score_label": candidate.score_label,
    }
