"""Restarts of jobs, drains with a deadline, hangs and their stacks"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.add_column(sa.Column("exit_code", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("retried_after", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("cancel_saves", sa.Boolean(), nullable=False, server_default=sa.false()))
    with op.batch_alter_table("vms", schema=None) as batch_op:
        batch_op.add_column(sa.Column("drain_deadline", sa.Float(precision=53), nullable=True))
        batch_op.add_column(sa.Column("hangs", sa.Integer(), nullable=False, server_default="0"))
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_workers_state"), ["state"], unique=False)
    op.create_table(
        "stacks",
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("vm_id", sa.String(length=255), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id", "generation", "rank"),
    )
