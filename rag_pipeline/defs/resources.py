"""The Dagster resource: a thin adapter over `rag_pipeline.workspace.Workspace`."""

from pathlib import Path

import dagster as dg
from pydantic import Field, PrivateAttr

from rag_pipeline.settings import load_settings
from rag_pipeline.workspace import Workspace


class WorkspaceResource(dg.ConfigurableResource):
    """Opens the state folder that the settings name; the settings come from file and environment as everywhere."""

    config_file: str = Field(default="", description="Configuration file; blank: rag_pipeline.toml when present.")
    state_dir: str = Field(default="", description="State folder; blank: the setting state_dir.")
    alias: str = Field(default="", description="Milvus alias; blank: the setting index.alias.")

    _workspaces: dict[tuple[bool, bool], Workspace] = PrivateAttr(default_factory=dict)

    def open(self, *, allow_mass_deletion: bool = False, take_over: bool = False) -> Workspace:
        """The workspace, the same one (with one loaded model) for every step of a process.

        Args:
            allow_mass_deletion: Overrides the setting for this run.
            take_over: Overrides the setting for this run.
        """
        key = (allow_mass_deletion, take_over)
        if key not in self._workspaces:
            flags = {
                "state_dir": self.state_dir or None,
                "index.alias": self.alias or None,
                "knowledge.allow_mass_deletion": allow_mass_deletion or None,
                "index.take_over": take_over or None,
            }
            config = Path(self.config_file) if self.config_file else None
            self._workspaces[key] = Workspace(load_settings(config, flags=flags))
        return self._workspaces[key]
