"""The sidecar: a second retrieval path asked after each lookup, in the background, for comparison only.

It has a client, a thread and a time limit of its own. Whatever becomes of it is told as a status beside the recorded
lookup; the lookup's answer was given before it began.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.deadline import Deadline
from rag_pipeline.retrieval.snapshot import Snapshot
from rag_pipeline.retrieval.vector_search import VectorSearch
from rag_pipeline.workspace import Workspace

_WAITING = 64
_TOP = 10
_PREVIEW_CHARS = 160

Done = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _Comparison:
    snapshot: Snapshot
    query: str
    category: str
    done: Done


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
        self._waiting: queue.Queue[_Comparison | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name="sidecar", daemon=True)
        self._thread.start()

    def compare(self, snapshot: Snapshot, query: str, *, category: str, done: Done) -> None:
        """Ask for a query later; ``done`` gets the status then, or at once when too many are waiting.

        Args:
            category: The filter of the attempt that was selected; blank for none.
        """
        try:
            self._waiting.put_nowait(_Comparison(snapshot, query, category, done))
        except queue.Full:
            done(self._status("skipped", reason=f"{_WAITING} comparisons are waiting already"))

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is waiting or being asked; False when that takes longer."""
        deadline = Deadline(timeout_s)
        while self._waiting.unfinished_tasks and not deadline.passed:
            time.sleep(0.005)
        return not self._waiting.unfinished_tasks

    def close(self, timeout_s: float) -> None:
        """Finish what is waiting while there is time, tell the rest as skipped, and let go of the connections."""
        self.wait(timeout_s)
        while True:
            try:
                left = self._waiting.get_nowait()
            except queue.Empty:
                break
            if left is not None:
                left.done(self._status("skipped", reason="the lookup was closed"))
            self._waiting.task_done()
        self._waiting.put(None)
        if self._search is not None:
            self._search.close()
        self._own.store.close()

    def _work(self) -> None:
        while (comparison := self._waiting.get()) is not None:
            try:
                comparison.done(self._outcome(comparison))
            finally:
                self._waiting.task_done()
        self._waiting.task_done()

    def _outcome(self, comparison: _Comparison) -> dict[str, Any]:
        started = time.monotonic()
        try:
            if self._search is None:
                self._search = VectorSearch(self._own, mode=self._settings.mode)
                self._search.warm_up()  # an import is no part of the query's time
            found = self._search.search(
                comparison.snapshot,
                comparison.query,
                top_k=self._top_k,
                category=comparison.category,
                deadline=Deadline(self._settings.timeout_s),
            )
        except Exception as error:  # whatever it is, it is the sidecar's, not the lookup's
            return self._status("unavailable", reason=str(error) or type(error).__name__, started=started)
        return {
            **self._status("available", started=started),
            "candidates": [_comparable(rank, item) for rank, item in enumerate(found.candidates, 1)],
        }

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
