"""${message}.

Revision ${up_revision} after ${down_revision | comma,n}, ${create_date}.
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    """Bring the schema to this revision."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Not supported: a database is never taken back."""
    raise NotImplementedError
