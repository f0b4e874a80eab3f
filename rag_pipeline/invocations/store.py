"""Invocations in the database: write, read, list, purge."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.records import ID_LENGTH, Invocation

if TYPE_CHECKING:
    from sqlalchemy import Connection

MIN_PREFIX = 6
_BATCH = 200
_HEX = re.compile(r"[0-9a-f]+")


class InvocationStore:
    """The table ``tool_invocation``.

    Every method raises `ConfigurationError` for a database that the settings name wrongly, and
    `StoreUnavailableError` for one that cannot be used (`Database.problem` says why).

    Args:
        database: Where the table is.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def insert(self, invocations: Sequence[Invocation]) -> dict[str, str]:
        """Write the invocations whose id is not there yet.

        Returns:
            Why the database refused a row, by its id; the others are written. Empty when all are.
        """
        from rag_pipeline.invocations.tables import row_of

        refused: dict[str, str] = {}
        rows = [row_of(invocation) for invocation in invocations]
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            if not self._insert(batch):
                continue
            for row in batch:
                if reason := self._insert([row]):
                    refused[row["id"]] = reason
        return refused

    def get(self, id: str) -> Invocation | None:  # noqa: A002 (the name of the field)
        """The invocation with this id, or with the only id that begins so; ``None`` when there is none.

        Raises:
            ConfigurationError: Fewer than 6 characters, or several ids begin so.
        """
        import sqlalchemy as sa

        from rag_pipeline.invocations.tables import invocation_of, tool_invocation

        wanted = id.strip().lower().replace("-", "")
        if len(wanted) < MIN_PREFIX:
            raise ConfigurationError(f"{id!r} is too short for an invocation: give at least {MIN_PREFIX} characters.")
        if not _HEX.fullmatch(wanted) or len(wanted) > ID_LENGTH:
            return None
        column = tool_invocation.c.id
        query = sa.select(tool_invocation).where(column >= wanted, column <= wanted.ljust(ID_LENGTH, "f"))
        with self._database.transaction() as connection:
            found = connection.execute(query.order_by(column).limit(2)).mappings().all()
        if len(found) > 1:
            shared = _common_beginning(found[0]["id"], found[1]["id"])
            raise ConfigurationError(
                f"Several invocations begin with {id!r}, {found[0]['id']} and {found[1]['id']} among them. "
                f"Give more than {len(shared)} characters."
            )
        return invocation_of(dict(found[0])) if found else None

    def list(self, *, limit: int = 20, session_id: str = "", before: datetime | None = None) -> tuple[Invocation, ...]:
        """The newest invocations, newest first, of equal times the greater id first.

        Args:
            limit: How many at most.
            session_id: Only of this session, blanks around it left out; blank: of all.
            before: Only those created earlier than this; ``None``: all.
        """
        import sqlalchemy as sa

        from rag_pipeline.invocations.tables import invocation_of, tool_invocation

        query = sa.select(tool_invocation)
        if session_id:
            query = query.where(tool_invocation.c.session_id == session_id.strip())
        if before is not None:
            query = query.where(tool_invocation.c.created_at < before)
        query = query.order_by(tool_invocation.c.created_at.desc(), tool_invocation.c.id.desc()).limit(max(0, limit))
        with self._database.transaction() as connection:
            return tuple(invocation_of(dict(row)) for row in connection.execute(query).mappings())

    def count(self) -> int:
        """How many invocations there are."""
        import sqlalchemy as sa

        from rag_pipeline.invocations.tables import tool_invocation

        with self._database.transaction() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(tool_invocation)).scalar_one())

    def purge(self, older_than: datetime) -> int:
        """Delete invocations, and what sessions were given, from before ``older_than``.

        Returns:
            How many invocations were deleted.
        """
        import sqlalchemy as sa

        from rag_pipeline.invocations.tables import session_domain, session_evidence, tool_invocation

        for table in (session_evidence, session_domain):
            with self._database.transaction(writes=True) as connection:
                connection.execute(sa.delete(table).where(table.c.created_at < older_than))
        # In portions, so that nobody waits long for SQLite's write lock.
        deleted = 0
        oldest = sa.select(tool_invocation.c.id).where(tool_invocation.c.created_at < older_than).limit(_BATCH)
        while True:
            with self._database.transaction(writes=True) as connection:
                ids = connection.execute(oldest).scalars().all()
                if not ids:
                    return deleted
                connection.execute(sa.delete(tool_invocation).where(tool_invocation.c.id.in_(ids)))
            deleted += len(ids)

    def _insert(self, rows: "Sequence[dict[str, Any]]") -> str:
        """Write the rows in one transaction; returns why they, not the database, are to blame when that fails."""
        from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError

        try:
            with self._database.transaction(writes=True) as connection:
                try:
                    self._insert_absent(connection, rows)
                except StatementError as error:
                    if isinstance(error, DBAPIError) and not isinstance(error, DataError | IntegrityError):
                        raise
                    raise _RefusedRowsError(_reason(error)) from None
                except (ValueError, TypeError, OverflowError) as error:
                    raise _RefusedRowsError(_reason(error)) from None
        except _RefusedRowsError as refusal:
            return str(refusal)
        return ""

    @staticmethod
    def _insert_absent(connection: "Connection", rows: "Sequence[dict[str, Any]]") -> None:
        from rag_pipeline.invocations.tables import insert_absent, tool_invocation

        insert_absent(connection, tool_invocation, rows)


class _RefusedRowsError(Exception):
    """Leaves the transaction, which rolls back."""


def _reason(error: Exception) -> str:
    text = str(getattr(error, "orig", None) or error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def _common_beginning(first: str, second: str) -> str:
    return first[: next((at for at, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))]
