"""Scenarios on the packed context and on the rule rerank."""

import pytest

from rag_pipeline_tests.retrieval.scenarios.conftest import LookUp
from rag_pipeline_tests.retrieval.small_base import recorded

SOCKETS = "sealkeeper, maxclients is reached: close idle sockets of the checkout pool"


def test_context_pack_preserves_source_metadata(look_up: LookUp) -> None:
    """Scenario: Context pack preserves source metadata."""
    result = look_up(retrieval__normalization__reference_threshold=0.3).lookup(SOCKETS)
    pack = result.context_pack
    assert len(pack.included) == len(result.evidence_blocks) >= 2
    parts = pack.text.split("\n```\n")
    for part, included, block in zip(parts, pack.included, result.evidence_blocks, strict=False):
        assert f"source: {block.source}\n" in part
        assert f"title: {block.title}\n" in part
        assert (f"section: {block.breadcrumb_text}\n" in part) is bool(block.breadcrumb)
        assert f"found by: {'; '.join(block.hit_reasons)}\n" in part
        assert (included["source"], included["title"], included["breadcrumb"], tuple(included["hit_reasons"])) == (
            block.source,
            block.title,
            block.breadcrumb_text,
            block.hit_reasons,
        )


def test_context_pack_respects_budget(look_up: LookUp) -> None:
    """Scenario: Context pack respects budget.

    Two blocks of about 100 characters each, with about 200 of metadata each.
    """
    budgets = range(40, 700, 30)
    truncated, omitted = 0, 0
    for unit in ("characters", "tokens"):
        for budget in budgets:
            lookup = look_up(
                retrieval__context__budget=budget,
                retrieval__context__unit=unit,
                retrieval__normalization__reference_threshold=0.3,
            )
            result = lookup.lookup(SOCKETS)
            pack, blocks = result.context_pack, result.evidence_blocks
            assert (len(blocks), pack.budget, pack.unit) == (2, budget, unit)
            assert pack.used <= budget
            if unit == "characters":
                assert len(pack.text) == pack.used
            places = [(one["source"], one["breadcrumb"]) for one in (*pack.included, *pack.omitted)]
            assert places == [(block.source, block.breadcrumb_text) for block in blocks]
            for included, block in zip(pack.included, blocks, strict=False):
                assert f"source: {block.source}\n" in pack.text
                assert f"title: {block.title}\n" in pack.text
                assert f"section: {block.breadcrumb_text}\n" in pack.text
                assert f"found by: {'; '.join(block.hit_reasons)}\n" in pack.text
                assert (block.content in pack.text) is not included["truncated"]
            assert {block.content for block in blocks}.isdisjoint({""})
            assert (result.completeness_hint == "truncated") is pack.truncated
            truncated += any(one["truncated"] for one in pack.included)
            omitted += bool(pack.omitted)
        summary = recorded(lookup, result.invocation_id).retrieval_details["context_pack_summary"]
        assert [one["source"] for one in summary["included"]] == [block.source for block in blocks]
        assert summary["omitted"] == []
    assert truncated > 0
    assert 0 < omitted < 2 * len(budgets)

    tight = look_up(
        retrieval__context__budget=300,
        retrieval__context__unit="characters",
        retrieval__normalization__reference_threshold=0.3,
    )
    result = tight.lookup(SOCKETS)
    summary = recorded(tight, result.invocation_id).retrieval_details["context_pack_summary"]
    assert [one["source"] for one in summary["omitted"]] == [result.evidence_blocks[1].source]
    included = [(one["source"], one["truncated"]) for one in summary["included"]]
    assert included == [(result.evidence_blocks[0].source, True)]


def test_rerank_trace_records_score_contributions(look_up: LookUp) -> None:
    """Scenario: Rerank trace records score contributions."""
    result = look_up().lookup("how to close idle sockets when maxclients is reached, Redis clients of cart-cache")
    trace = result.to_dict()["rerankTrace"]
    assert [one["rank"] for one in trace] == list(range(1, len(trace) + 1))
    assert len(trace) >= 2
    first = trace[0]
    assert first["source"] == "cache/redis-clients.md"
    assert first["contributions"]["title"] > 0
    assert first["contributions"]["keyword"] > 0
    assert first["contributions"]["category"] > 0
    assert first["contributions"]["sectionKind"] > 0
    assert {"L0 title: Redis clients", "L0 keyword: maxclients", "L0 domain: cache", "section kind: steps"} <= set(
        first["reasons"]
    )
    for one in trace:
        assert one["finalScore"] == pytest.approx(one["baseSimilarity"] + sum(one["contributions"].values()), abs=1e-5)
    assert [one["finalScore"] for one in trace] == sorted((one["finalScore"] for one in trace), reverse=True)
    assert result.evidence_blocks[0].similarity == first["baseSimilarity"]


def test_query_hints_influence_rerank_without_becoming_evidence(look_up: LookUp) -> None:
    """Scenario: Query hints influence rerank without becoming evidence.

    The document in another category is a little nearer, the hints lift the named one above it; a document that is
    only named gives nothing.
    """
    query = (
        "RedisConnectionsHigh, Sealkeeper quorum: when maxclients is reached close idle sockets of the checkout pool "
        "then count"
    )
    result = look_up(retrieval__normalization__reference_threshold=0.3).lookup(query)
    assert result.retrieval_trace["l0"]["matched_titles"][:2] == ["Redis clients", "Sealkeeper quorum"]
    trace = {one["source"]: one for one in reversed(result.rerank_trace)}
    lifted, nearer = trace["cache/redis-clients.md"], trace["host/sockets.md"]
    assert lifted["base_similarity"] < nearer["base_similarity"]
    assert lifted["final_score"] > nearer["final_score"]
    assert lifted["contributions"]["alert_name"] > 0
    block = result.evidence_blocks[0]
    assert (block.source, block.retrieval_layer) == ("cache/redis-clients.md", "L0+L1")
    assert "L0 alert name: RedisConnectionsHigh" in block.hit_reasons
    assert "vault/seal.md" not in [block.source for block in result.evidence_blocks]
    assert "RedisConnectionsHigh" not in block.content
    assert "Sealkeeper" not in "".join(block.content for block in result.evidence_blocks)
