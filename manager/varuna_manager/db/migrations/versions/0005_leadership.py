"""Which manager leads; where a job's checkpoints are, whoever leads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    leadership = op.create_table(
        "leadership",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("holder", sa.String(length=255), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=False),
        sa.Column("http_url", sa.String(length=255), nullable=False),
        sa.Column("grpc_address", sa.String(length=255), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    nobody = {"id": 1, "holder": "", "epoch": 0, "expires_at": 0.0, "http_url": "", "grpc_address": ""}
    op.bulk_insert(leadership, [nobody])
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.add_column(sa.Column("checkpoint_url", sa.Text(), nullable=True))
