"""Calibrates the evidence score of the default model on the shipped knowledge base and prints how well it tells.

    python -m benchmarks.evidence_calibration [--state .rag]

``benchmarks/data/evidence_queries.jsonl`` has queries that a document answers (``expect``) and queries that none does:
far off, or operations vocabulary about what the base does not cover. Candidates are what a lookup gets: the 30 nearest
chunks, of the hinted category and of all. Found are:

1. ``max_l2_distance``: twice the distance that 90 % of the queries stay under in the category of their answer, so that
   0.5, the threshold of a good filtered attempt, is that distance.
2. ``background``: the mean distance behind the nearest ten.
3. The weights of a logistic over the signals. A query's best candidate counts: of an answerable query the best one of
   an expected document, of the others the best one at all (found again after each fit, as that depends on the weights).
   The answerable ones weigh twice as much: evidence that exists and is refused costs an agent more than evidence that
   turns out not to help. A ridge keeps the weights small. Queries whose documents are not among the candidates are a
   matter of retrieval and left out, but counted.

The output ends with the constants for `rag_pipeline.index.models`; a test compares them. Equal input gives equal output
up to rounding of the vectors.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_pipeline import steps
from rag_pipeline.index import changes
from rag_pipeline.index.models import EvidenceWeights
from rag_pipeline.ingest.knowledge_index import to_json
from rag_pipeline.records import Candidate
from rag_pipeline.retrieval.evidence_score import SIGNALS, Signals, signals
from rag_pipeline.retrieval.l0_hints import HintMatcher
from rag_pipeline.retrieval.query_transform import TransformedQuery, transform
from rag_pipeline.settings import load_settings
from rag_pipeline.workspace import Workspace

PROJECT = Path(__file__).resolve().parent.parent
QUERIES = PROJECT / "benchmarks" / "data" / "evidence_queries.jsonl"
CANDIDATES = 30
NEAREST = 10
RIDGE = 0.5
ANSWERABLE_SHARE = 2 / 3
FOLDS = 5
SEEDS = range(10)
RIGHT_SHARE = 90

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """A query of the set."""

    id: str
    query: str
    language: str
    expect: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup of one query sees: candidates of each attempt."""

    case: Case
    query: TransformedQuery
    attempts: tuple[tuple[Candidate, ...], ...]
    right_category: float | None
    """Distance of the nearest chunk in the category of the answer."""


@dataclass(frozen=True, slots=True)
class Bag:
    """All candidates of one query: signals of shape (candidates, signals), and which are of an expected document."""

    case: Case
    signals: Array
    right: npt.NDArray[np.bool_]

    @property
    def counts(self) -> bool:
        """Whether retrieval found what was asked for, or there was nothing to find."""
        return not self.case.expect or bool(self.right.any())


def read_cases(path: Path = QUERIES) -> list[Case]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Case(row["id"], row["query"], row["language"], tuple(row["expect"])) for row in rows]


class Base:
    """A knowledge base in memory: exact search over the chunks that a reindex would make."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        documents = changes.read_knowledge(ws.roots, parent=None, max_bytes=ws.settings.knowledge.max_file_bytes)
        chunks = changes.chunk_knowledge(documents, tokens=lambda: ws.token_counter, budget=ws.budget, recipe="")
        self._vectors = np.stack(steps.embed_chunks(ws, chunks).table["vector"].to_list())
        self.matcher = HintMatcher.from_json(to_json(steps.index_knowledge(documents, chunks)))
        self._rows = chunks.to_dict("records")
        self._categories = np.array(chunks["category"])

    @cached_property
    def category_of(self) -> dict[str, str]:
        return {row["source"]: row["category"] for row in self._rows}

    def nearest(self, text: str, *, category: str = "") -> tuple[Candidate, ...]:
        distances = ((self._vectors - self._ws.embedder.embed_query(text)) ** 2).sum(axis=1)
        if category:
            distances = np.where(self._categories == category, distances, np.inf)
        order = [int(row) for row in np.argsort(distances, kind="stable")[:CANDIDATES] if np.isfinite(distances[row])]
        return tuple(self._candidate(row, float(distances[row])) for row in order)

    def _candidate(self, row: int, distance: float) -> Candidate:
        chunk = self._rows[row]
        names = ("source", "title", "language")
        lists = ("breadcrumb", "keywords")
        metadata = {name: chunk[name] for name in names} | {name: list(chunk[name]) for name in lists}
        return Candidate(chunk["id"], chunk["content"], chunk["category"], distance, distance, "l2_distance", metadata)

    def look_up(self, case: Case) -> Found:
        query = transform(case.query, matcher=self.matcher, max_chars=8000)
        categories = dict.fromkeys([query.hints.domain, ""])
        attempts = tuple(self.nearest(query.text, category=category) for category in categories)
        right = {self.category_of[source] for source in case.expect}
        tops = [self.nearest(query.text, category=category)[0].score for category in sorted(right)]
        return Found(case, query, attempts, min(tops, default=None))


def bag_of(found: Found, *, max_l2_distance: float, background: float) -> Bag:
    rows: list[Signals] = []
    right: list[bool] = []
    for candidates in found.attempts:
        rows += signals(found.query, candidates, max_l2_distance=max_l2_distance, background=background)
        right += [candidate.metadata["source"] in found.case.expect for candidate in candidates]
    values = np.array([[getattr(row, name) for name in SIGNALS] for row in rows], dtype=float)
    return Bag(found.case, values, np.array(right, dtype=bool))


def fit(bags: Sequence[Bag], *, rounds: int = 12) -> Array:
    """Intercept and weights in the order of `SIGNALS`."""
    bags = [bag for bag in bags if bag.counts]
    labels = np.array([bool(bag.case.expect) for bag in bags], dtype=float)
    shares = np.where(labels == 1, ANSWERABLE_SHARE / labels.sum(), (1 - ANSWERABLE_SHARE) / (1 - labels).sum())
    shares *= len(labels)
    weights = np.array([0.0, 1.0, *[0.0] * (len(SIGNALS) - 1)])
    for _ in range(rounds):
        best = []
        for bag in bags:
            choice = np.flatnonzero(bag.right) if bag.case.expect else np.arange(len(bag.signals))
            best.append(bag.signals[choice[np.argmax(bag.signals[choice] @ weights[1:])]])
        weights = _logistic(np.array(best), labels, shares)
    return weights


def _logistic(values: Array, labels: Array, shares: Array) -> Array:
    matrix = np.column_stack([np.ones(len(values)), values])
    ridge = np.diag([1e-6, *[RIDGE] * values.shape[1]])
    weights = np.zeros(matrix.shape[1])
    for _ in range(100):
        chance = 1 / (1 + np.exp(-matrix @ weights))
        slope = matrix.T @ (shares * (labels - chance)) - ridge @ weights
        curve = (matrix * (shares * chance * (1 - chance))[:, None]).T @ matrix + ridge
        step = np.linalg.solve(curve, slope)
        weights = weights + step
        if np.abs(step).max() < 1e-9:
            break
    return weights


def scores_of(weights: Array, bag: Bag) -> Array:
    return 1 / (1 + np.exp(-(weights[0] + bag.signals @ weights[1:])))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one query: the score of the best candidate, and of the best of an expected document."""

    case: Case
    best: float
    right: float


def outcomes(weights: Array, bags: Sequence[Bag]) -> list[Outcome]:
    found = []
    for bag in bags:
        scores = scores_of(weights, bag)
        found.append(Outcome(bag.case, float(scores.max()), float(scores[bag.right].max(initial=0.0))))
    return found


def auc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """Chance that a positive has the higher score than a negative, ties counted half."""
    higher = np.array(positive)[:, None] - np.array(negative)[None, :]
    return float((higher > 0).mean() + (higher == 0).mean() / 2)


def cross_validated(bags: Sequence[Bag]) -> list[list[Outcome]]:
    """For each seed the outcomes of all queries, each scored by weights fitted without its fold."""
    runs = []
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        fold = np.zeros(len(bags), dtype=int)
        for answerable in (True, False):
            places = [at for at, bag in enumerate(bags) if bool(bag.case.expect) == answerable]
            fold[random.permutation(places)] = np.arange(len(places)) % FOLDS
        run: list[Outcome] = []
        for left_out in range(FOLDS):
            weights = fit([bag for bag, one in zip(bags, fold, strict=True) if one != left_out])
            run += outcomes(weights, [bag for bag, one in zip(bags, fold, strict=True) if one == left_out])
        runs.append(run)
    return runs


@dataclass(frozen=True, slots=True)
class Quality:
    """How well scores tell; shares of queries.

    Attributes:
        auc: Of the best candidate's score, answerable against unanswerable.
        found: Answerable queries, their document among the candidates, whose document reaches the threshold.
        refused: Unanswerable queries none of whose candidates reaches it.
    """

    auc: float
    found: float
    refused: float


def quality(runs: Sequence[Sequence[Outcome]], *, threshold: float = 0.5) -> Quality:
    rows = []
    for run in runs:
        yes = [one for one in run if one.case.expect and one.right > 0]
        no = [one for one in run if not one.case.expect]
        rows.append(
            (
                auc([one.best for one in run if one.case.expect], [one.best for one in no]),
                np.mean([one.right >= threshold for one in yes]),
                np.mean([one.best < threshold for one in no]),
            )
        )
    return Quality(*(float(value) for value in np.mean(rows, axis=0)))


@dataclass(frozen=True, slots=True)
class Result:
    max_l2_distance: float
    weights: EvidenceWeights
    bags: tuple[Bag, ...]


def calibrate(ws: Workspace) -> Result:
    base = Base(ws)
    found = [base.look_up(case) for case in read_cases()]
    tops = [one.right_category for one in found if one.right_category is not None]
    max_l2_distance = round(2 * float(np.percentile(tops, RIGHT_SHARE)), 2)
    behind = [candidate.score for one in found for candidate in one.attempts[-1][NEAREST:]]
    background = round(float(np.mean(behind)), 3)
    bags = tuple(bag_of(one, max_l2_distance=max_l2_distance, background=background) for one in found)
    values = [round(float(value), 2) for value in fit(bags)]
    weights = EvidenceWeights(background, values[0], **dict(zip(SIGNALS, values[1:], strict=True)))
    return Result(max_l2_distance, weights, bags)


def vector_of(weights: EvidenceWeights) -> Array:
    return np.array([weights.intercept, *(getattr(weights, name) for name in SIGNALS)])


def report(result: Result) -> str:
    bags = result.bags
    missed = sum(not bag.counts for bag in bags)
    answerable = sum(bool(bag.case.expect) for bag in bags)
    lines = [
        f"{answerable} answerable queries, {len(bags) - answerable} unanswerable; "
        f"the expected document of {missed} is not among the candidates.",
        "",
        "cross-validated     AUC   found  refused",
    ]
    runs = cross_validated(bags)
    alone = [[Outcome(bag.case, float(bag.signals[:, 0].max()), 1.0) for bag in bags]]
    lines.append(f"similarity alone  {quality(alone).auc:.3f}")
    for threshold in (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8):
        at = quality(runs, threshold=threshold)
        lines.append(f"score >= {threshold:<4}     {at.auc:.3f}  {at.found:5.1%}   {at.refused:5.1%}")
    lines += ["", "levels (cross-validated, all runs)   low  reference  highly_relevant"]
    for name, answer in (("answerable", True), ("unanswerable", False)):
        values = np.array([one.best for run in runs for one in run if bool(one.case.expect) == answer])
        parts = [values < 0.5, (values >= 0.5) & (values < 0.75), values >= 0.75]
        lines.append(f"{name:<34}" + "".join(f"{part.mean():8.1%}" for part in parts))
    lines += ["", f"max_l2_distance={result.max_l2_distance}", str(result.weights)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=PROJECT / ".rag", help="state folder with the embedding cache")
    parser.add_argument("--misses", action="store_true", help="list the queries on the wrong side")
    options = parser.parse_args(arguments)
    result = calibrate(workspace(options.state))
    print(report(result))
    if options.misses:
        for one in outcomes(vector_of(result.weights), result.bags):
            if (one.right < 0.5) if one.case.expect else (one.best >= 0.5):
                print(f"{one.case.id}  best {one.best:.2f}  right {one.right:.2f}  {one.case.query[:100]}")
    return 0


def workspace(state: Path) -> Workspace:
    flags = {"state_dir": state, "knowledge.roots": [str(PROJECT / "knowledge")]}
    return Workspace(load_settings(flags=flags, project_root=PROJECT))


if __name__ == "__main__":
    sys.exit(main())
