"""The Dagster entry: every asset, check, job, sensor and schedule of the project."""

import dagster as dg
from upath import UPath

from rag_pipeline.defs import automation, knowledge_assets
from rag_pipeline.defs.io_managers import ParquetIOManager
from rag_pipeline.defs.resources import WorkspaceResource
from rag_pipeline.settings import load_settings


@dg.definitions
def defs() -> dg.Definitions:
    """Read the settings once, for what Dagster must know before a run: where tables lie, what starts by itself."""
    settings = load_settings()
    return dg.Definitions(
        assets=dg.load_assets_from_modules([knowledge_assets]),
        jobs=[automation.reindex_job, automation.weekly_rebuild_job, automation.rollback_job],
        sensors=[automation.knowledge_sensor(settings.automation)],
        schedules=[automation.weekly_rebuild(settings.automation)],
        resources={
            "workspace": WorkspaceResource(),
            "io_manager": ParquetIOManager(base_path=UPath(settings.state / "tables")),
        },
        # The default multiprocess executor imports torch anew in every step; in one process the steps share one model.
        executor=dg.in_process_executor,
    )
