"""The first tables"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("job_id", sa.String(length=255), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=True),
        sa.Column("vm_id", sa.String(length=255), nullable=True),
        sa.Column("kind", sa.String(length=255), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_job_id_id", ["job_id", "id"], unique=False)

    op.create_table(
        "fleet",
        sa.Column("provider", sa.String(length=255), nullable=False),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("provider"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("active_name", sa.String(length=255), nullable=True),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=True),
        sa.Column("finished_at", sa.Float(precision=53), nullable=True),
        sa.Column("profile_json", sa.Text(), nullable=True),
        sa.Column("profiled_at", sa.Float(precision=53), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=255), nullable=False),
        sa.Column("history", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("active_name"),
        sa.UniqueConstraint("idempotency_key"),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_jobs_name"), ["name"], unique=False)

    op.create_table(
        "vms",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("provider", sa.String(length=255), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("device_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("host", sa.String(length=255), nullable=True),
        sa.Column("ref", sa.JSON(), nullable=False),
        sa.Column("incarnation", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("notice_id", sa.String(length=255), nullable=True),
        sa.Column("notice_deadline", sa.Float(precision=53), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=255), nullable=False),
        sa.Column("history", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("job_id", "generation", "step"),
    )
    op.create_table(
        "generations",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=255), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.Column("candidates", sa.JSON(), nullable=False),
        sa.Column("rendezvous_host", sa.String(length=255), nullable=False),
        sa.Column("rendezvous_port", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.Column("end_cause", sa.String(length=255), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("stop_mode", sa.String(length=255), nullable=True),
        sa.Column("stop_cause", sa.String(length=255), nullable=True),
        sa.Column("stop_reason", sa.Text(), nullable=True),
        sa.Column("stop_requested_at", sa.Float(precision=53), nullable=True),
        sa.Column("started_at", sa.Float(precision=53), nullable=True),
        sa.Column("resumed_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("last_loss", sa.Float(precision=53), nullable=True),
        sa.Column("last_step_at", sa.Float(precision=53), nullable=True),
        sa.Column("seconds_without_progress", sa.Float(precision=53), nullable=True),
        sa.Column("steps_redone", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=255), nullable=False),
        sa.Column("history", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("job_id", "number", name="uq_generations_job_id_number"),
    )
    op.create_table(
        "metrics",
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("loss", sa.Float(precision=53), nullable=True),
        sa.Column("step_s", sa.Float(precision=53), nullable=False),
        sa.Column("examples", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("job_id", "step"),
    )
    op.create_table(
        "workers",
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("vm_id", sa.String(length=255), nullable=False),
        sa.Column("local_rank", sa.Integer(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("resumed_step", sa.BigInteger(), nullable=True),
        sa.Column("cause", sa.String(length=255), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("error_text", sa.Text(), nullable=True),
        sa.Column("stopped_at", sa.Float(precision=53), nullable=True),
        sa.Column("state", sa.String(length=255), nullable=False),
        sa.Column("history", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("job_id", "generation", "rank"),
    )
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_workers_vm_id"), ["vm_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_workers_vm_id"))

    op.drop_table("workers")
    op.drop_table("metrics")
    op.drop_table("generations")
    op.drop_table("checkpoints")
    op.drop_table("vms")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_jobs_name"))

    op.drop_table("jobs")
    op.drop_table("fleet")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("ix_events_job_id_id")

    op.drop_table("events")
