"""The earlier prices of VMs, and what jobs' ended generations have cost by them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    real = sa.Float(precision=53)
    with op.batch_alter_table("vms", schema=None) as batch_op:
        batch_op.add_column(sa.Column("priced_since", real, nullable=True))
    # Nothing of the present rows is priced: it goes on to count at the VMs' present prices.
    with op.batch_alter_table("job_vms", schema=None) as batch_op:
        batch_op.add_column(sa.Column("priced_gpu_seconds", real, nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("seconds_times_price", real, nullable=False, server_default="0"))
    op.create_table(
        "vm_prices",
        sa.Column("vm_id", sa.String(255), sa.ForeignKey("vms.id"), primary_key=True),
        sa.Column("until", real, primary_key=True),
        sa.Column("since", real, nullable=False),
        sa.Column("price_per_hour", real, nullable=False),
    )
