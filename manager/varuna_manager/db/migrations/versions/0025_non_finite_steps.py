"""Since when a job's steps have no finite loss or gradient, and how many of its steps updated nothing."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("not_finite_from", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("steps_skipped", sa.BigInteger(), nullable=False, server_default="0"))
