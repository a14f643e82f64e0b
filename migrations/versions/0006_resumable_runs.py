"""Runs that can be resumed, and of which one at a time owns a policy."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def _columns() -> dict[str, list[sa.Column[object]]]:
    return {
        "runs": [
            sa.Column("start_version", sa.Integer),
            sa.Column("owned_policy", sa.Text),
            sa.Column("owner_token", sa.Text),
            sa.Column("owner_host", sa.Text),
            sa.Column("owner_pid", sa.Integer),
            sa.Column("owner_process", sa.Text),
            sa.Column("seen_at_ms", sa.BigInteger),
        ],
        "step_manifests": [sa.Column("counts", _JSON)],
        "manifest_choices": [sa.Column("position", sa.Integer)],
    }


def upgrade() -> None:
    for table, columns in _columns().items():
        for column in columns:
            op.add_column(table, column)
    op.create_index("ix_runs_owned_policy", "runs", ["owned_policy"], unique=True)


def downgrade() -> None:
    op.drop_index("ix_runs_owned_policy", "runs")
    for table, columns in _columns().items():
        for column in columns:
            op.drop_column(table, column.name)
