"""The asset graph as a snapshot, what the definitions hold, and the two ways of starting them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from rag_pipeline.definitions import defs
from rag_pipeline.index import lite_server
from rag_pipeline.verdicts import CHECKS, ERROR
from rag_pipeline_tests.conftest import PROJECT, write
from rag_pipeline_tests.defs.conftest import SETTINGS

KNOWLEDGE = {
    # asset: (upstream, kinds, blocking checks, other checks)
    "raw_documents": (
        [],
        ["markdown", "pandas"],
        ["documents_present"],
        ["documents_in_taxonomy", "documents_not_rejected", "documents_titled"],
    ),
    "chunks": (
        ["raw_documents"],
        ["markdown", "pandas"],
        [
            "chunk_content_present",
            "chunk_ids_unique",
            "chunk_tokens_within_limit",
            "chunks_present",
            "documents_have_chunks",
        ],
        ["chunk_breadcrumbs_present"],
    ),
    "knowledge_index": (["chunks", "raw_documents"], ["pandas"], [], []),
    "breadcrumb_embeddings": (
        ["chunks"],
        ["huggingface", "pandas"],
        [
            "embedding_dimension",
            "embeddings_complete",
            "embeddings_current",
            "embeddings_finite",
            "embeddings_unit_norm",
        ],
        ["embeddings_distinct"],
    ),
    "milvus_collection": (
        ["breadcrumb_embeddings", "chunks", "knowledge_index", "raw_documents"],
        ["milvus"],
        ["collection_parity", "collection_self_retrieval"],
        [],
    ),
    "promoted_collection": (["milvus_collection"], ["milvus"], [], []),
}


def names(keys: object) -> list[str]:
    return sorted(key.to_user_string() for key in keys)  # type: ignore[attr-defined]


def test_the_asset_graph() -> None:
    graph = defs().resolve_asset_graph()
    checks = [(key, graph.get_check_spec(key).blocking) for key in graph.asset_check_keys]

    def of(asset: str, *, blocking: bool) -> list[str]:
        return sorted(
            key.name for key, blocks in checks if key.asset_key.to_user_string() == asset and blocks is blocking
        )

    found = {
        asset: (
            names(graph.get(key).parent_keys),
            sorted(graph.get(key).kinds),
            of(asset, blocking=True),
            of(asset, blocking=False),
        )
        for key in graph.get_all_asset_keys()
        if (asset := key.to_user_string()) and graph.get(key).group_name == "knowledge"
    }

    assert found == KNOWLEDGE


def test_every_asset_is_owned_and_described() -> None:
    graph = defs().resolve_asset_graph()

    for key in graph.get_all_asset_keys():
        assert graph.get(key).owners, key
        assert len(graph.get(key).description or "") > 20, key


def test_every_check_of_the_contracts_is_in_the_graph_and_blocks_if_it_is_an_error() -> None:
    graph = defs().resolve_asset_graph()
    found = {key.name: graph.get_check_spec(key) for key in graph.asset_check_keys}

    for check in CHECKS:
        assert found[check.name].blocking is (check.severity == ERROR)
        assert found[check.name].description == check.description


def test_jobs_and_automation_are_there_and_stopped() -> None:
    definitions = defs()

    for job in ("reindex_job", "weekly_rebuild_job", "rollback_job"):
        assert definitions.resolve_job_def(job).name == job
    sensor, schedule = (
        definitions.resolve_sensor_def("knowledge_sensor"),
        definitions.resolve_schedule_def("weekly_rebuild"),
    )
    assert sensor.default_status is dg.DefaultSensorStatus.STOPPED
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED


def test_one_setting_starts_the_automation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "rag_pipeline.toml", "[automation]\nenabled = true\n")
    monkeypatch.chdir(tmp_path)

    definitions = defs()

    assert definitions.resolve_sensor_def("knowledge_sensor").default_status is dg.DefaultSensorStatus.RUNNING
    assert definitions.resolve_schedule_def("weekly_rebuild").default_status is dg.DefaultScheduleStatus.RUNNING


def dagster(*arguments: str, home: Path, cwd: Path = PROJECT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the ``dagster`` command with its home in ``home``."""
    home.mkdir(exist_ok=True)
    write(home / "dagster.yaml", "telemetry:\n  enabled: false\n")
    return subprocess.run(
        [sys.executable, "-m", "dagster", *arguments],
        cwd=cwd,
        env={**os.environ, "DAGSTER_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("-w", "workspace.yaml")], ids=["bare", "workspace.yaml"])
def test_the_definitions_load_in_both_ways(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = dagster("definitions", "validate", *arguments, home=tmp_path / "dagster")

    assert done.returncode == 0, done.stderr
    assert "Validation successful for code location rag_pipeline." in done.stdout + done.stderr


@pytest.fixture
def small_project(tmp_path: Path, tiny_models: tuple[Path, Path]) -> Iterator[Path]:
    """A folder with settings and one document; its Milvus Lite is stopped at the end."""
    home = tmp_path / "project"
    write(home / "rag_pipeline.toml", SETTINGS.format(model=repr(str(tiny_models[0]))))
    write(home / "docs/redis.md", "# Redis\n\nEvictions.\n\n## Check\n\nRun `INFO memory`.\n")
    yield home
    lite_server.stop(home / "state/milvus")


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["in_process", "multiprocess"])
def test_a_job_runs_with_either_executor(tmp_path: Path, small_project: Path, executor: str) -> None:
    config = tmp_path / "run.yaml"
    write(config, f"execution:\n  config:\n    {executor}: {{}}\n" if executor != "in_process" else "{}\n")

    done = dagster(
        *("job", "execute", "-m", "rag_pipeline.definitions", "-j", "reindex_job", "-c", str(config)),
        home=tmp_path / "dagster",
        cwd=small_project,
    )

    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    assert ("Multiprocess executor" if executor == "multiprocess" else "Executing steps in process") in log
    assert "Materialized value promoted_collection." in log
