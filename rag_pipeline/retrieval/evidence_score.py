"""How far a candidate answers the query, 0 to 1: the similarity, or a calibrated and itemised evidence score.

Models of the e5 family put nearly all cosines between 0.78 and 0.93, with or without an answer, so that the similarity
alone does not tell. The evidence score is a logistic over six signals, each in the trace with its log odds:

- ``similarity``: the normalised similarity.
- ``margin``: how far it exceeds the similarity of the query's own background, the candidates behind the nearest ten.
- ``names_missing``: the share of the query's technical terms that the candidate lacks (title, breadcrumb, keywords and
  content); a term that few candidates have weighs more.
- ``words_missing``: the same for all its terms. A candidate in another language can hardly have the query's words: it
  lacks no more than the best one in the query's own language does (what nobody has, it will not have either).
- ``other_language``: 1 where the candidate is in another language than the query.
- ``agreement``: similarity / n where a title, alert name, keyword or heading in the query names n documents and this
  is one: a hint speaks for a candidate as far as the vectors do, and cannot make a far one usable.

The weights belong to the model (`ModelProfile.evidence`); ``python -m benchmarks.evidence_calibration`` finds them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from rag_pipeline.index.models import EvidenceWeights, ModelProfile
from rag_pipeline.records import Candidate, RelevanceLevel
from rag_pipeline.retrieval.lexical import Terms, is_chinese, standing, terms_of
from rag_pipeline.retrieval.query_transform import TransformedQuery
from rag_pipeline.setting_groups import NormalizationSettings

_NEAREST = 10
_PRIOR_CANDIDATES = 5
# Of a long query no candidate has every word: this much (about three rare words) is as good as all.
_ENOUGH = 10.0
# Of a candidate in another language, where none in the query's own is there to tell.
_WORDS_UNTOLD = 0.4
_NAMING_KINDS = frozenset({"title", "alert", "keyword", "heading"})


@dataclass(frozen=True, slots=True)
class Calibration:
    """How distances become similarities, scores and levels.

    Attributes:
        max_l2_distance: Squared L2 distance whose similarity is 0.
        highly_relevant_threshold: Least score of ``highly_relevant``.
        reference_threshold: Least score of ``reference``.
        evidence: Makes the evidence score of several signals; without it, it is the similarity.
    """

    max_l2_distance: float = 2.0
    highly_relevant_threshold: float = 0.75
    reference_threshold: float = 0.5
    evidence: EvidenceWeights | None = None

    def trace(self) -> dict[str, object]:
        """What a trace keeps of it; ready for JSON."""
        return {
            "max_l2_distance": self.max_l2_distance,
            "highly_relevant_threshold": self.highly_relevant_threshold,
            "reference_threshold": self.reference_threshold,
            "evidence": "calibrated" if self.evidence else "similarity",
        }


@dataclass(frozen=True, slots=True)
class EvidenceScore:
    """The relevance of one candidate.

    Attributes:
        value: 0 to 1; cut into levels at the calibration's thresholds.
        similarity: The normalised similarity, 0 to 1.
        parts: What each signal contributes; with calibration in log odds, so that ``value`` is the logistic of their
            sum, else the similarity alone.
    """

    value: float
    similarity: float
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def calibrated(self) -> bool:
        """Whether ``value`` says more than the similarity."""
        return "intercept" in self.parts


def effective_calibration(
    normalization: NormalizationSettings,
    profile: ModelProfile,
    manifest_calibration: Mapping[str, float] | None = None,
) -> Calibration:
    """The calibration in force: an explicit setting, else the manifest's value, else the model profile's.

    Args:
        normalization: The settings; None where nothing was set.
        profile: Of the version's model; the seed's 2.0, 0.75 and 0.5 where the model has no calibration.
        manifest_calibration: Values by the names of `Calibration`; those it lacks come from the profile.
    """
    manifest = manifest_calibration or {}

    def of(name: str, setting: float | None, default: float) -> float:
        return setting if setting is not None else float(manifest.get(name, default))

    return Calibration(
        max_l2_distance=of("max_l2_distance", normalization.max_l2_distance, profile.max_l2_distance),
        highly_relevant_threshold=of(
            "highly_relevant_threshold", normalization.highly_relevant_threshold, profile.highly_relevant_threshold
        ),
        reference_threshold=of("reference_threshold", normalization.reference_threshold, profile.reference_threshold),
        evidence=profile.evidence,
    )


def normalised_similarity(distance: float, max_l2_distance: float) -> float:
    """``1 - distance / max_l2_distance``, clamped to 0…1; ``distance`` is the squared L2 distance. NaN gives 0."""
    similarity = 1.0 - distance / max_l2_distance
    return min(max(similarity, 0.0), 1.0) if not math.isnan(similarity) else 0.0


def relevance_level(score: float, calibration: Calibration) -> RelevanceLevel:
    """``highly_relevant``, ``reference`` or ``low``; a score on a threshold has the better level."""
    if score >= calibration.reference_threshold:
        return "highly_relevant" if score >= calibration.highly_relevant_threshold else "reference"
    return "low"


@dataclass(frozen=True, slots=True)
class Signals:
    """What speaks for a candidate and against it; see the module's first lines."""

    similarity: float
    margin: float
    names_missing: float
    words_missing: float
    other_language: float
    agreement: float


def score_evidence(
    query: TransformedQuery, candidates: Sequence[Candidate], calibration: Calibration
) -> list[EvidenceScore]:
    """The evidence score of each candidate, in the order given.

    Args:
        query: What was searched for.
        candidates: All that one attempt found, in any order; background and rarity are taken from them.
        calibration: See `effective_calibration`.
    """
    weights = calibration.evidence
    if weights is None:
        similarities = [normalised_similarity(item.score, calibration.max_l2_distance) for item in candidates]
        return [EvidenceScore(value=one, similarity=one, parts={"similarity": one}) for one in similarities]
    found = signals(query, candidates, max_l2_distance=calibration.max_l2_distance, background=weights.background)
    scores = []
    for one in found:
        parts = {"intercept": weights.intercept}
        parts |= {name: getattr(weights, name) * getattr(one, name) for name in SIGNALS}
        scores.append(EvidenceScore(_logistic(sum(parts.values())), one.similarity, parts))
    return scores


def signals(
    query: TransformedQuery, candidates: Sequence[Candidate], *, max_l2_distance: float, background: float
) -> list[Signals]:
    """The signals of each candidate, in the order given.

    Args:
        query: What was searched for.
        candidates: All that one attempt found, in any order.
        max_l2_distance: See `normalised_similarity`.
        background: Squared distance of an average background; counts as much as five candidates, so that few candidates
            (a small category, a small knowledge base) give no wild background.
    """
    behind = sorted(candidate.score for candidate in candidates)[_NEAREST:]
    distance = (sum(behind) + _PRIOR_CANDIDATES * background) / (len(behind) + _PRIOR_CANDIDATES)
    terms = terms_of(query.text)
    asked = (*terms.names, *terms.words, *terms.bigrams)
    texts = [_text(candidate) for candidate in candidates]
    stand = [standing(asked, text) for text in texts]
    weight = {term: math.log(1 + len(texts) / (sum(term in one for one in stand) + 0.5)) for term in asked}
    # A word is about two bigrams.
    weight |= {term: weight[term] / 2 for term in terms.bigrams}
    nothing_asked = not asked and not _in_other_script(query.text)
    naming = [match.sources for match in query.hints.matches if match.kind in _NAMING_KINDS]

    def words_missing(present: frozenset[str]) -> float:
        whole = min(sum(weight.values()), _ENOUGH)
        return max(0.0, 1.0 - sum(weight[term] for term in present) / whole) if whole else 0.0

    def names_missing(present: frozenset[str]) -> float:
        whole = sum(weight[term] for term in terms.names)
        return sum(weight[term] for term in terms.names if term not in present) / whole if whole else 0.0

    foreign = [_is_foreign(candidate, text, terms) for candidate, text in zip(candidates, texts, strict=True)]
    lacking = [1.0 if nothing_asked else words_missing(present) for present in stand]
    # What no candidate in the query's language has, one in another language can hardly have.
    least = min((one for one, other in zip(lacking, foreign, strict=True) if not other), default=_WORDS_UNTOLD)
    found = []
    for candidate, present, other, words in zip(candidates, stand, foreign, lacking, strict=True):
        source = candidate.metadata.get("source")
        distances = (candidate.score, distance)
        near, far = (1.0 - min(value, 4.0) / max_l2_distance if not math.isnan(value) else 0.0 for value in distances)
        similarity = normalised_similarity(candidate.score, max_l2_distance)
        found.append(
            Signals(
                similarity=similarity,
                margin=near - far,
                names_missing=names_missing(present),
                words_missing=min(words, least) if other else words,
                other_language=float(other),
                agreement=max((similarity / len(sources) for sources in naming if source in sources), default=0.0),
            )
        )
    return found


SIGNALS = tuple(one.name for one in fields(Signals))


def _logistic(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds)) if log_odds >= 0 else 1.0 - 1.0 / (1.0 + math.exp(log_odds))


def _is_foreign(candidate: Candidate, text: str, terms: Terms) -> bool:
    language = str(candidate.metadata.get("language") or "")
    return (language.startswith("zh") if language else is_chinese(text)) != terms.chinese


def _in_other_script(text: str) -> bool:
    """Whether a text is written in letters whose words are not known here, such as Cyrillic ones."""
    return any(letter.isalpha() and not letter.isascii() and not is_chinese(letter) for letter in text)


def _text(candidate: Candidate) -> str:
    metadata = candidate.metadata
    lists = [metadata.get("breadcrumb"), metadata.get("keywords")]
    parts = [str(part) for parts in lists if isinstance(parts, list | tuple) for part in parts]
    return "\n".join([str(metadata.get("title") or ""), *parts, candidate.content])
