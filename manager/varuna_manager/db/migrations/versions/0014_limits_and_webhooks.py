"""From when a job's limits count, what a VM's GPUs are, and which events webhooks have been sent for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.add_column(sa.Column("retried_at", sa.Float(precision=53), nullable=True))
        batch_op.add_column(sa.Column("run_since", sa.Float(precision=53), nullable=True))
    with op.batch_alter_table("vms", schema=None) as batch_op:
        batch_op.add_column(sa.Column("gpu_type", sa.String(length=255), nullable=True))
    op.create_table(
        "webhook_cursor",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("event_id", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
