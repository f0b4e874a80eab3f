"""What is recorded of a lookup: enough to explain and replay it, never a block's full content."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from rag_pipeline.invocations.records import Invocation
from rag_pipeline.retrieval.results import LookupResult, plain
from rag_pipeline.retrieval.retriever import Retrieved
from rag_pipeline.retrieval.session import SessionState
from rag_pipeline.setting_groups import RetrievalSettings

TOOL_NAME = "lookup_knowledge"
_PREVIEW_CHARS = 500


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the tool.

    Attributes:
        query: As the caller gave it.
        session_id: The caller's session; blank for none.
        created_at: When the call began.
        state: What the session had been given before.
    """

    query: str
    session_id: str
    created_at: datetime
    state: SessionState


def invocation_of(
    result: LookupResult,
    call: Call,
    retrieved: Retrieved,
    *,
    settings: RetrievalSettings,
    sidecar: Mapping[str, Any],
) -> Invocation:
    """The record of a lookup.

    Args:
        settings: What it ran with; recorded for a replay.
        sidecar: Status and top list of the sidecar.
    """
    trace, post, query = result.retrieval_trace, retrieved.post, retrieved.query
    hints, durations = query.hints, trace["duration_ms"]
    details = {
        "query_transform": query.trace(),
        "retrieval_trace": trace,
        "fallback_reason": trace["fallback_reason"],
        "context_pack_summary": result.context_pack.summary(),
        "rerank_trace": result.rerank_trace,
        "evidence_blocks": [block.summary() for block in result.evidence_blocks],
        "candidate_count": post.counts["candidates"] if post else 0,
        "final_count": len(result.evidence_blocks),
        "message": result.message,
        "completeness_hint": result.completeness_hint,
        "retrieved_domains_this_session": result.retrieved_domains_this_session,
        "sidecar": sidecar,
        "settings": settings.model_dump(mode="json", exclude={"milvus"}),
        "session_state": call.state.to_dict(),
        "result_digest": result_digest(result),
    }
    shown = call.query[: settings.max_query_chars]
    return Invocation(
        id=result.invocation_id,
        session_id=call.session_id,
        tool_name=TOOL_NAME,
        input_params={
            "query": shown,
            **({"payload": asdict(query.payload)} if query.payload else {}),
            **({"query_chars": len(call.query)} if len(call.query) > len(shown) else {}),
        },
        output_preview=_preview(result),
        retrieval_layer=result.retrieval_layer,
        l0_match_count=len(hints.matches),
        l1_match_count=len(post.ranked) if post else 0,
        retrieval_details=plain(details),
        relevance_level=result.relevance_level,
        evidence_status=result.evidence_status,
        dedup_reason=result.dedup_reason,
        duration_ms=durations["whole"],
        stage_ms={name: ms for name, ms in durations.items() if name != "whole"},
        success=result.evidence_status != "retrieval_unavailable",
        index_fingerprint=result.index_fingerprint,
        created_at=call.created_at,
    )


def result_digest(result: LookupResult) -> str:
    """SHA-256, 64 hex digits, over all of a result but its retrieval trace, which holds times and the invocation."""
    values = result.to_dict()
    del values["retrievalTrace"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _preview(result: LookupResult) -> str:
    text = result.context_pack.text or result.message
    return text if len(text) <= _PREVIEW_CHARS else text[:_PREVIEW_CHARS] + "…"
