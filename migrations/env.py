"""Alembic's entry point: runs the revisions on the connection that the program hands in.

Loaded by Alembic as a file, not as a module of the package, and never from a command line: there is no
alembic.ini. The caller owns the transaction, so an upgrade happens whole or not at all.
"""

from alembic import context

_attributes = context.config.attributes
context.configure(
    connection=_attributes["connection"],
    target_metadata=_attributes["metadata"],
    render_as_batch=True,  # SQLite can't alter a column: copy, drop, rename
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
