"""Who may call what: tokens, the agents that have joined, and the record of changing calls."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_big_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("role", sa.String(255), nullable=True),
        sa.Column("secret_sha256", sa.String(255), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("created_by", sa.String(255), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=True),
        sa.Column("last_used_at", sa.Float(precision=53), nullable=True),
        sa.Column("revoked_at", sa.Float(precision=53), nullable=True),
        sa.Column("single_use", sa.Boolean(), nullable=False),
        sa.Column("vm_id", sa.String(255), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "enrolments",
        sa.Column("vm_id", sa.String(255), nullable=False),
        sa.Column("enrolment", sa.String(255), nullable=False),
        sa.Column("token_id", sa.String(255), nullable=False),
        sa.Column("key_sha256", sa.String(255), nullable=False),
        sa.Column("joined_at", sa.Float(precision=53), nullable=False),
        sa.Column("revoked_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("vm_id"),
    )
    op.create_table(
        "audit",
        sa.Column("id", _big_id, autoincrement=True, nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("who", sa.String(255), nullable=False),
        sa.Column("role", sa.String(255), nullable=True),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
