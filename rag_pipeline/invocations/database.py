"""The database of invocations and sessions: connections with limits, its schema, and one kind of error."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rag_pipeline.errors import RagPipelineError, StoreUnavailableError
from rag_pipeline.invocations.connecting import Target, connect, engine_for, require_file, target_of, translated
from rag_pipeline.invocations.forking import reset_in_forks
from rag_pipeline.setting_groups import DatabaseSettings

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

# The revision of `migrations/` that this code reads and writes; a test compares. Alembic itself is for upgrades only.
SCHEMA_REVISION = "0001"


class Database:
    """A database that is opened at first use; safe in threads, and in forked children.

    Args:
        settings: Where it is and how long to wait for it.
        state: The state folder: holds the SQLite file unless the settings name another database, and the lock of
            upgrades.
    """

    def __init__(self, settings: DatabaseSettings, *, state: Path) -> None:
        self._settings = settings
        self._state = state
        self._lock = threading.Lock()
        self._engines: dict[float, Engine] = {}
        self._of_parent: list[dict[float, Engine]] = []
        self._found_target: Target | None = None
        self._is_ready = False
        reset_in_forks(self)

    @property
    def description(self) -> str:
        """Kind and place of the database, without user and password.

        Raises:
            ConfigurationError: See `connecting.target_of`.
        """
        return self._target.description

    def upgrade(self) -> tuple[str, ...]:
        """Make the database, or bring its schema to this code's; one at a time, on however many hosts.

        Returns:
            The revisions that were applied, oldest first; empty when there was nothing to do.

        Raises:
            ConfigurationError: See `connecting.target_of`.
            RefusedError: The schema is newer than this code, the database holds a foreign table of the same name, or
                another process has been upgrading for a minute. Nothing was written.
            StoreUnavailableError: The database cannot be reached or written.
        """
        from rag_pipeline.invocations.upgrading import upgrade

        applied = upgrade(self._target, state=self._state, connect_s=self._settings.timeout_s)
        self._is_ready = False
        return applied

    def ready(self) -> bool:
        """Whether the database can be reached and its schema is this code's; `problem` says why not."""
        return not self.problem()

    def problem(self) -> str:
        """Why the database cannot be used, as a full sentence; blank when it can. Changes nothing, raises nothing."""
        try:
            self.require_ready()
        except RagPipelineError as error:
            return str(error)
        return ""

    def require_ready(self) -> None:
        """Return when the schema is this code's; that it was is remembered until an error.

        Raises:
            ConfigurationError: See `connecting.target_of`.
            StoreUnavailableError: The database cannot be reached, was never upgraded, or has another schema.
        """
        self._require_ready(self._settings.timeout_s)

    def _require_ready(self, wait_s: float) -> None:
        if self._is_ready:
            return
        require_file(self._target)
        with self._connection(writes=False, wait_s=wait_s) as connection:
            self._require_revision(revision_of(connection))
        self._is_ready = True

    def _require_revision(self, revision: str) -> None:
        if revision != SCHEMA_REVISION:
            found = f"has schema {revision}, this version needs {SCHEMA_REVISION}" if revision else "has no tables yet"
            raise StoreUnavailableError(f"The database of invocations ({self.description}) {found}. {_UPGRADE}")

    @contextmanager
    def transaction(self, *, writes: bool = False, wait_s: float | None = None) -> "Iterator[Connection]":
        """A connection in a transaction: committed at the end, rolled back when an exception leaves the block.

        Args:
            writes: Take SQLite's write lock at once, so that waiting for it is possible; and look at the schema again,
                since a newer program may have upgraded it under this process.
            wait_s: How long to wait for a lock; ``None``: as set.

        Raises:
            ConfigurationError: See `connecting.target_of`.
            StoreUnavailableError: See `require_ready`; or an SQL error inside the block.
        """
        wait_s = self._settings.timeout_s if wait_s is None else wait_s
        self._require_ready(wait_s)
        with self._connection(writes=writes, wait_s=wait_s) as opened:
            if writes:
                self._require_revision(_recorded_revision(opened))
            yield opened

    def close(self) -> None:
        """Close the idle connections; the next use opens new ones."""
        with self._lock:
            engines, self._engines = self._engines, {}
            self._is_ready = False
        for engine in engines.values():
            engine.dispose()

    def after_fork(self) -> None:
        """Leave the connections to the parent."""
        self._lock = threading.Lock()
        # Kept, not closed: closing would say goodbye to the server on the parent's behalf.
        self._of_parent.append(self._engines)
        self._engines = {}

    @property
    def _target(self) -> Target:
        if self._found_target is None:
            self._found_target = target_of(self._settings.url.get_secret_value(), state=self._state)
        return self._found_target

    def _engine(self, wait_s: float) -> "Engine":
        with self._lock:
            if wait_s not in self._engines:
                self._engines[wait_s] = engine_for(self._target, wait_s=wait_s, connect_s=self._settings.timeout_s)
            return self._engines[wait_s]

    @contextmanager
    def _connection(self, *, writes: bool, wait_s: float) -> "Iterator[Connection]":
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with (
                connect(lambda: self._engine(wait_s), self._target) as connection,
                connection.execution_options(writes=writes).begin(),
            ):
                yield connection
        except RagPipelineError:
            self._is_ready = False
            raise
        except SQLAlchemyError as error:
            self._is_ready = False
            raise translated(error, self._target) from None


_UPGRADE = "Run `rag-pipeline db upgrade`."


def revision_of(connection: "Connection") -> str:
    """The schema's revision, blank when there is none."""
    import sqlalchemy as sa

    from rag_pipeline.invocations.tables import VERSION_TABLE

    return _recorded_revision(connection) if sa.inspect(connection).has_table(VERSION_TABLE) else ""


def _recorded_revision(connection: "Connection") -> str:
    import sqlalchemy as sa

    from rag_pipeline.invocations.tables import VERSION_TABLE

    found = connection.execute(sa.select(sa.column("version_num")).select_from(sa.table(VERSION_TABLE))).scalar()
    return str(found or "")
