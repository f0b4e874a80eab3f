"""The Dagster entry: every asset, check, job, sensor and schedule of the project."""

import dagster as dg

from rag_pipeline.defs import automation, knowledge_assets
from rag_pipeline.defs.resources import TablesResource, WorkspaceResource
from rag_pipeline.settings import load_settings


def _in_process_unless_chosen() -> dg.ExecutorDefinition:
    """In one process the steps share one loaded model; ``execution: config: multiprocess: {}`` of a run chooses other.

    Dagster's default is the reverse: it imports torch anew in every step.
    """
    choices = {
        "in_process": dg.in_process_executor.config_schema.as_field(),
        "multiprocess": dg.multiprocess_executor.config_schema.as_field(),
    }
    schema = dg.Field(dg.Selector(choices), default_value={"in_process": {}})  # type: ignore[no-untyped-call]
    return dg.multi_or_in_process_executor.configured(
        lambda config: config, name="in_process_unless_chosen", config_schema=schema
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Read the settings once, for what Dagster must know before a run: what starts by itself."""
    settings = load_settings()
    workspace = WorkspaceResource.configure_at_launch()
    return dg.Definitions(
        assets=dg.load_assets_from_modules([knowledge_assets]),
        jobs=[automation.reindex_job, automation.weekly_rebuild_job, automation.rollback_job],
        sensors=[automation.knowledge_sensor(settings.automation)],
        schedules=[automation.weekly_rebuild(settings.automation)],
        resources={"workspace": workspace, "io_manager": TablesResource(workspace=workspace)},
        executor=_in_process_unless_chosen(),
    )
