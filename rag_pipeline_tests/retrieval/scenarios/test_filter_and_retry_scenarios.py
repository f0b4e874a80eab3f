"""Scenarios on the category filter that L0 may give, and on the retry without it."""

from rag_pipeline_tests.retrieval.scenarios.conftest import LookUp, Searches
from rag_pipeline_tests.retrieval.small_base import recorded

SOCKETS = "when maxclients is reached, close idle sockets of the checkout pool, then count descriptors"
PROMOTION = "promotion stalls while the standby waits for quorum, fence the old primary"


def categories(result: object, attempt: int = 0) -> set[str]:
    return {found["category"] for found in result.retrieval_trace["attempts"][attempt]["candidates"]}


def test_single_domain_filter(look_up: LookUp, searches: Searches) -> None:
    """Scenario: Single domain filter.

    A document of another category is nearer to the query, yet the filter leaves it out.
    """
    lookup = look_up()
    result = lookup.lookup(SOCKETS)
    assert result.retrieval_trace["l0"]["domains"] == ["cache"]
    assert searches.asked == [(SOCKETS, "cache")]
    assert result.retrieval_trace["attempts"][0]["category_filter"] == "cache"
    assert categories(result) == {"cache"}
    nearest = {name: lookup.search(SOCKETS, category=name).ranked[0].candidate.score for name in ("cache", "host")}
    assert nearest["host"] < nearest["cache"]

    quoted = look_up().lookup("a quotedvolume detaches when its label holds a quotation mark")
    assert [block.source for block in quoted.evidence_blocks] == ["storage/quotes.md"]
    assert categories(quoted) == {'odd "name" with \\back\\slash'}


def test_ambiguous_domain_fallback(look_up: LookUp, searches: Searches) -> None:
    """Scenario: Ambiguous domain fallback."""
    for query, domains in (
        ("close idle sockets of the checkout pool", []),
        ("maxclients and sealkeeper: close idle sockets of the checkout pool", ["cache", "vault"]),
    ):
        searches.asked.clear()
        result = look_up().lookup(query)
        assert result.retrieval_trace["l0"]["domains"] == domains
        assert searches.asked == [(query, "")]
        attempts = result.retrieval_trace["attempts"]
        assert [(attempt["name"], attempt["category_filter"]) for attempt in attempts] == [("unfiltered", "")]
        assert {"cache", "host"} <= categories(result)
        assert result.retrieval_trace["fallback_reason"] == ""


def test_filtered_retrieval_succeeds(look_up: LookUp, searches: Searches) -> None:
    """Scenario: Filtered retrieval succeeds.

    Without the filter there would be better candidates; there is no retry all the same.
    """
    lookup = look_up()
    result = lookup.lookup(SOCKETS)
    trace = result.retrieval_trace
    assert searches.asked == [(SOCKETS, "cache")]
    assert [(attempt["name"], attempt["category_filter"]) for attempt in trace["attempts"]] == [("filtered", "cache")]
    assert trace["attempts"][0]["top_similarity"] >= trace["calibration"]["reference_threshold"] == 0.5
    assert (trace["selected_attempt"], trace["fallback_reason"]) == ("filtered", "")
    assert (result.found, {block.category for block in result.evidence_blocks}) == (True, {"cache"})
    better = lookup.search(SOCKETS, category="host").ranked[0]
    assert better.evidence.similarity > trace["attempts"][0]["top_similarity"]


def test_filtered_retrieval_returns_no_evidence(look_up: LookUp, searches: Searches) -> None:
    """Scenario: Filtered retrieval returns no evidence.

    The category that L0 names has no text at all.
    """
    query = f"sealkeeper {PROMOTION}"
    result = look_up().lookup(f"  {query}\n")
    trace = result.retrieval_trace
    assert searches.asked == [(query, "vault"), (query, "")]
    assert [len(found.candidates) > 0 for found in searches.answered] == [False, True]
    assert [(attempt["name"], attempt["category_filter"]) for attempt in trace["attempts"]] == [
        ("filtered", "vault"),
        ("unfiltered", ""),
    ]
    assert (trace["selected_attempt"], trace["fallback_reason"]) == ("unfiltered", "filtered_vector_no_evidence")
    assert result.to_dict()["retrievalTrace"]["fallbackReason"] == "filtered_vector_no_evidence"
    assert [block.source for block in result.evidence_blocks] == ["database/failover.md"]


def test_filtered_retrieval_is_below_reference_quality(look_up: LookUp, searches: Searches) -> None:
    """Scenario: Filtered retrieval is below reference quality."""
    query = f"ZephyrHandshakeFailures {PROMOTION}"
    result = look_up().lookup(query)
    trace = result.retrieval_trace
    assert searches.asked == [(query, "edge"), (query, "")]
    filtered, unfiltered = trace["attempts"]
    assert [found["source"] for found in filtered["candidates"]] == ["edge/zephyr.md"]
    assert filtered["top_similarity"] < trace["calibration"]["reference_threshold"] <= unfiltered["top_similarity"]
    assert (trace["selected_attempt"], trace["fallback_reason"]) == ("unfiltered", "filtered_vector_low_quality")
    assert [block.source for block in result.evidence_blocks] == ["database/failover.md"]


def test_both_retrieval_attempts_fail(look_up: LookUp, searches: Searches) -> None:
    """Scenario: Both retrieval attempts fail.

    The title of a document stands in the query word for word.
    """
    query = "Zephyr gateway: marzipan parade postponed, glockenspiel orchestra unavailable"
    lookup = look_up()
    result = lookup.lookup(query)
    assert searches.asked == [(query, "edge"), (query, "")]
    assert all(outcome.candidates for outcome in searches.answered)
    wire = result.to_dict()
    assert (wire["found"], wire["evidenceStatus"], wire["evidenceBlocks"]) == (False, "no_evidence", [])
    assert wire["contextPack"]["text"] == ""
    assert [attempt["name"] for attempt in wire["retrievalTrace"]["attempts"]] == ["filtered", "unfiltered"]
    assert wire["retrievalTrace"]["l0"]["matchedTitles"] == ["Zephyr gateway"]
    assert recorded(lookup, result.invocation_id).evidence_status == "no_evidence"
