"""What people ask of the publisher: promotions and rollbacks, and what became of each."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "policy_requests",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("verb", sa.Text, nullable=False),
        sa.Column("from_version", sa.Integer, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("note", sa.Text),
        sa.Column("outcome", sa.Text),
        sa.Column("verdict", _JSON),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("decided_at_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_policy_requests"),
    )
    op.create_index("ix_policy_requests_policy_id", "policy_requests", ["policy", "id"])
    waiting = sa.text("outcome IS NULL")
    op.create_index(
        "ix_policy_requests_waiting",
        "policy_requests",
        ["policy"],
        sqlite_where=waiting,
        postgresql_where=waiting,
    )


def downgrade() -> None:
    op.drop_table("policy_requests")
