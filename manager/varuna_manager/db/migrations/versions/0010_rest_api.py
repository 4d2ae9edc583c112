"""Blocks of steps for charts, traces of mini-batches, and indexes for pages of long lists."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# The blocks of the steps that are there already; they are kept up to date as steps come.
_FILL = """
    INSERT INTO metric_blocks
    SELECT job_id, (step - 1) / 100, min(step), max(step), count(*), max(at), max(generation), count(loss), sum(loss),
           min(loss), max(loss), sum(step_s), min(step_s), max(step_s),
           sum(CASE WHEN step_s > 0 THEN examples ELSE 0 END), min(examples / nullif(step_s, 0)),
           max(examples / nullif(step_s, 0))
    FROM metrics GROUP BY job_id, (step - 1) / 100
"""


def upgrade() -> None:
    real, whole, name = sa.Float(precision=53), sa.BigInteger(), sa.String(length=255)
    op.create_table(
        "metric_blocks",
        sa.Column("job_id", name, nullable=False),
        sa.Column("block", whole, autoincrement=False, nullable=False),
        sa.Column("first_step", whole, nullable=False),
        sa.Column("last_step", whole, nullable=False),
        sa.Column("steps", whole, nullable=False),
        sa.Column("at", real, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("losses", whole, nullable=False),
        sa.Column("loss_sum", real, nullable=True),
        sa.Column("loss_min", real, nullable=True),
        sa.Column("loss_max", real, nullable=True),
        sa.Column("step_s_sum", real, nullable=False),
        sa.Column("step_s_min", real, nullable=False),
        sa.Column("step_s_max", real, nullable=False),
        sa.Column("examples", whole, nullable=False),
        sa.Column("rate_min", real, nullable=True),
        sa.Column("rate_max", real, nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id", "block"),
    )
    op.execute(_FILL)
    op.create_table(
        "traces",
        sa.Column("job_id", name, nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", whole, nullable=False),
        sa.Column("at", real, nullable=False),
        sa.Column("begin_us", real, nullable=False),
        sa.Column("spans", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id", "generation", "rank"),
    )
    op.create_index("ix_events_vm_id_id", "events", ["vm_id", "id"])
    op.create_index("ix_events_kind_id", "events", ["kind", "id"])
    op.create_index("ix_events_at", "events", ["at"])
    op.create_index("ix_jobs_created_at_id", "jobs", ["created_at", "id"])
    op.create_index("ix_vms_created_at_id", "vms", ["created_at", "id"])
