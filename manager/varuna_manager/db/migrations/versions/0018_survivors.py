"""Which workers keep their process between generations, and which generations go on with them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("in_place", sa.Boolean(), nullable=False, server_default=sa.false()))
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("kept_bytes", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("held_step", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("held_bytes", sa.BigInteger(), nullable=True))
