"""Put a lookup's result together: status, levels, hints on completeness, and the message for the agent."""

from collections.abc import Mapping, Sequence
from typing import Any

from rag_pipeline.records import Hints
from rag_pipeline.retrieval.results import (
    CompletenessHint,
    ContextPack,
    EvidenceBlock,
    EvidenceStatus,
    LookupResult,
    RetrievalLayer,
)
from rag_pipeline.retrieval.retriever import Retrieved

NO_EVIDENCE = "No knowledge evidence was found for this query"


def assemble(
    retrieved: Retrieved,
    *,
    blocks: Sequence[EvidenceBlock],
    pack: ContextPack,
    trace: Mapping[str, Any],
    domains: Sequence[str],
) -> LookupResult:
    """The result of a lookup.

    Args:
        retrieved: How retrieval went.
        blocks: Usable evidence after session memory.
        pack: Made of these blocks.
        trace: The retrieval trace.
        domains: Categories of this session's evidence, this lookup included.
    """
    post = retrieved.post
    status, message = _status(retrieved, blocks, pack)
    reasons = [*(post.dedup_reasons if post else ())]
    if any(block.given_before for block in blocks):
        reasons.append("already_provided")
    return LookupResult(
        found=bool(blocks),
        message=message,
        evidence_status=status,
        evidence_blocks=tuple(blocks),
        context_pack=pack,
        retrieval_trace=trace,
        rerank_trace=post.rerank_trace() if post else [],
        relevance_level=post.level if post else "none",
        completeness_hint=_completeness(blocks, pack),
        retrieval_layer=_layer(retrieved.query.hints, has_candidates=bool(post and post.ranked)),
        dedup_reason=", ".join(reasons),
        retrieved_domains_this_session=tuple(sorted(set(domains))),
    )


def _status(retrieved: Retrieved, blocks: Sequence[EvidenceBlock], pack: ContextPack) -> tuple[EvidenceStatus, str]:
    if blocks and all(block.given_before for block in blocks):
        return (
            "already_provided",
            "All of the evidence was given to this session before; see the invocations that the blocks name.",
        )
    if blocks:
        found = f"{len(blocks)} evidence block{'s' * (len(blocks) > 1)} found"
        if not pack.included:
            return "evidence", (
                f"{found}, but none fits the context budget of {pack.budget} {pack.unit}: read the blocks themselves, "
                "or raise retrieval.context.budget."
            )
        return "evidence", f"{found}; cite them by number."
    if retrieved.unavailable:
        return (
            "retrieval_unavailable",
            f"Knowledge retrieval is unavailable just now, which says nothing about the knowledge: "
            f"{retrieved.unavailable}",
        )
    return "no_evidence", _no_evidence(retrieved)


def _no_evidence(retrieved: Retrieved) -> str:
    if retrieved.nothing_searched:
        return f"{NO_EVIDENCE}: {retrieved.nothing_searched}"
    post = retrieved.post
    if post is None or not post.ranked:
        return f"{NO_EVIDENCE}: the knowledge base gave no candidates."
    return (
        f"{NO_EVIDENCE}: none of {len(post.ranked)} candidates is relevant enough (best similarity "
        f"{post.top_similarity:.2f}). Try other words, or treat the knowledge base as silent on this."
    )


def _completeness(blocks: Sequence[EvidenceBlock], pack: ContextPack) -> CompletenessHint:
    if not blocks:
        return "none"
    if pack.truncated:
        return "truncated"
    return "complete" if all(block.complete for block in blocks) else "partial"


def _layer(hints: Hints, *, has_candidates: bool) -> RetrievalLayer:
    if has_candidates:
        return "L0+L1" if hints.matches else "L1"
    return "L0" if hints.matches else "none"
