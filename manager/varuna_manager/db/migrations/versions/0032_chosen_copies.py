"""Whether a generation's ranks copy the sums of long steps, and why it keeps copies or keeps none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("copies_shares", sa.Boolean(), nullable=True))
        batch_op.add_column(sa.Column("copies_reason", sa.Text(), nullable=True))
