"""The versions of the schema."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

_MIGRATING = 0x76617275
"""Number of the PostgreSQL lock that the migrating manager holds."""


class TooNewError(Exception):
    """The store was made by a later version of Varuna; `str()` is one line with the remedy."""


def migration_config() -> Config:
    """Alembic's configuration, for the scripts inside this package."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


def known_revisions() -> set[str]:
    """Revisions of schemas that this version of Varuna can read, after an upgrade."""
    return {each.revision for each in ScriptDirectory.from_config(migration_config()).walk_revisions()}


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema to the revision, within the connection's transaction. Raises TooNewError."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _MIGRATING})
    config = migration_config()
    script = ScriptDirectory.from_config(config)
    present = MigrationContext.configure(connection).get_current_revision()
    if present is not None and present not in known_revisions():
        raise TooNewError(
            f"the store's schema is of revision {present}, and this version of Varuna knows those up to "
            f"{script.get_current_head()}: start the version that the store was last used with, or a later one"
        )
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
