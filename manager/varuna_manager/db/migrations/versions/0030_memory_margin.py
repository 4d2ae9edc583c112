"""What a worker's device had when it ran out of memory, and what a job's plans allow for since."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("memory_margin", sa.JSON(), nullable=True))
    op.add_column("workers", sa.Column("shortage", sa.JSON(), nullable=True))
