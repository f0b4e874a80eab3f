"""Order candidates by similarity and by rules: what each rule adds is written down, and L0 hints become hit reasons.

A candidate's final score is its normalised similarity plus what these rules add; equal scores are ordered by distance,
then id:

- ``title``, ``alert_name``, ``keyword``: an L0 match of that kind names the candidate's document.
- ``heading``: an L0 heading stands in the candidate's breadcrumb.
- ``entity``: an identifier or service of the query stands in the candidate's content, title or breadcrumb.
- ``category``: the query's only domain is the candidate's category.
- ``section_kind``: the query asks for steps, causes or meaning, and the candidate's heading says it is that.
- ``evidence``: the candidate's evidence score, where the model has a calibrated one.

A rule that several matches speak for adds its weight once for the first and half as much for each other one, up to
twice its weight. The weights are in units of normalised similarity.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rag_pipeline.ingest.terms import normalise
from rag_pipeline.records import Candidate, HintMatch
from rag_pipeline.retrieval.evidence_score import EvidenceScore
from rag_pipeline.retrieval.query_transform import TransformedQuery

WEIGHTS: Mapping[str, float] = {
    "title": 0.16,
    "alert_name": 0.24,
    "keyword": 0.12,
    "heading": 0.12,
    "entity": 0.12,
    "category": 0.04,
    "section_kind": 0.08,
    "evidence": 0.3,
}
_MOST = 2.0
_RULE_OF_KIND = {"title": "title", "alert": "alert_name", "keyword": "keyword"}
_MOST_REASONS = 8

# What a query asks for, and the headings that promise it.
_SECTION_KINDS = (
    (
        "steps",
        re.compile(r"怎么|怎样|如何|怎么办|处理|解决|修复|恢复|排查|步骤|\b(?:how (?:to|do|can|should)|fix|resolve|"
                   r"mitigat\w*|recover\w*|troubleshoot\w*|steps?|what (?:to|should) (?:i |we )?do)\b"),
        re.compile(r"处理|处置|步骤|排查|解决|修复|恢复|缓解|止血|止损|应急|操作|流程|\b(?:steps?|mitigat\w*|resol\w+|fix\w*|"
                   r"remediat\w*|diagnos\w*|triage|recover\w*|procedure|troubleshoot\w*|what to do|action)\b"),
    ),
    (
        "causes",
        re.compile(r"为什么|为何|原因|怎么回事|\b(?:why|cause[sd]?|reasons?)\b"),
        re.compile(r"原因|根因|为什么|分析|\b(?:causes?|why|root cause|reasons?)\b"),
    ),
    (
        "meaning",
        re.compile(r"是什么|什么意思|含义|\b(?:what (?:is|does|are)|meaning|means?)\b"),
        re.compile(r"含义|说明|概述|介绍|简介|定义|\b(?:meaning|overview|summary|about|description|what)\b"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate with its place.

    Attributes:
        evidence: Its relevance.
        contributions: What each rule added; rules that added nothing are left out.
        final: Normalised similarity plus all contributions.
        reasons: Hit reasons, the vector first, then L0 hints and rules.
    """

    candidate: Candidate
    evidence: EvidenceScore
    contributions: Mapping[str, float]
    final: float
    reasons: tuple[str, ...]

    @property
    def source(self) -> str:
        """The document."""
        return str(self.candidate.metadata.get("source", ""))

    @property
    def section(self) -> tuple[str, str]:
        """Identity of the section: document and section id."""
        return self.source, str(self.candidate.metadata.get("section", self.candidate.id))

    @property
    def has_hint(self) -> bool:
        """Whether an L0 hint is among the hit reasons."""
        return any(reason.startswith("L0 ") for reason in self.reasons)


def rerank(query: TransformedQuery, candidates: Sequence[Candidate], evidence: Sequence[EvidenceScore]) -> list[Ranked]:
    """Candidates in final order.

    Args:
        candidates: With distinct ids.
        evidence: One for each candidate, in the same order.
    """
    wanted = [(name, headings) for name, asks, headings in _SECTION_KINDS if asks.search(query.matching)]
    ranked = [_ranked(query, candidate, score, wanted) for candidate, score in zip(candidates, evidence, strict=True)]
    return sorted(ranked, key=lambda item: (-item.final, item.candidate.score, item.candidate.id))


def _ranked(
    query: TransformedQuery,
    candidate: Candidate,
    evidence: EvidenceScore,
    wanted: Sequence[tuple[str, re.Pattern[str]]],
) -> Ranked:
    matches = _matches(query.hints.matches, candidate)
    contributions = {
        rule: WEIGHTS[rule] * min(_MOST, 1.0 + 0.5 * (len(found) - 1)) for rule, found in matches.items() if found
    }
    reasons = [f"vector similarity {evidence.similarity:.2f}"]
    for rule, found in matches.items():
        reasons += [f"L0 {rule.replace('_', ' ')}: {surface}" for surface in found]
    if query.hints.domain and query.hints.domain == candidate.category:
        contributions["category"] = WEIGHTS["category"]
        reasons.append(f"L0 domain: {candidate.category}")
    breadcrumb = candidate.metadata.get("breadcrumb")
    heading = normalise(str(breadcrumb[-1])) if isinstance(breadcrumb, list | tuple) and breadcrumb else ""
    for name, headings in wanted:
        if heading and headings.search(heading):
            contributions["section_kind"] = WEIGHTS["section_kind"]
            reasons.append(f"section kind: {name}")
            break
    if evidence.calibrated:
        contributions["evidence"] = WEIGHTS["evidence"] * evidence.value
    return Ranked(
        candidate=candidate,
        evidence=evidence,
        contributions=contributions,
        final=evidence.similarity + sum(contributions.values()),
        reasons=tuple(reasons[:_MOST_REASONS]),
    )


def _matches(matches: Sequence[HintMatch], candidate: Candidate) -> dict[str, list[str]]:
    """For each rule the L0 terms that speak for the candidate, as its documents write them."""
    found: dict[str, dict[str, None]] = {rule: {} for rule in WEIGHTS}
    source = candidate.metadata.get("source")
    texts: tuple[str, str] | None = None
    for match in matches:
        rule = _RULE_OF_KIND.get(match.kind)
        if rule is not None:
            if source in match.sources:
                found[rule][match.surface] = None
            continue
        if match.kind not in ("heading", "entity", "service"):
            continue
        if texts is None:
            texts = _texts(candidate)
        breadcrumb, whole = texts
        if match.kind == "heading":
            if source in match.sources and match.term in breadcrumb:
                found["heading"][match.surface] = None
        elif match.term in whole:
            found["entity"][match.surface] = None
    return {rule: list(surfaces) for rule, surfaces in found.items() if surfaces}


def _texts(candidate: Candidate) -> tuple[str, str]:
    breadcrumb = candidate.metadata.get("breadcrumb")
    headings = normalise("\n".join(map(str, breadcrumb)) if isinstance(breadcrumb, list | tuple) else "")
    return headings, normalise(f"{candidate.metadata.get('title', '')}\n{headings}\n{candidate.content}")
