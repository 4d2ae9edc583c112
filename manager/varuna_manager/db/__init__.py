"""The store: SQLAlchemy models, engine, migrations."""
