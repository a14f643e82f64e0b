"""Other vendors' answers"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("calls", sa.Column("usage_estimated", sa.Boolean()))


def downgrade() -> None:
    op.drop_column("calls", "usage_estimated")
