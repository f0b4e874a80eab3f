"""From candidates to evidence blocks: relevance, rule rerank, deduplication, levels, expansion.

Blocks are sections: chunks of one section become one block with merged hit reasons. Only blocks at level ``reference``
or better are evidence; what is below stays in the trace.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_pipeline.records import Candidate, RelevanceLevel
from rag_pipeline.retrieval.evidence_score import Calibration, relevance_level, score_evidence
from rag_pipeline.retrieval.expansion import Fetch, with_neighbours
from rag_pipeline.retrieval.query_transform import TransformedQuery
from rag_pipeline.retrieval.rerank import Ranked, rerank
from rag_pipeline.retrieval.results import EvidenceBlock
from rag_pipeline.setting_groups import RetrievalSettings

_MOST_CHUNKS = 6
_NEAR_EQUAL = 0.9
_TRACED = 10
_WORD = re.compile(r"[A-Za-z0-9_]+|[^\W\d_]")


@dataclass(frozen=True, slots=True)
class _Words:
    """A text as a bag of words, and those of them that may be a name or a number."""

    words: Counter[str]
    facts: frozenset[str]

    @classmethod
    def of(cls, text: str) -> "_Words":
        found = _WORD.findall(text)
        facts = frozenset(word for word in found if not word.islower() and word.isascii())
        return cls(Counter(word.lower() for word in found), facts)


@dataclass(frozen=True, slots=True)
class PostRetrieval:
    """What became of one attempt's candidates.

    Attributes:
        blocks: Usable evidence in rerank order.
        ranked: All candidates in rerank order.
        top_similarity: Best normalised similarity, 0 without candidates.
        level: Of the best evidence score; ``none`` without candidates.
        counts: Candidates, and what each step left or dropped.
        dedup_reasons: ``same_section``, ``near_duplicate``, ``document_limit``: those that dropped or merged something.
        expansion_failure: Why neighbours could not be fetched; blank otherwise.
    """

    blocks: tuple[EvidenceBlock, ...]
    ranked: tuple[Ranked, ...]
    top_similarity: float
    level: RelevanceLevel
    counts: Mapping[str, int]
    dedup_reasons: tuple[str, ...]
    expansion_failure: str = ""

    def rerank_trace(self) -> list[dict[str, Any]]:
        """The top candidates in final order, with what each rule contributed."""
        return [
            {
                "rank": rank,
                "id": item.candidate.id,
                "source": item.source,
                "base_similarity": _rounded(item.evidence.similarity),
                "contributions": {rule: _rounded(value) for rule, value in item.contributions.items()},
                "final_score": _rounded(item.final),
                "evidence_score": _rounded(item.evidence.value),
                "evidence_parts": {name: _rounded(value) for name, value in item.evidence.parts.items()},
                "reasons": list(item.reasons),
            }
            for rank, item in enumerate(self.ranked[:_TRACED], 1)
        ]


def rank_candidates(query: TransformedQuery, candidates: Sequence[Candidate], calibration: Calibration) -> list[Ranked]:
    """Candidates without repeated ids, scored and in final order."""
    distinct = list({candidate.id: candidate for candidate in reversed(candidates)}.values())[::-1]
    return rerank(query, distinct, score_evidence(query, distinct, calibration))


def process(
    query: TransformedQuery,
    candidates: Sequence[Candidate],
    *,
    calibration: Calibration,
    settings: RetrievalSettings,
    fetch: Fetch | None,
) -> PostRetrieval:
    """Turn candidates into evidence blocks.

    Args:
        candidates: As a search gave them, in any order.
        calibration: Thresholds and scores of the version's model.
        settings: Limits of blocks, documents and expansion.
        fetch: Gives neighbouring chunks; ``None``: no expansion.
    """
    ranked = rank_candidates(query, candidates, calibration)
    usable, low = _split_by_level(ranked, calibration)
    merged = sum(len(group) - 1 for group in usable)
    distinct, also_in = _without_near_duplicates(usable)
    limited = _limited(distinct, settings.max_blocks_per_document)
    chosen = limited[: settings.max_blocks]
    failure = ""
    blocks = []
    for group in chosen:
        best = group[0]
        chunks = _run_around([item.candidate for item in group], best)
        added: tuple[str, ...] = ()
        if fetch is not None and settings.expansion_chunks and not failure:
            try:
                chunks, added = with_neighbours(chunks, most=settings.expansion_chunks, fetch=fetch)
            except Exception as error:  # evidence without its neighbours is better than none
                failure = f"neighbours could not be fetched: {error}"
        blocks.append(_block(group, chunks, added, also_in.get(group[0].section, ()), calibration))
    return PostRetrieval(
        blocks=tuple(blocks),
        ranked=tuple(ranked),
        top_similarity=max((item.evidence.similarity for item in ranked), default=0.0),
        level=relevance_level(max(item.evidence.value for item in ranked), calibration) if ranked else "none",
        counts={
            "candidates": len(candidates),
            "distinct_chunks": len(ranked),
            "sections": len(usable) + len(low),
            "below_reference": len(low),
            "near_duplicates": len(usable) - len(distinct),
            "over_document_limit": len(distinct) - len(limited),
            "over_block_limit": len(limited) - len(chosen),
            "final": len(chosen),
        },
        dedup_reasons=tuple(
            name
            for name, happened in (
                ("same_section", merged > 0),
                ("near_duplicate", len(distinct) < len(usable)),
                ("document_limit", len(limited) < len(distinct)),
            )
            if happened
        ),
        expansion_failure=failure,
    )


def _sections(ranked: Sequence[Ranked]) -> list[list[Ranked]]:
    """Candidates by section, in order of each section's best one."""
    groups: dict[tuple[str, str], list[Ranked]] = {}
    for item in ranked:
        groups.setdefault(item.section, []).append(item)
    return list(groups.values())


def _usable(item: Ranked, calibration: Calibration) -> bool:
    return relevance_level(item.evidence.value, calibration) != "low"


def _split_by_level(
    ranked: Sequence[Ranked], calibration: Calibration
) -> tuple[list[list[Ranked]], list[list[Ranked]]]:
    """Sections with their usable candidates alone, however a hint lifts the others; and sections without any."""
    usable = _sections([item for item in ranked if _usable(item, calibration)])
    kept = {group[0].section for group in usable}
    return usable, [group for group in _sections(ranked) if group[0].section not in kept]


def _without_near_duplicates(
    groups: Sequence[list[Ranked]],
) -> tuple[list[list[Ranked]], dict[tuple[str, str], tuple[str, ...]]]:
    """Drop sections that say nearly the same as a better one; their documents are kept as ``also_in``."""
    kept: list[tuple[list[Ranked], _Words]] = []
    also_in: dict[tuple[str, str], tuple[str, ...]] = {}
    for group in groups:
        words = _Words.of(group[0].candidate.content)
        for other, other_words in kept:
            if _near_equal(words, other_words):
                key = other[0].section
                also_in[key] = tuple(dict.fromkeys((*also_in.get(key, ()), group[0].source)))
                break
        else:
            kept.append((group, words))
    return [group for group, _ in kept], also_in


def _near_equal(one: _Words, other: _Words) -> bool:
    """Equal in what may be a name or a number, and in at least nine tenths of all words."""
    if one.facts != other.facts:
        return False
    common: int = (one.words & other.words).total()
    return common >= _NEAR_EQUAL * max(one.words.total(), other.words.total())


def _limited(groups: Sequence[list[Ranked]], most: int) -> list[list[Ranked]]:
    seen: dict[str, int] = {}
    kept = []
    for group in groups:
        source = group[0].source
        seen[source] = seen.get(source, 0) + 1
        if seen[source] <= most:
            kept.append(group)
    return kept


def _position(candidate: Candidate) -> int:
    return _number(candidate, "chunk_index")


def _number(candidate: Candidate, name: str) -> int:
    value = candidate.metadata.get(name, 0)
    return value if isinstance(value, int) else 0


def _run_around(chunks: Sequence[Candidate], best: Ranked) -> list[Candidate]:
    """The chunks that stand next to each other around the best one, at most `_MOST_CHUNKS` of them."""
    by_position = {_position(chunk): chunk for chunk in chunks}
    first = last = _position(best.candidate)
    while last - first + 1 < _MOST_CHUNKS and (first - 1 in by_position or last + 1 in by_position):
        if last + 1 in by_position:
            last += 1
        else:
            first -= 1
    return [by_position[position] for position in range(first, last + 1)]


def _block(
    group: Sequence[Ranked],
    chunks: Sequence[Candidate],
    added: tuple[str, ...],
    also_in: tuple[str, ...],
    calibration: Calibration,
) -> EvidenceBlock:
    best = group[0]
    strongest = max(group, key=lambda item: (item.evidence.value, -item.candidate.score))
    metadata = best.candidate.metadata
    breadcrumb = metadata.get("breadcrumb")
    reasons = list(dict.fromkeys(reason for item in group for reason in item.reasons if item is best
                                 or not reason.startswith("vector ")))  # fmt: skip
    parts = metadata.get("section_parts", 1)
    return EvidenceBlock(
        source=best.source,
        title=str(metadata.get("title", "")),
        breadcrumb=tuple(map(str, breadcrumb)) if isinstance(breadcrumb, list | tuple) else (),
        category=best.candidate.category,
        section=best.section[1],
        retrieval_layer="L0+L1" if any(reason.startswith("L0 ") for reason in reasons) else "L1",
        content="\n\n".join(chunk.content for chunk in chunks),
        score=best.candidate.score,
        raw_score=best.candidate.raw_score,
        score_label=best.candidate.score_label,
        similarity=_rounded(best.evidence.similarity),
        evidence_score=_rounded(strongest.evidence.value),
        relevance_level=relevance_level(strongest.evidence.value, calibration),
        hit_reasons=tuple(reasons),
        chunk_ids=tuple(chunk.id for chunk in chunks),
        expanded_ids=added,
        line_start=min(_number(chunk, "line_start") for chunk in chunks),
        line_end=max(_number(chunk, "line_end") for chunk in chunks),
        complete=len(chunks) == parts,
        also_in=also_in,
    )


def _rounded(value: float) -> float:
    return round(float(value), 6)
