"""Scenarios on what comes back: evidence blocks, deduplication, and the contract of the result."""

import pytest

from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.tool_declarations import langchain_tool
from rag_pipeline_tests.retrieval.scenarios.conftest import LookUp
from rag_pipeline_tests.retrieval.small_base import recorded

MITIGATION = "maxclients is reached: close idle sockets of the checkout pool"


def keys_of(value: object) -> set[str]:
    """The keys of all mappings in a JSON value."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_evidence_block_contains_source_metadata(look_up: LookUp) -> None:
    """Scenario: Evidence block contains source metadata."""
    block = look_up().lookup(MITIGATION).to_dict()["evidenceBlocks"][0]
    assert block["source"] == "cache/redis-clients.md"
    assert block["title"] == "Redis clients"
    assert block["breadcrumb"] == ["Redis clients", "Mitigation"]
    assert block["retrievalLayer"] == "L0+L1"
    assert "close idle sockets of the checkout pool, then raise the ceiling by CONFIG SET." in block["content"]
    assert block["hitReasons"][0].startswith("vector similarity 0.")
    assert {"L0 keyword: maxclients", "L0 domain: cache"} <= set(block["hitReasons"])

    # No hint stands in this query, and the text before any heading has no breadcrumb.
    plain = look_up(retrieval__normalization__reference_threshold=0.3)
    bare = plain.lookup("inventory owners Aaltje Bjarne Chiara Dagny Eamon").to_dict()["evidenceBlocks"][0]
    assert (bare["source"], bare["breadcrumb"], bare["retrievalLayer"]) == ("edge/zephyr.md", [], "L1")


def test_evidence_blocks_are_the_primary_evidence_contract(look_up: LookUp) -> None:
    """Scenario: Evidence blocks are the primary evidence contract.

    The hints also name a document without text: nothing of it reaches what the agent reads.
    """
    lookup = look_up(retrieval__normalization__reference_threshold=0.3)
    query = f"sealkeeper, {MITIGATION}"
    result = lookup.lookup(query)
    assert result.retrieval_trace["l0"]["matched_titles"] == ["Sealkeeper quorum", "Redis clients"]
    assert len(result.evidence_blocks) >= 2
    rest = result.context_pack.text
    for number, block in enumerate(result.evidence_blocks, 1):
        before, _, rest = rest.partition(block.content)
        assert f"[{number}]" in before
        assert f"source: {block.source}" in before
    assert rest.strip() == "```"
    assert "Sealkeeper" not in result.context_pack.text
    call = {"type": "tool_call", "id": "1", "name": "lookup_knowledge", "args": {"query": query}}
    message = langchain_tool(lookup=lookup).invoke(call)
    assert message.content == result.context_pack.text
    assert keys_of(result.to_dict()) & {"primary", "supplement"} == set()
    assert keys_of(recorded(lookup, result.invocation_id).retrieval_details) & {"primary", "supplement"} == set()


def test_duplicate_source_deduplication(look_up: LookUp) -> None:
    """Scenario: Duplicate source deduplication.

    L0 names the document by title and identifiers, L1 finds two chunks of one of its sections.
    """
    lookup = look_up(retrieval__normalization__reference_threshold=0.3)
    query = "Broker backlog: partitions drain slowly when consumer_group_alpha and consumer_group_omega, wait until"
    result = lookup.lookup(query)
    attempt = result.retrieval_trace["attempts"][0]
    assert [found["source"] for found in attempt["candidates"]].count("messaging/broker.md") == 2
    blocks = [block for block in result.evidence_blocks if block.source == "messaging/broker.md"]
    assert len(blocks) == 1
    reasons = blocks[0].hit_reasons
    assert reasons[0].startswith("vector similarity")
    assert {
        "L0 title: Broker backlog",
        "L0 entity: consumer_group_alpha",
        "L0 entity: consumer_group_omega",
    } <= set(reasons)
    assert len(reasons) == len(set(reasons))
    assert blocks[0].retrieval_layer == "L0+L1"
    assert len(blocks[0].chunk_ids) == len(set(blocks[0].chunk_ids)) == 2
    assert blocks[0].content.count("Partitions drain slowly") == 2
    assert "same_section" in result.dedup_reason
    identities = [(block.source, block.section) for block in result.evidence_blocks]
    assert len(identities) == len(set(identities))


def test_postprocess_count_tracking(look_up: LookUp) -> None:
    """Scenario: Postprocess count tracking."""
    lookup = look_up(retrieval__normalization__reference_threshold=0.3)
    for query in (
        "Broker backlog: partitions drain slowly when consumer_group_alpha and consumer_group_omega, wait until",
        "close idle sockets of the checkout pool",
        "glockenspiel",
    ):
        result = lookup.lookup(query)
        details = recorded(lookup, result.invocation_id).retrieval_details
        trace = details["retrieval_trace"]
        selected = next(found for found in trace["attempts"] if found["name"] == trace["selected_attempt"])
        assert details["candidate_count"] == len(selected["candidates"]) == selected["counts"]["candidates"]
        assert details["final_count"] == len(result.evidence_blocks) == selected["counts"]["final"]
    assert (details["candidate_count"], details["final_count"]) == (9, 0)


@pytest.mark.model
def test_evidence_result_contains_context_and_traces(real_lookup: KnowledgeLookup) -> None:
    """Scenario: Evidence result contains context and traces.

    A Chinese question to the default model; the document that answers it is in English.
    """
    wire = real_lookup.lookup("Redis 连接数打满了，新连接被拒绝，怎么排查？").to_dict()
    assert (wire["found"], wire["evidenceStatus"]) == (True, "evidence")
    first = wire["evidenceBlocks"][0]
    assert first["source"] == "cache/redis-connections-exhausted.en.md"
    assert first["content"].split("\n")[0] in wire["contextPack"]["text"]
    assert wire["contextPack"]["included"][0]["source"] == first["source"]
    attempt = wire["retrievalTrace"]["attempts"][0]
    assert attempt["candidates"][0]["scoreLabel"] == "l2_distance"
    assert wire["rerankTrace"][0]["source"] == first["source"]
    assert wire["relevanceLevel"] in ("highly_relevant", "reference")
    assert wire["relevanceLevel"] == first["relevanceLevel"]
    assert wire["completenessHint"] in ("complete", "partial", "truncated")


def test_no_evidence_result_keeps_traceability(look_up: LookUp) -> None:
    """Scenario: No-evidence result keeps traceability."""
    wire = look_up().lookup("Zephyr gateway glockenspiel").to_dict()
    assert wire["found"] is False
    assert wire["evidenceStatus"] == "no_evidence"
    assert "No knowledge evidence was found" in wire["message"]
    attempts = wire["retrievalTrace"]["attempts"]
    assert [(attempt["name"], attempt["path"], attempt["categoryFilter"]) for attempt in attempts] == [
        ("filtered", "sdk", "edge"),
        ("unfiltered", "sdk", ""),
    ]
    assert [[found["source"] for found in attempt["candidates"]][:1] for attempt in attempts] == [
        ["edge/zephyr.md"]
    ] * 2
    assert (wire["completenessHint"], wire["relevanceLevel"]) == ("none", "low")
