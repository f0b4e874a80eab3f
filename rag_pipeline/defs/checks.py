"""Asset checks from the contracts, with the names and verdicts of the version's manifest; and a guard of lineage."""

from collections.abc import Iterable, Mapping

import dagster as dg

from rag_pipeline.errors import RefusedError
from rag_pipeline.index.manifest import Manifest
from rag_pipeline.verdicts import CHECKS, ERROR, CheckResult

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


def guard_lineage(context: dg.AssetExecutionContext, versions: Mapping[str, dg.DataVersion]) -> None:
    """Refuse tables that were not made from one another, as a run of only some assets can leave them.

    Ids and counts do not tell: an edited chunk keeps its id, so old vectors would pass for those of the new text.

    Args:
        context: Of an asset that reads tables made from other tables it reads.
        versions: Data version, as it is now, of each table that others were made from.

    Raises:
        RefusedError: A table was made from another version; the message says what to materialize.
    """
    for asset in sorted(key.to_user_string() for key in context.assets_def.keys_by_input_name.values()):
        provenance = context.get_asset_provenance(dg.AssetKey(asset))
        for key, version in (provenance.input_data_versions if provenance else {}).items():
            upstream = key.to_user_string()
            if upstream in versions and versions[upstream] != version:
                raise RefusedError(
                    f"The table {asset} was made from other {upstream} than there are now; nothing was written. "
                    f"Materialize {asset} and what follows it too, or run reindex_job."
                )
