"""The property that L0 alone never puts text into evidence blocks, over generated indexes, stores and answers of L1."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_pipeline.index.models import EvidenceWeights
from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.evidence_score import Calibration, score_evidence
from rag_pipeline.retrieval.filtered_retry import retrieve
from rag_pipeline.retrieval.l0_hints import KINDS, HintMatcher
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.post_retrieval import PostRetrieval, process
from rag_pipeline.retrieval.query_transform import TransformedQuery, transform
from rag_pipeline.retrieval.results import EvidenceBlock
from rag_pipeline.retrieval.vector_search import PathTrial, SearchOutcome
from rag_pipeline.setting_groups import RetrievalSettings
from rag_pipeline.workspace import Workspace

TERMS = ("redis clients", "maxclients", "redis", "oom_score_adj", "KubeNodeDown", "磁盘写满", "steps", "cache")
DOCUMENTS = ("cache/a.md", "cache/b.md", "host/c.md")
# In the L0 index only, as documents without text are.
GHOSTS = ("cache/ghost.md", "vault/ghost.md")
TEXTS = ("Plain words.", "Steps:\n- do one thing", "- do the next thing", "```sh\nls\n```", "Set maxclients for redis.")

Store = dict[str, Candidate]


def category_of(source: str) -> str:
    return source.partition("/")[0]


@st.composite
def stores(draw: st.DrawFn) -> Store:
    """Chunks by id; each text tells its chunk, so that it cannot be taken for another one's."""
    store: Store = {}
    for source in DOCUMENTS:
        sizes = draw(st.lists(st.integers(1, 4), max_size=3))
        ids = [f"{source}#{section}.{part}" for section, size in enumerate(sizes) for part in range(size)]
        places = [(section, part, size) for section, size in enumerate(sizes) for part in range(size)]
        for index, (key, (section, part, size)) in enumerate(zip(ids, places, strict=True)):
            store[key] = Candidate(
                id=key,
                content=f"{draw(st.sampled_from(TEXTS))}\n- item of {key}",
                category=category_of(source),
                score=float("nan"),
                raw_score=float("nan"),
                score_label="",
                metadata={
                    "source": source,
                    "title": source,
                    "breadcrumb": draw(st.sampled_from(([], ["Redis clients"], ["Mitigation steps"]))),
                    "section": f"{source}#{section}",
                    "section_part": part + 1,
                    "section_parts": size,
                    "chunk_index": index,
                    "prev_id": ids[index - 1] if index else "",
                    "next_id": ids[index + 1] if index + 1 < len(ids) else "",
                    "line_start": 2 * index + 1,
                    "line_end": 2 * index + 2,
                },
            )
    return store


@st.composite
def answers(draw: st.DrawFn, store: Store) -> list[Candidate]:
    """What L1 may give: none, some or all chunks at any distances, some of them twice."""
    keys = draw(st.lists(st.sampled_from(sorted(store)), max_size=12)) if store else []
    near = st.sampled_from((0.0, 0.5, 0.99, 1.0, 1.01, 1.02, 1.5, 2.0, 4.0)) | st.floats(0.0, 4.0)
    found = []
    for key in keys:
        distance = draw(near)
        found.append(replace(store[key], score=distance, raw_score=distance, score_label="l2_distance"))
    return found


def matchers() -> st.SearchStrategy[HintMatcher]:
    rows = st.builds(
        lambda term, kind, source: (term.lower(), term, kind, source, f"Title of {source}", category_of(source)),
        st.sampled_from(TERMS),
        st.sampled_from(KINDS),
        st.sampled_from(DOCUMENTS + GHOSTS),
    )
    return st.lists(rows, max_size=12).map(HintMatcher)


def queries() -> st.SearchStrategy[TransformedQuery]:
    texts = st.lists(st.sampled_from((*TERMS, "how to fix", "why")), min_size=1, max_size=4).map(" ".join)
    return st.builds(lambda text, matcher: transform(text, matcher=matcher, max_chars=500), texts, matchers())


def weights() -> st.SearchStrategy[EvidenceWeights]:
    """Of any model; a hint that agrees may count for much."""
    number = st.floats(-5.0, 5.0)
    return st.builds(EvidenceWeights, **{field.name: number for field in fields(EvidenceWeights)})


def calibrations() -> st.SearchStrategy[Calibration]:
    return st.builds(
        lambda reference, evidence: Calibration(
            highly_relevant_threshold=0.75, reference_threshold=reference, evidence=evidence
        ),
        st.sampled_from((0.5, 0.05, 0.49, 0.9, 1.0)),
        st.none() | weights(),
    )


@dataclass(frozen=True)
class Case:
    query: TransformedQuery
    calibration: Calibration
    store: Store
    filtered: list[Candidate]
    unfiltered: list[Candidate]
    expansion: int

    def process(self, candidates: Sequence[Candidate], query: TransformedQuery | None = None) -> PostRetrieval:
        limits = RetrievalSettings(max_blocks=100, max_blocks_per_document=100, expansion_chunks=self.expansion)

        def fetch(ids: list[str]) -> Mapping[str, Candidate]:
            return {key: self.store[key] for key in ids if key in self.store}

        return process(query or self.query, candidates, calibration=self.calibration, settings=limits, fetch=fetch)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    store = draw(stores())
    return Case(
        draw(queries()),
        draw(calibrations()),
        store,
        draw(answers(store)),
        draw(answers(store)),
        draw(st.integers(0, 4)),
    )


def check_block(
    block: EvidenceBlock, *, usable: set[str], texts: Mapping[str, str], sections: Mapping[str, str]
) -> None:
    """All of its text is that of chunks which L1 found good enough, or of their neighbours in the same section."""
    found, expanded = set(block.chunk_ids) - set(block.expanded_ids), set(block.expanded_ids)
    assert found
    assert found <= usable
    assert expanded <= set(texts)
    assert block.content == "\n\n".join(texts[key] for key in block.chunk_ids)
    assert {sections[key] for key in block.chunk_ids} == {block.section}
    assert block.hit_reasons[0].startswith("vector similarity")


def check(case: Case, candidates: Sequence[Candidate], post: PostRetrieval) -> None:
    distinct = list({one.id: one for one in reversed(candidates)}.values())[::-1]
    scores = score_evidence(case.query, distinct, case.calibration)
    reference = case.calibration.reference_threshold
    usable = {one.id for one, score in zip(distinct, scores, strict=True) if score.value >= reference}
    if not usable:
        assert post.blocks == ()
    for block in post.blocks:
        check_block(
            block,
            usable=usable,
            texts={key: chunk.content for key, chunk in case.store.items()},
            sections={key: str(chunk.metadata["section"]) for key, chunk in case.store.items()},
        )
        assert block.source in DOCUMENTS


@settings(max_examples=300, deadline=None)
@given(cases())
def test_blocks_hold_nothing_but_what_l1_found_good_enough(case: Case) -> None:
    check(case, case.unfiltered, case.process(case.unfiltered))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_hints_make_no_section_usable_where_the_score_is_the_similarity(case: Case) -> None:
    case = replace(case, calibration=replace(case.calibration, evidence=None))
    bare = transform(case.query.text, matcher=None, max_chars=500)
    hinted, plain = case.process(case.unfiltered), case.process(case.unfiltered, bare)
    assert {block.section for block in hinted.blocks} == {block.section for block in plain.blocks}
    assert hinted.level == plain.level


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_selected_attempt_holds_nothing_but_its_own_candidates(case: Case) -> None:
    def search(_: str, category: str) -> SearchOutcome:
        of_category = [one for one in case.filtered if one.category == category]
        return SearchOutcome(
            tuple(of_category if category else case.unfiltered), "sdk", (PathTrial("sdk", "answered"),)
        )

    done = retrieve(
        text=case.query.text,
        raw=case.query.raw,
        category=case.query.hints.domain,
        search=search,
        process=case.process,
        calibration=case.calibration,
    )
    assert done.selected.post is not None
    check(case, search("", done.selected.category).candidates, done.selected.post)
    if not any(attempt.usable for attempt in done.attempts):
        assert done.selected.post.blocks == ()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    named=st.lists(
        st.sampled_from(
            ("Redis clients", "RedisConnectionsHigh", "Zephyr gateway", "Sealkeeper quorum", "sealkeeper", "backlog",
             "maxclients", "Standby promotion", "consumer_group_alpha", "quotedvolume")
        ),
        min_size=1, max_size=3, unique=True,
    ),
    asked=st.sampled_from(("", "glockenspiel", "close idle sockets of the checkout pool", "partitions drain slowly")),
    threshold=st.sampled_from((0.0, 0.2, 0.35, 0.5, 0.9)),
    l1_enabled=st.sampled_from((True, True, True, False)),
)  # fmt: skip
def test_whole_lookups_give_nothing_but_what_l1_found(
    look_up: Callable[..., KnowledgeLookup], named: list[str], asked: str, threshold: float, l1_enabled: bool
) -> None:
    lookup = look_up(
        retrieval__normalization__reference_threshold=threshold,
        retrieval__l1_enabled=l1_enabled,
        retrieval__max_blocks=50,
    )
    result = lookup.lookup(f"{' '.join(named)} {asked}")
    trace = result.retrieval_trace
    assert trace["l0"]["matched_titles"] or trace["l0"]["matched_keywords"] or trace["l0"]["entities"]
    selected = [attempt for attempt in trace["attempts"] if attempt["name"] == trace["selected_attempt"]]
    usable = {one["id"] for attempt in selected for one in attempt["candidates"] if one["evidence_score"] >= threshold}
    assert bool(selected) is l1_enabled
    assert result.found is bool(usable)
    ws = Workspace(lookup.settings)
    rows = {row["id"]: row for row in ws.store.rows(ws.versions.promoted().collection)}
    for block in result.evidence_blocks:
        check_block(
            block,
            usable=usable,
            texts={key: row["content"] for key, row in rows.items()},
            sections={key: row["metadata"]["section"] for key, row in rows.items()},
        )
        assert block.source != "vault/seal.md"
    if not usable:
        assert (result.evidence_blocks, result.context_pack.text) == ((), "")
        assert result.evidence_status == "no_evidence"


@pytest.mark.parametrize("agreement", [0.0, 5.0, 50.0])
def test_a_hint_that_counts_for_much_still_needs_a_candidate(agreement: float) -> None:
    matcher = HintMatcher([("redis clients", "Redis clients", "title", "cache/a.md", "Redis clients", "cache")])
    query = transform("Redis clients", matcher=matcher, max_chars=100)
    assert query.hints.titles == ("Redis clients",)
    evidence = EvidenceWeights(**{field.name: 0.0 for field in fields(EvidenceWeights)} | {"agreement": agreement})
    post = process(
        query, [], calibration=Calibration(evidence=evidence), settings=RetrievalSettings(), fetch=lambda _: {}
    )
    assert (post.blocks, post.level, post.top_similarity) == ((), "none", 0.0)


def test_a_hint_lifts_no_weak_chunk_into_the_block_of_a_good_one() -> None:
    """The weak one stands first after rerank, and apart from the good one in their section."""
    matcher = HintMatcher([("maxclients", "maxclients", "entity", "cache/a.md", "A", "cache")])
    query = transform("maxclients", matcher=matcher, max_chars=100)

    def chunk(part: int, content: str, distance: float) -> Candidate:
        place = {"source": "cache/a.md", "section": "one", "section_part": part, "section_parts": 3}
        return Candidate(
            f"c{part}", content, "cache", distance, distance, "l2_distance", {**place, "chunk_index": part}
        )

    good, weak = chunk(1, "The good text.", 0.99), chunk(3, "The weak text on maxclients.", 1.01)
    post = process(query, [good, weak], calibration=Calibration(), settings=RetrievalSettings(), fetch=None)
    assert [item.candidate.id for item in post.ranked] == ["c3", "c1"]
    assert [(block.content, block.chunk_ids, block.score) for block in post.blocks] == [
        ("The good text.", ("c1",), 0.99)
    ]


def test_nothing_below_the_reference_threshold_is_evidence_even_if_that_is_the_higher_one() -> None:
    query = transform("maxclients", matcher=None, max_chars=100)
    found = Candidate("c", "Text.", "cache", 0.4, 0.4, "l2_distance", {"source": "cache/a.md", "section": "one"})
    strict = Calibration(highly_relevant_threshold=0.75, reference_threshold=0.9)
    post = process(query, [found], calibration=strict, settings=RetrievalSettings(), fetch=None)
    assert (post.top_similarity, post.level, post.blocks) == (0.8, "low", ())
