"""When the sensor and the schedule start a run, and that neither does before someone says so."""

from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest

from rag_pipeline.defs.automation import knowledge_sensor, weekly_rebuild
from rag_pipeline.defs.resources import WorkspaceResource
from rag_pipeline.errors import ConfigurationError
from rag_pipeline.setting_groups import AutomationSettings
from rag_pipeline_tests.conftest import write

Tick = Callable[[], bool]
REDIS = "cache/redis-memory.md"


@pytest.fixture
def instance() -> dg.DagsterInstance:
    return dg.DagsterInstance.ephemeral()


@pytest.fixture
def tick(tmp_path: Path, knowledge: Path, instance: dg.DagsterInstance) -> Tick:
    """A function that lets the sensor look once, and says whether it asks for a run; its cursor is kept."""
    config = tmp_path / "rag_pipeline.toml"
    write(config, f'state_dir = "state"\n[knowledge]\nroots = ["{knowledge.name}"]\n')
    sensor = knowledge_sensor(AutomationSettings())
    cursor: list[str | None] = [None]

    def look() -> bool:
        context = dg.build_sensor_context(
            instance=instance,
            cursor=cursor[0],
            resources={"workspace": WorkspaceResource(config_file=str(config))},
        )
        answer = sensor(context)
        if isinstance(answer, dg.SkipReason):
            return False
        assert isinstance(answer, dg.SensorResult)
        [request] = answer.run_requests or []
        assert request.run_key is None  # a run key would suppress the third run of A, B, A
        cursor[0] = answer.cursor
        return True

    return look


def test_the_first_tick_starts_a_run_and_an_unchanged_tree_none(tick: Tick) -> None:
    assert [tick(), tick(), tick()] == [True, False, False]


def test_going_back_to_an_earlier_state_is_a_change(tick: Tick, knowledge: Path) -> None:
    first = (knowledge / REDIS).read_text(encoding="utf-8")
    started = [tick()]
    write(knowledge / REDIS, "# Redis memory\n\nEdited.\n")
    started.append(tick())
    write(knowledge / REDIS, first)
    started.append(tick())

    assert started == [True, True, True]
    assert not tick()


def test_a_deletion_is_a_change(tick: Tick, knowledge: Path) -> None:
    tick()
    (knowledge / REDIS).unlink()

    assert [tick(), tick()] == [True, False]


def test_a_rename_is_a_change(tick: Tick, knowledge: Path) -> None:
    tick()
    (knowledge / REDIS).rename(knowledge / "cache/memory.md")

    assert [tick(), tick()] == [True, False]


def test_an_equal_file_written_again_and_a_file_that_is_no_markdown_are_no_changes(tick: Tick, knowledge: Path) -> None:
    tick()
    write(knowledge / REDIS, (knowledge / REDIS).read_text(encoding="utf-8"))
    write(knowledge / "notes.txt", "no Markdown")

    assert not tick()


def test_a_missing_folder_is_an_error_of_the_tick_and_the_change_is_not_lost(tick: Tick, knowledge: Path) -> None:
    tick()
    knowledge.rename(knowledge.with_name("gone"))
    with pytest.raises(ConfigurationError, match="docs"):
        tick()
    knowledge.with_name("gone").rename(knowledge)
    (knowledge / REDIS).unlink()

    assert tick()


def test_the_sensor_waits_for_the_reindex_that_is_under_way(
    tick: Tick, knowledge: Path, instance: dg.DagsterInstance
) -> None:
    tick()

    @dg.job(name="reindex_job")
    def job() -> None: ...

    run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    (knowledge / REDIS).unlink()
    assert [tick(), tick()] == [False, False]

    instance.report_run_canceled(run)

    assert [tick(), tick()] == [True, False]


def test_nothing_starts_by_itself_before_the_switch_is_set() -> None:
    off, on = (
        AutomationSettings(),
        AutomationSettings(enabled=True, sensor_interval_s=5, weekly_rebuild_cron="5 4 * * 1"),
    )

    assert knowledge_sensor(off).default_status is dg.DefaultSensorStatus.STOPPED
    assert weekly_rebuild(off).default_status is dg.DefaultScheduleStatus.STOPPED
    assert knowledge_sensor(on).default_status is dg.DefaultSensorStatus.RUNNING
    assert knowledge_sensor(on).minimum_interval_seconds == 5
    assert weekly_rebuild(on).default_status is dg.DefaultScheduleStatus.RUNNING
    assert weekly_rebuild(on).cron_schedule == "5 4 * * 1"
