"""What a job's generations come to on one row; what it takes to delete jobs and VMs that are over."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_SUM_UP = """
    INSERT INTO job_progress
        (job_id, newest, trained, stepped, step, step_at, stalled_s, steps_redone, changes)
    SELECT job_id, max(number), coalesce(max(CASE WHEN kind = 'training' THEN number END), 0),
           coalesce(max(CASE WHEN last_step IS NOT NULL THEN number END), 0), coalesce(max(last_step), 0),
           coalesce(max(last_step_at), 0), coalesce(sum(seconds_without_progress), 0), coalesce(sum(steps_redone), 0),
           count(CASE WHEN state = 'ended' THEN 1 END)
    FROM generations GROUP BY job_id
"""
_WENT = {  # the time of the last entry of its history
    "sqlite": "UPDATE vms SET gone_at = json_extract(history, '$[#-1].at') WHERE state = 'gone'",
    "postgresql": "UPDATE vms SET gone_at = (history->-1->>'at')::float WHERE state = 'gone'",
}


def upgrade() -> None:
    real, whole, name = sa.Float(precision=53), sa.BigInteger(), sa.String(length=255)
    op.create_table(
        "job_progress",
        sa.Column("job_id", name, nullable=False),
        sa.Column("newest", sa.Integer(), nullable=False),
        sa.Column("trained", sa.Integer(), nullable=False),
        sa.Column("stepped", sa.Integer(), nullable=False),
        sa.Column("step", whole, nullable=False),
        sa.Column("step_at", real, nullable=False),
        sa.Column("stalled_s", real, nullable=False),
        sa.Column("steps_redone", whole, nullable=False),
        sa.Column("changes", whole, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id"),
    )
    op.execute(_SUM_UP)
    op.create_table(
        "fleet_days",
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("vm_hours", real, nullable=False),
        sa.Column("gpu_hours", real, nullable=False),
        sa.Column("cost", real, nullable=False),
        sa.Column("gone", whole, nullable=False),
        sa.Column("gone_with_price", whole, nullable=False),
        sa.PrimaryKeyConstraint("day"),
    )
    op.add_column("jobs", sa.Column("deleted_at", real, nullable=True))
    op.add_column("vms", sa.Column("gone_at", real, nullable=True))
    op.execute(_WENT[op.get_bind().dialect.name])
    op.create_index("ix_vms_gone_at", "vms", ["gone_at"])
    op.create_index("ix_generations_ended_at", "generations", ["ended_at"])
    op.create_index("ix_traces_at", "traces", ["at"])
    op.create_index("ix_stacks_at", "stacks", ["at"])
