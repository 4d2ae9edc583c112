"""What the fleet controller remembers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("fleet", schema=None) as batch_op:
        batch_op.add_column(sa.Column("min_vms", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("max_vms", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("request", sa.String(length=255), nullable=True))
        batch_op.add_column(sa.Column("request_count", sa.Integer(), nullable=True))
    with op.batch_alter_table("vms", schema=None) as batch_op:
        batch_op.add_column(sa.Column("request", sa.String(length=255), nullable=True))
        batch_op.add_column(sa.Column("price_per_hour", sa.Float(precision=53), nullable=True))
