"""Cordoned VMs, deaths on a VM, peers that were not reached, and how long saves took."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("vms", schema=None) as batch_op:
        batch_op.add_column(sa.Column("cordoned_at", sa.Float(precision=53), nullable=True))
        batch_op.add_column(sa.Column("deaths", sa.Integer(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("last_death_at", sa.Float(precision=53), nullable=True))
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("unreached", sa.BigInteger(), nullable=True))
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("save_s", sa.Float(precision=53), nullable=True))
