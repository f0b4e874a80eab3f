"""From a query to the attempts at retrieval: version, hints, vector search, filtered retry, post-retrieval."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rag_pipeline.errors import RagPipelineError
from rag_pipeline.index.milvus import nearest_first
from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.deadline import Deadline, Running
from rag_pipeline.retrieval.evidence_score import Calibration, effective_calibration
from rag_pipeline.retrieval.filtered_retry import Attempt, Retrieval, retrieve
from rag_pipeline.retrieval.post_retrieval import PostRetrieval, process
from rag_pipeline.retrieval.query_transform import AlertPayload, TransformedQuery, transform
from rag_pipeline.retrieval.snapshot import Snapshot, SnapshotResolver
from rag_pipeline.retrieval.stages import Stages
from rag_pipeline.retrieval.vector_search import SearchFailedError, SearchOutcome, VectorSearch, on_current
from rag_pipeline.setting_groups import RetrievalSettings, VectorStoreMode
from rag_pipeline.workspace import Workspace

# A model loads in seconds; what takes longer than this hangs.
_LOADING_S = 300.0
_LOOK_S = 0.05
_log = logging.getLogger(__name__)
_BLANK = "the query is blank."
_DISABLED = "semantic retrieval (L1) is disabled by configuration (retrieval.l1_enabled)."


@dataclass(slots=True)
class Retrieved:
    """What is known of one lookup once retrieval is over, however far it came.

    Attributes:
        query: The transformed query; without hints when no version could be read.
        snapshot: The version that was read, ``None`` when none could be.
        calibration: Of the version's model.
        retrieval: The attempts, ``None`` when none was made.
        unavailable: Why retrieval could not be done; blank when it could.
        nothing_searched: Why nothing was searched on purpose; blank when it was.
    """

    query: TransformedQuery
    snapshot: Snapshot | None = None
    calibration: Calibration | None = None
    retrieval: Retrieval | None = None
    unavailable: str = ""
    nothing_searched: str = ""

    @property
    def post(self) -> PostRetrieval | None:
        """Post-retrieval of the selected attempt."""
        return self.retrieval.selected.post if self.retrieval else None

    def trace(self) -> dict[str, Any]:
        """The retrieval trace: version, hints, attempts with their candidates, what was given up and why."""
        snapshot, retrieval = self.snapshot, self.retrieval
        return {
            "index_fingerprint": snapshot.manifest.fingerprint if snapshot else "",
            "collection": snapshot.collection if snapshot else "",
            "model": snapshot.manifest.model.name if snapshot else "",
            **self.query.trace(),
            "l0_failure": snapshot.matcher_failure if snapshot else "",
            "path": retrieval.selected.path if retrieval else "",
            "attempts": [attempt.trace() for attempt in retrieval.attempts] if retrieval else [],
            "selected_attempt": retrieval.selected.name if retrieval else "",
            "fallback_reason": retrieval.fallback_reason if retrieval else "",
            "nothing_searched": self.nothing_searched,
            "unavailable": self.unavailable,
            "calibration": self.calibration.trace() if self.calibration else {},
        }


class Retriever:
    """Retrieves from one version, whichever the alias points to; safe to use from many threads.

    Args:
        ws: Where everything is.
        version: A collection to read instead of the alias's target; blank for the alias.
        mode: Path to take; ``None`` takes the setting ``retrieval.vector_store.mode``.
    """

    def __init__(self, ws: Workspace, *, version: str = "", mode: VectorStoreMode | None = None) -> None:
        self._ws = ws
        self._settings = ws.settings.retrieval
        self._resolver = SnapshotResolver(ws, version=version)
        self._search = VectorSearch(ws, mode=mode, resolver=self._resolver)

    @property
    def mode(self) -> VectorStoreMode:
        """``auto``, ``langchain`` or ``sdk``."""
        return self._search.mode

    def warm_up(self) -> None:
        """Load the model and connect.

        Raises:
            StoreUnavailableError: There is no store or no version to read.
            ModelUnavailableError: The version's model is not on this machine.
        """
        self._search.warm_up()
        self._resolver.resolve()

    def close(self) -> None:
        """Let go of connections."""
        self._search.close()
        self._ws.store.close()

    def retrieve(
        self,
        query: str,
        *,
        stages: Stages,
        payload: AlertPayload | None = None,
        category: str = "",
        candidates: int = 0,
        expand: bool = True,
    ) -> Retrieved:
        """Retrieve within the time limit of a lookup; what goes wrong is told in the answer, not raised.

        Args:
            query: Any text.
            stages: Takes the time of each stage.
            payload: The alert that the query was made of.
            category: Only chunks of this category and no other filter; blank lets the hints decide.
            candidates: Chunks to take from the store; 0 takes the setting ``retrieval.candidates``.
            expand: Whether neighbours may complete a hit.
        """
        settings = self._settings
        bare = transform(query, matcher=None, max_chars=settings.max_query_chars, payload=payload)
        # A retry asks as the caller did: of an alert that is the recommended query, all of it.
        raw = transform(query, matcher=None, max_chars=settings.max_query_chars).text
        found = Retrieved(bare)
        if not bare.text:
            found.nothing_searched = _BLANK
            return found
        deadline = Deadline(settings.timeout_s)

        def run(snapshot: Snapshot) -> None:
            found.snapshot = snapshot
            found.calibration = effective_calibration(
                settings.normalization, snapshot.queries.embedder.model.profile, snapshot.manifest.calibration
            )
            with stages.timed("query_transform"):
                found.query = transform(
                    query,
                    matcher=snapshot.matcher,
                    max_chars=settings.max_query_chars,
                    variants=settings.query_variants,
                    payload=payload,
                )
            if not settings.l1_enabled:
                found.nothing_searched = _DISABLED
                return
            attempts = _Attempts(self._search, snapshot, found.query, found.calibration, deadline, stages)
            found.retrieval = retrieve(
                text=found.query.text,
                raw=raw,
                category="" if category else found.query.hints.domain,
                search=partial(attempts.search, top_k=candidates or settings.candidates, always=category),
                process=partial(attempts.process, settings=settings, expand=expand),
                calibration=found.calibration,
            )
            found.unavailable = found.retrieval.unavailable

        try:
            on_current(self._resolver, run, resolve=partial(self._resolve, deadline, stages))
        except SearchFailedError as error:  # refused, by every version there was
            text, domain = found.query.text, "" if category else found.query.hints.domain
            failed = Attempt("filtered" if domain else "unfiltered", text, domain, "", error.trials, None, str(error))
            found.retrieval, found.unavailable = Retrieval((failed,), failed), str(error)
        except RagPipelineError as error:
            found.unavailable = str(error)
        except Exception as error:  # a fault of ours is no reason to stop the agent; the log has it
            _log.exception("a lookup failed")
            found.unavailable = f"{type(error).__name__}: {error}"
        return found

    def _resolve(self, deadline: Deadline, stages: Stages) -> Snapshot:
        """The version to read. The time that imports, a model's loading and Milvus Lite's start take is not counted."""
        with stages.timed("resolve"):
            if (fresh := self._resolver.fresh()) is not None:
                return fresh
            started = time.monotonic()
            self._search.warm_up()
            deadline.extend(time.monotonic() - started)
            resolving = Running(self._ws.store.description, self._resolver.resolve)
            waited = time.monotonic()
            while not resolving.wait(_LOOK_S):
                if self._resolver.loading and time.monotonic() - waited < _LOADING_S:
                    deadline.extend(_LOOK_S)
                elif deadline.passed:
                    break
            return resolving.result(deadline.limit_s)


@dataclass(frozen=True, slots=True)
class _Attempts:
    """What all attempts of one lookup share."""

    vector_search: VectorSearch
    snapshot: Snapshot
    query: TransformedQuery
    calibration: Calibration
    deadline: Deadline
    stages: Stages

    def search(self, text: str, category: str, *, top_k: int, always: str) -> SearchOutcome:
        """Candidates of the query, and of its variants where they help."""
        found = self._search(text, always or category, top_k)
        for variant in self.query.variants:
            try:
                found = _merged(found, self._search(variant, always or category, top_k), top_k)
            except RagPipelineError:
                continue  # a variant is a bonus
        return found

    def process(self, candidates: Sequence[Candidate], *, settings: RetrievalSettings, expand: bool) -> PostRetrieval:
        """Post-retrieval, with the time that fetching neighbours takes apart."""

        def fetch(ids: list[str]) -> Mapping[str, Candidate]:
            with self.stages.timed("expansion"):
                return self.vector_search.fetch(self.snapshot, ids, deadline=self.deadline)

        with self.stages.timed("post_retrieval"):
            return process(
                self.query,
                candidates,
                calibration=self.calibration,
                settings=settings,
                fetch=fetch if expand else None,
            )

    def _search(self, text: str, category: str, top_k: int) -> SearchOutcome:
        with self.stages.timed("embed"):
            self.snapshot.queries.of(text)
        with self.stages.timed("vector_search"):
            return self.vector_search.search(
                self.snapshot, text, top_k=top_k, category=category, deadline=self.deadline
            )


def _merged(plain: SearchOutcome, variant: SearchOutcome, top_k: int) -> SearchOutcome:
    """Both results by distance; the plain one alone when the variant found fewer."""
    if len(variant.candidates) < len(plain.candidates):
        return plain
    best: dict[str, Candidate] = {}
    for candidate in (*plain.candidates, *variant.candidates):
        if candidate.id not in best or candidate.score < best[candidate.id].score:
            best[candidate.id] = candidate
    merged = tuple(sorted(best.values(), key=nearest_first)[:top_k])
    return SearchOutcome(merged, plain.path, (*plain.trials, *variant.trials))
