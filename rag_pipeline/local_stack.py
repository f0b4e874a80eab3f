"""The local stack (`up`, `down`), and `doctor`, which says what is wrong with it.

``python -m rag_pipeline.local_stack STATE`` makes Dagster's home in a state folder and prints it, for the Makefile.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rag_pipeline.errors import ConfigurationError, RagPipelineError, RefusedError, UnavailableError
from rag_pipeline.index import lite_server
from rag_pipeline.settings import CONFIG_VARIABLE, masked
from rag_pipeline.workspace import Workspace

PARTS = ("milvus", "dagster")
_DAGSTER_PORT = 3000
_DAGSTER_LIMIT_S = 120.0
_FREE_BYTES = 500 * 2**20
_DAGSTER_YAML = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `doctor` looked at; ``text`` says what to do when it is not ``ok``."""

    name: str
    ok: bool
    text: str


def _chosen(parts: Sequence[str]) -> list[str]:
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigurationError(f"There is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}.")
    return [part for part in PARTS if part in parts or not parts]


def up(ws: Workspace, parts: Sequence[str]) -> Iterator[str]:
    """Start parts (default: all) and leave them running; yields a line each, with its address.

    Raises:
        UnavailableError: A part did not start; the message says which and where its log is.
    """
    for part in _chosen(parts):
        yield _up_milvus(ws) if part == "milvus" else _up_dagster(ws)


def down(ws: Workspace, parts: Sequence[str]) -> Iterator[str]:
    """Stop parts (default: all) by their pid; yields a line each."""
    for part in reversed(_chosen(parts)):
        yield _down_milvus(ws) if part == "milvus" else _down_dagster(ws)


def _up_milvus(ws: Workspace) -> str:
    if not ws.store.is_lite:
        return f"milvus: {masked(ws.store.description)}, version {ws.store.check()} (not started by this command)"
    lite_server.keep_running(ws.lite_folder, keep=True)
    server = lite_server.attach(ws.lite_folder, idle_s=ws.settings.retrieval.milvus.lite_idle_s)
    return f"milvus: {server.uri}, process {server.pid}"


def _down_milvus(ws: Workspace) -> str:
    if not ws.store.is_lite:
        return f"milvus: {masked(ws.store.description)} was not started by this command and is left alone"
    lite_server.keep_running(ws.lite_folder, keep=False)
    server = lite_server.stop(ws.lite_folder)
    return f"milvus: stopped process {server.pid}" if server else "milvus: was not running"


def dagster_home(state: Path) -> Path:
    """Dagster's home in a state folder, made with its configuration when absent."""
    home = state / "dagster"
    home.mkdir(parents=True, exist_ok=True)
    config = home / "dagster.yaml"
    if not config.exists():
        config.write_text(_DAGSTER_YAML, encoding="utf-8")
    return home


def _dagster_workspace(ws: Workspace) -> Path:
    """The workspace file of `up`; its location has the name that ``workspace.yaml`` and ``pyproject.toml`` give it.

    Dagster keeps the state of a sensor by the name of its location, so that it is the same one under `make dev`.
    """
    import yaml

    location = {
        "module_name": "rag_pipeline.definitions",
        "working_directory": str(ws.settings.project_root),
        "location_name": "rag_pipeline",
    }
    file = dagster_home(ws.state) / "workspace.yaml"
    file.write_text(yaml.safe_dump({"load_from": [{"python_module": location}]}, sort_keys=False), encoding="utf-8")
    return file


def _dagster_environment(ws: Workspace) -> dict[str, str]:
    """The environment in which Dagster reads the settings of this workspace."""
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(dagster_home(ws.state)),
        "RAG_STATE_DIR": str(ws.state),
        "RAG_INDEX__ALIAS": ws.settings.index.alias,
    }
    if ws.settings.config:
        environment[CONFIG_VARIABLE] = str(ws.settings.config)
    return environment


def _dagster_address(ws: Workspace) -> Path:
    return ws.state / "dagster" / "webserver.json"


def _up_dagster(ws: Workspace) -> str:
    import psutil

    address = _dagster_address(ws)
    if running := _dagster_process(address):
        return f"dagster: http://127.0.0.1:{running[1]}, process {running[0]}"
    port = _free_port(_DAGSTER_PORT)
    log = dagster_home(ws.state) / "webserver.log"
    with log.open("ab") as out:
        child = subprocess.Popen(
            [
                sys.executable, "-m", "dagster", "dev", "-w", str(_dagster_workspace(ws)), "-h", "127.0.0.1",
                "-p", str(port),
            ],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            cwd=ws.settings.project_root, env=_dagster_environment(ws),
        )  # fmt: skip
    try:
        created = psutil.Process(child.pid).create_time()
    except psutil.Error:
        raise UnavailableError(f"Dagster ended as soon as it was started; its log is {log}.") from None
    address.write_text(json.dumps({"pid": child.pid, "created": created, "port": port}), encoding="utf-8")
    deadline = time.monotonic() + _DAGSTER_LIMIT_S
    while time.monotonic() < deadline and child.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return f"dagster: http://127.0.0.1:{port}, process {child.pid}"
        time.sleep(0.3)
    ended = child.poll()
    _down_dagster(ws)
    how = f"did not serve within {_DAGSTER_LIMIT_S:.0f} s" if ended is None else f"ended with exit code {ended}"
    raise UnavailableError(f"Dagster was started on port {port} and {how}; its log is {log}.")


def _down_dagster(ws: Workspace) -> str:
    import psutil

    address = _dagster_address(ws)
    running = _dagster_process(address)
    address.unlink(missing_ok=True)
    if running is None:
        return "dagster: was not running"
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
        family = psutil.Process(running[0])
        members = [*family.children(recursive=True), family]
        family.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(members, timeout=20)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
    return f"dagster: stopped process {running[0]}"


def _dagster_process(address: Path) -> tuple[int, int] | None:
    """Pid and port of the web server that `up` started, if that very process still lives."""
    try:
        values = json.loads(address.read_text(encoding="utf-8"))
        pid, created, port = values["pid"], values["created"], values["port"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (pid, port) if lite_server.process_lives(pid, created) else None


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise UnavailableError("No free port on 127.0.0.1.")


def diagnose(ws: Workspace) -> list[Finding]:
    """Look at everything a command needs; a look that fails says what to do."""
    looks: tuple[tuple[str, Callable[[Workspace], str]], ...] = (
        ("versions", _versions),
        ("state folder", _state_folder),
        ("locks", _locks),
        ("knowledge", _knowledge),
        ("model", _model),
        ("store", _store),
        ("promoted version", _promoted),
        ("records of lookups", _records),
    )
    findings = []
    for name, look in looks:
        try:
            findings.append(Finding(name, ok=True, text=masked(look(ws))))
        except (RagPipelineError, OSError) as error:
            findings.append(Finding(name, ok=False, text=masked(str(error))))
    return findings


def _versions(_ws: Workspace) -> str:
    from importlib.metadata import PackageNotFoundError, version

    names = (
        "dagster", "pymilvus", "milvus-lite", "langchain-milvus", "sentence-transformers", "torch", "markdown-it-py",
        "pandas", "sqlalchemy",
    )  # fmt: skip
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            raise UnavailableError(f"The package {name} is not installed; `make setup` installs it.") from None
    return f"Python {sys.version.split()[0]}, {', '.join(found)}"


def _state_folder(ws: Workspace) -> str:
    ws.state.mkdir(parents=True, exist_ok=True)
    probe = ws.state / f".probe-{os.getpid()}"
    probe.write_bytes(b"x")
    probe.unlink()
    free = shutil.disk_usage(ws.state).free
    if free < _FREE_BYTES:
        raise UnavailableError(
            f"Only {free / 2**20:.0f} MiB are free where {ws.state} lies; a reindex wants {_FREE_BYTES / 2**20:.0f}. "
            "Free some space, or set state_dir to another disk."
        )
    return f"{ws.state}, writable, {free / 2**30:.1f} GiB free"


def _locks(ws: Workspace) -> str:
    try:
        with ws.writing():
            writer = f"nobody holds the write lock of the alias {ws.settings.index.alias!r}"
    except RefusedError as error:
        writer = f"{error} If it hangs, end that process: readers keep the promoted version, the next run cleans up."
    if not ws.store.is_lite:
        return writer
    if server := lite_server.running(ws.lite_folder):
        return f"{writer}; process {server.pid} serves Milvus Lite; `rag-pipeline down milvus` stops it if it hangs"
    return f"{writer}; no process serves Milvus Lite, the next command that needs it starts one"


def _knowledge(ws: Workspace) -> str:
    from rag_pipeline.ingest.documents import discover

    files, issues = discover(ws.roots, max_bytes=ws.settings.knowledge.max_file_bytes)
    if not files:
        raise ConfigurationError(f"No Markdown in {', '.join(str(root.path) for root in ws.roots)}.")
    return f"{len(files)} files in {', '.join(str(root.path) for root in ws.roots)}, {len(issues)} skipped"


def _records(ws: Workspace) -> str:
    from rag_pipeline.invocations.database import Database
    from rag_pipeline.invocations.spool import Spool
    from rag_pipeline.invocations.store import InvocationStore

    waiting = Spool(ws.spool_folder).waiting()
    database = Database(ws.settings.database, state=ws.state)
    try:
        count = InvocationStore(database).count()
    except UnavailableError as error:
        raise UnavailableError(f"{error} Lookups work without it; {waiting} spool files wait for it.") from None
    finally:
        database.close()
    return f"{count} in {database.description}, {waiting} spool files waiting"


def _model(ws: Workspace) -> str:
    profile = ws.model.profile
    size = f"{profile.dimension} dimensions, {profile.max_tokens} tokens"
    return f"{ws.model.name}, {size}, fingerprint {ws.model.fingerprint}"


def _store(ws: Workspace) -> str:
    version = ws.store.check()
    server = lite_server.running(ws.lite_folder) if ws.store.is_lite else None
    served = f", served by process {server.pid}" if server else ""
    return f"{ws.store.description}, version {version}{served}"


def _promoted(ws: Workspace) -> str:
    manifest = ws.versions.promoted()
    if manifest is None:
        raise UnavailableError("Nothing is promoted yet; run `rag-pipeline reindex`.")
    if not ws.artifacts.intact(manifest):
        raise UnavailableError(
            f"The artefacts of {manifest.collection} are not what was published with it. Run "
            "`rag-pipeline reindex --full`; it publishes them again from Markdown and cached vectors."
        )
    rows = ws.store.count(manifest.collection)
    if rows != manifest.chunks:
        raise UnavailableError(
            f"{manifest.collection} has {rows} rows, its manifest says {manifest.chunks}. "
            "Run `rag-pipeline reindex --full`; it rebuilds from Markdown and cached vectors."
        )
    return f"{manifest.collection}, {rows} rows, {len(manifest.artifacts)} artefacts intact"


if __name__ == "__main__":
    print(dagster_home(Path(sys.argv[1]).absolute()))
