"""Attempts at one call are found by their idempotency key and by their first attempt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_COLUMNS = ("idempotency_key", "retry_of")


def upgrade() -> None:
    for column in _COLUMNS:
        given = sa.text(f"{column} IS NOT NULL")
        op.create_index(f"ix_calls_{column}", "calls", [column], sqlite_where=given, postgresql_where=given)


def downgrade() -> None:
    for column in _COLUMNS:
        op.drop_index(f"ix_calls_{column}", "calls")
