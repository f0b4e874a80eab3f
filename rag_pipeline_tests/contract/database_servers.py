"""Real PostgreSQL and MariaDB servers for tests: Debian's packages, on a free port of 127.0.0.1, in a temporary folder.

They are installed when absent and this process is root, run as `nobody` then, and end with this process.
"""

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

PASSWORD = "s3cret-of-tests"
_POLICY = Path("/usr/sbin/policy-rc.d")
_INSTALL_LIMIT_S = 900.0
_START_LIMIT_S = 90.0
_PR_SET_PDEATHSIG = 1
_MARIADB = ("mariadbd", "mariadb-install-db", "my_print_defaults")


class CannotStartError(Exception):
    """No such server on this machine; says why."""


class DatabaseServer(ABC):
    """One server that can be stopped, frozen and started again on the same data and port."""

    name: str

    def __init__(self) -> None:
        # pytest's own folders can be entered by their owner only.
        self._home = Path(tempfile.mkdtemp(prefix="rag-db-", dir="/tmp"))
        self._home.chmod(0o755)
        self.data = self._home / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.data.mkdir(mode=0o700)
        if os.geteuid() == 0:
            shutil.chown(self.data, _account().pw_uid, _account().pw_gid)
            shutil.chown(self._home, _account().pw_uid, _account().pw_gid)

    @abstractmethod
    def url(self, database: str) -> str:
        """SQLAlchemy URL of a database."""

    @abstractmethod
    def _command(self) -> list[str]:
        """How the server is started in the foreground."""

    @abstractmethod
    def _initialise(self) -> None:
        """Make the data folder."""

    @property
    @abstractmethod
    def _admin_url(self) -> str: ...

    def start(self) -> None:
        """Start it, and return once it takes connections.

        Raises:
            CannotStartError: It does not come up.
        """
        if not any(self.data.iterdir()):
            self._initialise()
        with (self._home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (it only makes one system call)
                **_as_account(),
            )
        deadline = time.monotonic() + _START_LIMIT_S
        while True:
            try:
                self.execute("SELECT 1")
            except Exception as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    said = (self._home / "server.log").read_text(errors="replace").splitlines()[-5:]
                    raise CannotStartError(f"{self.name} did not start ({error}): {' | '.join(said)}") from None
                time.sleep(0.1)
            else:
                return

    def new_database(self) -> str:
        """URL of a new, empty database."""
        self._databases += 1
        name = f"rag_{self._databases}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str, *, url: str = "") -> list[tuple[object, ...]]:
        """Run one statement by itself; returns its rows, if it has any."""
        import sqlalchemy as sa
        from sqlalchemy.pool import NullPool

        engine = sa.create_engine(url or self._admin_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and the processes that serve its connections."""
        import psutil

        assert self._process is not None
        leader = psutil.Process(self._process.pid)
        for process in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def stop(self) -> None:
        """End it with all its connections, and return when it has ended."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT if self.name == "postgresql" else signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def remove(self) -> None:
        """Kill it and delete its data."""
        if self._process is not None:
            with contextlib.suppress(Exception):
                self.signal(signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def _run(self, *command: str) -> None:
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, cwd=self._home, timeout=300, **_as_account()
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = f"{getattr(error, 'stdout', '')} {getattr(error, 'stderr', '') or error}".strip()[-500:]
            raise CannotStartError(f"{self.name}: {Path(command[0]).name} failed: {said}") from None


class PostgresServer(DatabaseServer):
    """PostgreSQL."""

    name = "postgresql"

    def __init__(self) -> None:
        self._programs = _postgres_programs()
        if self._programs is None:
            _install("postgresql")
            self._programs = _postgres_programs()
        if self._programs is None:
            raise CannotStartError("the package postgresql has no /usr/lib/postgresql/*/bin/postgres")
        super().__init__()

    @property
    def _admin_url(self) -> str:
        return self.url("postgres")

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://rag:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def _initialise(self) -> None:
        assert self._programs is not None
        secret = self._home / "password"
        secret.write_text(PASSWORD)
        self._run(
            str(self._programs / "initdb"), "-D", str(self.data), "-U", "rag", "-A", "scram-sha-256",
            "--pwfile", str(secret), "-E", "UTF8", "--locale", "C.UTF-8", "--no-sync",
        )  # fmt: skip

    def _command(self) -> list[str]:
        assert self._programs is not None
        return [
            str(self._programs / "postgres"), "-D", str(self.data), "-p", str(self.port), "-h", "127.0.0.1",
            "-k", "", "-c", "fsync=off", "-c", "shared_buffers=32MB",
        ]  # fmt: skip


class MariaDbServer(DatabaseServer):
    """MariaDB."""

    name = "mariadb"

    def __init__(self) -> None:
        if not all(map(_program, _MARIADB)):
            # The programs without the service that would start on a fixed port.
            _install("mariadb-server-core", "mariadb-client-core")
        if missing := [name for name in _MARIADB if not _program(name)]:
            raise CannotStartError(f"MariaDB's packages lack {', '.join(missing)}")
        self._server, self._installer, _ = (str(_program(name)) for name in _MARIADB)
        super().__init__()

    @property
    def _admin_url(self) -> str:
        return self.url("mysql")

    def url(self, database: str) -> str:
        return f"mysql+pymysql://rag:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def _initialise(self) -> None:
        self._run(
            self._installer, "--no-defaults", f"--datadir={self.data}", "--skip-test-db", "--skip-name-resolve",
            "--auth-root-authentication-method=normal",
        )  # fmt: skip
        grants = self._home / "grants.sql"
        grants.write_text(
            f"CREATE USER IF NOT EXISTS 'rag'@'%' IDENTIFIED BY '{PASSWORD}';\nGRANT ALL ON *.* TO 'rag'@'%';\n"
        )

    def _command(self) -> list[str]:
        return [
            self._server, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}",
            "--bind-address=127.0.0.1", f"--socket={self._home}/server.sock", "--skip-name-resolve",
            f"--init-file={self._home}/grants.sql", "--innodb-buffer-pool-size=32M",
            "--innodb-flush-log-at-trx-commit=0", f"--pid-file={self._home}/server.pid",
        ]  # fmt: skip


def _postgres_programs() -> Path | None:
    # `postgres` on the path may be anything; these are Debian's places.
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4]))
    return found[-1].parent if found else None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")


def _install(*packages: str) -> None:
    from filelock import FileLock

    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotStartError(f"{packages[0]} is not installed, and only root can do that with apt-get")
    with FileLock("/tmp/rag-pipeline-apt.lock"), _services_stay_down():
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *packages]):
            try:
                subprocess.run(
                    command,
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=_INSTALL_LIMIT_S,
                    env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                )
            except (OSError, subprocess.SubprocessError) as error:
                said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
                raise CannotStartError(f"{packages[0]} cannot be installed: {' '.join(said)}") from None


@contextlib.contextmanager
def _services_stay_down():  # type: ignore[no-untyped-def]
    """Keep a package that is installed from starting its service."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


def _account() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


def _as_account() -> dict[str, object]:
    """Neither server runs as root."""
    if os.geteuid() != 0:
        return {}
    return {"user": _account().pw_uid, "group": _account().pw_gid, "extra_groups": []}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
