"""What a job's ended generations have used of each VM."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_BILLED = """
    UPDATE job_progress SET billed = coalesce((
        SELECT coalesce(min(CASE WHEN ended_at IS NULL THEN number END) - 1, max(number))
        FROM generations WHERE generations.job_id = job_progress.job_id), 0)
"""
_ADD = """
    INSERT INTO job_vms (job_id, vm_id, gpu_seconds)
    SELECT generations.job_id, vm_id,
           sum(CASE WHEN ended_at > generations.created_at THEN ended_at - generations.created_at ELSE 0 END)
    FROM job_progress
    JOIN generations ON generations.job_id = job_progress.job_id AND number <= billed
    JOIN workers ON workers.job_id = generations.job_id AND workers.generation = generations.number
    GROUP BY generations.job_id, vm_id
"""


def upgrade() -> None:
    name = sa.String(length=255)
    op.add_column("job_progress", sa.Column("billed", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "job_vms",
        sa.Column("job_id", name, nullable=False),
        sa.Column("vm_id", name, nullable=False),
        sa.Column("gpu_seconds", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id", "vm_id"),
    )
    op.execute(_BILLED)
    op.execute(_ADD)
