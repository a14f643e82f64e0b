"""The log's first schema"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


_tables = (
    "choices",
    "rewards",
    "manifest_episodes",
    "manifest_choices",
    "calls",
    "step_manifests",
    "episodes",
    "token_blocks",
    "runs",
    "policy_versions",
    "groups",
    "fingerprints",
    "events",
    "episode_keys",
    "body_parts",
)
_json = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "body_parts",
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("bytes", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_body_parts"),
    )
    op.create_table(
        "episode_keys",
        sa.Column("key_hash", sa.LargeBinary, nullable=False),
        sa.Column("episode_id", sa.Text, nullable=False),
        sa.Column("agent", sa.Text),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("key_hash", name="pk_episode_keys"),
    )
    op.create_index("ix_episode_keys_episode_id", "episode_keys", ["episode_id"])

    op.create_table(
        "events",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("subject_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("value", _json),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("note", sa.Text),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index(
        "ix_events_subject_subject_id_created_at_ms", "events", ["subject", "subject_id", "created_at_ms"]
    )

    op.create_table(
        "fingerprints",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("tokenizer_probe", sa.Text),
        sa.Column("template_probe", sa.Text),
        sa.Column("max_model_tokens", sa.Integer),
        sa.Column("logprobs_mode", sa.Text),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_fingerprints"),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("batch", sa.Text, nullable=False),
        sa.Column("expected_size", sa.Integer),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_groups"),
        sa.UniqueConstraint("task_id", "batch", name="uq_groups_task_id_batch"),
    )
    op.create_table(
        "policy_versions",
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("path", sa.Text),
        sa.Column("checksum", sa.Text),
        sa.Column("probe", sa.LargeBinary),
        sa.Column("base_model", sa.Text),
        sa.Column("run_id", sa.Text),
        sa.Column("step", sa.Integer),
        sa.Column("verdict", _json),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("live_at_ms", sa.BigInteger),
        sa.Column("retired_at_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("policy", "version", name="pk_policy_versions"),
    )
    op.create_index("ix_policy_versions_status", "policy_versions", ["status"])

    op.create_table(
        "runs",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("settings", _json, nullable=False),
        sa.Column("environment", _json, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("ended_at_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_table(
        "token_blocks",
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("parent", sa.LargeBinary),
        sa.Column("ids", sa.LargeBinary, nullable=False),
        sa.Column("num_tokens", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_token_blocks"),
    )
    op.create_index("ix_token_blocks_parent", "token_blocks", ["parent"])

    op.create_table(
        "episodes",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text),
        sa.Column("group_id", sa.Text),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("ended_by", sa.Text),
        sa.Column("tags", _json, nullable=False),
        sa.Column("num_calls", sa.Integer, nullable=False),
        sa.Column("has_gap", sa.Boolean, nullable=False),
        sa.Column("policy", sa.Text),
        sa.Column("policy_version", sa.Integer),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("last_call_at_ms", sa.BigInteger),
        sa.Column("ended_at_ms", sa.BigInteger),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name="fk_episodes_group_id"),
        sa.PrimaryKeyConstraint("id", name="pk_episodes"),
    )
    op.create_index("ix_episodes_created_at_ms", "episodes", ["created_at_ms"])
    op.create_index("ix_episodes_group_id", "episodes", ["group_id"])
    op.create_index(
        "ix_episodes_status_purpose_ended_at_ms", "episodes", ["status", "purpose", "ended_at_ms"]
    )

    op.create_table(
        "step_manifests",
        sa.Column("run_id", sa.Text, nullable=False),
        sa.Column("step", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("from_version", sa.Integer, nullable=False),
        sa.Column("to_version", sa.Integer),
        sa.Column("metrics", _json),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("trained_at_ms", sa.BigInteger),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_step_manifests_run_id"),
        sa.PrimaryKeyConstraint("run_id", "step", name="pk_step_manifests"),
    )
    op.create_table(
        "calls",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("episode_id", sa.Text),
        sa.Column("ordinal", sa.Integer),
        sa.Column("agent", sa.Text),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("attribution_rule", sa.Text, nullable=False),
        sa.Column("attribution_conflict", sa.Text),
        sa.Column("parent_call_id", sa.Text),
        sa.Column("state_key", sa.Text),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("dialect", sa.Text, nullable=False),
        sa.Column("streaming", sa.Boolean, nullable=False),
        sa.Column("requested_model", sa.Text),
        sa.Column("served_model", sa.Text),
        sa.Column("policy", sa.Text),
        sa.Column("policy_version", sa.Integer),
        sa.Column("policy_version_end", sa.Integer),
        sa.Column("engine_url", sa.Text, nullable=False),
        sa.Column("fingerprint_id", sa.Text),
        sa.Column("sampling", _json, nullable=False),
        sa.Column("request_body", sa.LargeBinary),
        sa.Column("request_hash", sa.LargeBinary),
        sa.Column("idempotency_key", sa.Text),
        sa.Column("retry_count", sa.Integer, nullable=False),
        sa.Column("retry_of", sa.Text),
        sa.Column("unrecordable", sa.Text),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("http_status", sa.Integer),
        sa.Column("delivered", sa.Boolean),
        sa.Column("upstream_id", sa.Text),
        sa.Column("prompt_block", sa.LargeBinary),
        sa.Column("num_prompt_tokens", sa.Integer),
        sa.Column("reported_completion_tokens", sa.Integer),
        sa.Column("error", sa.Text),
        sa.Column("tags", _json, nullable=False),
        sa.Column("started_at_ms", sa.BigInteger, nullable=False),
        sa.Column("first_byte_at_ms", sa.BigInteger),
        sa.Column("ended_at_ms", sa.BigInteger),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name="fk_calls_episode_id"),
        sa.ForeignKeyConstraint(["fingerprint_id"], ["fingerprints.id"], name="fk_calls_fingerprint_id"),
        sa.PrimaryKeyConstraint("id", name="pk_calls"),
    )
    op.create_index("ix_calls_episode_id_ordinal", "calls", ["episode_id", "ordinal"])
    op.create_index("ix_calls_policy_policy_version", "calls", ["policy", "policy_version"])
    op.create_index("ix_calls_prompt_block", "calls", ["prompt_block"])
    op.create_index("ix_calls_started_at_ms", "calls", ["started_at_ms"])
    op.create_index("ix_calls_upstream_id", "calls", ["upstream_id"])

    op.create_table(
        "manifest_choices",
        sa.Column("run_id", sa.Text, nullable=False),
        sa.Column("step", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("call_id", sa.Text, nullable=False),
        sa.Column("choice_index", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("episode_id", sa.Text, nullable=False),
        sa.Column("agent", sa.Text),
        sa.Column("advantage", sa.Float(precision=53)),
        sa.Column("multiplier", sa.Float(precision=53), nullable=False),
        sa.Column("reason", sa.Text),
        sa.ForeignKeyConstraint(
            ["run_id", "step"],
            ["step_manifests.run_id", "step_manifests.step"],
            name="fk_manifest_choices_run_id_step",
        ),
        sa.PrimaryKeyConstraint("run_id", "step", "call_id", "choice_index", name="pk_manifest_choices"),
    )
    op.create_index(
        "ix_manifest_choices_call_id_choice_index", "manifest_choices", ["call_id", "choice_index"]
    )

    op.create_table(
        "manifest_episodes",
        sa.Column("run_id", sa.Text, nullable=False),
        sa.Column("step", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("episode_id", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text),
        sa.Column("value", sa.Float(precision=53)),
        sa.Column("reward_ids", _json, nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "step"],
            ["step_manifests.run_id", "step_manifests.step"],
            name="fk_manifest_episodes_run_id_step",
        ),
        sa.PrimaryKeyConstraint("run_id", "step", "episode_id", name="pk_manifest_episodes"),
    )
    op.create_index("ix_manifest_episodes_episode_id", "manifest_episodes", ["episode_id"])

    op.create_table(
        "rewards",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("episode_id", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("agent", sa.Text),
        sa.Column("call_id", sa.Text),
        sa.Column("choice_index", sa.Integer),
        sa.Column("token_start", sa.Integer),
        sa.Column("token_end", sa.Integer),
        sa.Column("value", sa.Float(precision=53), nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("final", sa.Boolean, nullable=False),
        sa.Column("note", sa.Text),
        sa.Column("supersedes", sa.Text),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name="fk_rewards_episode_id"),
        sa.PrimaryKeyConstraint("id", name="pk_rewards"),
    )
    op.create_index("ix_rewards_episode_id_created_at_ms", "rewards", ["episode_id", "created_at_ms"])

    op.create_table(
        "choices",
        sa.Column("call_id", sa.Text, nullable=False),
        sa.Column("index", sa.Integer, nullable=False),
        sa.Column("completion_ids", sa.LargeBinary),
        sa.Column("behavior_logprobs", sa.LargeBinary),
        sa.Column("num_tokens", sa.Integer, nullable=False),
        sa.Column("finish_reason", sa.Text),
        sa.Column("stop_reason", _json),
        sa.Column("message", sa.LargeBinary),
        sa.Column("quarantine", sa.Text),
        sa.Column("used", sa.Boolean),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name="fk_choices_call_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("call_id", "index", name="pk_choices"),
    )
    op.create_index("ix_choices_quarantine", "choices", ["quarantine"])


def downgrade() -> None:
    for table in _tables:
        op.drop_table(table)
