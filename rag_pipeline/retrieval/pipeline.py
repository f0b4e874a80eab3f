"""The lookup: its components in order, with a trace of each.

Query transformation with L0 hints, vector search with filtered retry, post-retrieval, session memory, context packing,
assembly, recording. Nothing that goes wrong in the store, the model, the database or the sidecar leaves `lookup` as an
exception: it becomes a degraded result that says so.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rag_pipeline.errors import ConfigurationError, StoreUnavailableError
from rag_pipeline.invocations.records import new_invocation_id
from rag_pipeline.retrieval.assembly import assemble
from rag_pipeline.retrieval.context_pack import pack_context
from rag_pipeline.retrieval.deadline import Deadline
from rag_pipeline.retrieval.query_transform import AlertPayload, build_knowledge_retrieval_query
from rag_pipeline.retrieval.recording import Call, invocation_of
from rag_pipeline.retrieval.rerank import Ranked
from rag_pipeline.retrieval.results import ContextPack, EvidenceBlock, LookupResult
from rag_pipeline.retrieval.retriever import Retrieved, Retriever
from rag_pipeline.retrieval.session import NEW_SESSION, Sessions, SessionState, without_repeats
from rag_pipeline.retrieval.stages import Stages
from rag_pipeline.settings import Settings, load_settings
from rag_pipeline.workspace import Workspace

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from rag_pipeline.retrieval.sidecar import Sidecar


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates of one `KnowledgeLookup.search`.

    Attributes:
        ranked: In final order.
        path: ``langchain`` or ``sdk``; blank when nothing was searched.
        index_fingerprint: Of the version that was read.
        fallback_reason: Why the L0 filter was given up; blank when it was not.
    """

    ranked: tuple[Ranked, ...]
    path: str
    index_fingerprint: str
    fallback_reason: str = ""


class KnowledgeLookup:
    """Looks knowledge up in the version that the alias points to; safe to use from many threads.

    The model is loaded and the store is connected at the first lookup. `close` (or leaving the ``with`` block) writes
    what is still to be recorded.

    Args:
        settings: See `rag_pipeline.settings.load_settings`; ``None`` loads them.
        version: A collection to read instead of the alias's target; blank for the alias.
        record: Whether lookups are recorded and sessions remembered.
    """

    def __init__(self, settings: Settings | None = None, *, version: str = "", record: bool = True) -> None:
        from rag_pipeline.invocations.database import Database
        from rag_pipeline.invocations.recorder import InvocationRecorder
        from rag_pipeline.invocations.session_memory import SessionMemory

        self.settings = settings or load_settings()
        self._retrieval = self.settings.retrieval
        self._ws = Workspace(self.settings)
        self._retriever = Retriever(self._ws, version=version)
        self._database = Database(self.settings.database, state=self._ws.state)
        invocations, session = self.settings.invocations, self._retrieval.session
        self._recorder: InvocationRecorder | None = None
        if record and invocations.enabled:
            self._recorder = InvocationRecorder(
                self._database,
                spool_folder=self._ws.spool_folder,
                retention_days=invocations.retention_days,
                patterns=invocations.redact,
            )
        remembers = record and session.enabled
        self._sessions = Sessions(
            SessionMemory(self._database, timeout_ms=session.timeout_ms, patterns=invocations.redact)
            if remembers
            else None
        )
        self._sidecar: Sidecar | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "KnowledgeLookup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self) -> None:
        """Load the model and connect, so that the next lookup does not have to.

        Raises:
            StoreUnavailableError: There is no store or no version to read.
            ModelUnavailableError: The version's model is not on this machine.
        """
        self._retriever.warm_up()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all lookups so far are in the database; False when some are still in the spool."""
        deadline = Deadline(timeout_s)
        if self._sidecar is not None:
            self._sidecar.wait(deadline.left())
        return self._recorder.flush(deadline.left()) if self._recorder else True

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is to be recorded (what cannot be stays in the spool), and let go of connections."""
        deadline = Deadline(timeout_s)
        if self._sidecar is not None:
            self._sidecar.close(deadline.left() / 2)
        if self._recorder is not None:
            self._recorder.close(deadline.left())
        self._retriever.close()
        self._database.close()

    def lookup_for_alert(self, payload: Mapping[str, Any], *, session_id: str = "") -> LookupResult:
        """`lookup` with the recommended query of an alert payload.

        Raises:
            ConfigurationError: The payload has no field to make a query of.
        """
        alert = AlertPayload.parse(payload)
        return self.lookup(build_knowledge_retrieval_query(alert), session_id=session_id, payload=alert)

    def lookup(
        self,
        query: str,
        *,
        session_id: str = "",
        payload: AlertPayload | None = None,
        session_state: SessionState | None = None,
    ) -> LookupResult:
        """Evidence for a query.

        Args:
            query: Any text.
            session_id: Evidence given to this session before is not repeated; blank for no session.
            payload: The alert that the query was made of, for the record.
            session_state: Taken instead of what the session memory says (a replay).

        Returns:
            The result; with the store down, one with the status ``retrieval_unavailable``.

        Raises:
            TypeError: The query or the session id is not text.
        """
        if not isinstance(query, str) or not isinstance(session_id, str):
            raise TypeError(f"query and session_id are text; found {type(query).__name__}, {type(session_id).__name__}")
        stages = Stages()
        created_at, invocation_id = datetime.now(UTC), new_invocation_id()
        self._sessions.prepare(session_id)
        retrieved = self._retriever.retrieve(query, stages=stages, payload=payload)
        try:
            result, state = self._answer(retrieved, invocation_id, session_id, session_state, stages)
        except Exception as error:  # a fault of ours is no reason to stop the agent; the log has it
            _log.exception("a lookup failed after retrieval")
            failed = replace(retrieved, retrieval=None, unavailable=f"{type(error).__name__}: {error}")
            state = session_state or NEW_SESSION
            trace = {"invocation_id": invocation_id, "mode": self._retriever.mode, **failed.trace()}
            result = assemble(failed, blocks=(), pack=ContextPack(), trace=trace, domains=state.domains)
        result = replace(result, retrieval_trace={**result.retrieval_trace, "duration_ms": stages.so_far()})
        self._record(result, retrieved, Call(query, session_id, created_at, state))
        return result

    def _answer(
        self,
        retrieved: Retrieved,
        invocation_id: str,
        session_id: str,
        session_state: SessionState | None,
        stages: Stages,
    ) -> tuple[LookupResult, SessionState]:
        """Session memory, packing and assembly; also what the session had been given before."""
        with stages.timed("session_recall"):
            state = session_state or self._sessions.recall(session_id)
        blocks = without_repeats(retrieved.post.blocks if retrieved.post else (), state)
        domains = sorted({*state.domains, *(block.category for block in blocks if block.category)})
        with stages.timed("context_pack"):
            pack = self._pack(blocks, retrieved)
        session_failure = state.failure
        if session_state is None and not session_failure:
            with stages.timed("session_remember"):
                session_failure = self._sessions.remember(
                    session_id, invocation_id, blocks=blocks, pack=pack, domains=domains
                )
        with stages.timed("assembly"):
            trace = {
                "invocation_id": invocation_id,
                "mode": self._retriever.mode,
                **retrieved.trace(),
                "session_failure": session_failure,
            }
            return assemble(retrieved, blocks=blocks, pack=pack, trace=trace, domains=domains), state

    def search(self, query: str, *, top_k: int | None = None, category: str = "") -> SearchResult:
        """Candidates for a query after hints, filter, retry and rerank; no threshold, packing or recording.

        Args:
            query: Any text; a blank one finds nothing.
            top_k: Chunks to return; ``None`` takes the setting ``retrieval.top_k``.
            category: Only chunks of this category, and no other filter; blank lets the L0 hints decide.

        Raises:
            ConfigurationError: ``top_k`` is less than 1.
            StoreUnavailableError: The store does not answer, or has no promoted version that can be read.
        """
        wanted = self._retrieval.top_k if top_k is None else top_k
        if wanted < 1:
            raise ConfigurationError(f"top_k is the number of chunks to return, at least 1; found {wanted}.")
        retrieved = self._retriever.retrieve(
            query,
            stages=Stages(),
            category=category.encode("utf-8", "replace").decode(),
            candidates=max(wanted, self._retrieval.candidates),
            expand=False,
        )
        if retrieved.unavailable:
            raise StoreUnavailableError(retrieved.unavailable)
        return SearchResult(
            ranked=retrieved.post.ranked[:wanted] if retrieved.post else (),
            path=retrieved.retrieval.selected.path if retrieved.retrieval else "",
            index_fingerprint=retrieved.snapshot.manifest.fingerprint if retrieved.snapshot else "",
            fallback_reason=retrieved.retrieval.fallback_reason if retrieved.retrieval else "",
        )

    def _pack(self, blocks: Sequence[EvidenceBlock], retrieved: Retrieved) -> ContextPack:
        context = self._retrieval.context
        if not blocks or retrieved.snapshot is None:
            return ContextPack(budget=context.budget, unit=context.unit)
        if context.unit == "characters":
            return pack_context(blocks, budget=context.budget, unit=context.unit)
        counter = retrieved.snapshot.queries.counter
        return pack_context(
            blocks, budget=context.budget, unit=context.unit, count=lambda text: counter.count([text])[0] if text else 0
        )

    def _record(self, result: LookupResult, retrieved: Retrieved, call: Call) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        retrieval, snapshot = retrieved.retrieval, retrieved.snapshot
        sidecar: Sidecar | None = None
        status = {"status": "disabled"}
        try:
            if (sidecar := self._started_sidecar()) is not None:
                status = {"status": "skipped", "reason": "nothing searched"}
        except Exception as error:  # whatever it is, it is the sidecar's, not the lookup's
            status = {"status": "unavailable", "reason": str(error) or type(error).__name__}
        if sidecar is not None and retrieval is not None and snapshot is not None:
            status = {"status": "pending", "mode": self._retrieval.sidecar.mode}
        # At once, whatever becomes of the sidecar or of this process.
        recorder.record(invocation_of(result, call, retrieved, settings=self._retrieval, sidecar=status))
        if sidecar is None or retrieval is None or snapshot is None:
            return
        invocation_id = result.invocation_id
        sidecar.compare(
            snapshot,
            retrieved.query.text,
            category=retrieval.selected.category,
            done=lambda outcome: recorder.amend(invocation_id, {"sidecar": outcome}),
        )

    def _started_sidecar(self) -> "Sidecar | None":
        if not self._retrieval.sidecar.enabled:
            return None
        with self._lock:
            if self._sidecar is None:
                from rag_pipeline.retrieval.sidecar import Sidecar

                self._sidecar = Sidecar(self._ws)
            return self._sidecar
