"""The evidence score: calibration in force, similarity, levels, and what each signal does to a calibrated score."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_pipeline.index.models import DEFAULT_MODEL, EvidenceWeights, ModelProfile, resolve_model
from rag_pipeline.records import Candidate, HintMatch, Hints
from rag_pipeline.retrieval.evidence_score import (
    SIGNALS,
    Calibration,
    EvidenceScore,
    Signals,
    effective_calibration,
    normalised_similarity,
    relevance_level,
    score_evidence,
    signals,
)
from rag_pipeline.retrieval.query_transform import TransformedQuery, transform
from rag_pipeline.setting_groups import NormalizationSettings

SEED = Calibration()
WEIGHTS = EvidenceWeights(
    background=0.3,
    intercept=0.2,
    similarity=3.0,
    margin=2.0,
    names_missing=-2.5,
    words_missing=-3.0,
    other_language=-0.5,
    agreement=3.0,
)
CALIBRATED = Calibration(max_l2_distance=0.6, evidence=WEIGHTS)
PROFILE = ModelProfile(
    name="fake",
    query_prompt="",
    document_prompt="",
    max_tokens=128,
    dimension=8,
    pooling="mean",
    normalize=True,
    max_l2_distance=0.6,
    highly_relevant_threshold=0.8,
    reference_threshold=0.4,
    evidence=WEIGHTS,
)


def found(key: str, distance: float, content: str = "", **metadata: Any) -> Candidate:
    return Candidate(key, content, "", distance, distance, "l2_distance", {"source": f"{key}.md", **metadata})


def asked(text: str, *matches: HintMatch) -> TransformedQuery:
    return replace(transform(text, matcher=None, max_chars=1000), hints=Hints(matches=matches))


def named(kind: str, *sources: str) -> HintMatch:
    return HintMatch("redis clients", "Redis clients", kind, sources, ())


def signals_of(query: TransformedQuery, *candidates: Candidate) -> list[Signals]:
    return signals(query, candidates, max_l2_distance=0.6, background=0.3)


# Calibration in force

SETTINGS = {"max_l2_distance": 1.5, "highly_relevant_threshold": 0.9, "reference_threshold": 0.6}
MANIFEST = {"max_l2_distance": 1.1, "highly_relevant_threshold": 0.7, "reference_threshold": 0.3}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_setting_wins_over_the_manifest_over_the_profile_over_the_seed(name: str) -> None:
    bare = ModelProfile("bare", "", "", 128, 8, "mean", normalize=True)
    other = [one for one in SETTINGS if one != name]
    for setting, manifest, profile, expected in (
        (SETTINGS[name], MANIFEST, PROFILE, SETTINGS[name]),
        (SETTINGS[name], None, bare, SETTINGS[name]),
        (None, MANIFEST, PROFILE, MANIFEST[name]),
        (None, {one: MANIFEST[one] for one in other}, PROFILE, getattr(PROFILE, name)),
        (None, None, PROFILE, getattr(PROFILE, name)),
        (None, {}, bare, {"max_l2_distance": 2.0, "highly_relevant_threshold": 0.75, "reference_threshold": 0.5}[name]),
    ):
        calibration = effective_calibration(NormalizationSettings(**{name: setting}), profile, manifest)
        assert getattr(calibration, name) == expected
        # One value says nothing of the others.
        for one in other:
            assert getattr(calibration, one) == (manifest or {}).get(one, getattr(profile, one))
        assert calibration.evidence is profile.evidence


def test_a_setting_of_zero_is_a_setting() -> None:
    calibration = effective_calibration(NormalizationSettings(reference_threshold=0.0), PROFILE, MANIFEST)
    assert calibration.reference_threshold == 0.0


def test_the_trace_says_which_calibration_was_in_force() -> None:
    values = {"max_l2_distance": 2.0, "highly_relevant_threshold": 0.75, "reference_threshold": 0.5}
    assert SEED.trace() == {**values, "evidence": "similarity"}
    assert CALIBRATED.trace() == {**values, "max_l2_distance": 0.6, "evidence": "calibrated"}


# Similarity and levels


@pytest.mark.parametrize(
    ("distance", "longest", "similarity"),
    [
        (0.0, 2.0, 1.0),
        (0.5, 2.0, 0.75),
        (2.0, 2.0, 0.0),
        (2.1, 2.0, 0.0),
        (4.0, 0.5, 0.0),
        (-1e-7, 2.0, 1.0),
        (0.15, 0.6, 0.75),
        (math.inf, 2.0, 0.0),
        (math.nan, 2.0, 0.0),
    ],
)
def test_similarity_is_one_minus_the_share_of_the_distance_within_0_and_1(
    distance: float, longest: float, similarity: float
) -> None:
    assert normalised_similarity(distance, longest) == pytest.approx(similarity, abs=1e-12)
    assert 0.0 <= normalised_similarity(distance, longest) <= 1.0


@pytest.mark.parametrize(
    ("score", "level"),
    [
        (1.0, "highly_relevant"), (0.75, "highly_relevant"), (math.nextafter(0.75, 0), "reference"),
        (0.5, "reference"), (math.nextafter(0.5, 0), "low"), (0.0, "low"), (math.nan, "low"),
    ],
)  # fmt: skip
def test_a_score_on_a_threshold_has_the_better_level(score: float, level: str) -> None:
    assert relevance_level(score, SEED) == level


def test_levels_are_cut_at_the_calibrations_thresholds() -> None:
    calibration = Calibration(highly_relevant_threshold=0.9, reference_threshold=0.2)
    assert [relevance_level(score, calibration) for score in (0.9, 0.89, 0.2, 0.19)] == [
        "highly_relevant", "reference", "reference", "low",
    ]  # fmt: skip
    # Where the thresholds stand crosswise, nothing under the one of evidence is evidence.
    crosswise = Calibration(highly_relevant_threshold=0.75, reference_threshold=0.9)
    assert [relevance_level(score, crosswise) for score in (0.8, 0.9)] == ["low", "highly_relevant"]


def test_without_calibration_the_score_is_the_similarity_whatever_else_speaks() -> None:
    query = asked("Redis clients", named("title", "b.md"))
    scores = score_evidence(query, [found("a", 0.5, "Redis"), found("b", 1.0), found("c", 3.0)], SEED)
    assert scores == [EvidenceScore(one, one, {"similarity": one}) for one in (0.75, 0.5, 0.0)]
    assert not any(score.calibrated for score in scores)


# The calibrated score


def test_the_parts_say_how_the_score_came_about() -> None:
    query = asked("why does RedisCart evict keys", named("title", "a.md"))
    candidates = [found("a", 0.2, "RedisCart evicts keys"), found("b", 0.3, "磁盘"), found("c", 0.7)]
    for candidate, signal, score in zip(
        candidates, signals_of(query, *candidates), score_evidence(query, candidates, CALIBRATED), strict=True
    ):
        assert score.calibrated
        assert list(score.parts) == ["intercept", *SIGNALS]
        assert score.parts["intercept"] == 0.2
        for name in SIGNALS:
            assert score.parts[name] == pytest.approx(getattr(WEIGHTS, name) * getattr(signal, name))
        assert score.value == pytest.approx(1 / (1 + math.exp(-sum(score.parts.values()))))
        assert score.similarity == normalised_similarity(candidate.score, 0.6)


def test_every_signal_has_its_weight() -> None:
    assert {one.name for one in fields(EvidenceWeights)} == {*SIGNALS, "background", "intercept"}


def test_extreme_weights_overflow_nothing() -> None:
    for intercept, value in ((1e6, 1.0), (-1e6, 0.0)):
        calibration = replace(CALIBRATED, evidence=replace(WEIGHTS, intercept=intercept))
        assert score_evidence(asked("Redis"), [found("a", 0.2)], calibration)[0].value == value


def better_of(query: TransformedQuery, better: Candidate, worse: Candidate) -> str:
    """The signals that tell two candidates of one result apart; ``better`` must have the higher score."""
    one, other = signals_of(query, better, worse)
    high, low = score_evidence(query, [better, worse], CALIBRATED)
    assert high.value > low.value
    return " ".join(name for name in SIGNALS if getattr(one, name) != getattr(other, name))


def test_each_signal_moves_the_score_in_its_direction() -> None:
    query = asked("why does RedisCart evict keys")
    text = "RedisCart evicts keys"
    assert better_of(query, found("a", 0.2, text), found("b", 0.21, text)) == "similarity margin"
    # "Technical" terms count twice: as names, and among all that was asked.
    names = better_of(query, found("a", 0.2, text), found("b", 0.2, "evicts keys"))
    assert names == "names_missing words_missing"
    assert better_of(query, found("a", 0.2, text), found("b", 0.2, "RedisCart keys")) == "words_missing"
    chinese = found("b", 0.2, text, language="zh")
    assert better_of(query, found("a", 0.2, text, language="en"), chinese) == "other_language"
    agreed = asked("Redis clients", named("title", "a.md"))
    assert better_of(agreed, found("a", 0.2, "Redis clients"), found("b", 0.2, "Redis clients")) == "agreement"


def test_beyond_the_largest_distance_the_margin_still_tells_the_nearer_one() -> None:
    one, other, far = signals_of(asked("redis"), found("a", 0.7), found("b", 0.8), found("c", 9.0))
    assert (one.similarity, other.similarity) == (0.0, 0.0)
    assert one.margin - other.margin == pytest.approx(0.1 / 0.6)
    assert far.margin == pytest.approx((0.3 - 4.0) / 0.6)


def test_the_background_is_what_lies_behind_the_nearest_ten_and_five_average_ones() -> None:
    near = [found(f"n{n}", 0.1) for n in range(10)]
    assert signals_of(asked("redis"), *near)[0].margin == pytest.approx((0.3 - 0.1) / 0.6)
    behind = [found(f"b{n}", 0.4) for n in range(20)]
    background = (20 * 0.4 + 5 * 0.3) / 25
    assert signals_of(asked("redis"), *near, *behind)[0].margin == pytest.approx((background - 0.1) / 0.6)
    # Whatever their order.
    assert signals_of(asked("redis"), *behind, *near)[-1].margin == pytest.approx((background - 0.1) / 0.6)


def test_terms_are_looked_for_in_title_breadcrumb_keywords_and_content() -> None:
    query = asked("the RedisCart alert")
    places: list[dict[str, Any]] = [
        {"content": "RedisCart alert"},
        {"title": "RedisCart alert"},
        {"breadcrumb": ["On RedisCart", "Alert"]},
        {"keywords": ("RedisCart", "alert")},
    ]
    for place in places:
        (one,) = signals_of(query, found("a", 0.2, **place))
        assert (one.names_missing, one.words_missing) == (0.0, 0.0)
    (none,) = signals_of(query, found("a", 0.2, "else", keywords="RedisCart alert", source="RedisCart alert"))
    assert (none.names_missing, none.words_missing) == (1.0, 1.0)


def test_a_rare_term_weighs_more_than_a_common_one() -> None:
    query = asked("restart zookeeper")
    with_rare, with_common, *_ = signals_of(
        query, found("a", 0.2, "zookeeper"), *(found(f"b{n}", 0.2, "restart") for n in range(8))
    )
    rare, common = math.log(1 + 9 / 1.5), math.log(1 + 9 / 8.5)
    assert with_common.words_missing == pytest.approx(rare / (rare + common))
    assert with_rare.words_missing == pytest.approx(common / (rare + common))


def test_two_bigrams_weigh_as_much_as_one_word() -> None:
    query = asked("Kafka 磁盘写满")
    one, _ = signals_of(query, found("a", 0.2, "磁盘写满"), found("b", 0.2, "Kafka 磁盘写满"))
    whole, halves = math.log(1 + 2 / 1.5), 3 * math.log(1 + 2 / 2.5) / 2
    assert one.words_missing == pytest.approx(whole / (whole + halves))
    assert one.names_missing == 1.0


@pytest.mark.parametrize(
    ("query", "content", "language", "foreign"),
    [
        ("redis evicts keys", "Redis evicts keys", "", False),
        ("redis evicts keys", "内存淘汰", "", True),
        ("内存淘汰怎么办", "内存淘汰", "", False),
        ("内存淘汰怎么办", "Redis evicts keys", "", True),
        # What the document says of itself wins.
        ("内存淘汰怎么办", "redis-cli info", "zh", False),
        ("内存淘汰怎么办", "redis-cli info", "zh-CN", False),
        ("redis evicts keys", "内存", "en", False),
    ],
)
def test_a_document_in_another_language_is_told_apart(query: str, content: str, language: str, foreign: bool) -> None:
    (one,) = signals_of(asked(query), found("a", 0.2, content, language=language))
    assert one.other_language == float(foreign)


def test_a_candidate_in_another_language_is_not_sunk_by_words_it_cannot_have() -> None:
    query = asked("RedisCart 内存淘汰怎么办")
    foreign = found("a", 0.2, "RedisCart evicts keys when its memory is full")
    own = found("b", 0.2, "RedisCart 淘汰了内存里的键")
    one, other = signals_of(query, foreign, own)
    assert one.names_missing == other.names_missing == 0.0
    assert 0.0 < one.words_missing == other.words_missing < 0.5
    (high, _) = score_evidence(query, [foreign, own], CALIBRATED)
    assert relevance_level(high.value, CALIBRATED) != "low"
    # Names are written alike in all languages, so that they can be missed.
    (nameless,) = signals_of(query, found("a", 0.2, "Keys are evicted when memory is full"))
    assert nameless.names_missing == 1.0


def test_a_candidate_in_another_language_lacks_no_more_than_the_best_one_in_the_querys_own() -> None:
    query = asked("evicted keys of the session store")
    foreign = found("a", 0.2, "会话存储的淘汰")
    words = [one.words_missing for one in signals_of(query, foreign, found("b", 0.2, "keys of a session"))]
    assert words[0] == words[1]
    assert 0.0 < words[0] < 1.0
    # What nobody has, it will not have either.
    assert [one.words_missing for one in signals_of(query, foreign, found("b", 0.2, "disk full"))] == [1.0, 1.0]
    # Nobody there to tell, and what it has itself, whoever else lacks it.
    assert [one.words_missing for one in signals_of(query, foreign)] == [0.4]
    assert (
        signals_of(asked("evicted keys"), found("a", 0.2, "evicted keys 淘汰", language="zh"))[0].words_missing == 0.0
    )


def test_of_a_long_query_a_few_rare_words_are_enough() -> None:
    query = asked(" ".join(f"word{letter}" for letter in "abcdfghijklmnopqrtuv"))
    texts = ["worda wordb wordc wordd wordf wordg wordh wordi wordj wordk", "worda wordb", "nothing"]
    most, some, none = signals_of(query, *(found(f"c{at}", 0.2, text) for at, text in enumerate(texts)))
    assert (most.words_missing, none.words_missing) == (0.0, 1.0)
    assert some.words_missing == pytest.approx(1 - 2 * math.log(1 + 3 / 2.5) / 10)


@pytest.mark.parametrize("text", ["13", "what is it", "🔥", "你好"])
def test_a_query_that_asks_for_nothing_misses_everything(text: str) -> None:
    (one,) = signals_of(asked(text), found("a", 0.2, text))
    assert (one.words_missing, one.names_missing) == (1.0, 0.0)


def test_a_query_in_a_script_without_terms_is_left_to_the_vectors() -> None:
    (one,) = signals_of(asked("где логи"), found("a", 0.2, "журналы"))
    assert (one.words_missing, one.names_missing) == (0.0, 0.0)


@pytest.mark.parametrize("kind", ["title", "alert", "keyword", "heading", "category", "service", "entity"])
def test_a_name_speaks_for_its_documents_the_less_the_more_it_names(kind: str) -> None:
    names = kind in ("title", "alert", "keyword", "heading")
    candidates = found("a", 0.2), found("b", 0.2), found("c", 0.2)
    alone = [one.agreement for one in signals_of(asked("q", named(kind, "a.md")), *candidates)]
    of_two = [one.agreement for one in signals_of(asked("q", named(kind, "a.md", "b.md")), *candidates)]
    assert bool(alone[0]) is names
    assert alone[1:] == [0.0, 0.0]
    assert of_two == [alone[0] / 2, alone[0] / 2, 0.0]
    # The best of several names counts, not their sum.
    both = asked("q", named(kind, "a.md", "b.md"), named(kind, "a.md"))
    assert [one.agreement for one in signals_of(both, *candidates)] == [alone[0], alone[0] / 2, 0.0]


def test_a_name_speaks_only_as_far_as_the_vectors_do() -> None:
    hinted, plain = asked("q", named("title", "near.md", "far.md")), asked("q")
    candidates = found("near", 0.15), found("far", 0.6)
    assert [one.agreement for one in signals_of(hinted, *candidates)] == pytest.approx([0.75 / 2, 0.0])
    near, far = score_evidence(hinted, candidates, CALIBRATED)
    bare_near, bare_far = score_evidence(plain, candidates, CALIBRATED)
    assert near.value > bare_near.value
    assert far.value == bare_far.value


def test_without_candidates_there_is_no_score() -> None:
    assert score_evidence(asked("redis"), [], CALIBRATED) == []
    assert score_evidence(asked("redis"), [], SEED) == []


TEXTS = st.lists(
    st.sampled_from(("Redis", "max_connections", "磁盘写满", "how", "KubePodLost", "evicted", "🔥", "137", "é")),
    max_size=5,
).map(" ".join)
DISTANCES = st.floats(0.0, 4.0) | st.sampled_from((0.0, 0.3, 0.6, math.nan, math.inf))
CANDIDATES = st.lists(
    st.builds(
        lambda key, distance, content, language: found(key, distance, content, language=language),
        st.sampled_from("abc"),
        DISTANCES,
        TEXTS,
        st.sampled_from(("", "en", "zh")),
    ),
    max_size=25,
)
NUMBERS = st.floats(-50.0, 50.0)


@settings(max_examples=300, deadline=None)
@given(
    TEXTS,
    CANDIDATES,
    st.none() | st.builds(EvidenceWeights, **{one.name: NUMBERS for one in fields(EvidenceWeights)}),
    st.floats(0.01, 4.0),
    st.lists(st.builds(named, st.sampled_from(("title", "entity")), st.sampled_from(("a.md", "z.md"))), max_size=3),
)
def test_scores_are_within_0_and_1(
    text: str,
    candidates: list[Candidate],
    weights: EvidenceWeights | None,
    longest: float,
    matches: list[HintMatch],
) -> None:
    calibration = Calibration(max_l2_distance=longest, evidence=weights)
    scores = score_evidence(asked(text, *matches), candidates, calibration)
    assert len(scores) == len(candidates)
    for candidate, score in zip(candidates, scores, strict=True):
        assert 0.0 <= score.value <= 1.0
        assert score.similarity == normalised_similarity(candidate.score, longest)
        assert all(math.isfinite(part) for part in score.parts.values())
    if weights is not None:
        for one in signals(asked(text, *matches), candidates, max_l2_distance=longest, background=0.3):
            shares = (one.similarity, one.names_missing, one.words_missing, one.other_language, one.agreement)
            assert all(0.0 <= share <= 1.0 + 1e-9 for share in shares)


@settings(max_examples=100, deadline=None)
@given(TEXTS, CANDIDATES, st.randoms())
def test_the_order_of_the_candidates_matters_not(text: str, candidates: list[Candidate], random: Any) -> None:
    candidates = [one for one in candidates if not math.isnan(one.score)]
    places = list(range(len(candidates)))
    random.shuffle(places)
    scores = score_evidence(asked(text), candidates, CALIBRATED)
    shuffled = score_evidence(asked(text), [candidates[place] for place in places], CALIBRATED)
    assert [one.value for one in shuffled] == pytest.approx([scores[place].value for place in places])


# The default model's constants


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_models_weights_are_those_of_the_benchmark_and_tell_well(model_cache_dir: Path) -> None:
    from benchmarks import evidence_calibration as benchmark

    profile = resolve_model(DEFAULT_MODEL, cache_dir=model_cache_dir).profile
    result = benchmark.calibrate(benchmark.workspace(model_cache_dir.parent.parent))
    assert result.max_l2_distance == pytest.approx(profile.max_l2_distance, abs=0.011)
    assert profile.evidence is not None
    assert result.weights.background == pytest.approx(profile.evidence.background, abs=0.002)
    for name in ("intercept", *SIGNALS):
        assert getattr(result.weights, name) == pytest.approx(getattr(profile.evidence, name), abs=0.06), name

    runs = benchmark.cross_validated(result.bags)
    quality = benchmark.quality(runs)
    assert quality.auc >= 0.95
    assert quality.found >= 0.95
    assert quality.refused >= 0.85
    alone = [[benchmark.Outcome(bag.case, float(bag.signals[:, 0].max()), 1.0) for bag in result.bags]]
    assert quality.auc >= benchmark.quality(alone).auc + 0.1
    assert re.search(r"score >= 0\.5 +0\.9\d\d", benchmark.report(result))
