"""Several proxies on one log"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "proxies",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("started_at_ms", sa.BigInteger, nullable=False),
        sa.Column("seen_at_ms", sa.BigInteger, nullable=False),
        sa.Column("acked_seq", sa.BigInteger, nullable=False),
        sa.Column("uses", _JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_proxies"),
    )
    op.create_table(
        "publisher_lease",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.Text),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_publisher_lease"),
    )
    op.create_table(
        "serving_state",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("is_changing", sa.Boolean, nullable=False),
        sa.Column("live", _JSON, nullable=False),
        sa.Column("engines", _JSON, nullable=False),
        sa.Column("written_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_serving_state"),
    )


def downgrade() -> None:
    for table in ("serving_state", "publisher_lease", "proxies"):
        op.drop_table(table)
