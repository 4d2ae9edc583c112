"""Why a generation's workers keep no copies that were chosen for it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("generations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("copies_obstacle", sa.Text(), nullable=True))
        batch_op.add_column(sa.Column("marks_obstacle", sa.Text(), nullable=True))
