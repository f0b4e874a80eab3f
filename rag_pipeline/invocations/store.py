"""Invocations in the database: write, read, list, purge."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.records import ID_LENGTH, Amendment, Invocation
from rag_pipeline.invocations.redaction import Redactor

if TYPE_CHECKING:
    from sqlalchemy import Connection

logger = logging.getLogger(__name__)

MIN_PREFIX = 6
_BATCH = 200
_HEX = re.compile(r"[0-9a-f]+")


class InvocationStore:
    """The table ``tool_invocation``.

    Every method raises `ConfigurationError` for a database that the settings name wrongly, and
    `StoreUnavailableError` for one that cannot be used (`Database.problem` says why).

    Args:
        database: Where the table is.
        patterns: As for the recorder: by them a session's id is stored as it is, or as its digest.

    Raises:
        ConfigurationError: See `redaction.Redactor`.
    """

    def __init__(self, database: Database, *, patterns: Sequence[str] = ()) -> None:
        self._database = database
        self._redactor = Redactor(patterns)

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

    def amend(self, amendments: Sequence[Amendment]) -> dict[str, str]:
        """Amend the details of invocations, in the order given; doing so again changes nothing more.

        Returns:
            Why the database refused the amendments of an invocation, by its id; blank when it has no such row. Empty
            when all are done.
        """
        left: dict[str, list[Amendment]] = {}
        for amendment in amendments:
            left.setdefault(amendment.id, []).append(amendment)
        undone: dict[str, str] = {}
        ids = sorted(left)
        for start in range(0, len(ids), _BATCH):
            batch = {id_: left[id_] for id_ in ids[start : start + _BATCH]}
            absent: set[str] = set()
            if self._write(partial(_amend, amendments=batch, absent=absent)):
                for id_, own in batch.items():
                    if reason := self._write(partial(_amend, amendments={id_: own}, absent=absent)):
                        undone[id_] = reason
            undone.update(dict.fromkeys(absent, ""))
        return undone

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
            session_id: Only of this session, whose id is looked for as it is stored; blank: of all.
            before: Only those created earlier than this; ``None``: all.
        """
        import sqlalchemy as sa

        from rag_pipeline.invocations.tables import invocation_of, tool_invocation

        query = sa.select(tool_invocation)
        if session_id:
            query = query.where(tool_invocation.c.session_id == self._redactor.session_id(session_id))
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
        from rag_pipeline.invocations.tables import insert_absent, tool_invocation

        return self._write(lambda connection: insert_absent(connection, tool_invocation, rows))

    def _write(self, statements: "Callable[[Connection], None]") -> str:
        """Run statements in one transaction; returns why their values are to blame when that fails."""
        from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError

        try:
            with self._database.transaction(writes=True) as connection:
                try:
                    statements(connection)
                except StatementError as error:
                    if isinstance(error, DBAPIError) and not isinstance(error, DataError | IntegrityError):
                        raise
                    raise _RefusedRowsError(_reason(error)) from None
                except (ValueError, TypeError, OverflowError) as error:
                    raise _RefusedRowsError(_reason(error)) from None
        except _RefusedRowsError as refusal:
            return str(refusal)
        return ""


class _RefusedRowsError(Exception):
    """Leaves the transaction, which rolls back."""


def _amend(connection: "Connection", amendments: "Mapping[str, Sequence[Amendment]]", absent: set[str]) -> None:
    """Amend rows inside a transaction; ``absent`` gets the ids that have none."""
    import sqlalchemy as sa

    from rag_pipeline.invocations.tables import tool_invocation

    table = tool_invocation
    # Read and written back, since no JSON function is the same in all databases.
    query = sa.select(table.c.id, table.c.retrieval_details).where(table.c.id.in_(list(amendments)))
    found = {row.id: row.retrieval_details for row in connection.execute(query.order_by(table.c.id).with_for_update())}
    absent |= set(amendments) - set(found)
    rows = []
    for id_, stored in found.items():
        if not isinstance(stored, dict):
            logger.warning("Invocation %s is not amended: its details cannot be read", id_)
            continue
        details = stored
        for amendment in amendments[id_]:
            details = amendment.amended(details)
        rows.append({"of": id_, "amended": details})
    if rows:
        update = sa.update(table).where(table.c.id == sa.bindparam("of"))
        connection.execute(update.values(retrieval_details=sa.bindparam("amended")), rows)


def _reason(error: Exception) -> str:
    text = str(getattr(error, "orig", None) or error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def _common_beginning(first: str, second: str) -> str:
    return first[: next((at for at, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))]
