"""A large log in a minute: rows made by the store's own encodings, put in by the databases' bulk ways.

What a year of an agent looks like: episodes of 20 turns whose prompts grow, in groups of 8, most of them
rewarded and long trained, some failed, running or unrewarded; a few calls in no episode, of another kind, at
temperature 0, or without an answer. Ids, prompts and logprobs differ from call to call; request bodies are
the same in every episode (they are in no measurement).
"""

from __future__ import annotations

import json
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lightning_rl.records import Quarantine, logprobs, token_ids
from lightning_rl.store.blocks import BLOCK_TOKENS, block_hash, pack_floats, pack_ids
from lightning_rl.store.bodies import pack_json, pack_part, split_body
from lightning_rl.store.database import Database
from lightning_rl.store.placement import group_id
from lightning_rl.store.schema import metadata

TURNS = 20
GROUP_SIZE = 8
SYSTEM_TOKENS, ASKED_TOKENS, ANSWER_TOKENS = 48, 12, 12
TRAINED_SHARE = 0.8
STEP_GROUPS = 8
FIRST_MS = 1_760_000_000_000
CALL_MS = 250
BATCH_EPISODES = 500


@dataclass(slots=True)
class Rows:
    """What one batch of episodes adds, by table; each row a tuple in the order of COLUMNS."""

    by_table: dict[str, list[tuple[Any, ...]]]

    @classmethod
    def empty(cls) -> Rows:
        return cls({name: [] for name in COLUMNS})


COLUMNS: dict[str, tuple[str, ...]] = {
    "groups": ("id", "task_id", "batch", "expected_size", "created_at_ms"),
    "episodes": (
        "id",
        "task_id",
        "group_id",
        "purpose",
        "status",
        "ended_by",
        "tags",
        "num_calls",
        "has_gap",
        "policy",
        "policy_version",
        "created_at_ms",
        "last_call_at_ms",
        "ended_at_ms",
    ),
    "token_blocks": ("hash", "parent", "ids", "num_tokens"),
    "body_parts": ("hash", "bytes"),
    "calls": (
        "id",
        "episode_id",
        "ordinal",
        "agent",
        "kind",
        "attribution_rule",
        "attribution_conflict",
        "parent_call_id",
        "route",
        "dialect",
        "streaming",
        "requested_model",
        "served_model",
        "policy",
        "policy_version",
        "policy_version_end",
        "engine_url",
        "sampling",
        "request_body",
        "retry_count",
        "status",
        "http_status",
        "delivered",
        "upstream_id",
        "prompt_block",
        "num_prompt_tokens",
        "reported_completion_tokens",
        "tags",
        "started_at_ms",
        "first_byte_at_ms",
        "ended_at_ms",
    ),
    "choices": (
        "call_id",
        "index",
        "completion_ids",
        "behavior_logprobs",
        "num_tokens",
        "finish_reason",
        "message",
        "quarantine",
    ),
    "rewards": ("id", "episode_id", "target", "value", "source", "final", "created_at_ms"),
    "events": ("id", "subject", "subject_id", "kind", "source", "created_at_ms"),
    "runs": ("id", "policy", "status", "settings", "environment", "created_at_ms"),
    "step_manifests": ("run_id", "step", "policy", "from_version", "created_at_ms"),
    "manifest_episodes": ("run_id", "step", "episode_id", "group_id", "value", "reward_ids"),
    "policy_versions": ("policy", "version", "status", "kind", "run_id", "step", "created_at_ms"),
}


class Author:
    """Makes the rows. The same seed, the same log."""

    def __init__(self, num_calls: int, seed: int = 0) -> None:
        self.num_episodes = max(GROUP_SIZE, num_calls // TURNS)
        self._random = random.Random(seed)
        self._system = token_ids([self._random.randrange(50_000) for _ in range(SYSTEM_TOKENS)])
        self._skeletons, self._parts = _bodies()
        self._message = pack_json({"role": "assistant", "content": "The next step is as good as the last."})
        self._clock = FIRST_MS
        self._num_ids = 0

    def batches(self) -> Iterator[Rows]:
        first = Rows.empty()
        first.by_table["runs"].append(("earlier", "policy", "finished", "{}", "{}", FIRST_MS))
        first.by_table["body_parts"] += [(name, pack_part(part)) for name, part in self._parts.items()]
        yield first
        for start in range(0, self.num_episodes, BATCH_EPISODES):
            rows = Rows.empty()
            for number in range(start, min(start + BATCH_EPISODES, self.num_episodes)):
                self._episode(number, rows.by_table)
            yield rows

    def _id(self) -> str:
        self._num_ids += 1
        return f"{self._clock:012x}{self._random.getrandbits(48):012x}{self._num_ids:08x}"

    def _episode(self, number: int, rows: dict[str, list[tuple[Any, ...]]]) -> None:
        name, task = f"episode-{number:07}", f"task-{number // GROUP_SIZE:06}"
        group = group_id(task, "")
        is_trained = number < TRAINED_SHARE * self.num_episodes
        began = self._clock
        if number % GROUP_SIZE == 0:
            rows["groups"].append((group, task, "", GROUP_SIZE, began))
            step = number // GROUP_SIZE // STEP_GROUPS
            if is_trained and (number // GROUP_SIZE) % STEP_GROUPS == 0:
                rows["step_manifests"].append(("earlier", step, "policy", step, began))
                made = f"policy/{step + 1}"
                rows["events"].append((self._id(), "policy_version", made, "retired", "publisher", began))
                rows["policy_versions"].append(
                    ("policy", step + 1, "retired", "lora", "earlier", step, began)
                )
        status = "ended" if is_trained else self._status(number)
        self._calls(name, rows)
        version = number // GROUP_SIZE // STEP_GROUPS if is_trained else 0
        ended = None if status == "running" else self._clock
        rows["episodes"].append(
            (
                name,
                task,
                group,
                "train",
                status,
                None if ended is None else "reward",
                json.dumps({"split": "train", "user": str(number % 97)}),
                TURNS,
                False,
                "policy",
                version,
                began,
                self._clock,
                ended,
            )
        )
        if ended is not None:
            rows["events"].append((self._id(), "episode", name, status, "reward", ended))
        if ended is not None and (is_trained or number % 50):
            reward = self._id()
            value = float(self._random.random() < 0.4)
            rows["rewards"].append((reward, name, "episode", value, "checker", True, ended))
            if is_trained:
                manifest = ("earlier", number // GROUP_SIZE // STEP_GROUPS, name, group, value)
                rows["manifest_episodes"].append((*manifest, json.dumps([reward])))

    def _status(self, number: int) -> str:
        # Of a hundred groups, seven have an episode that is still running.
        if number % (GROUP_SIZE * 14) == 3:
            return "running"
        return {1: "failed", 2: "excluded"}.get(number % 100, "ended")

    def _calls(self, episode: str, rows: dict[str, list[tuple[Any, ...]]]) -> None:
        grown = array("I", self._system)
        parent_block: bytes | None = None  # of the last full block
        num_full = 0
        parent_call = None
        own = array("I")
        own.frombytes(self._random.randbytes(4 * TURNS * (ASKED_TOKENS + ANSWER_TOKENS)))
        drawn = array("I", [value % 50_000 for value in own])
        for turn in range(TURNS):
            at = turn * (ASKED_TOKENS + ANSWER_TOKENS)
            grown += drawn[at : at + ASKED_TOKENS]
            while (num_full + 1) * BLOCK_TOKENS <= len(grown):
                block = grown[num_full * BLOCK_TOKENS : (num_full + 1) * BLOCK_TOKENS]
                name = block_hash(parent_block, block)
                rows["token_blocks"].append(
                    (name, parent_block, pack_ids(block), (num_full + 1) * BLOCK_TOKENS)
                )
                parent_block, num_full = name, num_full + 1
            tail = grown[num_full * BLOCK_TOKENS :]
            last = parent_block
            if tail:
                last = block_hash(parent_block, tail)
                rows["token_blocks"].append((last, parent_block, pack_ids(tail), len(grown)))
            answer = drawn[at + ASKED_TOKENS : at + ASKED_TOKENS + ANSWER_TOKENS]
            parent_call = self._call(episode, turn, parent_call, last, len(grown), answer, rows)
            grown += answer

    def _call(  # noqa: PLR0917 - what a turn has
        self,
        episode: str,
        turn: int,
        parent: str | None,
        block: bytes | None,
        num_prompt_tokens: int,
        answer: array[int],
        rows: dict[str, list[tuple[Any, ...]]],
    ) -> str:
        self._clock += CALL_MS
        call = self._id()
        luck = self._random.random()
        is_free = luck > 0.99  # beside the episode's own 20, one in a hundred that names none
        quarantine, status, kind = None, "complete", "policy"
        if luck < 0.03:
            quarantine = Quarantine.TEMPERATURE_ZERO.value
        elif luck < 0.04:
            quarantine = Quarantine.TRUNCATED_SUPPORT.value
        elif luck < 0.045:
            status = "error"
        elif luck < 0.06:
            kind = "side"
        agent = ("planner", "writer")[turn % 2] if kind == "policy" else "title"
        conflict = "body says 'other'" if 0.06 < luck < 0.061 else None
        for name in (None, episode) if is_free else (episode,):
            call_id = call if name is not None else self._id()
            rows["calls"].append(
                (
                    call_id,
                    name,
                    None if name is None else turn,
                    agent,
                    kind,
                    "none" if name is None else "path",
                    conflict,
                    parent,
                    "/v1/chat/completions",
                    "chat",
                    bool(turn % 2),
                    "gpt-4o",
                    "policy-v1",
                    "policy",
                    0,
                    0,
                    "http://127.0.0.1:8000",
                    '{"temperature": 1.0, "max_tokens": 256}',
                    self._skeletons[turn],
                    0,
                    status,
                    200 if status == "complete" else 500,
                    True,
                    f"chatcmpl-{call_id}",
                    block,
                    num_prompt_tokens,
                    len(answer),
                    "{}",
                    self._clock,
                    self._clock + 20,
                    self._clock + 200,
                )
            )
            if status == "complete":
                values = logprobs([-self._random.random() for _ in answer])
                rows["choices"].append(
                    (
                        call_id,
                        0,
                        pack_ids(answer),
                        pack_floats(values),
                        len(answer),
                        "stop",
                        self._message,
                        quarantine,
                    )
                )
        return call


def _bodies() -> tuple[list[bytes], dict[bytes, bytes]]:
    """The stored form of each turn's request, and the parts that they share."""
    messages: list[dict[str, str]] = [
        {"role": "system", "content": "You take one step after the other. " * 6}
    ]
    skeletons, parts = [], {}
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"What is step {turn}? " * 8})
        body = {"model": "gpt-4o", "temperature": 1.0, "max_tokens": 256, "messages": messages}
        skeleton, found = split_body(json.dumps(body).encode())
        skeletons.append(skeleton)
        parts.update(found)
        messages.append({"role": "assistant", "content": "The next step is as good as the last."})
    return skeletons, parts


def fill(database: Database, num_calls: int, on_progress: Callable[[int, int], None]) -> float:
    """Put the log in; seconds that it took. Indexes and statistics are those of a log that grew by itself."""
    began = time.monotonic()
    author = Author(num_calls)
    with database.engine.begin() as conn:
        indexes = [index for table in metadata.sorted_tables for index in table.indexes]
        for index in indexes:
            index.drop(conn)
    put = _put_sqlite if database.engine.dialect.name == "sqlite" else _put_postgres
    put(database, author.batches(), lambda done: on_progress(done * BATCH_EPISODES, author.num_episodes))
    with database.engine.begin() as conn:
        for index in indexes:
            index.create(conn)
    if database.engine.dialect.name == "postgresql":
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.execute(sa.text("VACUUM ANALYZE"))  # what autovacuum does by itself, a minute later
    return time.monotonic() - began


def _put_sqlite(database: Database, batches: Iterator[Rows], on_batch: Callable[[int], None]) -> None:
    raw = database.engine.raw_connection()
    try:
        cursor = raw.cursor()
        cursor.execute("PRAGMA synchronous = OFF")
        cursor.execute("PRAGMA foreign_keys = OFF")
        cursor.execute("PRAGMA cache_size = -500000")
        for number, rows in enumerate(batches):
            cursor.execute("BEGIN")
            for table, columns in COLUMNS.items():
                marks = ", ".join("?" for _ in columns)
                cursor.executemany(
                    f"INSERT INTO {table} ({_names(columns)}) VALUES ({marks})", rows.by_table[table]
                )
            cursor.execute("COMMIT")
            on_batch(number)
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        raw.close()
        database.engine.dispose()  # the pragmas go with the connection


def _put_postgres(database: Database, batches: Iterator[Rows], on_batch: Callable[[int], None]) -> None:
    raw = database.engine.raw_connection()
    try:
        cursor: Any = raw.cursor()
        cursor.execute("SET synchronous_commit = off")
        cursor.execute("SET session_replication_role = replica")  # foreign keys hold by construction
        for number, rows in enumerate(batches):
            for table, columns in COLUMNS.items():
                with cursor.copy(f"COPY {table} ({_names(columns)}) FROM STDIN") as copy:
                    for row in rows.by_table[table]:
                        copy.write_row(row)
            raw.commit()
            on_batch(number)
        cursor.execute("RESET session_replication_role")
        cursor.execute("RESET synchronous_commit")
    finally:
        raw.close()


def _names(columns: Sequence[str]) -> str:
    return ", ".join(f'"{column}"' for column in columns)
