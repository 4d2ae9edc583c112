"""The gradient norm and the learning rate of each step, and of blocks of steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_NAMES = ("gradient_norm", "learning_rate")


def upgrade() -> None:
    number = sa.Float(precision=53)
    for name in _NAMES:
        op.add_column("metrics", sa.Column(name, number, nullable=True))
        op.add_column("metric_blocks", sa.Column(f"{name}s", sa.BigInteger(), nullable=False, server_default="0"))
        for part in ("sum", "min", "max"):
            op.add_column("metric_blocks", sa.Column(f"{name}_{part}", number, nullable=True))
