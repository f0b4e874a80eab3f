"""One or two attempts at retrieval: with the L0 domain as a filter, and without it when that gives nothing good.

The filter is an optimization, never a condition: an attempt that it leaves without evidence, or with weak candidates
only, is followed by one with the raw query and no filter. Without an L0 filter there is one attempt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.evidence_score import Calibration
from rag_pipeline.retrieval.post_retrieval import PostRetrieval
from rag_pipeline.retrieval.vector_search import PathTrial, SearchFailedError, SearchOutcome

FallbackReason = Literal["", "filtered_vector_no_evidence", "filtered_vector_low_quality"]
_TRACED = 10

Search = Callable[[str, str], SearchOutcome]
"""(query, category) to candidates; a blank category is no filter."""
Process = Callable[[Sequence[Candidate]], PostRetrieval]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One search and what post-retrieval made of it.

    Attributes:
        name: ``filtered`` or ``unfiltered``.
        category: The filter, blank without one.
        post: ``None`` when the search failed.
        failure: Why it failed; blank otherwise.
    """

    name: Literal["filtered", "unfiltered"]
    query: str
    category: str
    path: str
    trials: tuple[PathTrial, ...]
    post: PostRetrieval | None
    failure: str = ""

    @property
    def usable(self) -> bool:
        """Whether it gives evidence."""
        return self.post is not None and bool(self.post.blocks)

    def trace(self) -> dict[str, Any]:
        """The attempt for the retrieval trace, with its top candidates."""
        post = self.post
        return {
            "name": self.name,
            "query_chars": len(self.query),
            "category_filter": self.category,
            "path": self.path,
            "paths": [
                {"path": trial.path, "outcome": trial.outcome, "reason": trial.reason, "ms": round(trial.ms, 3)}
                for trial in self.trials
            ],
            "failure": self.failure,
            "top_similarity": round(post.top_similarity, 6) if post else 0.0,
            "counts": dict(post.counts) if post else {},
            "expansion_failure": post.expansion_failure if post else "",
            "candidates": [
                {
                    "id": item.candidate.id,
                    "source": item.source,
                    "breadcrumb": item.candidate.metadata.get("breadcrumb", []),
                    "category": item.candidate.category,
                    "score": item.candidate.score,
                    "raw_score": item.candidate.raw_score,
                    "score_label": item.candidate.score_label,
                    "similarity": round(item.evidence.similarity, 6),
                    "evidence_score": round(item.evidence.value, 6),
                }
                for item in (post.ranked[:_TRACED] if post else ())
            ],
        }


@dataclass(frozen=True, slots=True)
class Retrieval:
    """The attempts, and the one that counts.

    Attributes:
        attempts: In the order they ran.
        selected: The one whose evidence is used; with neither usable, the last one that did not fail.
        fallback_reason: Why a retry ran; blank when none did.
    """

    attempts: tuple[Attempt, ...]
    selected: Attempt
    fallback_reason: FallbackReason = ""

    @property
    def unavailable(self) -> str:
        """Why nothing can be said of the knowledge: a failure that leaves no evidence; blank otherwise."""
        if self.selected.usable:
            return ""
        return next((attempt.failure for attempt in reversed(self.attempts) if attempt.failure), "")


def retrieve(
    *, text: str, raw: str, category: str, search: Search, process: Process, calibration: Calibration
) -> Retrieval:
    """Search with the filter, then without it if need be.

    Args:
        text: The transformed query of the first attempt.
        raw: The query of a retry.
        category: The only L0 domain; blank: no filter, no retry.
    """
    first = _attempt("filtered" if category else "unfiltered", text, category, search, process)
    reason = _reason_to_retry(first, calibration) if category else ""
    if not reason:
        return Retrieval((first,), first)
    second = _attempt("unfiltered", raw, "", search, process)
    if second.usable:
        selected = second
    elif first.usable or second.post is None:
        selected = first
    else:
        selected = second
    return Retrieval((first, second), selected, reason)


def _attempt(
    name: Literal["filtered", "unfiltered"], query: str, category: str, search: Search, process: Process
) -> Attempt:
    try:
        outcome = search(query, category)
    except SearchFailedError as error:
        if error.store_refused:
            raise
        return Attempt(name, query, category, "", error.trials, None, str(error))
    return Attempt(name, query, category, outcome.path, outcome.trials, process(outcome.candidates))


def _reason_to_retry(attempt: Attempt, calibration: Calibration) -> FallbackReason:
    post = attempt.post
    if post is None:
        return ""  # the store failed, not the filter
    if not post.ranked:
        return "filtered_vector_no_evidence"
    if post.top_similarity < calibration.reference_threshold:
        return "filtered_vector_low_quality"
    return "" if post.blocks else "filtered_vector_no_evidence"
