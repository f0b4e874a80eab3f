"""A small project in a folder of its own, materialized with the real assets, the real store and a tiny model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import dagster as dg
import pytest

from rag_pipeline.defs import knowledge_assets
from rag_pipeline.defs.resources import TablesResource, WorkspaceResource
from rag_pipeline.index import lite_server
from rag_pipeline.settings import load_settings
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.conftest import write

ASSETS = dg.load_assets_from_modules([knowledge_assets])
SETTINGS = """\
state_dir = "state"

[knowledge]
roots = ["docs"]

[embedding]
model = {model}

[chunking]
soft_tokens = 80
hard_tokens = 120

[index]
grace_s = 0.0

[retrieval.milvus]
lite_idle_s = 30.0
"""


class Project:
    """Knowledge, settings and state under one folder, and one Dagster instance that remembers the runs."""

    def __init__(self, home: Path, model: Path, instance: dg.DagsterInstance) -> None:
        self.home = home
        self.docs = home / "docs"
        self.config = home / "rag_pipeline.toml"
        self.instance = instance
        write(self.config, SETTINGS.format(model=repr(str(model))))
        # More than ten chunks: a search for the ten nearest must be able to miss.
        for number in range(6):
            write(
                self.docs / f"cache/redis-{number}.md",
                f"# Redis {number}\n\nEvictions of kind {number * 31}.\n\n## Check {number}\n\nRun `INFO {number}`.\n\n"
                f"## Mend {number}\n\nRaise maxmemory to {number}00 MB.\n",
            )
        write(self.docs / "kubernetes/oom.md", "---\ntitle: OOMKilled\nkeywords: [oom]\n---\n# OOM\n\nExit code 137.\n")
        write(self.docs / "kubernetes/disk.md", "# 磁盘\n\n节点磁盘写满了。\n\n## 处理\n\n清理镜像。\n")

    def run(
        self,
        selection: Sequence[str] = (),
        *,
        ops: Mapping[str, object] | None = None,
        **overrides: object,
    ) -> "Run":
        """Materialize all assets or those named; ``overrides`` go into the workspace resource's run config."""
        workspace = WorkspaceResource.configure_at_launch()
        settings = {"config_file": str(self.config), **overrides}
        result = dg.materialize(
            ASSETS,
            selection=list(selection) or None,
            resources={"workspace": workspace, "io_manager": TablesResource(workspace=workspace)},
            run_config={
                "resources": {"workspace": {"config": settings}},
                "loggers": {"console": {"config": {"log_level": "WARNING"}}},
                "ops": {name: {"config": config} for name, config in (ops or {}).items()},
            },
            instance=self.instance,
            raise_on_error=False,
        )
        return Run(result)

    def rebuild(self) -> "Run":
        """Materialize all assets as the weekly rebuild does: a new version even from equal knowledge."""
        return self.run(ops={name: {"full": True} for name in ("raw_documents", "chunks", "milvus_collection")})

    def workspace(self, **flags: object) -> Workspace:
        """The same state folder, opened as the command opens it."""
        return Workspace(load_settings(self.config, flags={key.replace("__", "."): flags[key] for key in flags}))

    def promoted(self, alias: str = "knowledge") -> str | None:
        """What the alias points to."""
        return self.workspace().store.alias_target(alias)

    def collections(self) -> list[str]:
        """All collections there are."""
        return self.workspace().store.collections()

    def edit(self, source: str, text: str) -> None:
        """Write a document."""
        write(self.docs / source, text)


class Run:
    """What one run left in the event log."""

    def __init__(self, result: dg.ExecuteInProcessResult) -> None:
        self.success = result.success
        events = result.get_asset_materialization_events()
        self.metadata = {_name(event.asset_key): _plain(event.materialization.metadata) for event in events}
        self.versions = {
            _name(event.asset_key): event.materialization.tags["dagster/data_version"]  # type: ignore[index]
            for event in events
        }
        evaluations = result.get_asset_check_evaluations()
        self.checks = {evaluation.check_name: evaluation.passed for evaluation in evaluations}
        self.descriptions = {evaluation.check_name: evaluation.description for evaluation in evaluations}
        failures = [event.step_failure_data for event in result.all_events if event.is_step_failure]
        self.reason = "\n".join(failure.error.to_string() for failure in failures if failure.error)

    @property
    def failed_checks(self) -> list[str]:
        """Names of the checks that failed, sorted."""
        return sorted(name for name, passed in self.checks.items() if not passed)


def _name(key: dg.AssetKey | None) -> str:
    assert key is not None
    return key.to_user_string()


def _plain(metadata: Mapping[str, dg.MetadataValue]) -> dict[str, object]:
    return {
        name: [dict(record.data) for record in value.records]
        if isinstance(value, dg.TableMetadataValue)
        else value.value
        for name, value in metadata.items()
    }


@pytest.fixture(scope="module")
def make_project(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: tuple[Path, Path]
) -> Iterator[Callable[[], Project]]:
    """A function that makes a project; its Milvus Lite is stopped after the module."""
    made: list[Project] = []
    with dg.DagsterInstance.ephemeral() as instance:

        def make() -> Project:
            made.append(Project(tmp_path_factory.mktemp("project"), tiny_models[0], instance))
            return made[-1]

        yield make
        for project in made:
            lite_server.stop(project.home / "state" / "milvus")


@pytest.fixture(scope="module")
def project(make_project: Callable[[], Project]) -> Project:
    """The module's project, with its first version promoted."""
    project = make_project()
    run = project.run()
    assert run.success, run.reason
    return project
