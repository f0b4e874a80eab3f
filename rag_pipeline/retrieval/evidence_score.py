"""How far a candidate answers the query, 0 to 1: the similarity, or a calibrated and itemised evidence score."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rag_pipeline.index.models import EvidenceWeights, ModelProfile
from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.query_transform import TransformedQuery
from rag_pipeline.setting_groups import NormalizationSettings


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


def relevance_level(score: float, calibration: Calibration) -> str:
    """``highly_relevant``, ``reference`` or ``low``; a score on a threshold has the better level."""
    if score >= calibration.highly_relevant_threshold:
        return "highly_relevant"
    return "reference" if score >= calibration.reference_threshold else "low"


def score_evidence(
    query: TransformedQuery, candidates: Sequence[Candidate], calibration: Calibration
) -> list[EvidenceScore]:
    """The evidence score of each candidate, in the order given.

    Args:
        query: What was searched for.
        candidates: All that one attempt found, in any order; the query's background is taken from them.
        calibration: See `effective_calibration`.
    """
    scores = []
    for candidate in candidates:
        similarity = normalised_similarity(candidate.score, calibration.max_l2_distance)
        scores.append(EvidenceScore(value=similarity, similarity=similarity, parts={"similarity": similarity}))
    return scores
