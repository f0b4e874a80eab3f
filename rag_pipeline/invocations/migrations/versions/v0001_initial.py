"""The first tables: invocations, and what sessions were given.

They are spelled out here rather than taken from `invocations.tables`, which goes on to change. MySQL commits each
statement by itself, so a run that was cut off leaves some of them behind, and the next one adds the rest.
"""

import sqlalchemy as sa
from alembic import op

from rag_pipeline.invocations.tables import ShortText, StorableJson, StorableText, UtcMilliseconds

revision = "0001"
down_revision = None

_OPTIONS = {
    f"{dialect}_{name}": value
    for dialect in ("mysql", "mariadb")
    for name, value in (("charset", "utf8mb4"), ("collate", "utf8mb4_bin"), ("engine", "InnoDB"))
}


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "tool_invocation",
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
        if_not_exists=True,
        **_OPTIONS,
    )
    op.create_table(
        "session_evidence",
        sa.Column("session_id", ShortText(255), primary_key=True),
        sa.Column("evidence_digest", ShortText(64), primary_key=True),
        sa.Column("evidence_key", StorableText, nullable=False),
        sa.Column("invocation_id", ShortText(32), nullable=False),
        sa.Column("created_at", UtcMilliseconds, nullable=False),
        if_not_exists=True,
        **_OPTIONS,
    )
    op.create_table(
        "session_domain",
        sa.Column("session_id", ShortText(255), primary_key=True),
        sa.Column("domain_digest", ShortText(64), primary_key=True),
        sa.Column("domain", StorableText, nullable=False),
        sa.Column("created_at", UtcMilliseconds, nullable=False),
        if_not_exists=True,
        **_OPTIONS,
    )
    _index("ix_tool_invocation_created_at", "tool_invocation", "created_at")
    _index("ix_tool_invocation_session_id", "tool_invocation", "session_id", "created_at")
    _index("ix_session_evidence_created_at", "session_evidence", "created_at")
    _index("ix_session_domain_created_at", "session_domain", "created_at")


def downgrade() -> None:
    """Not supported: a database is never taken back."""
    raise NotImplementedError


def _index(name: str, table: str, *columns: str) -> None:
    # MySQL has no CREATE INDEX IF NOT EXISTS.
    if name not in {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}:
        op.create_index(name, table, list(columns))
