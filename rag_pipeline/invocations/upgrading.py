"""Bring a database to the schema of this code with Alembic, one process at a time."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rag_pipeline.errors import RefusedError, StoreUnavailableError
from rag_pipeline.invocations.connecting import Target, connect, engine_for, translated

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection

_LOCK_LIMIT_S = 60.0
# Any number will do that other programs of the same PostgreSQL database do not take.
_ADVISORY_LOCK = 0x7261675F70697065
# Alembic's context is the process's, whatever the database.
_in_this_process = threading.Lock()


def upgrade(target: Target, *, state: Path, connect_s: float) -> tuple[str, ...]:
    """See `rag_pipeline.invocations.database.Database.upgrade`."""
    from filelock import FileLock, Timeout
    from sqlalchemy.exc import SQLAlchemyError

    try:
        (state / "locks").mkdir(parents=True, exist_ok=True)
        lock = FileLock(state / "locks" / "database.lock", timeout=_LOCK_LIMIT_S)
        with _in_this_process, lock:
            if target.file is not None:
                target.file.parent.mkdir(parents=True, exist_ok=True)
                target.file.touch(mode=0o600)
            return _upgrade(target, connect_s=connect_s)
    except Timeout:
        raise RefusedError(
            f"Another process has been upgrading {target.description} for {_LOCK_LIMIT_S:.0f} s. "
            "Wait for it to end, then run `rag-pipeline db upgrade`."
        ) from None
    except OSError as error:
        raise StoreUnavailableError(
            f"{target.description} cannot be upgraded: {error}. Make the state folder writable, then try again."
        ) from None
    except SQLAlchemyError as error:
        raise translated(error, target) from None


def alembic_config() -> "Config":
    """Alembic's configuration, without the ini file."""
    from alembic.config import Config

    config = Config()
    folder = Path(__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _upgrade(target: Target, *, connect_s: float) -> tuple[str, ...]:
    from alembic import command
    from alembic.script import ScriptDirectory

    from rag_pipeline.invocations.database import revision_of

    config = alembic_config()
    scripts = ScriptDirectory.from_config(config)
    known = [script.revision for script in scripts.walk_revisions()][::-1]
    with connect(
        lambda: engine_for(target, wait_s=_LOCK_LIMIT_S, connect_s=connect_s, upgrading=True), target
    ) as connection:
        with _alone(connection, target), connection.begin():
            if connection.dialect.name == "postgresql":
                # Waits as long as `lock_timeout`, and ends with the transaction.
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
            before = revision_of(connection)
            if before and before not in known:
                raise RefusedError(
                    f"The database of invocations ({target.description}) has schema {before}; this version of "
                    f"rag-pipeline knows none newer than {known[-1]}. Install the newer rag-pipeline, or set "
                    "database.url to another database. Nothing was written."
                )
            applied = tuple(known[known.index(before) + 1 if before else 0 :])
            if applied:
                _refuse_foreign_tables(connection, target)
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        if target.file is not None:
            # After the first commit, since it cannot change inside a transaction; it stays so.
            connection.rollback()
            cursor = connection.connection.cursor()
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.close()
    return applied


@contextmanager
def _alone(connection: "Connection", target: Target) -> Iterator[None]:
    """Hold MySQL's named lock; on SQLite and PostgreSQL the transaction itself locks."""
    if connection.dialect.name not in ("mysql", "mariadb"):
        yield
        return
    name = f"rag_pipeline:{hashlib.sha256(str(target.url.database).encode()).hexdigest()[:32]}"
    got = connection.exec_driver_sql("SELECT GET_LOCK(%s, %s)", (name, _LOCK_LIMIT_S)).scalar()
    connection.rollback()
    if got != 1:
        raise RefusedError(
            f"Another process has been upgrading {target.description} for {_LOCK_LIMIT_S:.0f} s. "
            "Wait for it to end, then run `rag-pipeline db upgrade`."
        )
    try:
        yield
    finally:
        connection.exec_driver_sql("SELECT RELEASE_LOCK(%s)", (name,))
        connection.rollback()


def _refuse_foreign_tables(connection: "Connection", target: Target) -> None:
    """Do not take another program's ``tool_invocation`` for one of an upgrade that was cut off."""
    import sqlalchemy as sa

    from rag_pipeline.invocations.tables import metadata

    inspector = sa.inspect(connection)
    for table in metadata.sorted_tables:
        if not inspector.has_table(table.name):
            continue
        foreign = {str(column["name"]) for column in inspector.get_columns(table.name)} - set(table.columns.keys())
        if foreign:
            raise RefusedError(
                f"{target.description} holds a table {table.name} of another program (column {min(foreign)}). "
                "Set database.url to a database of its own. Nothing was written."
            )
