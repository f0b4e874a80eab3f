"""The tables of invocations and sessions, with types that work alike on SQLite, PostgreSQL and MySQL or MariaDB.

Importing this module imports SQLAlchemy; the others of the package do so inside their functions.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from rag_pipeline.invocations.records import Invocation, storable_text, storable_value, utc_milliseconds

VERSION_TABLE = "rag_pipeline_version"
_MYSQL = ("mysql", "mariadb")


logger = logging.getLogger(__name__)

# What stands for a stored value that cannot be read, so that it does not hide the others.
UNREADABLE = object()
_NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)


class StorableText(sa.types.TypeDecorator[str]):
    """Text of any kind and length; what a database refuses becomes U+FFFD (see `records.storable_text`)."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """The storable form."""
        del dialect
        return None if value is None else storable_text(value)

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[str]:
        """Up to 4 GB on MySQL, where a plain text ends at 64 KB."""
        if dialect.name in _MYSQL:
            return dialect.type_descriptor(mysql.LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin"))
        return dialect.type_descriptor(sa.Text())


class ShortText(sa.types.TypeDecorator[str]):
    """Text that can be indexed and compared byte by byte; cut at its length."""

    impl = sa.String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._length = length

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """The storable form, cut."""
        del dialect
        return None if value is None else storable_text(value)[: self._length]

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[str]:
        """With the collation that tells ``a`` from ``A``."""
        if dialect.name in _MYSQL:
            return dialect.type_descriptor(mysql.VARCHAR(self._length, charset="utf8mb4", collation="utf8mb4_bin"))
        collation = "C" if dialect.name == "postgresql" else None
        return dialect.type_descriptor(sa.String(self._length, collation=collation))


class StorableJson(sa.types.TypeDecorator[Any]):
    """JSON that every database takes (see `records.storable_value`)."""

    impl = sa.JSON
    cache_ok = True

    def process_bind_param(self, value: object, dialect: sa.Dialect) -> object:
        """The storable form."""
        del dialect
        return storable_value(value)


class UtcMilliseconds(sa.types.TypeDecorator[datetime]):
    """A moment in UTC, cut to milliseconds."""

    impl = sa.DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """UTC; without the zone where the database keeps none."""
        if value is None:
            return None
        value = utc_milliseconds(value)
        return value if dialect.name == "postgresql" else value.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """UTC, whatever zone the connection shows it in."""
        del dialect
        return None if value is None else utc_milliseconds(value)

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:
        """As `process_result_value`; `UNREADABLE` for what is no time (SQLite stores anything)."""
        process = super().result_processor(dialect, coltype)

        def read(value: Any) -> Any:
            try:
                return process(value) if process else value
            except (ValueError, TypeError, AttributeError, OverflowError):
                return UNREADABLE

        return read

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[datetime]:
        """The database's own type with milliseconds."""
        if dialect.name in _MYSQL:
            return dialect.type_descriptor(mysql.DATETIME(fsp=3))
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.TIMESTAMP(timezone=True, precision=3))
        return dialect.type_descriptor(sa.DateTime())


metadata = sa.MetaData()
_OPTIONS: dict[str, Any] = {
    f"{dialect}_{name}": value
    for dialect in _MYSQL
    for name, value in (("charset", "utf8mb4"), ("collate", "utf8mb4_bin"), ("engine", "InnoDB"))
}

tool_invocation = sa.Table(
    "tool_invocation",
    metadata,
    sa.Column("id", ShortText(32), primary_key=True),
    sa.Column("session_id", ShortText(255), nullable=False),
    sa.Column("tool_name", ShortText(255), nullable=False),
    sa.Column("input_params", StorableJson, nullable=False),
    sa.Column("output_preview", StorableText, nullable=False),
    sa.Column("retrieval_layer", ShortText(32), nullable=False),
    sa.Column("l0_match_count", sa.BigInteger, nullable=False),
    sa.Column("l1_match_count", sa.BigInteger, nullable=False),
    sa.Column("retrieval_details", StorableJson, nullable=False),
    sa.Column("relevance_level", ShortText(32), nullable=False),
    sa.Column("evidence_status", ShortText(32), nullable=False),
    sa.Column("dedup_reason", StorableText, nullable=False),
    sa.Column("duration_ms", sa.Double, nullable=False),
    sa.Column("stage_ms", StorableJson, nullable=False),
    sa.Column("success", sa.Boolean, nullable=False),
    sa.Column("index_fingerprint", ShortText(255), nullable=False),
    sa.Column("created_at", UtcMilliseconds, nullable=False),
    sa.Index("ix_tool_invocation_created_at", "created_at"),
    sa.Index("ix_tool_invocation_session_id", "session_id", "created_at"),
    **_OPTIONS,
)

# A key has no limit to its length, which an index has: its digest identifies it.
session_evidence = sa.Table(
    "session_evidence",
    metadata,
    sa.Column("session_id", ShortText(255), primary_key=True),
    sa.Column("evidence_digest", ShortText(64), primary_key=True),
    sa.Column("evidence_key", StorableText, nullable=False),
    sa.Column("invocation_id", ShortText(32), nullable=False),
    sa.Column("created_at", UtcMilliseconds, nullable=False),
    sa.Index("ix_session_evidence_created_at", "created_at"),
    **_OPTIONS,
)

session_domain = sa.Table(
    "session_domain",
    metadata,
    sa.Column("session_id", ShortText(255), primary_key=True),
    sa.Column("domain_digest", ShortText(64), primary_key=True),
    sa.Column("domain", StorableText, nullable=False),
    sa.Column("created_at", UtcMilliseconds, nullable=False),
    sa.Index("ix_session_domain_created_at", "created_at"),
    **_OPTIONS,
)


def insert_absent(connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the rows whose primary key the table does not hold; the others stay as they are."""
    if not rows:
        return
    name = connection.dialect.name
    statement: sa.Insert
    if name in _MYSQL:
        # INSERT IGNORE would also ignore a value that does not fit.
        key = next(iter(table.primary_key))
        statement = mysql.insert(table).on_duplicate_key_update({key.name: key})
    elif name == "postgresql":
        statement = postgresql.insert(table).on_conflict_do_nothing(index_elements=list(table.primary_key))
    else:
        statement = sqlite.insert(table).on_conflict_do_nothing(index_elements=list(table.primary_key))
    connection.execute(statement, list(rows))


def row_of(invocation: Invocation) -> dict[str, Any]:
    """The row of an invocation."""
    storable = invocation.storable()
    return {column.name: getattr(storable, column.name) for column in tool_invocation.columns}


def invocation_of(row: Mapping[str, Any]) -> Invocation:
    """The invocation of a row; a field whose value is of no use is empty, named, and logged."""
    model = Invocation(id="", tool_name="", created_at=_NO_TIME)
    values: dict[str, Any] = {}
    unreadable = []
    for column in tool_invocation.columns:
        kind, value = type(getattr(model, column.name)), row[column.name]
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            unreadable.append(column.name)
            value = getattr(model, column.name)
        values[column.name] = value
    if unreadable:
        logger.warning("Of invocation %s, what is stored as %s cannot be read.", values["id"], ", ".join(unreadable))
    return Invocation(**values, unreadable=tuple(unreadable))


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text; `UNREADABLE` when it is none."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return UNREADABLE


def digest(text: str) -> str:
    """What identifies a text of any length: SHA-256, hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def now() -> datetime:
    """The current time, as `UtcMilliseconds` keeps it."""
    return utc_milliseconds(datetime.now(UTC))
