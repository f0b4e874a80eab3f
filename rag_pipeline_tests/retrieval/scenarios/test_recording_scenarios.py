"""Scenarios on what ``tool_invocation`` keeps of a lookup, read back from the database."""

import json

from rag_pipeline_tests.retrieval.scenarios.conftest import LookUp
from rag_pipeline_tests.retrieval.scenarios.test_evidence_scenarios import MITIGATION
from rag_pipeline_tests.retrieval.scenarios.test_l0_hints_scenarios import HINTED, HINTS
from rag_pipeline_tests.retrieval.small_base import recorded

# From the text of documents, in none of the queries.
SENTENCES = ("then raise the ceiling by CONFIG SET", "forgets to close its pool leaves idle sockets", "Kirsten, Leif")


def test_retrieval_details_include_l0_hints(look_up: LookUp) -> None:
    """Scenario: Retrieval details include L0 hints."""
    lookup = look_up()
    row = recorded(lookup, lookup.lookup(HINTED).invocation_id)
    assert (row.tool_name, row.input_params["query"]) == ("lookup_knowledge", HINTED)
    l0 = row.retrieval_details["query_transform"]["l0"]
    assert {name.removeprefix("matched_"): found for name, found in l0.items()} == HINTS


def test_retrieval_layer_reflects_cooperating_retrieval(look_up: LookUp) -> None:
    """Scenario: Retrieval layer reflects cooperating retrieval."""
    lookup, without_l1 = look_up(), look_up(retrieval__l1_enabled=False)
    for opened, query, layer in (
        (lookup, MITIGATION, "L0+L1"),
        (lookup, "idle sockets", "L1"),
        (without_l1, MITIGATION, "L0"),
        (without_l1, "idle sockets", "none"),
    ):
        result = opened.lookup(query)
        row = recorded(opened, result.invocation_id)
        assert row.retrieval_layer == result.to_dict()["retrievalLayer"] == layer
        assert (row.l0_match_count > 0, row.l1_match_count > 0) == ("L0" in layer, "L1" in layer)


def test_evidence_summaries_are_persisted(look_up: LookUp) -> None:
    """Scenario: Evidence summaries are persisted."""
    lookup = look_up(retrieval__normalization__reference_threshold=0.3)
    result = lookup.lookup(f"sealkeeper: {MITIGATION}")
    summaries = recorded(lookup, result.invocation_id).retrieval_details["evidence_blocks"]
    assert len(summaries) == len(result.evidence_blocks) >= 2
    for summary, block in zip(summaries, result.evidence_blocks, strict=True):
        assert summary["source"] == block.source
        assert summary["title"] == block.title
        assert summary["retrieval_layer"] == block.retrieval_layer
        assert summary["score"] == block.score
        assert summary["hit_reasons"] == list(block.hit_reasons)
    assert {summary["source"]: summary["retrieval_layer"] for summary in summaries} == {
        "cache/redis-clients.md": "L0+L1",
        "host/sockets.md": "L1",
    }


def test_full_content_is_not_duplicated_into_retrieval_details(look_up: LookUp) -> None:
    """Scenario: Full content is not duplicated into retrieval details.

    The session makes the record hold more, and the second lookup repeats what was given.
    """
    lookup = look_up(retrieval__normalization__reference_threshold=0.2)
    for _ in range(2):
        result = lookup.lookup(MITIGATION, session_id="incident-4711-content")
        assert result.found
        row = recorded(lookup, result.invocation_id)
        stored = json.dumps(row.retrieval_details, ensure_ascii=False)
        assert [sentence for sentence in SENTENCES if sentence in stored] == []
        assert [block["content_chars"] for block in row.retrieval_details["evidence_blocks"]] == [
            len(block.content) for block in result.evidence_blocks
        ]
        assert all("content" not in block for block in row.retrieval_details["evidence_blocks"])


def test_evidence_lookup_persists_modular_detail_keys(look_up: LookUp) -> None:
    """Scenario: Evidence lookup persists modular detail keys."""
    lookup = look_up()
    result = lookup.lookup(MITIGATION)
    assert result.found
    details = recorded(lookup, result.invocation_id).retrieval_details
    assert details["query_transform"]["query"] == MITIGATION
    assert details["retrieval_trace"]["attempts"][0]["candidates"][0]["source"] == "cache/redis-clients.md"
    assert details["context_pack_summary"]["included"][0]["source"] == "cache/redis-clients.md"
    assert details["context_pack_summary"]["used"] == result.context_pack.used > 0
    assert details["rerank_trace"] == result.rerank_trace
    assert [block["source"] for block in details["evidence_blocks"]] == ["cache/redis-clients.md"]


def test_fallback_lookup_persists_fallback_reason(look_up: LookUp) -> None:
    """Scenario: Fallback lookup persists fallback reason."""
    lookup = look_up()
    promotion = "promotion stalls while the standby waits for quorum, fence the old primary"
    for query, reason, selected in (
        (f"sealkeeper {promotion}", "filtered_vector_no_evidence", "unfiltered"),
        (f"ZephyrHandshakeFailures {promotion}", "filtered_vector_low_quality", "unfiltered"),
        (MITIGATION, "", "filtered"),
    ):
        details = recorded(lookup, lookup.lookup(query).invocation_id).retrieval_details
        assert details["fallback_reason"] == details["retrieval_trace"]["fallback_reason"] == reason
        assert details["retrieval_trace"]["selected_attempt"] == selected
        assert selected in [attempt["name"] for attempt in details["retrieval_trace"]["attempts"]]


def test_no_evidence_lookup_still_preserves_trace(look_up: LookUp) -> None:
    """Scenario: No-evidence lookup still preserves trace."""
    lookup = look_up()
    result = lookup.lookup("ZephyrHandshakeFailures: glockenspiel of idle sockets")
    assert not result.found
    row = recorded(lookup, result.invocation_id)
    details = row.retrieval_details
    assert (row.evidence_status, row.relevance_level, row.success) == ("no_evidence", "low", True)
    attempts = details["retrieval_trace"]["attempts"]
    assert [(attempt["name"], len(attempt["candidates"])) for attempt in attempts] == [
        ("filtered", 1),
        ("unfiltered", 9),
    ]
    assert details["evidence_blocks"] == []
    stored = json.dumps(details, ensure_ascii=False)
    assert [sentence for sentence in SENTENCES if sentence in stored] == []
