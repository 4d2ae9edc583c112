"""Run by Alembic, inside the connection that `varuna_manager.db.engine` hands over."""

from __future__ import annotations

from alembic import context

from varuna_manager.db.models import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
