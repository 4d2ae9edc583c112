"""What a look at the whole fleet reads of it, as indexes that hold it all: VMs' versions, workers by their states."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("vms", schema=None) as batch_op:
        batch_op.create_index("ix_vms_state_id_version", ["state", "id", "version"], unique=False)
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.drop_index("ix_workers_state")
        batch_op.create_index("ix_workers_state_job_id_generation", ["state", "job_id", "generation"], unique=False)
