"""The commands that look knowledge up and show what was recorded: output, exit codes, messages."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_pipeline.index import lite_server
from rag_pipeline_tests.command import run_in
from rag_pipeline_tests.conftest import write


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_models: tuple[Path, Path]) -> Iterator[Path]:
    """A project whose model knows nothing, so every candidate counts as evidence."""
    home = tmp_path_factory.mktemp("lookups")
    write(home / "knowledge/cache/redis.md", "---\nalerts: [RedisDown]\n---\n# Redis\n\nMemory is full.\n")
    write(home / "knowledge/host/evil.md", "# Title \x1b[31mred\n\n```\nclear\x1b[2J\n```\n")
    write(
        home / "rag_pipeline.toml",
        f'[embedding]\nmodel = "{tiny_models[0]}"\n[chunking]\nsoft_tokens = 80\nhard_tokens = 120\n'
        "[retrieval.normalization]\nreference_threshold = 0.0\n[retrieval.session]\ntimeout_ms = 5000\n",
    )
    done = run_in(home, "reindex")
    assert done.returncode == 0, done.stderr
    yield home
    lite_server.stop(home / ".rag/milvus")


def test_a_lookup_is_readable_and_as_json_the_wire_contract_alone(project: Path) -> None:
    shown = run_in(project, "lookup", "memory is full")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("evidence")
    assert "[1] " in shown.stdout
    assert "cache/redis.md:" in shown.stdout
    assert "\x1b" not in shown.stdout  # no colours off a terminal, and none from a document
    wire = json.loads(run_in(project, "lookup", "memory is full", "--json").stdout)
    assert wire["found"] is True
    assert wire["evidenceStatus"] == "evidence"


def test_a_session_and_a_payload(project: Path, tmp_path: Path) -> None:
    write(tmp_path / "alert.json", '{"alertName": "RedisDown", "service": "cart", "summary": "memory is full"}')
    arguments = ("lookup", "--payload", str(tmp_path / "alert.json"), "--session", "cli-1", "--json")
    first, second = (json.loads(run_in(project, *arguments).stdout) for _ in range(2))
    assert (first["evidenceStatus"], second["evidenceStatus"]) == ("evidence", "already_provided")
    listed = [json.loads(line) for line in run_in(project, "invocations", "list", "--session", "cli-1", "--json")
              .stdout.splitlines()]  # fmt: skip
    assert [row["id"] for row in listed] == [item["retrievalTrace"]["invocationId"] for item in (second, first)]
    assert listed[0]["input_params"]["payload"]["alert_name"] == "RedisDown"
    assert "retrieval_details" not in listed[0]


def test_a_recorded_lookup_is_shown_and_replayed(project: Path) -> None:
    wire = json.loads(run_in(project, "lookup", "RedisDown memory", "--json").stdout)
    key = wire["retrievalTrace"]["invocationId"]
    listed = run_in(project, "invocations", "list", "--limit", "1").stdout
    assert key in listed
    assert "RedisDown memory" in listed
    shown = run_in(project, "invocations", "show", key)
    for part in ("RedisDown memory", "attempt ", "rerank", "time spent", wire["retrievalTrace"]["collection"]):
        assert part in shown.stdout
    record = json.loads(run_in(project, "invocations", "show", key, "--json").stdout)
    assert record["retrieval_details"]["query_transform"]["l0"]["matched_keywords"] == ["RedisDown"]
    again = run_in(project, "replay", key)
    assert again.returncode == 0, again.stderr
    assert "The same answer as on" in again.stdout
    replayed = json.loads(run_in(project, "replay", key, "--json").stdout)
    assert (replayed["same"], replayed["result"]["evidenceBlocks"]) == (True, wire["evidenceBlocks"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("lookup",), 2, "Give a query, or --payload"),
        (("lookup", "x", "--payload", "y"), 2, "not both"),
        (("lookup", "--payload", "absent.json"), 2, "The alert payload in absent.json cannot be read"),
        (("lookup", "--payload", "broken.json"), 2, "cannot be read"),
        (("lookup", "--payload", "deep.json"), 2, "cannot be read"),
        (("search", "--queries", "deep.json"), 2, "line 1: expected an object"),
        (("lookup", "--payload", "list.json"), 2, "is no JSON object"),
        (("lookup", "--payload", "empty.json"), 2, "no field to search for"),
        (("invocations", "show", "ffffffffff"), 2, "There is no recorded lookup ffffffffff"),
        (("replay", "ffffffffff"), 2, "There is no recorded lookup"),
        (("search", "x", "--mode", "telepathy"), 2, "retrieval.vector_store.mode"),
        (("lookup", "x", "--state", "elsewhere"), 3, "There is no index in the state folder"),
        (("invocations", "list", "--state", "elsewhere"), 3, "There is no database yet"),
    ],
)
def test_wrong_usage_and_what_is_missing(project: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    for name, text in (("broken", "{"), ("list", "[1]"), ("empty", "{}"), ("deep", "[" * 200_000)):
        write(project / f"{name}.json", text)
    done = run_in(project, *arguments)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    for name in ("broken", "list", "empty", "deep"):
        (project / f"{name}.json").unlink()


def test_a_degraded_lookup_still_prints_its_json(project: Path, tmp_path: Path) -> None:
    done = run_in(project, "lookup", "x", "--json", "--state", str(tmp_path / "none"))
    assert done.returncode == 3
    assert json.loads(done.stdout)["evidenceStatus"] == "retrieval_unavailable"


def test_a_replay_that_differs_ends_with_1(project: Path) -> None:
    from rag_pipeline.invocations.database import Database
    from rag_pipeline.setting_groups import DatabaseSettings

    wire = json.loads(run_in(project, "lookup", "another query", "--json").stdout)
    key = wire["retrievalTrace"]["invocationId"]
    import sqlite3

    database = Database(DatabaseSettings(), state=project / ".rag")
    assert database.ready()
    with sqlite3.connect(project / ".rag/invocations.db") as connection:
        (details,) = connection.execute("select retrieval_details from tool_invocation where id = ?", (key,)).fetchone()
        values = json.loads(details)
        values["evidence_blocks"] = values["evidence_blocks"][:0]
        values["result_digest"] = "0" * 64
        connection.execute("update tool_invocation set retrieval_details = ? where id = ?", (json.dumps(values), key))
    connection.close()
    done = run_in(project, "replay", key)
    assert done.returncode == 1
    assert "is not the one that was recorded: evidence blocks" in done.stderr


def test_a_record_that_cannot_be_read_hides_no_other(project: Path, tmp_path: Path) -> None:
    import sqlite3

    from rag_pipeline.invocations.store import InvocationStore
    from rag_pipeline_tests.invocations.samples import invocation, open_database

    state = tmp_path / "state"
    database = open_database(state)
    database.upgrade()
    bad, odd, good = (
        invocation(),
        invocation(retrieval_details={"query_transform": 1, "retrieval_trace": []}),
        invocation(),
    )
    InvocationStore(database).insert([bad, odd, good])
    with sqlite3.connect(state / "invocations.db") as connection:
        connection.execute("UPDATE tool_invocation SET retrieval_details = '{not json' WHERE id = ?", (bad.id,))
    connection.close()
    listed = run_in(project, "invocations", "list", "--state", str(state))
    assert listed.returncode == 0, listed.stderr
    assert all(item.id in listed.stdout for item in (bad, odd, good))
    for item in (bad, odd):
        shown = run_in(project, "invocations", "show", item.id, "--state", str(state))
        assert shown.returncode == 0, shown.stderr
        assert "cannot be read, and is left out" in " ".join(shown.stdout.split())
    replayed = run_in(project, "replay", bad.id, "--state", str(state))
    assert replayed.returncode == 2
    assert "retrieval_details" in replayed.stderr
    assert "Traceback" not in replayed.stderr
    record = json.loads(run_in(project, "invocations", "show", bad.id, "--json", "--state", str(state)).stdout)
    assert (record["retrieval_details"], record["unreadable"]) == ({}, ["retrieval_details"])


def test_records_are_found_by_a_session_that_is_stored_as_its_digest(project: Path) -> None:
    wire = json.loads(run_in(project, "lookup", "RedisDown", "--session", "token=hunter2", "--json").stdout)
    listed = run_in(project, "invocations", "list", "--session", "token=hunter2").stdout
    assert wire["retrievalTrace"]["invocationId"] in listed
    assert listed.count("RedisDown") == 1


@pytest.mark.parametrize("arguments", [("invocations", "list"), ("db", "upgrade")])
@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("mysql://me:hunter2@a..b/d", 2),
        ("mysql://me:hunter2@127.0.0.1:9/d?foo=bar", 2),
        ("mysql://me:hunter2@127.0.0.1:9/d?ssl_ca=/nowhere", 3),
        ("sqlite:////tmp/a%00b", 2),
        ("nonsense", 2),
    ],
)
def test_a_wrong_database_url_ends_in_a_message(project: Path, arguments: tuple[str, ...], url: str, code: int) -> None:
    done = run_in(project, *arguments, RAG_DATABASE__URL=url)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr
    assert "********" not in done.stderr


def test_the_database_is_made_by_a_command_too(project: Path, tmp_path: Path) -> None:
    first, second = (run_in(project, "db", "upgrade", "--json", "--state", str(tmp_path / "new")) for _ in range(2))
    assert json.loads(first.stdout)["applied"] != []
    assert json.loads(second.stdout)["applied"] == []
    wrong = run_in(project, "db", "upgrade", RAG_DATABASE__URL="postgresql://me:hunter2@127.0.0.1:9/none")
    assert wrong.returncode == 3
    assert "hunter2" not in wrong.stderr + wrong.stdout


@pytest.mark.slow
@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_stop_no_lookup(project: Path, closing: str) -> None:
    command = f"{sys.executable} -m rag_pipeline.cli lookup 'memory is full' {closing}"
    done = subprocess.run(["bash", "-c", command], cwd=project, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert ("[1] " in done.stdout) is (closing == "2>&-")


@pytest.mark.slow
def test_output_that_cannot_hold_chinese_stops_no_lookup(project: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "rag_pipeline.cli", "lookup", "内存"],
        cwd=project, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "[1] " in done.stdout) == (0, True), done.stderr
