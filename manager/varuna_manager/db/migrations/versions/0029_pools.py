"""Pools: where each VM comes from, and the request of each pool that may be under way."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("vms", schema=None) as batch_op:
        for name in ("pool", "zone", "machine_type"):
            batch_op.add_column(sa.Column(name, sa.String(length=255), nullable=True))
    op.create_table(
        "pools",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("request", sa.String(length=255), nullable=True),
        sa.Column("request_count", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("name"),
    )
