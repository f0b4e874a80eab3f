"""One Milvus Lite for many processes: a server on a Unix socket that the first user starts and the last one outlives.

Milvus Lite takes one process a data folder, so a lookup, ``dagster dev`` and a reindex would lock each other out. Here
none of them opens the folder: each attaches to a small server process, started on demand.

- The socket lies in a folder that only its owner can enter: nothing listens on the network.
- ``server.json`` says which process serves where. It counts only while a process with that pid *and* start time lives
  and its socket takes connections, so a stale file or a reused pid leads to a new server, not to an error.
- Two processes that start it at once are put in line by ``start.lock``; the second finds the first one's server.
- Every user holds a shared lock on ``users.lock`` until it ends, however it ends. The server stops once it could take
  that lock alone for ``idle_s`` seconds; it keeps the lock until it is gone, so that nobody attaches to a dying server.
  While the file ``keep-running`` exists it does not stop by itself.
"""

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from rag_pipeline.errors import RefusedError, StoreUnavailableError

# sockaddr_un holds 108 bytes on Linux and 104 on macOS, the closing NUL included.
_MAX_SOCKET_PATH = 100
_START_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class LiteServer:
    """A running server.

    Attributes:
        pid: Its process.
        created: The process's start time in seconds since 1970, which tells it from a later process with its pid.
        socket: Path of its Unix socket.
    """

    pid: int
    created: float
    socket: str

    @property
    def uri(self) -> str:
        """What `pymilvus.MilvusClient` takes."""
        return f"unix:{self.socket}"


_attached: dict[Path, int] = {}
_attach_lock = threading.Lock()


def attach(folder: Path, *, idle_s: float) -> LiteServer:
    """The server of ``folder``, started when none runs; this process counts as its user until it ends.

    Args:
        folder: Holds the data, the locks and the address; made when absent.
        idle_s: A new server ends this long after its last user.

    Raises:
        StoreUnavailableError: The server does not start; the message gives its last words.
        RefusedError: Another process holds the data folder; the message names it.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    _hold_users_lock(folder)
    if server := running(folder):
        return server
    try:
        with FileLock(folder / "start.lock", timeout=_START_LIMIT_S):
            return running(folder) or _start(folder, idle_s=idle_s)
    except Timeout:
        raise StoreUnavailableError(
            f"Another process has been starting Milvus Lite in {folder} for {_START_LIMIT_S:.0f} s. "
            f"Look at {folder / 'server.log'}; `rag-pipeline down milvus` stops what runs."
        ) from None


def running(folder: Path) -> LiteServer | None:
    """The server that serves ``folder`` now, without starting one."""
    server = _recorded(folder)
    if server is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(server.socket)
        except BlockingIOError:
            return server  # a full backlog: it lives, but does not take connections just now
        except OSError:
            return None
    return server


def stop(folder: Path, *, limit_s: float = 15.0) -> LiteServer | None:
    """Stop the server of ``folder``; returns what was stopped, ``None`` when nothing ran.

    A server that does not end within ``limit_s`` (frozen, say) is killed; the next start replays its log.
    """
    import psutil

    server = _recorded(folder)
    if server is None:
        return None
    process = psutil.Process(server.pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
        try:
            process.wait(limit_s)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(limit_s)
    return server


def keep_running(folder: Path, *, keep: bool) -> None:
    """Let the server of ``folder`` stay without users, or (``keep=False``) end when idle as usual."""
    folder.mkdir(parents=True, exist_ok=True)
    if keep:
        (folder / "keep-running").touch()
    else:
        (folder / "keep-running").unlink(missing_ok=True)


def _hold_users_lock(folder: Path) -> None:
    with _attach_lock:
        if folder in _attached:
            return
        descriptor = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Blocks only while a server that found itself idle is on its way out.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _attached[folder] = descriptor


def _recorded(folder: Path) -> LiteServer | None:
    """The server that ``server.json`` names, if that very process still lives."""
    try:
        server = LiteServer(**json.loads((folder / "server.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return server if process_lives(server.pid, server.created) and isinstance(server.socket, str) else None


def process_lives(pid: object, created: object) -> bool:
    """Whether the process that an address file names lives: the same start time tells it from a later one with its pid.

    Args:
        pid: As read from the file; anything but a positive whole number names no process.
        created: Its start time in seconds since 1970, as read from the file.
    """
    import psutil

    if type(pid) is not int or pid <= 0 or not isinstance(created, float):
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - created) < 1.0
    except psutil.Error:
        return False


def _start(folder: Path, *, idle_s: float) -> LiteServer:
    if holder := _data_holder(folder):
        raise RefusedError(
            f"Process {holder} holds the Milvus Lite data in {folder / 'lite.db'} directly, so it cannot be shared. "
            f"End that process (or let it use this project's commands), then try again."
        )
    log = folder / "server.log"
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "rag_pipeline.index.lite_server", str(folder), str(idle_s)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=folder,
        )
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        server = running(folder)
        if server and server.pid == child.pid:
            # The server is nobody's child to wait for; a thread reaps it should it end before this process does.
            threading.Thread(target=child.wait, name="reap-milvus-lite", daemon=True).start()
            return server
        if child.poll() is not None:
            break
        time.sleep(0.05)
    child.kill()
    child.wait()
    last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
    raise StoreUnavailableError(
        f"Milvus Lite did not start in {folder}. The last lines of {log}:\n{last}\n"
        "`rag-pipeline doctor` checks disk, locks and versions."
    )


def _data_holder(folder: Path) -> int | None:
    """Pid of a process that has a file of the data folder open (only processes that this user may look into)."""
    import psutil

    data = str(folder / "lite.db") + os.sep
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):
            if any(file.path.startswith(data) for file in process.open_files()):
                return process.pid
    return None


def _socket_path(folder: Path) -> Path:
    """A fresh path for each start, so that a dead server's socket is never mistaken for a live one."""
    name = f"{secrets.token_hex(6)}.sock"
    home = folder / "socket"
    if len(os.fsencode(home / name)) > _MAX_SOCKET_PATH:
        home = Path(tempfile.gettempdir()) / f"rag-pipeline-{os.getuid()}"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if home.stat().st_uid != os.getuid() or home.is_symlink():
        raise RefusedError(f"{home} belongs to another user; Milvus Lite's socket is not put there.")
    home.chmod(0o700)
    return home / name


def _serve(folder: Path, *, idle_s: float) -> None:
    import psutil
    from milvus_lite.adapter.grpc.server import start_server_in_thread

    stopping = threading.Event()

    def on_signal(_signum: int, _frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    path = _socket_path(folder)
    # grpc takes "unix:<path>" where it takes "host:port", and that is how the two are joined.
    server, database, _ = start_server_in_thread(str(folder / "lite.db"), host="unix", port=str(path))
    address = folder / "server.json"
    try:
        _mend(f"unix:{path}")
        me = LiteServer(os.getpid(), psutil.Process().create_time(), str(path))
        aside = address.with_suffix(f".{me.pid}")
        aside.write_text(json.dumps(asdict(me)), encoding="utf-8")
        aside.replace(address)
        _wait_until_idle(folder, stopping, idle_s=idle_s)
    finally:
        server.stop(grace=5).wait()
        database.close()
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError, ValueError):
            if json.loads(address.read_text(encoding="utf-8"))["pid"] == os.getpid():
                address.unlink()


def _mend(uri: str) -> None:
    """Flush and load every collection: an unclean exit can leave rows twice until a flush, and nothing loaded."""
    from pymilvus import MilvusClient

    client = MilvusClient(uri=uri, timeout=30)
    try:
        for name in client.list_collections(timeout=30):
            try:
                client.flush(name, timeout=120)
                client.load_collection(name, timeout=120)
            except Exception as error:  # one broken collection must not keep the others from being served
                print(f"{name} cannot be loaded: {error}", file=sys.stderr, flush=True)
    finally:
        client.close()


def _wait_until_idle(folder: Path, stopping: threading.Event, *, idle_s: float) -> None:
    descriptor = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    idle_since: float | None = None
    while not stopping.wait(min(5.0, idle_s / 4)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            idle_since = None
            continue
        idle_since = idle_since or time.monotonic()
        if time.monotonic() - idle_since >= idle_s and not (folder / "keep-running").exists():
            return  # with the lock held, until this process is gone
        fcntl.flock(descriptor, fcntl.LOCK_UN)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), idle_s=float(sys.argv[2]))
