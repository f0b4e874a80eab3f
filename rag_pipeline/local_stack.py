"""The local stack (`up`, `down`), and `doctor`, which says what is wrong with it."""

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

from rag_pipeline.errors import ConfigurationError, RagPipelineError, UnavailableError
from rag_pipeline.index import lite_server
from rag_pipeline.workspace import Workspace

PARTS = ("milvus", "dagster")
_DAGSTER_PORT = 3000
_DAGSTER_LIMIT_S = 120.0
_FREE_BYTES = 500 * 2**20


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
        return f"milvus: {ws.store.description}, version {ws.store.check()} (not started by this command)"
    lite_server.keep_running(ws.lite_folder, keep=True)
    server = lite_server.attach(ws.lite_folder, idle_s=ws.settings.retrieval.milvus.lite_idle_s)
    return f"milvus: {server.uri}, process {server.pid}"


def _down_milvus(ws: Workspace) -> str:
    if not ws.store.is_lite:
        return f"milvus: {ws.store.description} was not started by this command and is left alone"
    lite_server.keep_running(ws.lite_folder, keep=False)
    server = lite_server.stop(ws.lite_folder)
    return f"milvus: stopped process {server.pid}" if server else "milvus: was not running"


def dagster_home(ws: Workspace) -> Path:
    """Dagster's home in the state folder, made with its configuration when absent."""
    home = ws.state / "dagster"
    home.mkdir(parents=True, exist_ok=True)
    config = home / "dagster.yaml"
    if not config.exists():
        config.write_text("telemetry:\n  enabled: false\n", encoding="utf-8")
    return home


def _dagster_address(ws: Workspace) -> Path:
    return dagster_home(ws) / "webserver.json"


def _up_dagster(ws: Workspace) -> str:
    address = _dagster_address(ws)
    if running := _dagster_process(address):
        return f"dagster: http://127.0.0.1:{running[1]}, process {running[0]}"
    port = _free_port(_DAGSTER_PORT)
    log = dagster_home(ws) / "webserver.log"
    environment = {**os.environ, "DAGSTER_HOME": str(dagster_home(ws)), "RAG_STATE_DIR": str(ws.state)}
    environment["RAG_INDEX__ALIAS"] = ws.settings.index.alias
    with log.open("ab") as out:
        child = subprocess.Popen(
            [
                sys.executable, "-m", "dagster", "dev", "-m", "rag_pipeline.definitions", "-h", "127.0.0.1",
                "-p", str(port),
            ],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            cwd=ws.settings.project_root, env=environment,
        )  # fmt: skip
    import psutil

    address.write_text(
        json.dumps({"pid": child.pid, "created": psutil.Process(child.pid).create_time(), "port": port}),
        encoding="utf-8",
    )
    deadline = time.monotonic() + _DAGSTER_LIMIT_S
    while time.monotonic() < deadline and child.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return f"dagster: http://127.0.0.1:{port}, process {child.pid}"
        time.sleep(0.3)
    _down_dagster(ws)
    raise UnavailableError(f"Dagster did not start on port {port}; its log is {log}.")


def _down_dagster(ws: Workspace) -> str:
    import psutil

    address = _dagster_address(ws)
    running = _dagster_process(address)
    address.unlink(missing_ok=True)
    if running is None:
        return "dagster: was not running"
    family = psutil.Process(running[0])
    members = [*family.children(recursive=True), family]
    family.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(members, timeout=20)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=5)
    return f"dagster: stopped process {running[0]}"


def _dagster_process(address: Path) -> tuple[int, int] | None:
    """Pid and port of the web server that `up` started, if that very process still lives."""
    import psutil

    try:
        values = json.loads(address.read_text(encoding="utf-8"))
        process = psutil.Process(values["pid"])
        if abs(process.create_time() - values["created"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE:
            return values["pid"], values["port"]
    except (OSError, ValueError, KeyError, psutil.Error):
        pass
    return None


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
        ("knowledge", _knowledge),
        ("model", _model),
        ("store", _store),
        ("promoted version", _promoted),
    )
    findings = []
    for name, look in looks:
        try:
            findings.append(Finding(name, ok=True, text=look(ws)))
        except (RagPipelineError, OSError) as error:
            findings.append(Finding(name, ok=False, text=str(error)))
    return findings


def _versions(_ws: Workspace) -> str:
    from importlib.metadata import PackageNotFoundError, version

    names = ("dagster", "pymilvus", "milvus-lite", "sentence-transformers", "torch", "markdown-it-py", "pandas")
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


def _knowledge(ws: Workspace) -> str:
    from rag_pipeline.ingest.documents import discover

    files, issues = discover(ws.roots, max_bytes=ws.settings.knowledge.max_file_bytes)
    if not files:
        raise ConfigurationError(f"No Markdown in {', '.join(str(root.path) for root in ws.roots)}.")
    return f"{len(files)} files in {', '.join(str(root.path) for root in ws.roots)}, {len(issues)} skipped"


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
    for name in manifest.artifacts:
        ws.artifacts.read(manifest, name)
    rows = ws.store.count(manifest.collection)
    if rows != manifest.chunks:
        raise UnavailableError(
            f"{manifest.collection} has {rows} rows, its manifest says {manifest.chunks}. "
            "Run `rag-pipeline reindex --full`; it rebuilds from Markdown and cached vectors."
        )
    return f"{manifest.collection}, {rows} rows, {len(manifest.artifacts)} artefacts intact"
