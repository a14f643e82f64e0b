"""The tables of the log, for SQLite and Postgres alike.

Rows are added, rarely changed: a column that does change (an episode's status, a call's kind or episode) is a
cached copy of the newest row in `events`, kept for indexed reads. Times are milliseconds since the epoch.
Ids are text: ours are `records.new_id()` (they sort by time), episodes and tasks are named by the agents.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _partial(name: str, *columns: str, where: str) -> sa.Index:
    """An index of the rows that `where` picks. Of exceptions, it lets doctor count them without a look at the
    others, and costs an ordinary row nothing. A query uses it where it says `where` in literals, not in
    parameters; comparing a column says that it is not null."""
    return sa.Index(name, *columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


Json = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
Float64 = sa.Float(53)

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("task_id", sa.Text, nullable=False),
    sa.Column("batch", sa.Text, nullable=False),  # "" where nobody named one
    sa.Column("expected_size", sa.Integer),  # None: nobody said
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("task_id", "batch"),
    sa.Index(None, "created_at_ms", "id"),
)

episodes = sa.Table(
    "episodes",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("task_id", sa.Text),
    sa.Column("group_id", sa.Text, sa.ForeignKey("groups.id")),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),  # newest of its events
    sa.Column("ended_by", sa.Text),  # "api" | "reward" | "runner" | "idle"
    sa.Column("tags", Json, nullable=False),
    sa.Column("num_calls", sa.Integer, nullable=False),  # the counter that gives calls their ordinal
    sa.Column("has_gap", sa.Boolean, nullable=False),  # a call was served but not recorded
    sa.Column("policy", sa.Text),  # pinned: the policy and version that it began with
    sa.Column("policy_version", sa.Integer),
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.Column("last_call_at_ms", sa.BigInteger),
    sa.Column("ended_at_ms", sa.BigInteger),
    # As long as it is so that it wins: without statistics, SQLite would read all ended episodes per group.
    sa.Index(None, "group_id", "purpose", "status"),
    sa.Index(None, "status", "purpose", "ended_at_ms"),
    sa.Index(None, "created_at_ms", "id"),
    sa.Index(None, "task_id", "created_at_ms", "id"),
    sa.Index(None, "status", "created_at_ms", "id"),
    _partial("ix_episodes_gaps", "id", where="has_gap"),
)

episode_keys = sa.Table(
    "episode_keys",
    metadata,
    sa.Column("key_hash", sa.LargeBinary, primary_key=True),  # the key itself is never stored
    sa.Column("episode_id", sa.Text, nullable=False),
    sa.Column("agent", sa.Text),
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.Column("expires_at_ms", sa.BigInteger),
    sa.Index(None, "episode_id"),
)

fingerprints = sa.Table(
    "fingerprints",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("engine", sa.Text, nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("tokenizer_probe", sa.Text),
    sa.Column("template_probe", sa.Text),
    sa.Column("max_model_tokens", sa.Integer),
    sa.Column("logprobs_mode", sa.Text),
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
)

token_blocks = sa.Table(
    "token_blocks",
    metadata,
    sa.Column("hash", sa.LargeBinary, primary_key=True),  # blake2b-128(parent hash + ids)
    sa.Column("parent", sa.LargeBinary),  # None: the first block of a prompt
    sa.Column("ids", sa.LargeBinary, nullable=False),
    sa.Column("num_tokens", sa.Integer, nullable=False),  # up to and including this block
    sa.Index(None, "parent"),
)

body_parts = sa.Table(
    "body_parts",
    metadata,
    sa.Column("hash", sa.LargeBinary, primary_key=True),  # blake2b-128 of the uncompressed bytes
    sa.Column("bytes", sa.LargeBinary, nullable=False),  # one message, or one list of tools, compressed JSON
)

calls = sa.Table(
    "calls",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("episode_id", sa.Text, sa.ForeignKey("episodes.id")),  # None: the unattributed bin
    sa.Column("ordinal", sa.Integer),  # order within the episode, 0-based; None while unattributed
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
    sa.Column("policy_version", sa.Integer),  # when the engine was asked
    sa.Column("policy_version_end", sa.Integer),  # when it had finished
    sa.Column("engine_url", sa.Text, nullable=False),
    sa.Column("fingerprint_id", sa.Text, sa.ForeignKey("fingerprints.id")),
    sa.Column("sampling", Json, nullable=False),
    sa.Column("request_body", sa.LargeBinary),  # skeleton; its messages and tools are body_parts
    sa.Column("request_hash", sa.LargeBinary),
    sa.Column("idempotency_key", sa.Text),
    sa.Column("retry_count", sa.Integer, nullable=False),
    sa.Column("retry_of", sa.Text),  # id of the call that this one repeats
    sa.Column("unrecordable", sa.Text),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("http_status", sa.Integer),
    sa.Column("delivered", sa.Boolean),  # None: not known (yet)
    sa.Column("upstream_id", sa.Text),
    sa.Column("prompt_block", sa.LargeBinary),  # hash of the prompt's last token block
    sa.Column("num_prompt_tokens", sa.Integer),
    sa.Column("reported_completion_tokens", sa.Integer),
    sa.Column("usage_estimated", sa.Boolean),  # True: a vendor gave no counts, these are ours
    sa.Column("error", sa.Text),
    sa.Column("tags", Json, nullable=False),
    sa.Column("started_at_ms", sa.BigInteger, nullable=False),
    sa.Column("first_byte_at_ms", sa.BigInteger),
    sa.Column("ended_at_ms", sa.BigInteger),
    # Without the unattributed calls, which have an index of their own: SQLite would rather read this one.
    _partial("ix_calls_episode_id_ordinal", "episode_id", "ordinal", where="episode_id IS NOT NULL"),
    sa.Index(None, "upstream_id"),
    sa.Index(None, "started_at_ms"),
    sa.Index(None, "policy", "policy_version"),
    sa.Index(None, "prompt_block"),
    _partial("ix_calls_agent_episode_id", "agent", "episode_id", where="agent IS NOT NULL"),
    _partial("ix_calls_unattributed", "id", where="episode_id IS NULL"),
    _partial("ix_calls_unfinished", "status", "id", where="status <> 'complete'"),
    _partial("ix_calls_other_kinds", "kind", "id", where="kind <> 'policy'"),
    _partial("ix_calls_conflicts", "id", where="attribution_conflict IS NOT NULL"),
    _partial("ix_calls_idempotency_key", "idempotency_key", where="idempotency_key IS NOT NULL"),
    _partial("ix_calls_retry_of", "retry_of", where="retry_of IS NOT NULL"),
)

choices = sa.Table(
    "choices",
    metadata,
    sa.Column("call_id", sa.Text, sa.ForeignKey("calls.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("index", sa.Integer, primary_key=True),
    sa.Column("completion_ids", sa.LargeBinary),
    sa.Column("behavior_logprobs", sa.LargeBinary),
    sa.Column("num_tokens", sa.Integer, nullable=False),
    sa.Column("finish_reason", sa.Text),
    sa.Column("stop_reason", Json),
    sa.Column("message", sa.LargeBinary),  # compressed JSON
    sa.Column("quarantine", sa.Text),  # None: trainable
    sa.Column("used", sa.Boolean),  # None: nobody said
    _partial("ix_choices_quarantine", "quarantine", "call_id", where="quarantine IS NOT NULL"),
)

rewards = sa.Table(
    "rewards",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("episode_id", sa.Text, sa.ForeignKey("episodes.id"), nullable=False),
    sa.Column("target", sa.Text, nullable=False),
    sa.Column("agent", sa.Text),
    sa.Column("call_id", sa.Text),
    sa.Column("choice_index", sa.Integer),
    sa.Column("token_start", sa.Integer),
    sa.Column("token_end", sa.Integer),
    sa.Column("value", Float64, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("final", sa.Boolean, nullable=False),
    sa.Column("note", sa.Text),
    sa.Column("supersedes", sa.Text),
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.Index(None, "episode_id", "created_at_ms"),
)

events = (
    sa.Table(  # every later judgement on a row: ended, failed, excluded, tagged, assigned, kind, used, gap
        "events",
        metadata,
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("subject", sa.Text, nullable=False),  # "episode" | "call" | "choice" | "policy_version"
        sa.Column("subject_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("value", Json),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("note", sa.Text),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Index(None, "subject", "subject_id", "created_at_ms"),
        sa.Index(None, "kind", "created_at_ms"),
    )
)

policy_versions = sa.Table(
    "policy_versions",
    metadata,
    sa.Column("policy", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("status", sa.Text, nullable=False),  # newest of its events
    sa.Column("kind", sa.Text, nullable=False),  # "lora" | "full"
    sa.Column("path", sa.Text),
    sa.Column("checksum", sa.Text),
    sa.Column("probe", sa.LargeBinary),  # compressed JSON of ProbeSequences
    sa.Column("base_model", sa.Text),
    sa.Column("run_id", sa.Text),
    sa.Column("step", sa.Integer),
    sa.Column("verdict", Json),
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.Column("live_at_ms", sa.BigInteger),
    sa.Column("retired_at_ms", sa.BigInteger),
    sa.Index(None, "status"),
)

policy_requests = sa.Table(  # what people ask of the publisher (store/policy_requests.py)
    "policy_requests",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),  # 0: the base model
    sa.Column("verb", sa.Text, nullable=False),  # "promote" | "rollback"
    sa.Column("from_version", sa.Integer, nullable=False),  # live when it was asked
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("note", sa.Text),
    sa.Column("outcome", sa.Text),  # None: waiting; else "live" | "rejected" | "superseded"
    sa.Column("verdict", Json),  # the publisher's numbers, or the reason
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.Column("decided_at_ms", sa.BigInteger),
    sa.Index(None, "policy", "id"),
    _partial("ix_policy_requests_waiting", "policy", where="outcome IS NULL"),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),  # "running" | "finished" | "stopped" | "failed"
    sa.Column("settings", Json, nullable=False),
    sa.Column("environment", Json, nullable=False),
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.Column("ended_at_ms", sa.BigInteger),
    sa.Column("start_version", sa.Integer),  # the weights of its first step; 0: the base model
    # Who trains it (store/run_owners.py); "running" without a living owner is a run that was interrupted.
    sa.Column("owned_policy", sa.Text),  # the policy, while the run may publish versions of it
    sa.Column("owner_token", sa.Text),  # of one process
    sa.Column("owner_host", sa.Text),
    sa.Column("owner_pid", sa.Integer),
    sa.Column("owner_process", sa.Text),  # tells the process from a later one with its pid
    sa.Column("seen_at_ms", sa.BigInteger),  # its last heartbeat, by the database's clock
    sa.Index(None, "owned_policy", unique=True),
)

step_manifests = sa.Table(
    "step_manifests",
    metadata,
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("from_version", sa.Integer, nullable=False),
    sa.Column("to_version", sa.Integer),  # the version that the step produced; None until it has
    sa.Column("metrics", Json),  # the step's line, once it was trained
    sa.Column("counts", Json),  # what was planned, in numbers (trainer/planning/plan.py: StepCounts)
    sa.Column("created_at_ms", sa.BigInteger, nullable=False),
    sa.Column("trained_at_ms", sa.BigInteger),
)

manifest_episodes = sa.Table(
    "manifest_episodes",
    metadata,
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("episode_id", sa.Text, primary_key=True),
    sa.Column("group_id", sa.Text),
    sa.Column("value", Float64),  # resolved reward; None where it was missing
    sa.Column("reward_ids", Json, nullable=False),
    sa.ForeignKeyConstraint(["run_id", "step"], ["step_manifests.run_id", "step_manifests.step"]),
    sa.Index(None, "episode_id"),
)

manifest_choices = sa.Table(
    "manifest_choices",
    metadata,
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("call_id", sa.Text, primary_key=True),
    sa.Column("choice_index", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("episode_id", sa.Text, nullable=False),
    sa.Column("agent", sa.Text),
    sa.Column("advantage", Float64),  # None: not trained
    sa.Column("multiplier", Float64, nullable=False),
    sa.Column("reason", sa.Text),  # why not, where advantage is None
    sa.Column("position", sa.Integer),  # in the manifest: sums of floats depend on their order
    sa.ForeignKeyConstraint(["run_id", "step"], ["step_manifests.run_id", "step_manifests.step"]),
    sa.Index(None, "call_id", "choice_index"),
)

# --- several proxies on one log (store/fleet.py); times by the database's clock ---

proxies = sa.Table(
    "proxies",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_at_ms", sa.BigInteger, nullable=False),
    sa.Column("seen_at_ms", sa.BigInteger, nullable=False),  # its last heartbeat
    sa.Column("acked_seq", sa.BigInteger, nullable=False),  # the newest serving state that it has carried out
    sa.Column("uses", Json, nullable=False),  # [policy, version, whether a call is running] of what it needs
)

publisher_lease = sa.Table(
    "publisher_lease",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),  # one row
    sa.Column("owner", sa.Text),  # id of a proxy; None: free
    sa.Column("term", sa.BigInteger, nullable=False),  # counts owners
    sa.Column("expires_at_ms", sa.BigInteger, nullable=False),
)

serving_state = sa.Table(
    "serving_state",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),  # one row, written by the owner of the lease
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("phase", sa.Text, nullable=False),  # "open" | "hold" (admit nothing) | "drain" (and end)
    sa.Column("is_changing", sa.Boolean, nullable=False),  # a change is near: look often
    sa.Column("live", Json, nullable=False),
    sa.Column("engines", Json, nullable=False),  # those in rotation, by URL
    sa.Column("written_at_ms", sa.BigInteger, nullable=False),
)
