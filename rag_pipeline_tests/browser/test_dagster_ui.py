"""What a data engineer sees: the graph, what changed, the chunk sizes, and the name of the check that failed.

With the variable SCREENSHOTS set to a folder, each page is kept there as a picture.
"""

from pathlib import Path
from typing import Any

import pytest

from rag_pipeline_tests.browser.conftest import Pages, dagster_dev
from rag_pipeline_tests.conftest import write

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]
GRAPH = "/locations/rag_pipeline/asset-groups/knowledge/lineage"
ASSETS = (
    "raw_documents", "chunks", "knowledge_index", "breadcrumb_embeddings", "milvus_collection", "promoted_collection",
)  # fmt: skip


def test_from_a_failed_check_to_a_promoted_version(tmp_path: Path, tiny_models: tuple[Path, Path], driver: Any) -> None:
    knowledge = tmp_path / "docs"
    knowledge.mkdir()
    (knowledge / "broken.md").write_bytes(bytes(range(128, 256)) * 20)
    places = {"knowledge": knowledge, "state": tmp_path / "state", "model": tiny_models[0]}
    with dagster_dev(tmp_path / "dagster", **places) as dagster:
        pages = Pages(driver, dagster.url)
        driver.get_log("browser")

        assert dagster.end_of(dagster.launch("reindex_job")) == "FAILURE"
        text = pages.open("/assets/raw_documents?view=checks&checkDetail=documents_present", expect="Checks (4)")
        assert "documents_present" in text
        pages.wait_for("This is a blocking asset check.")
        pages.wait_for("Every file was rejected")
        pages.wait_for("Failed")
        pages.shoot("failed_check")
        pages.open(f"/runs/{dagster.run_number(1)}", expect="documents_present")
        pages.shoot("failed_run")

        (knowledge / "broken.md").unlink()
        for number in range(4):
            write(
                knowledge / f"cache/redis-{number}.md", f"# Redis {number}\n\nEvictions.\n\n## Check\n\nRun `INFO`.\n"
            )
        text = pages.open(GRAPH, expect="promoted_collection")
        assert all(asset in text for asset in ASSETS)
        pages.click("Materialize all")
        assert dagster.end_of(dagster.run_number(2)) == "SUCCESS"
        text = pages.open(GRAPH, expect="6 / 6 Passed")
        assert "2 / 2 Passed" in text
        pages.shoot("asset_graph")

        write(knowledge / "cache/redis-0.md", "# Redis 0\n\nEdited.\n")
        (knowledge / "cache/redis-1.md").rename(knowledge / "cache/renamed.md")
        (knowledge / "cache/redis-2.md").unlink()
        write(knowledge / "cache/new.md", "---\ntitle: [\n---\n# New\n\nAdded.\n")
        assert dagster.end_of(dagster.launch("reindex_job")) == "SUCCESS"

        text = pages.open("/assets/raw_documents?view=events", expect="changes")
        pages.wait_for("cache/redis-1.md → cache/renamed.md")
        for kind, source in (("added", "new"), ("edited", "redis-0"), ("removed", "redis-2")):
            assert f"{kind} (1)" in pages.text()
            assert f"cache/{source}.md" in pages.text()
        assert "front matter" in pages.text()  # the fault in new.md, in the table of issues
        pages.shoot("raw_documents")

        text = pages.open("/assets/chunks?view=events", expect="slowest_documents")
        assert "cache/renamed.md" in text
        pages.click("[Show Markdown]")
        pages.wait_for("Close")
        picture = "document.querySelector('img[alt=\"chunk sizes in tokens\"]')"
        assert pages.script(f"return {picture}.naturalWidth") == 640
        pages.shoot("chunks")

        pages.open("/assets/breadcrumb_embeddings", expect="re_embedded")
        pages.shoot("breadcrumb_embeddings")
        pages.open("/assets/promoted_collection", expect="moved")
        pages.shoot("promoted_collection")
        text = pages.open("/automation", expect="knowledge_sensor")
        assert "weekly_rebuild" in text
        pages.shoot("automation")
        assert pages.errors() == []


def test_the_workspace_file_gives_the_same_place_and_one_setting_starts_the_sensor(
    tmp_path: Path, tiny_models: tuple[Path, Path], driver: Any
) -> None:
    write(tmp_path / "docs/redis.md", "# Redis\n\nEvictions.\n")
    places = {"knowledge": tmp_path / "docs", "state": tmp_path / "state", "model": tiny_models[0]}
    switch = {"RAG_AUTOMATION__ENABLED": "true", "RAG_AUTOMATION__SENSOR_INTERVAL_S": "5"}
    with dagster_dev(tmp_path / "dagster", "-w", "workspace.yaml", **places, **switch) as dagster:
        assert dagster.end_of(dagster.run_number(1)) == "SUCCESS"
        write(tmp_path / "docs/mysql.md", "# MySQL\n\nReplication lag.\n")
        assert dagster.end_of(dagster.run_number(2)) == "SUCCESS"

        pages = Pages(driver, dagster.url)
        driver.get_log("browser")
        text = pages.open(GRAPH, expect="promoted_collection")
        assert all(asset in text for asset in ASSETS)
        pages.open("/assets/raw_documents?view=events", expect="mysql.md")
        assert pages.errors() == []
