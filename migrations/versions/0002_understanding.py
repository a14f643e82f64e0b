"""What curation and large logs need: indexes of the exceptions, and paging by time"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ADDED = (
    ("ix_groups_created_at_ms_id", "groups", ["created_at_ms", "id"], None),
    ("ix_episodes_group_id_purpose_status", "episodes", ["group_id", "purpose", "status"], None),
    ("ix_episodes_created_at_ms_id", "episodes", ["created_at_ms", "id"], None),
    ("ix_episodes_task_id_created_at_ms_id", "episodes", ["task_id", "created_at_ms", "id"], None),
    ("ix_episodes_status_created_at_ms_id", "episodes", ["status", "created_at_ms", "id"], None),
    ("ix_episodes_gaps", "episodes", ["id"], "has_gap"),
    ("ix_calls_episode_id_ordinal", "calls", ["episode_id", "ordinal"], "episode_id IS NOT NULL"),
    ("ix_calls_agent_episode_id", "calls", ["agent", "episode_id"], "agent IS NOT NULL"),
    ("ix_calls_unattributed", "calls", ["id"], "episode_id IS NULL"),
    ("ix_calls_unfinished", "calls", ["status", "id"], "status <> 'complete'"),
    ("ix_calls_other_kinds", "calls", ["kind", "id"], "kind <> 'policy'"),
    ("ix_calls_conflicts", "calls", ["id"], "attribution_conflict IS NOT NULL"),
    ("ix_choices_quarantine", "choices", ["quarantine", "call_id"], "quarantine IS NOT NULL"),
    ("ix_events_kind_created_at_ms", "events", ["kind", "created_at_ms"], None),
)
_DROPPED = (
    ("ix_calls_episode_id_ordinal", "calls", ["episode_id", "ordinal"]),
    ("ix_episodes_group_id", "episodes", ["group_id"]),
    ("ix_episodes_created_at_ms", "episodes", ["created_at_ms"]),
    ("ix_choices_quarantine", "choices", ["quarantine"]),
)


def upgrade() -> None:
    for name, table, _ in _DROPPED:
        op.drop_index(name, table)
    for name, table, columns, where in _ADDED:
        picked = None if where is None else sa.text(where)
        op.create_index(name, table, columns, sqlite_where=picked, postgresql_where=picked)


def downgrade() -> None:
    for name, table, _, _ in _ADDED:
        op.drop_index(name, table)
    for name, table, columns in _DROPPED:
        op.create_index(name, table, columns)
