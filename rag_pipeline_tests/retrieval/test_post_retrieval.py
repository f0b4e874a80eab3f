"""From candidates to blocks: order and ties, rules, levels, merged sections, near-equal texts, limits, retries."""

from pathlib import Path
from typing import Any

import pytest

from rag_pipeline.index.models import DEFAULT_MODEL, resolve_model
from rag_pipeline.records import Candidate, HintMatch, Hints
from rag_pipeline.retrieval.evidence_score import Calibration, effective_calibration
from rag_pipeline.retrieval.filtered_retry import Retrieval, retrieve
from rag_pipeline.retrieval.post_retrieval import PostRetrieval, process, rank_candidates
from rag_pipeline.retrieval.query_transform import TransformedQuery, transform
from rag_pipeline.retrieval.vector_search import SearchFailedError, SearchOutcome
from rag_pipeline.setting_groups import NormalizationSettings, RetrievalSettings

SEED = Calibration(max_l2_distance=2.0, highly_relevant_threshold=0.75, reference_threshold=0.5)


def found(key: str, distance: float, *, content: str = "", **metadata: Any) -> Candidate:
    known = {"source": f"{key}.md", "section": key, "title": key, "breadcrumb": [key], "chunk_index": 0,
             "section_part": 1, "section_parts": 1, "line_start": 1, "line_end": 2}  # fmt: skip
    category = str(metadata.pop("category", ""))
    return Candidate(
        id=key,
        content=content or f"content of {key}",
        category=category,
        score=distance,
        raw_score=distance,
        score_label="l2_distance",
        metadata={**known, **metadata},
    )


def asked(text: str = "query", *matches: HintMatch, domains: tuple[str, ...] = ()) -> TransformedQuery:
    plain = transform(text, matcher=None, max_chars=1000)
    return TransformedQuery(
        raw=text, text=plain.text, truncated=False, matching=plain.matching,
        hints=Hints(domains=domains, matches=matches),
    )  # fmt: skip


def hint(kind: str, term: str, *sources: str) -> HintMatch:
    return HintMatch(term=term.lower(), surface=term, kind=kind, sources=sources, categories=())


def processed(*candidates: Candidate, query: TransformedQuery | None = None, **settings: Any) -> PostRetrieval:
    return process(query or asked(), candidates, calibration=SEED, settings=RetrievalSettings(**settings), fetch=None)


def test_order_is_by_final_score_then_distance_then_id() -> None:
    ranked = rank_candidates(asked(), [found("b", 0.4), found("c", 0.2), found("a", 0.4)], SEED)
    assert [item.candidate.id for item in ranked] == ["c", "a", "b"]
    # Beyond the largest distance all similarities are 0; the nearer one still comes first.
    ranked = rank_candidates(asked(), [found("x", 3.0), found("y", 2.5)], SEED)
    assert [(item.candidate.id, item.evidence.similarity) for item in ranked] == [("y", 0.0), ("x", 0.0)]


def test_a_chunk_found_twice_counts_once() -> None:
    post = processed(found("a", 0.2), found("a", 0.2))
    assert (post.counts["candidates"], post.counts["distinct_chunks"], len(post.blocks)) == (2, 1, 1)
    assert post.dedup_reasons == ()


@pytest.mark.parametrize(
    ("rule", "match", "metadata"),
    [
        ("title", hint("title", "Redis guide", "b.md"), {}),
        ("alert_name", hint("alert", "RedisDown", "b.md"), {}),
        ("keyword", hint("keyword", "eviction", "b.md"), {}),
        ("heading", hint("heading", "Flush", "b.md"), {"breadcrumb": ["Redis", "Flush now"]}),
        ("entity", hint("entity", "max_clients", "z.md"), {"content": "Set max_clients higher."}),
        ("entity", hint("service", "cart-cache", "z.md"), {"title": "On cart-cache"}),
    ],
)
def test_each_rule_lifts_what_it_speaks_for_and_says_so(rule: str, match: HintMatch, metadata: dict[str, Any]) -> None:
    a, b = found("a", 0.40), found("b", 0.41, **metadata)
    ranked = rank_candidates(asked("query", match), [a, b], SEED)
    assert [item.candidate.id for item in ranked] == ["b", "a"]
    assert list(ranked[0].contributions) == [rule]
    assert ranked[0].final == pytest.approx(ranked[0].evidence.similarity + ranked[0].contributions[rule])
    assert f"L0 {rule.replace('_', ' ')}: {match.surface}" in ranked[0].reasons
    assert ranked[1].contributions == {}


def test_the_only_domain_and_the_kind_of_section_lift_too() -> None:
    a = found("a", 0.40)
    b = found("b", 0.41, category="cache", breadcrumb=["Redis", "处理步骤"])
    ranked = rank_candidates(asked("内存满了怎么办", domains=("cache",)), [a, b], SEED)
    assert [item.candidate.id for item in ranked] == ["b", "a"]
    assert set(ranked[0].contributions) == {"category", "section_kind"}
    assert "L0 domain: cache" in ranked[0].reasons


def test_several_matches_of_one_rule_add_less_and_less() -> None:
    matches = [hint("keyword", f"word{n}", "a.md") for n in range(6)]
    one, six = (
        rank_candidates(asked("query", *matches[:n]), [found("a", 0.4)], SEED)[0].contributions["keyword"]
        for n in (1, 6)
    )
    assert six == pytest.approx(2 * one)


def test_levels_are_cut_at_the_thresholds_and_what_is_below_is_no_evidence() -> None:
    post = processed(found("a", 0.5), found("b", 0.51), found("c", 1.0), found("d", 1.001))
    assert [(block.source, block.relevance_level) for block in post.blocks] == [
        ("a.md", "highly_relevant"),
        ("b.md", "reference"),
        ("c.md", "reference"),
    ]
    assert (post.level, post.top_similarity, post.counts["below_reference"]) == ("highly_relevant", 0.75, 1)
    assert processed(found("d", 1.5)).blocks == ()
    assert processed(found("d", 1.5)).level == "low"
    assert processed().level == "none"


def test_rules_lift_the_order_never_the_level() -> None:
    post = processed(found("d", 1.001), query=asked("query", hint("alert", "Alarm", "d.md")))
    assert post.ranked[0].final > 0.5
    assert post.blocks == ()


@pytest.mark.model
@pytest.mark.parametrize(("distance", "count"), [(0.55, 1), (0.55, 30), (4.0, 30)])
def test_a_hint_makes_no_far_candidate_usable_under_the_default_model(
    model_cache_dir: Path, distance: float, count: int
) -> None:
    profile = resolve_model(DEFAULT_MODEL, cache_dir=model_cache_dir).profile
    calibration = effective_calibration(NormalizationSettings(), profile)
    query = asked("Zephyr gateway", hint("title", "Zephyr gateway", "zephyr.md"), hint("alert", "Zephyr", "zephyr.md"))
    candidates = [
        found(f"c{n}", distance, source="zephyr.md", title="Zephyr gateway", content=f"Inventory owners {n}")
        for n in range(count)
    ]
    hinted, plain = (
        process(each, candidates, calibration=calibration, settings=RetrievalSettings(), fetch=None)
        for each in (query, asked("Zephyr gateway"))
    )
    assert [item.evidence.value for item in hinted.ranked] == [item.evidence.value for item in plain.ranked]
    assert [block.source for block in hinted.blocks] == [block.source for block in plain.blocks]
    near = process(
        query,
        [found("near", 0.2, source="zephyr.md", title="Zephyr gateway", content="The Zephyr gateway restarts.")],
        calibration=calibration,
        settings=RetrievalSettings(),
        fetch=None,
    )
    assert [block.source for block in near.blocks] == ["zephyr.md"]


def test_chunks_of_a_section_become_one_block_in_document_order_with_all_reasons() -> None:
    shared = {"source": "s.md", "section": "s", "section_parts": 3}
    query = asked("query", hint("entity", "alpha_one", "s.md"), hint("entity", "beta_two", "s.md"))
    post = processed(
        found(
            "p2", 0.2, content="second alpha_one", chunk_index=2, section_part=2, line_start=20, line_end=29, **shared
        ),
        found("p1", 0.3, content="first beta_two", chunk_index=1, section_part=1, line_start=10, line_end=19, **shared),
        query=query,
    )
    (block,) = post.blocks
    assert block.content == "first beta_two\n\nsecond alpha_one"
    assert block.chunk_ids == ("p1", "p2")
    assert (block.score, block.line_start, block.line_end, block.complete) == (0.2, 10, 29, False)
    assert {"L0 entity: alpha_one", "L0 entity: beta_two"} <= set(block.hit_reasons)
    assert block.retrieval_layer == "L0+L1"
    assert post.dedup_reasons == ("same_section",)


def test_a_document_gives_at_most_its_share() -> None:
    same = [
        found(f"s{n}", 0.2 + n / 100, source="big.md", section=f"s{n}", content=f"part {'x' * n}") for n in range(5)
    ]
    post = processed(*same, found("other", 0.4), max_blocks_per_document=2)
    assert [block.source for block in post.blocks] == ["big.md", "big.md", "other.md"]
    assert post.counts["over_document_limit"] == 3
    assert post.dedup_reasons == ("document_limit",)


TEXT = "When the pool is full stop the writers wait for the queue to drain then start them again one by one and check"


def test_near_equal_texts_are_one_block_that_names_the_other_document() -> None:
    post = processed(
        found("a", 0.2, content=TEXT), found("b", 0.3, content=f"{TEXT}."), found("c", 0.4, content="Other")
    )
    assert [(block.source, block.also_in) for block in post.blocks] == [("a.md", ("b.md",)), ("c.md", ())]
    assert post.dedup_reasons == ("near_duplicate",)


def test_texts_that_differ_in_a_name_or_number_are_two_blocks() -> None:
    post = processed(
        found("a", 0.2, content=f"{TEXT} Redis"),
        found("b", 0.3, content=f"{TEXT} Kafka"),
        found("c", 0.4, content=f"{TEXT} 137"),
    )
    assert [block.source for block in post.blocks] == ["a.md", "b.md", "c.md"]
    assert post.dedup_reasons == ()


def test_the_rerank_trace_adds_up() -> None:
    post = processed(found("a", 0.4), query=asked("query", hint("title", "A", "a.md"), hint("keyword", "k", "a.md")))
    (entry,) = post.rerank_trace()
    assert entry["final_score"] == pytest.approx(entry["base_similarity"] + sum(entry["contributions"].values()))
    assert (entry["rank"], entry["source"], entry["base_similarity"]) == (1, "a.md", 0.8)


# Filtered retry


def retried(answers: dict[str, list[Candidate] | Exception], *, category: str = "cache") -> tuple[Retrieval, list[str]]:
    """Retrieve with these answers by category filter; also gives the filters that were asked for, in order."""
    filters: list[str] = []

    def search(text: str, only: str) -> SearchOutcome:
        filters.append(only)
        answer = answers[only]
        if isinstance(answer, Exception):
            raise answer
        return SearchOutcome(tuple(answer), "sdk", ())

    done = retrieve(
        text="text",
        raw="raw",
        category=category,
        search=search,
        process=lambda candidates: processed(*candidates),
        calibration=SEED,
    )
    return done, filters


DOWN = SearchFailedError("down", trials=(), store_refused=False)


@pytest.mark.parametrize(
    ("filtered", "unfiltered", "reason", "selected", "sources"),
    [
        ([found("a", 0.2)], [found("b", 0.1)], "", "filtered", ["a.md"]),
        ([], [found("b", 0.1)], "filtered_vector_no_evidence", "unfiltered", ["b.md"]),
        ([found("a", 1.2)], [found("b", 0.1)], "filtered_vector_low_quality", "unfiltered", ["b.md"]),
        ([found("a", 1.2)], [found("b", 1.3)], "filtered_vector_low_quality", "unfiltered", []),
        ([found("a", 1.2)], DOWN, "filtered_vector_low_quality", "filtered", []),
        (DOWN, [found("b", 0.1)], "", "filtered", []),
    ],
)
def test_a_filter_that_gives_nothing_good_is_given_up(
    filtered: Any, unfiltered: Any, reason: str, selected: str, sources: list[str]
) -> None:
    done, filters = retried({"cache": filtered, "": unfiltered})
    assert done.fallback_reason == reason
    assert done.selected.name == selected
    assert [block.source for block in (done.selected.post.blocks if done.selected.post else ())] == sources
    assert filters == (["cache", ""] if reason else ["cache"])
    assert bool(done.unavailable) is (DOWN in (filtered, unfiltered))


def test_without_a_filter_nothing_is_retried() -> None:
    done, filters = retried({"": []}, category="")
    assert (filters, done.fallback_reason, done.selected.name) == ([""], "", "unfiltered")
