"""Slow VMs and their quarantine"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("vms", schema=None) as batch_op:
        batch_op.add_column(sa.Column("slow_ratio", sa.Float(precision=53), nullable=True))
        batch_op.add_column(sa.Column("slow_reason", sa.Text(), nullable=True))
        batch_op.add_column(sa.Column("quarantined_until", sa.Float(precision=53), nullable=True))
        batch_op.add_column(sa.Column("quarantines", sa.Integer(), nullable=False, server_default="0"))
