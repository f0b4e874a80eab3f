"""Asset checks from the contracts: the same names and verdicts that the version's manifest records."""

from collections.abc import Iterable

import dagster as dg

from rag_pipeline.contracts import CHECKS, ERROR, CheckResult
from rag_pipeline.index.manifest import Manifest

ASSET_OF_TABLE = {
    "documents": "raw_documents",
    "chunks": "chunks",
    "embeddings": "breadcrumb_embeddings",
    "collection": "milvus_collection",
}


def check_specs(table: str) -> list[dg.AssetCheckSpec]:
    """The checks of one table's asset; those of severity ERROR block what comes after."""
    return [
        dg.AssetCheckSpec(
            name=spec.name,
            asset=ASSET_OF_TABLE[table],
            description=spec.description,
            blocking=spec.severity == ERROR,
        )
        for spec in CHECKS
        if spec.table == table
    ]


def check_results(results: Iterable[CheckResult]) -> list[dg.AssetCheckResult]:
    """Verdicts as Dagster shows them."""
    return [
        dg.AssetCheckResult(
            check_name=result.name,
            asset_key=ASSET_OF_TABLE[result.table],
            passed=result.passed,
            severity=dg.AssetCheckSeverity.ERROR if result.severity == ERROR else dg.AssetCheckSeverity.WARN,
            description=result.description,
            metadata={"errored": result.errored, **result.metadata},
        )
        for result in results
    ]


def recorded_results(manifest: Manifest) -> list[CheckResult]:
    """The verdicts on a collection that its manifest holds: what an earlier run that built it found."""
    return [
        CheckResult(
            name=spec.name,
            table=spec.table,
            severity=verdict.severity,
            passed=verdict.passed,
            errored=False,
            description=verdict.description,
            metadata={"checked_when": f"{manifest.collection} was built"},
        )
        for spec in CHECKS
        if spec.table == "collection" and (verdict := manifest.checks.get(spec.name))
    ]
