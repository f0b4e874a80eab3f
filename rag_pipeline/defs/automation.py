"""Jobs, the sensor on the knowledge folders and the weekly rebuild."""

from datetime import UTC, datetime, timedelta

import dagster as dg
from pydantic import Field

from rag_pipeline.defs.resources import WorkspaceResource
from rag_pipeline.index.manifest import digest_of
from rag_pipeline.ingest.documents import discover
from rag_pipeline.release import rollback
from rag_pipeline.setting_groups import AutomationSettings

_FULL = {"ops": {name: {"config": {"full": True}} for name in ("raw_documents", "chunks", "milvus_collection")}}
_UNDER_WAY = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
# A run whose process was killed stays "started" for ever: it must not keep the sensor from looking.
_LONGEST_WAIT = timedelta(hours=1)

reindex_job = dg.define_asset_job(
    "reindex_job",
    selection=dg.AssetSelection.groups("knowledge"),
    description="Bring the index up to the knowledge folders; nothing is embedded twice, nothing unchecked promoted.",
)

weekly_rebuild_job = dg.define_asset_job(
    "weekly_rebuild_job",
    selection=dg.AssetSelection.groups("knowledge"),
    config=_FULL,
    description="Parse and chunk everything anew and build a whole version from cached vectors.",
)


class RollbackConfig(dg.Config):
    """Which version to go back to."""

    to: str = Field(default="", description="A version's collection; blank: the one promoted before.")


@dg.op
def roll_back(context: dg.OpExecutionContext, config: RollbackConfig, workspace: WorkspaceResource) -> None:
    """Move the alias back to the version before, or to the one named."""
    manifest = rollback(workspace.open(), to=config.to)
    context.log.info(f"The alias {manifest.alias} now points to {manifest.collection}.")
    context.add_output_metadata({"collection": manifest.collection, "fingerprint": manifest.fingerprint})


@dg.job
def rollback_job() -> None:
    """Move the alias back to the version before, or to the one named in the op's config."""
    roll_back()


def knowledge_sensor(settings: AutomationSettings) -> dg.SensorDefinition:
    """A sensor that starts a reindex when the tree of knowledge files differs from the one it saw last.

    The cursor is a digest of the tree and no run key is set, so going back to an earlier state is a change as well.
    While a reindex is under way the sensor waits: a second one would be refused by the alias's write lock.
    """

    @dg.sensor(
        name="knowledge_sensor",
        job=reindex_job,
        minimum_interval_seconds=settings.sensor_interval_s,
        default_status=dg.DefaultSensorStatus.RUNNING if settings.enabled else dg.DefaultSensorStatus.STOPPED,
        description="Reindexes when a file of the knowledge folders was added, edited, renamed or removed.",
    )
    def sense(context: dg.SensorEvaluationContext, workspace: WorkspaceResource) -> dg.SensorResult | dg.SkipReason:
        ws = workspace.open()
        files, _ = discover(ws.roots, max_bytes=ws.settings.knowledge.max_file_bytes)
        tree = digest_of(*(part for file in files for part in (file.source, file.digest)))
        if tree == context.cursor:
            return dg.SkipReason("The knowledge folders are as they were.")
        if run := _under_way(context.instance):
            return dg.SkipReason(f"The knowledge folders changed; waiting for run {run} to end.")
        return dg.SensorResult(run_requests=[dg.RunRequest()], cursor=tree)

    return sense


def _under_way(instance: dg.DagsterInstance) -> str:
    """Id of a reindex that has not ended, blank without one."""
    for job in (reindex_job, weekly_rebuild_job):
        since = datetime.now(UTC) - _LONGEST_WAIT
        runs = dg.RunsFilter(job_name=job.name, statuses=list(_UNDER_WAY), updated_after=since)
        for record in instance.get_run_records(runs, limit=1):
            return str(record.dagster_run.run_id)
    return ""


def weekly_rebuild(settings: AutomationSettings) -> dg.ScheduleDefinition:
    """The schedule of the weekly rebuild."""
    return dg.ScheduleDefinition(
        name="weekly_rebuild",
        job=weekly_rebuild_job,
        cron_schedule=settings.weekly_rebuild_cron,
        default_status=dg.DefaultScheduleStatus.RUNNING if settings.enabled else dg.DefaultScheduleStatus.STOPPED,
        description="A whole version from Markdown and cached vectors, against drift that no change would show.",
    )
