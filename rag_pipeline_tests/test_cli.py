"""The command: what it prints where, its exit codes, its start-up, and that the README names every part of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rag_pipeline.index import lite_server
from rag_pipeline_tests.command import run_in
from rag_pipeline_tests.conftest import PROJECT, write


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_models: tuple[Path, Path]) -> Iterator[Path]:
    """A project folder with a configuration file and an index."""
    home = tmp_path_factory.mktemp("project")
    write(home / "knowledge/cache/redis.md", "# Redis\n\nMemory is full.\n\n## Check\n\nRun `INFO`.\n")
    write(home / "knowledge/host/disk.md", "---\ntitle: 磁盘写满\n---\n# 磁盘\n\n清理日志。\n")
    write(
        home / "rag_pipeline.toml",
        f'[embedding]\nmodel = "{tiny_models[0]}"\n[chunking]\nsoft_tokens = 80\nhard_tokens = 120\n',
    )
    done = run_in(home, "reindex", "--json")
    assert done.returncode == 0, done.stderr
    yield home
    lite_server.stop(home / ".rag/milvus")


def test_reindex_prints_one_json_document_and_nothing_else(project: Path) -> None:
    done = run_in(project, "reindex", "--json")
    record = json.loads(done.stdout)
    assert (record["result"], record["documents"], record["embedded"], record["truncated"]) == ("unchanged", 2, 0, 0)
    assert record["gate"] == "none"


def test_everything_written_lies_in_the_state_folder(project: Path) -> None:
    assert sorted(path.name for path in project.iterdir()) == [".rag", "knowledge", "rag_pipeline.toml"]


def test_it_works_from_a_folder_below_the_project(project: Path) -> None:
    done = run_in(project / "knowledge" / "cache", "status", "--json")
    assert json.loads(done.stdout)["documents"] == 2


def test_status_from_copies_equals_the_live_one(project: Path) -> None:
    copies = json.loads(run_in(project, "status", "--json").stdout)
    live = json.loads(run_in(project, "status", "--live", "--json").stdout)
    assert (copies.pop("source"), live.pop("source")) == ("manifest copies", "store")
    assert (copies.pop("rows"), live.pop("rows")) == (None, live["chunks"])
    assert copies == live
    assert copies["gate"] == "none"
    assert copies["versions"][0]["standing"] == "promoted"


def test_search_finds_and_keeps_to_the_category(project: Path) -> None:
    by_path = {
        mode: json.loads(run_in(project, "search", "memory", "--json", "--top-k", "5", "--mode", mode).stdout)
        for mode in ("sdk", "spring-ai")
    }
    assert {mode: {item["score_label"] for item in found} for mode, found in by_path.items()} == {
        "sdk": {"l2_distance"},
        "spring-ai": {"similarity"},
    }
    found = by_path["sdk"]
    assert [item["rank"] for item in found] == [1, 2, 3]
    assert [item["id"] for item in found] == [item["id"] for item in by_path["spring-ai"]]
    assert all(item["raw_score"] == item["score"] for item in found)
    only = json.loads(run_in(project, "search", "memory", "--json", "--category", "host").stdout)
    assert {item["metadata"]["source"] for item in only} == {"host/disk.md"}
    assert "INFO" in run_in(project, "search", "Run INFO").stdout


def test_search_of_a_file_of_queries_writes_what_the_scorer_reads(
    project: Path, tmp_path: Path, data_dir: Path
) -> None:
    write(
        tmp_path / "set/queries.jsonl",
        '{"id": "q1", "query": "memory", "kind": "chat"}\n{"id": "q2", "query": "磁盘"}\n',
    )
    judged = ["query_id\tdoc\theading\tgrade", "q1\tcache/redis.md\t\t1", "q2\thost/disk.md\t磁盘\t1"]
    write(tmp_path / "set/qrels.tsv", "\n".join(judged))
    done = run_in(project, "search", "--queries", str(tmp_path / "set/queries.jsonl"), "--top-k", "3")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["id"] for line in lines] == ["q1", "q2"]
    assert [len(line["ranking"]) for line in lines] == [3, 1]  # 磁盘 names the category host alone
    assert set(lines[0]["ranking"][0]) == {"doc", "breadcrumb", "chunk_id", "score", "raw_score", "score_label"}
    write(tmp_path / "run.jsonl", done.stdout)
    scored = subprocess.run(
        [sys.executable, data_dir / "score.py", tmp_path / "run.jsonl", "--set", tmp_path / "set",
         "--queries", "queries.jsonl", "--qrels", "qrels.tsv"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert '"hit@5": 1.0' in scored.stdout, scored.stderr


def test_chunks_shows_spans_from_which_losslessness_can_be_checked(project: Path) -> None:
    file = project / "knowledge/cache/redis.md"
    chunks = [json.loads(line) for line in run_in(project, "chunks", str(file), "--json").stdout.splitlines()]
    text = file.read_text()
    covered = "\n".join(text[chunk["char_start"] : chunk["char_end"]] for chunk in chunks)
    assert covered.split() == text.split()
    assert [chunk["breadcrumb"] for chunk in chunks] == [["Redis"], ["Redis", "Check"]]
    assert "# Redis" in run_in(project, "chunks", str(file)).stdout


def test_settings_shows_where_each_value_comes_from_and_masks_secrets(project: Path) -> None:
    done = run_in(
        project, "settings", "--json", "--alias", "other",
        RAG_RETRIEVAL__MILVUS__TOKEN="root:hunter2", RAG_RETRIEVAL__TOP_K="7",
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert (rows["index.alias"]["value"], rows["index.alias"]["origin"]) == ("other", "command line")
    assert (rows["retrieval.top_k"]["value"], rows["retrieval.top_k"]["origin"]) == (
        7,
        "environment RAG_RETRIEVAL__TOP_K",
    )
    assert rows["chunking.soft_tokens"]["origin"].endswith("rag_pipeline.toml")
    assert rows["index.keep_versions"]["origin"] == "default"
    assert rows["retrieval.milvus.token"]["value"] == "********"
    assert "hunter2" not in done.stdout + done.stderr


def test_a_rollback_and_a_prune_work_on_a_base_given_by_flag(
    project: Path, tmp_path: Path, stop_lite: Callable[[Path], None]
) -> None:
    stop_lite(tmp_path / "state/milvus")
    write(tmp_path / "docs/a.md", "# A\n\nOne.\n")
    place = ("--state", str(tmp_path / "state"))
    first = json.loads(run_in(project, "reindex", "--knowledge", str(tmp_path / "docs"), *place, "--json").stdout)
    write(tmp_path / "docs/a.md", "# A\n\nTwo.\n")
    run_in(project, "reindex", "--knowledge", str(tmp_path / "docs"), *place)
    back = json.loads(run_in(project, "rollback", *place, "--json").stdout)
    assert back["promoted"] == first["collection"]
    held = run_in(project, "reindex", "--knowledge", str(tmp_path / "docs"), *place)
    assert (held.returncode, "was rolled back" in held.stderr) == (4, True)
    assert json.loads(run_in(project, "prune", *place, "--json").stdout) == {"dropped": []}
    assert json.loads(run_in(project, "status", *place, "--json").stdout)["roots"] == [str(tmp_path / "docs")]


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "said"),
    [
        (["reindex", "--no-such-flag"], {}, 2, "--no-such-flag"),
        (["nonsense"], {}, 2, "nonsense"),
        (["status", "--config", "absent.toml"], {}, 2, "absent.toml does not exist"),
        (["status"], {"RAG_RETRIEVAL__TOP_K": "many"}, 2, "RAG_RETRIEVAL__TOP_K"),
        (["status"], {"RAG_RETRIEVAL__TOP": "1"}, 2, "Setting retrieval.top from environment RAG_RETRIEVAL__TOP"),
        (["status", "--alias", "no-dash"], {}, 2, "index.alias"),
        (["search"], {}, 2, "Give a query"),
        (["search", "--queries", "absent.jsonl"], {}, 2, "absent.jsonl"),
        (["reindex", "--knowledge", "absent"], {}, 4, "holds another knowledge base"),
        (["search", "x", "--alias", "unused"], {}, 3, "No version is promoted"),
        (["search", "x"], {"RAG_RETRIEVAL__MILVUS__URI": "http://127.0.0.1:9"}, 3, "does not answer"),
        (["reindex", "--full"], {"RAG_EMBEDDING__MODEL": "bundled:unknown"}, 2, "bundled:unknown"),
        (["reindex", "--full"], {"RAG_EMBEDDING__MODEL": "no/such-model"}, 3, "no/such-model"),
        (["rollback"], {}, 4, "No earlier version"),
        (["rollback", "--to", "\x1b[31mred"], {}, 4, "No version \ufffd[31mred"),
        (["reindex"], {"RAG_KNOWLEDGE__ROOTS": ""}, 2, "names no folder"),
        (["reindex"], {"RAG_KNOWLEDGE__ROOTS": "knowledge:"}, 2, "names no folder"),
        (["up", "kafka"], {}, 2, "no part kafka"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_fault_is_one_message_with_its_exit_code(
    project: Path, arguments: list[str], environment: dict[str, str], code: int, said: str
) -> None:
    done = run_in(project, *arguments, **environment, HF_HUB_OFFLINE="1")
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "codes", "said"),
    [
        (["--state", "FILE"], {}, (3,), "/FILE"),
        (["--state", "FILE/below"], {}, (3,), "/FILE"),
        (["--knowledge", "x" * 5000], {}, (2,), "File name too long"),
        ([], {"RAG_INDEX__ARTIFACTS_URI": "foo://x"}, (2,), "index.artifacts_uri from environment"),
        ([], {"RAG_INDEX__ARTIFACTS_URI": "s3://key:hunter2@bucket/x"}, (2, 3), "index.artifacts_uri"),
        ([], {"RAG_INDEX__ARTIFACTS_URI": "FILE/below"}, (2, 3), "/FILE"),
        ([], {"RAG_CONFIG": "absent.toml"}, (2,), "named by RAG_CONFIG"),
        ([], {"RAG_INDEX__TAKE_OVER": "1"}, (2,), "--take-over"),
    ],
    ids=["state is a file", "state below a file", "long name", "foo", "s3", "artefacts below a file", "config", "once"],
)
def test_a_place_that_cannot_be_used_is_one_message(
    project: Path, tmp_path: Path, stop_lite: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], environment: dict[str, str], codes: tuple[int, ...], said: str,
) -> None:  # fmt: skip
    stop_lite(tmp_path / "state/milvus")
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if the extra were not installed; nothing goes to a network
    write(tmp_path / "FILE", "in the way")
    arguments = [item.replace("FILE", str(tmp_path / "FILE")) for item in arguments]
    environment = {name: value.replace("FILE", str(tmp_path / "FILE")) for name, value in environment.items()}
    if "--state" not in arguments:
        arguments += ["--state", str(tmp_path / "state")]
    done = run_in(project, "reindex", *arguments, **environment)
    assert (done.returncode in codes, done.stdout) == (True, ""), done.stderr
    assert done.stderr.count("rag-pipeline: ") == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr


def test_a_full_disk_is_one_message_with_the_state_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, live: bool) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rag_pipeline.console.status_record", full)
    done = run_in(project, "status", "--state", str(tmp_path / "state"))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"rag-pipeline: state folder {tmp_path / 'state'}: No space left on device. ")
    assert done.stderr.count("\n") == 1


def test_no_command_shows_the_password_of_a_uri(project: Path) -> None:
    uri = {"RAG_RETRIEVAL__MILVUS__URI": "http://root:hunter2@127.0.0.1:9"}
    for command in (["settings"], ["settings", "--json"], ["status"], ["search", "x"], ["doctor"]):
        done = run_in(project, *command, **uri, RAG_RETRIEVAL__MILVUS__TIMEOUT_S="1")
        assert "hunter2" not in done.stdout + done.stderr
        assert "127.0.0.1:9" in done.stdout + done.stderr


def test_a_broken_queries_line_is_named(project: Path, tmp_path: Path) -> None:
    write(tmp_path / "q.jsonl", '{"id": "a", "query": "x"}\n{"id": "b"}\n')
    done = run_in(project, "search", "--queries", str(tmp_path / "q.jsonl"))
    assert (done.returncode, "q.jsonl, line 2" in done.stderr) == (2, True)


def test_a_broken_configuration_file_is_named(project: Path, tmp_path: Path) -> None:
    write(tmp_path / "bad.toml", "[index\n")
    done = run_in(project, "status", "--config", str(tmp_path / "bad.toml"))
    assert (done.returncode, "bad.toml cannot be read" in done.stderr) == (2, True)
    write(tmp_path / "odd.toml", "[index]\nkeep_versions = 0\nodd = 1\n")
    done = run_in(project, "status", "--config", str(tmp_path / "odd.toml"))
    assert done.returncode == 2
    assert re.search(r"Setting index\.keep_versions from .*odd\.toml", done.stderr)
    assert "Setting index.odd" in done.stderr


def test_hostile_content_does_not_reach_the_terminal(project: Path, tmp_path: Path) -> None:
    write(tmp_path / "hostile.md", "# Title \x1b]0;owned\x07\n\nred \x1b[31m text \u202e reversed\n")
    shown = run_in(project, "chunks", str(tmp_path / "hostile.md")).stdout
    assert not set(shown) & {"\x1b", "\x07", "\u202e"}
    assert "owned" in shown


def test_up_doctor_down(project: Path) -> None:
    started = run_in(project, "up", "milvus")
    assert (started.returncode, started.stdout.startswith("milvus: unix:")) == (0, True)
    pid = int(started.stdout.split("process ")[1])
    healthy = run_in(project, "doctor", "--json")
    assert (healthy.returncode, [item["name"] for item in json.loads(healthy.stdout) if not item["ok"]]) == (0, [])
    assert run_in(project, "up", "milvus").stdout == started.stdout
    os.kill(pid, signal.SIGKILL)
    while (server := lite_server.running(project / ".rag/milvus")) and server.pid == pid:
        time.sleep(0.05)
    again = run_in(project, "up", "milvus").stdout
    assert again != started.stdout
    stopped = run_in(project, "down")
    assert f"milvus: stopped process {again.split('process ')[1].strip()}" in stopped.stdout
    assert lite_server.running(project / ".rag/milvus") is None
    assert "was not running" in run_in(project, "down", "milvus").stdout


def test_doctor_says_what_to_do(project: Path, tmp_path: Path) -> None:
    sick = run_in(project, "doctor", "--state", str(tmp_path / "new"), RAG_RETRIEVAL__MILVUS__URI="http://127.0.0.1:9")
    assert sick.returncode == 3
    assert "FAIL  store: Milvus at http://127.0.0.1:9 does not answer" in sick.stdout


def test_doctor_says_who_holds_the_locks(project: Path) -> None:
    def locks() -> str:
        found = json.loads(run_in(project, "doctor", "--json").stdout)
        return str(next(item["text"] for item in found if item["name"] == "locks"))

    run_in(project, "status", "--live")
    assert "nobody holds the write lock of the alias 'knowledge'" in locks()
    assert f"process {lite_server.running(project / '.rag/milvus').pid} serves Milvus Lite" in locks()
    script = (
        "import sys; from pathlib import Path\n"
        "from rag_pipeline.settings import load_settings; from rag_pipeline.workspace import Workspace\n"
        "with Workspace(load_settings(project_root=Path(sys.argv[1]))).writing(): print('held', flush=True); input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, project], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        said = locks()
        holder.communicate("\n")
    assert f"Process {holder.pid} (" in said
    assert "If it hangs, end that process" in said
    lite_server.stop(project / ".rag/milvus")
    assert "no process serves Milvus Lite" in locks()


def test_dagster_is_started_with_these_settings_and_the_name_of_the_project(project: Path, tmp_path: Path) -> None:
    import tomllib

    import yaml

    from rag_pipeline import local_stack
    from rag_pipeline.settings import load_settings
    from rag_pipeline.workspace import Workspace

    write(tmp_path / "own.toml", "")
    ws = Workspace(load_settings(tmp_path / "own.toml", flags={"state_dir": tmp_path / "s", "index.alias": "own"}))
    environment = local_stack._dagster_environment(ws)
    home = tmp_path / "s/dagster"
    assert {name: environment.get(name) for name in ("DAGSTER_HOME", "RAG_CONFIG", "RAG_STATE_DIR")} == {
        "DAGSTER_HOME": str(home), "RAG_CONFIG": str(tmp_path / "own.toml"), "RAG_STATE_DIR": str(tmp_path / "s"),
    }  # fmt: skip
    assert environment["RAG_INDEX__ALIAS"] == "own"
    assert "RAG_CONFIG" not in local_stack._dagster_environment(Workspace(load_settings(project_root=tmp_path)))
    (location,) = yaml.safe_load(local_stack._dagster_workspace(ws).read_text())["load_from"]
    (shipped,) = yaml.safe_load((PROJECT / "workspace.yaml").read_text())["load_from"]
    names = {location["python_module"]["location_name"], shipped["python_module"]["location_name"]}
    names.add(tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["dagster"]["code_location_name"])
    assert names == {"rag_pipeline"}
    assert location["python_module"]["working_directory"] == str(tmp_path)
    assert yaml.safe_load((home / "dagster.yaml").read_text()) == {
        "telemetry": {"enabled": False},
        "nux": {"enabled": False},
    }


def test_the_makefile_gets_the_home_of_dagster_from_the_same_function(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "rag_pipeline.local_stack"]
    for _ in range(2):
        done = subprocess.run([*module, tmp_path / "s"], capture_output=True, text=True, check=True)
        assert done.stdout == f"{tmp_path / 's/dagster'}\n"
        write(tmp_path / "s/dagster/dagster.yaml", "telemetry:\n  enabled: true\n")
    assert "enabled: true" in (tmp_path / "s/dagster/dagster.yaml").read_text()
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    assert "dagster.yaml" not in makefile
    assert "-m rag_pipeline.local_stack" in makefile


@pytest.mark.parametrize("gone", [False, True], ids=["a zombie", "reaped already"])
def test_a_dagster_that_ends_at_once_is_named_with_its_log(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    monkeypatch.setattr("rag_pipeline.local_stack.sys.executable", "/bin/false")
    if gone:

        def no_such(pid: int) -> object:
            raise psutil.NoSuchProcess(pid)

        monkeypatch.setattr(psutil, "Process", no_such)
    done = run_in(project, "up", "dagster", "--state", str(tmp_path / "s"))
    assert (done.returncode, done.stdout) == (3, "")
    assert re.search(r"^rag-pipeline: Dagster .*ended.*dagster/webserver\.log\.$", done.stderr)
    monkeypatch.undo()
    assert "was not running" in run_in(project, "down", "dagster", "--state", str(tmp_path / "s")).stdout


@pytest.mark.slow
def test_up_dagster_serves_the_location_of_the_project(project: Path) -> None:
    import urllib.request

    started = run_in(project, "up", "dagster", "--config", "rag_pipeline.toml")
    try:
        address = re.search(r"http://\S+(?=,)", started.stdout)
        assert address, started.stderr
        query = (
            "{workspaceOrError {... on Workspace {locationEntries {name loadStatus locationOrLoadError {__typename}}}}}"
        )
        request = urllib.request.Request(
            f"{address[0]}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            (entry,) = json.load(answer)["data"]["workspaceOrError"]["locationEntries"]
        assert entry["name"] == "rag_pipeline"
        assert entry["locationOrLoadError"]["__typename"] == "RepositoryLocation"
    finally:
        stopped = run_in(project, "down", "dagster")
    assert "dagster: stopped process" in stopped.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["reindex", "--help"]])
def test_start_up_is_quick_since_heavy_libraries_stay_out(project: Path, arguments: list[str]) -> None:
    script = (
        "import sys; sys.argv = ['rag-pipeline', *sys.argv[1:]]\n"
        "from rag_pipeline.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'pymilvus', 'dagster', 'great_expectations', 'sentence_transformers', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=project, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_fault_in_a_process_of_its_own_is_one_line_too(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rag_pipeline.cli", "status", "--config", "absent.toml"],
        cwd=project, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"rag-pipeline: The configuration file .*absent\.toml does not exist\.\n", done.stderr)


def test_progress_goes_to_standard_error_only_on_a_terminal(project: Path) -> None:
    done = run_in(project, "reindex", "--full", "--json")
    assert json.loads(done.stdout)["result"] == "promoted"
    assert "\x1b" not in done.stderr


def commands() -> dict[str, set[str]]:
    import typer.main

    from rag_pipeline.cli import app

    found: dict[str, set[str]] = {}

    def collect(group: object, prefix: str) -> None:
        for name, command in group.commands.items():  # type: ignore[attr-defined]
            if hasattr(command, "commands"):
                collect(command, f"{prefix}{name} ")
            else:
                options = {option for parameter in command.params for option in parameter.opts}
                found[f"{prefix}{name}"] = {option for option in options if option.startswith("--")}

    collect(typer.main.get_command(app), "")
    return found


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_readme_names_every_command_and_option(name: str) -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert f"rag-pipeline {name}" in readme
    common = {"--alias", "--state", "--config", "--json"}
    for option in commands()[name] | common:
        assert option in readme, f"{option} of {name} is not in the README"


def test_the_readme_names_every_setting() -> None:
    from rag_pipeline.settings import load_settings

    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    missing = [name for name, _, _ in load_settings(project_root=PROJECT).effective() if f"`{name}`" not in readme]
    assert missing == []


def test_no_server_of_these_tests_is_left(project: Path) -> None:
    lite_server.stop(project / ".rag/milvus")
    time.sleep(0.2)
    left = [p.pid for p in psutil.process_iter() if str(project) in " ".join(_cmdline(p))]
    assert left == []


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("address", ['{"pid": -5, "created": 1.0, "port": 1}', '{"pid": "a"}', "[]", "{garbled"])
def test_a_garbled_address_of_the_web_server_names_no_process(project: Path, address: str) -> None:
    write(project / ".rag/dagster/webserver.json", address)
    done = run_in(project, "down", "dagster")
    assert (done.returncode, done.stdout) == (0, "dagster: was not running\n")
