"""Alembic's migrations of the invocation database."""
