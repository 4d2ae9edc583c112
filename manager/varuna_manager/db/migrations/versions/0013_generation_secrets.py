"""A secret for each generation, and the checkpoint that it must find."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("secret", sa.String(length=255), nullable=True))
        batch_op.add_column(sa.Column("committed_step", sa.BigInteger(), nullable=True))
