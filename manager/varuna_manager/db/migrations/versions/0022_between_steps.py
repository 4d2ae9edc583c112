"""The part of a step's time that a script spends between two steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("metrics", schema=None) as batch_op:
        batch_op.add_column(sa.Column("between_s", sa.Float(precision=53), nullable=False, server_default="0"))
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("between_s", sa.JSON(), nullable=True))
