"""Packed workdirs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "archives",
        sa.Column("sha256", sa.String(length=255), nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("sha256"),
    )
    op.create_table(
        "archive_chunks",
        sa.Column("sha256", sa.String(length=255), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", "number"),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.add_column(sa.Column("archive", sa.String(length=255), nullable=True))
        batch_op.add_column(sa.Column("setup_error", sa.Text(), nullable=True))
        batch_op.add_column(sa.Column("setup_exit_code", sa.Integer(), nullable=True))
