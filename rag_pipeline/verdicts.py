"""Verdicts of checks: which checks there are, and how Great Expectations is made to judge one column.

A check reduces its table to one plain value a row (an id, a count, a norm). A null value means "does not apply to this
row", so that a defect fails the one check it concerns. A check that cannot be carried out (a missing column, an
exception) is ``errored`` and not passed; it never raises and never passes.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pandas as pd

ERROR = "error"
WARN = "warn"

DOCUMENTS_NOT_REJECTED = "documents_not_rejected"
DOCUMENTS_PRESENT = "documents_present"
DOCUMENTS_TITLED = "documents_titled"
DOCUMENTS_IN_TAXONOMY = "documents_in_taxonomy"
CHUNKS_PRESENT = "chunks_present"
CHUNK_IDS_UNIQUE = "chunk_ids_unique"
CHUNK_CONTENT_PRESENT = "chunk_content_present"
CHUNK_TOKENS_WITHIN_LIMIT = "chunk_tokens_within_limit"
DOCUMENTS_HAVE_CHUNKS = "documents_have_chunks"
CHUNK_BREADCRUMBS_PRESENT = "chunk_breadcrumbs_present"
EMBEDDING_DIMENSION = "embedding_dimension"
EMBEDDINGS_FINITE = "embeddings_finite"
EMBEDDINGS_UNIT_NORM = "embeddings_unit_norm"
EMBEDDINGS_COMPLETE = "embeddings_complete"
EMBEDDINGS_CURRENT = "embeddings_current"
EMBEDDINGS_DISTINCT = "embeddings_distinct"
COLLECTION_PARITY = "collection_parity"
COLLECTION_SELF_RETRIEVAL = "collection_self_retrieval"

_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class CheckSpec:
    """A check there is; ``description`` says what holds when it passes, ``table`` what it looks at."""

    name: str
    table: str
    severity: str
    description: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The verdict of one check.

    Attributes:
        name: One of the names in `CHECKS`.
        table: ``documents``, ``chunks``, ``embeddings`` or ``collection``.
        severity: `ERROR` blocks promotion, `WARN` does not.
        passed: The check was carried out and found nothing.
        errored: The check could not be carried out; then ``passed`` is false.
        description: Full sentences: what was found, how many, up to five examples, what to do.
        metadata: ``checked`` and ``failing`` counts, ``examples`` where it failed.
    """

    name: str
    table: str
    severity: str
    passed: bool
    errored: bool
    description: str
    metadata: dict[str, int | float | str]


CHECKS: tuple[CheckSpec, ...] = (
    CheckSpec(DOCUMENTS_NOT_REJECTED, "documents", WARN, "No file was rejected."),
    CheckSpec(DOCUMENTS_PRESENT, "documents", ERROR, "There is at least one document."),
    CheckSpec(DOCUMENTS_TITLED, "documents", WARN, "Every document has a title."),
    CheckSpec(DOCUMENTS_IN_TAXONOMY, "documents", WARN, "Every category is in the configured taxonomy."),
    CheckSpec(CHUNKS_PRESENT, "chunks", ERROR, "There is at least one chunk."),
    CheckSpec(CHUNK_IDS_UNIQUE, "chunks", ERROR, "Every chunk has an id of its own."),
    CheckSpec(CHUNK_CONTENT_PRESENT, "chunks", ERROR, "Every chunk holds text."),
    CheckSpec(CHUNK_TOKENS_WITHIN_LIMIT, "chunks", ERROR, "Every chunk fits into the model, so none is truncated."),
    CheckSpec(DOCUMENTS_HAVE_CHUNKS, "chunks", ERROR, "Every document with visible text has a chunk."),
    CheckSpec(CHUNK_BREADCRUMBS_PRESENT, "chunks", WARN, "Every chunk under a heading has a breadcrumb."),
    CheckSpec(EMBEDDING_DIMENSION, "embeddings", ERROR, "Every vector has the model's dimension."),
    CheckSpec(EMBEDDINGS_FINITE, "embeddings", ERROR, "No vector holds NaN or infinity."),
    CheckSpec(EMBEDDINGS_UNIT_NORM, "embeddings", ERROR, "Every vector has length 1."),
    CheckSpec(EMBEDDINGS_COMPLETE, "embeddings", ERROR, "Every chunk has exactly one vector."),
    CheckSpec(EMBEDDINGS_CURRENT, "embeddings", ERROR, "Every vector is of its chunk's present text."),
    CheckSpec(EMBEDDINGS_DISTINCT, "embeddings", WARN, "Different texts have different vectors."),
    CheckSpec(COLLECTION_PARITY, "collection", ERROR, "The collection holds exactly the expected ids."),
    CheckSpec(COLLECTION_SELF_RETRIEVAL, "collection", ERROR, "Sampled vectors find themselves."),
)
ERROR_CHECKS: frozenset[str] = frozenset(spec.name for spec in CHECKS if spec.severity == ERROR)
SPECS = {spec.name: spec for spec in CHECKS}

# An expectation on the column "value": the name of its class in great_expectations.expectations, and its arguments.
Expectation = tuple[str, dict[str, Any]]
UNIQUE: Expectation = ("ExpectColumnValuesToBeUnique", {})
NOT_BLANK: Expectation = ("ExpectColumnValueLengthsToBeBetween", {"min_value": 1})


def between(low: float, high: float | None = None) -> Expectation:
    """The value lies in ``low`` to ``high``, both included; None: no upper bound."""
    return "ExpectColumnValuesToBeBetween", {"min_value": low, "max_value": high}


def one_of(values: Sequence[object]) -> Expectation:
    """The value is one of ``values``."""
    return "ExpectColumnValuesToBeInSet", {"value_set": list(values)}


def failed_errors(results: Iterable[CheckResult]) -> list[CheckResult]:
    """The results that forbid promotion: ERROR checks that failed or could not be carried out."""
    return [result for result in results if result.severity == ERROR and not result.passed]


def judge(
    name: str, rows: Callable[[], pd.DataFrame], expectation: Expectation, *, finding: str, advice: str
) -> CheckResult:
    """Let Great Expectations judge the column ``value``; ``source``, ``id`` and ``detail`` name the examples."""

    def judged() -> CheckResult:
        table = rows().reset_index(drop=True)
        passed, checked, failing, positions = _validate(table[["value"]], expectation)
        if passed:
            return result(name, f"{SPECS[name].description} ({checked} checked.)", checked=checked)
        examples = [_example(row) for row in table.loc[positions].to_dict("records")]
        return failure(
            name, f"{failing} of {checked} {finding}", examples, advice=advice, checked=checked, failing=failing
        )

    return guarded(name, judged)


def guarded(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    """The result of ``check``; an exception becomes an errored result with its reason."""
    try:
        return check()
    except Exception as error:  # whatever a library raises, the other checks still have to be reported
        reason = f"the column {error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        text = f"The check could not be carried out, so nothing is known: {reason.rstrip('.')}."
        return _result(name, text, {}, errored=True)


def result(name: str, description: str, *, checked: int = 0, **metadata: int | float | str) -> CheckResult:
    """A pass."""
    return _result(name, description, {"checked": checked, "failing": 0, **metadata}, passed=True)


def failure(
    name: str,
    found: str,
    examples: Sequence[str],
    *,
    advice: str,
    checked: int,
    failing: int,
    **metadata: int | float | str,
) -> CheckResult:
    """A failure: what was found, the first five examples, what to do."""
    shown = "; ".join(examples[:_EXAMPLES])
    more = "; …" if max(failing, len(examples)) > _EXAMPLES else ""
    text = f"{found}{': ' if shown else ''}{shown}{more}. {advice}"
    return _result(name, text, {"checked": checked, "failing": failing, "examples": shown, **metadata})


def _result(
    name: str,
    description: str,
    metadata: dict[str, int | float | str],
    *,
    passed: bool = False,
    errored: bool = False,
) -> CheckResult:
    spec = SPECS[name]
    return CheckResult(name, spec.table, spec.severity, passed, errored, description, metadata)


def _example(row: dict[Any, Any]) -> str:
    notes = ", ".join(part for part in (f"id {row['id']}" if "id" in row else "", row.get("detail", "")) if part)
    return f"{row['source']} ({notes})" if notes else str(row["source"])


@cache
def _tables() -> Any:
    """What makes a batch of a table; one for the whole process, since each context costs a tenth of a second."""
    # Read when the library is imported or makes its context; without it a run may report usage over the network.
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    return (
        context.data_sources.add_pandas("tables")
        .add_dataframe_asset("table")
        .add_batch_definition_whole_dataframe("all")
    )


def _validate(table: pd.DataFrame, expectation: Expectation) -> tuple[bool, int, int, list[int]]:
    """Judge the table's column ``value``: passed, rows it applies to, rows at fault, positions of the first of them.

    Raises:
        RuntimeError: Great Expectations could not evaluate the expectation.
    """
    tables = _tables()
    from great_expectations import expectations as gxe

    name, arguments = expectation
    verdict = tables.get_batch(batch_parameters={"dataframe": table}).validate(
        getattr(gxe, name)(column="value", **arguments),
        # No unexpected_index_column_names: with them 50,000 rows at fault take 3 s instead of 0.1 s.
        result_format={"result_format": "SUMMARY", "partial_unexpected_count": _EXAMPLES},
    )
    outcome = verdict.result
    reasons = _exceptions(verdict.exception_info)
    if reasons or "element_count" not in outcome:
        raise RuntimeError(f"Great Expectations could not evaluate {name}: {'; '.join(reasons) or 'no reason given'}")
    return (
        bool(verdict.success),
        int(outcome["element_count"]) - int(outcome["missing_count"]),
        int(outcome["unexpected_count"]),
        list(outcome["partial_unexpected_index_list"]),
    )


def _exceptions(info: dict[str, Any]) -> list[str]:
    """The messages in an ``exception_info``, which is flat, or has one entry for each metric that raised."""
    entries = [info] if "raised_exception" in info else [entry for entry in info.values() if isinstance(entry, dict)]
    return list(dict.fromkeys(str(entry["exception_message"]) for entry in entries if entry.get("raised_exception")))
