"""How many micro-batches of the step under way a generation in place runs, again or for the first time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("micro_batches_left", sa.BigInteger(), nullable=True))
