"""Alembic migrations of the log."""
