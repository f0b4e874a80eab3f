"""From the setting ``database.url`` to a SQLAlchemy engine with limits, and from driver errors to the project's."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rag_pipeline.errors import ConfigurationError, StoreUnavailableError

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

# What a plain `postgresql://` means, and what must be installed for it.
_DRIVERS = {
    "postgres": ("postgresql+psycopg", "psycopg", "postgresql"),
    "postgresql": ("postgresql+psycopg", "psycopg", "postgresql"),
    "postgresql+psycopg": ("postgresql+psycopg", "psycopg", "postgresql"),
    "mysql": ("mysql+pymysql", "pymysql", "mysql"),
    "mysql+pymysql": ("mysql+pymysql", "pymysql", "mysql"),
    "mariadb": ("mariadb+pymysql", "pymysql", "mysql"),
    "mariadb+pymysql": ("mariadb+pymysql", "pymysql", "mysql"),
    "sqlite": ("sqlite", "sqlite3", ""),
    "sqlite+pysqlite": ("sqlite", "sqlite3", ""),
}
# Without user and password, which are masked wherever a message is shown.
_EXAMPLES = (
    "Write postgresql://host/database, mysql://host/database (with USER:PASSWORD and an at sign before the host) or "
    "sqlite:////folder/file.db, or leave database.url blank for SQLite in the state folder."
)
# Statements that wait on a migration of a large table may take long; a lookup never runs one.
UPGRADE_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Target:
    """A database that the settings name.

    Attributes:
        url: With the driver that is used.
        file: The file of a SQLite database.
    """

    url: "URL"
    file: Path | None

    @property
    def description(self) -> str:
        """Where it is, without user, password and options."""
        if self.file is not None:
            return f"SQLite at {self.file}"
        kind = "PostgreSQL" if self.url.drivername.startswith("postgresql") else "MySQL or MariaDB"
        # Hosts and sockets may be options, too.
        host = self.url.host or str(self.url.query.get("host") or self.url.query.get("unix_socket") or "localhost")
        port = f":{self.url.port}" if self.url.port else ""
        return f"{kind} at {host}{port}, database {self.url.database or '(default)'}"


def target_of(url: str, *, state: Path) -> Target:
    """The database of the setting ``database.url``.

    Args:
        url: SQLAlchemy URL; blank for ``invocations.db`` in the state folder.
        state: The state folder.

    Raises:
        ConfigurationError: No URL, a kind of database that is not supported, or a driver that is not installed; the
            message never shows the URL, which holds a password.
    """
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    if not url.strip():
        return _sqlite(state / "invocations.db")
    try:
        parsed = make_url(url.strip())
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"The setting database.url is no database URL. {_EXAMPLES}") from None
    try:
        driver, module, extra = _DRIVERS[parsed.drivername]
    except KeyError:
        raise ConfigurationError(
            f"The setting database.url names {parsed.drivername!r}, which is not supported. {_EXAMPLES}"
        ) from None
    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(
            f"The setting database.url needs the package {module}, which is not installed. "
            f"Run `pip install 'rag-pipeline[{extra}]'`."
        )
    if driver == "sqlite":
        file = Path(parsed.database or "")
        if "\0" in str(file):
            raise ConfigurationError("The setting database.url names a SQLite file with a NUL (%00) in its path.")
        if not file.is_absolute() or parsed.query:
            raise ConfigurationError(
                "The setting database.url must name a SQLite file by its absolute path and without options: "
                "sqlite:////folder/file.db (four slashes)."
            )
        return _sqlite(file)
    if not parsed.database:
        raise ConfigurationError(f"The setting database.url names no database. {_EXAMPLES}")
    host = parsed.host or ""
    try:
        if not host.startswith(("/", "@")):  # a socket
            host.encode("idna")
    except UnicodeError:  # an empty label, or one of more than 63 characters
        raise ConfigurationError(
            f"The setting database.url names {host!r:.100}, which is no name of a host. {_EXAMPLES}"
        ) from None
    return Target(parsed.set(drivername=driver), None)


def require_file(target: Target) -> None:
    """Return when the target is a server, or a file that is there.

    Raises:
        StoreUnavailableError: There is no such file, or its path cannot be looked at.
    """
    if target.file is None:
        return
    try:
        target.file.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreUnavailableError(
            f"There is no database yet ({target.description}). Run `rag-pipeline db upgrade`."
        ) from None
    except OSError as error:
        raise translated(error, target) from None


def engine_for(target: Target, *, wait_s: float, connect_s: float, upgrading: bool = False) -> "Engine":
    """An engine that waits ``wait_s`` for a lock and ``connect_s`` for a connection.

    A SQLite file is never made by connecting, and a connection whose file was deleted or replaced is not used again.
    """
    import sqlalchemy as sa
    from sqlalchemy.pool import NullPool

    from rag_pipeline.invocations.tables import read_json

    options: dict[str, Any] = {
        "hide_parameters": True,
        "pool_pre_ping": True,
        "json_serializer": _json,
        "json_deserializer": read_json,
    }
    if upgrading:
        options["poolclass"] = NullPool
    if target.file is not None:
        engine = sa.create_engine(target.url, connect_args={"timeout": wait_s}, **options)
        _adapt_sqlite(engine, target.file, immediate=upgrading)
        return engine
    if target.url.drivername.startswith("postgresql"):
        arguments = _postgresql_arguments(wait_s=wait_s, connect_s=connect_s)
        if "options" in target.url.query:
            arguments["options"] = f"{target.url.query['options']} {arguments['options']}"
        return sa.create_engine(target.url, connect_args=arguments, **options)
    arguments = _mysql_arguments(wait_s=wait_s, connect_s=connect_s, upgrading=upgrading)
    return sa.create_engine(target.url, connect_args=arguments, isolation_level="READ COMMITTED", **options)


def connect(engine_of: "Callable[[], Engine]", target: Target) -> "Connection":
    """A connection, or one of the project's errors, whatever the driver thinks of the URL's options.

    Raises:
        ConfigurationError: The driver does not understand the URL.
        StoreUnavailableError: The database, or a file that the URL's options name, cannot be reached.
    """
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return engine_of().connect()
    except (SQLAlchemyError, OSError) as error:
        raise translated(error, target) from None
    except Exception as error:  # drivers check options in their own ways
        raise ConfigurationError(
            f"The setting database.url ({target.description}) is not understood by the database's driver: "
            f"{_said(error, target)}. Correct its options."
        ) from None


def translated(error: Exception, target: Target) -> StoreUnavailableError:
    """The error to raise in place of one of SQLAlchemy's; it shows no statement and no value."""
    return StoreUnavailableError(
        f"The database of invocations ({target.description}) cannot be used: {_said(error, target)}. "
        "See `rag-pipeline doctor`."
    )


def _said(error: Exception, target: Target) -> str:
    reason = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    # PostgreSQL shows the failing row from the second line on.
    reason = reason.splitlines()[0][:300]
    secrets = [target.url.password, *(value for name, value in _options(target.url) if "pass" in name.lower())]
    for secret in filter(None, secrets):
        reason = reason.replace(secret, "********")
    return reason


def _options(url: "URL") -> list[tuple[str, str]]:
    values = ((name, (value,) if isinstance(value, str) else value) for name, value in url.query.items())
    return [(name, value) for name, several in values for value in several]


def _sqlite(file: Path) -> Target:
    from sqlalchemy import URL

    # mode=rw: only an upgrade makes a database, and that makes the file itself.
    url = URL.create("sqlite", database=f"file:{quote(str(file))}", query={"mode": "rw", "uri": "true"})
    return Target(url, file)


def _json(value: object) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _adapt_sqlite(engine: "Engine", file: Path, *, immediate: bool) -> None:
    from sqlalchemy import event
    from sqlalchemy.exc import DisconnectionError

    def identity() -> tuple[int, int] | None:
        try:
            found = os.stat(file)  # noqa: PTH116 (called for each use of a connection)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        # The driver begins a transaction before some statements only; `begin` below does it before all.
        connection.isolation_level = None
        # A text that is no UTF-8 must not hide the other rows.
        connection.text_factory = lambda found: found.decode("utf-8", "replace")
        connection.execute("PRAGMA synchronous=NORMAL")
        record.info["file"] = identity()

    @event.listens_for(engine, "checkout")
    def checked_out(_connection: Any, record: Any, _proxy: Any) -> None:
        if record.info["file"] != identity():
            raise DisconnectionError(f"{file} is another file than before, or gone")

    @event.listens_for(engine, "begin")
    def begin(connection: "Connection") -> None:
        writes = immediate or connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _postgresql_arguments(*, wait_s: float, connect_s: float) -> dict[str, Any]:
    return {
        "connect_timeout": max(2, round(connect_s)),  # libpq takes whole seconds, two at least
        "options": f"-c lock_timeout={max(1, round(wait_s * 1000))}",
        # A host that is gone without a word is noticed after about this long, twice.
        "keepalives_idle": max(1, round(connect_s)),
        "keepalives_interval": max(1, round(connect_s / 3)),
        "keepalives_count": 3,
        "tcp_user_timeout": max(1, round(connect_s * 1000)),
    }


def _mysql_arguments(*, wait_s: float, connect_s: float, upgrading: bool) -> dict[str, Any]:
    strict = "sql_mode=CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')"
    seconds = max(1, round(wait_s))  # MySQL takes whole seconds, one at least
    limit = UPGRADE_LIMIT_S if upgrading else connect_s + wait_s
    return {
        "charset": "utf8mb4",
        "connect_timeout": connect_s,
        "read_timeout": limit,
        "write_timeout": limit,
        "init_command": f"SET SESSION {strict}, innodb_lock_wait_timeout={seconds}, lock_wait_timeout={seconds}",
    }
