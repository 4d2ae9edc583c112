"""Which processes give their state to a generation, and where the state of its workers comes from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("holders_generation", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("holders", sa.JSON(), nullable=True))
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("held_gives_only", sa.Boolean(), nullable=False, server_default=sa.false()))
        batch_op.add_column(sa.Column("peer_bytes", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("store_bytes", sa.BigInteger(), nullable=True))
