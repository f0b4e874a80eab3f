"""The Dagster resources: thin adapters over `rag_pipeline.workspace.Workspace`."""

from pathlib import Path

import dagster as dg
from pydantic import Field, PrivateAttr
from upath import UPath

from rag_pipeline.defs.io_managers import ParquetIOManager
from rag_pipeline.settings import load_settings
from rag_pipeline.workspace import Workspace


class WorkspaceResource(dg.ConfigurableResource):
    """Opens the state folder that the settings name; the settings come from file and environment as everywhere.

    In a run's config (``resources: workspace: config:``) a field overrides its setting for that run.
    """

    config_file: str = Field(default="", description="Configuration file; blank: rag_pipeline.toml when present.")
    state_dir: str = Field(default="", description="State folder; blank: the setting state_dir.")
    alias: str = Field(default="", description="Milvus alias; blank: the setting index.alias.")
    allow_mass_deletion: bool = Field(
        default=False, description="Let this run remove more documents than the mass-deletion guard allows."
    )
    take_over: bool = Field(default=False, description="Let this run replace another knowledge base's alias.")

    _workspace: Workspace | None = PrivateAttr(default=None)

    def open(self) -> Workspace:
        """The workspace, the same one (with one loaded model) for every step of a process."""
        if self._workspace is None:
            flags = {
                "state_dir": Path(self.state_dir).absolute() if self.state_dir else None,
                "index.alias": self.alias or None,
                "knowledge.allow_mass_deletion": self.allow_mass_deletion or None,
                "index.take_over": self.take_over or None,
            }
            self._workspace = Workspace(
                load_settings(Path(self.config_file) if self.config_file else None, flags=flags)
            )
        return self._workspace


class TablesResource(dg.ConfigurableIOManagerFactory):
    """Keeps the tables between assets in the workspace's state folder, apart for each alias."""

    workspace: dg.ResourceDependency[WorkspaceResource]

    def create_io_manager(self, context: dg.InitResourceContext) -> ParquetIOManager:
        """The IO manager on ``<state>/tables/<alias>``."""
        del context
        ws = self.workspace.open()
        return ParquetIOManager(base_path=UPath(ws.state / "tables" / ws.settings.index.alias))
