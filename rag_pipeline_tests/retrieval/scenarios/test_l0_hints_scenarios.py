"""Scenarios on L0: hints that can be traced, that stop no semantic retrieval and never become evidence."""

from rag_pipeline_tests.retrieval.scenarios.conftest import LookUp, Searches
from rag_pipeline_tests.retrieval.small_base import recorded

HINTED = "RedisConnectionsHigh on cart-cache: redis_connected_clients near maxclients, Redis clients refused"
HINTS = {
    "titles": ["Redis clients"],
    "keywords": ["RedisConnectionsHigh", "maxclients"],
    "domains": ["cache"],
    "entities": ["cart-cache", "redis_connected_clients"],
}


def test_l0_produces_traceable_hint_data(look_up: LookUp) -> None:
    """Scenario: L0 produces traceable hint data."""
    result = look_up().lookup(HINTED)
    l0 = result.to_dict()["retrievalTrace"]["l0"]
    assert {name.lower().removeprefix("matched"): found for name, found in l0.items()} == HINTS


def test_l0_does_not_bypass_semantic_retrieval(look_up: LookUp, searches: Searches) -> None:
    """Scenario: L0 does not bypass semantic retrieval.

    There is one match, of a title, and it names the one document that answers.
    """
    query = "Standby promotion"
    lookup = look_up()
    result = lookup.lookup(query)
    row = recorded(lookup, result.invocation_id)
    assert row.l0_match_count == 1
    assert result.retrieval_trace["l0"]["matched_titles"] == [query]
    assert searches.asked[0] == (query, "database")
    assert len(searches.answered[0].candidates) == len(result.retrieval_trace["attempts"][0]["candidates"]) == 1
    assert row.l1_match_count >= 1

    searches.asked.clear()
    disabled = look_up(retrieval__l1_enabled=False).lookup(query)
    assert searches.asked == []
    assert (disabled.found, disabled.evidence_status, disabled.evidence_blocks) == (False, "no_evidence", ())
    assert "retrieval.l1_enabled" in disabled.message
    assert disabled.retrieval_trace["l0"]["matched_titles"] == [query]
    assert disabled.retrieval_layer == "L0"


def test_l0_hints_do_not_become_normal_evidence(look_up: LookUp) -> None:
    """Scenario: L0 hints do not become normal evidence.

    The queries are exact titles, one of a document whose text says something else, one of a document without text.
    """
    for title, query in (("Zephyr gateway", "zephyr gateway"), ("Sealkeeper quorum", "Sealkeeper quorum")):
        lookup = look_up()
        result = lookup.lookup(query)
        assert (result.found, result.evidence_status) == (False, "no_evidence")
        assert result.to_dict()["evidenceBlocks"] == []
        assert result.context_pack.text == ""
        assert result.retrieval_trace["l0"]["matched_titles"] == [title]
        details = recorded(lookup, result.invocation_id).retrieval_details
        assert details["query_transform"]["l0"]["matched_titles"] == [title]
        assert details["evidence_blocks"] == []
