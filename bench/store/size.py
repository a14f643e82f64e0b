"""How large a log of long conversations is, against one that keeps a copy of every call's prompt.

The copy is of the same kind: the prompt's ids packed as the log packs ids, the request compressed as the log
compresses it, everything else (rows, indexes, answers, logprobs) the same. Both are SQLite files without a
free page. Then everything is read back and compared with what was written.
"""

from __future__ import annotations

import json
import random
import sqlite3
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from fakes.log_rows import choice, end, intent

from lightning_rl.records import LogEntry, TokenIds, logprobs, token_ids
from lightning_rl.store.append import append_entries
from lightning_rl.store.blocks import pack_ids
from lightning_rl.store.bodies import load_bodies
from lightning_rl.store.database import Database
from lightning_rl.store.read import load_episodes
from lightning_rl.store.schema import calls

TURNS = 20
SYSTEM_TOKENS, TURN_TOKENS = 800, 800  # the last prompt has about 16,000
ANSWER_TOKENS = (40, 440)  # of a turn; the rest is what the user or a tool says
VOCABULARY = 151_000
LETTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Size:
    calls: int
    prompt_tokens: int
    log_bytes: int
    copies_bytes: int
    logprob_bytes: int
    prompt_bytes: int  # of the log: blocks of ids
    body_bytes: int  # of the log: parts and skeletons
    copied_prompt_bytes: int
    copied_body_bytes: int
    differences: int  # calls that came back other than they were written

    @property
    def ratio(self) -> float:
        return self.copies_bytes / self.log_bytes

    @property
    def logprob_share(self) -> float:
        return self.logprob_bytes / self.log_bytes


@dataclass(frozen=True, slots=True)
class _Turn:
    prompt: TokenIds
    answer: TokenIds
    values: Any
    body: bytes


def measure(folder: Path, num_episodes: int) -> Size:
    log, copies = folder / "size.db", folder / "copies.db"
    database = Database.open(f"sqlite:///{log}")
    try:
        for number in range(num_episodes):
            with database.write() as conn:
                append_entries(conn, list(_entries(number)))
        differences = sum(_differences(database, number) for number in range(num_episodes))
    finally:
        database.close()
    _compact(log)
    copied_prompts, copied_bodies, prompt_tokens = _write_copies(log, copies, num_episodes)
    _compact(copies)
    with sqlite3.connect(log) as conn:

        def total(column: str, table: str) -> int:
            return int(conn.execute(f"SELECT coalesce(sum(length({column})), 0) FROM {table}").fetchone()[0])

        size = Size(
            calls=num_episodes * TURNS,
            prompt_tokens=prompt_tokens,
            log_bytes=log.stat().st_size,
            copies_bytes=copies.stat().st_size,
            logprob_bytes=total("behavior_logprobs", "choices"),
            prompt_bytes=total("ids", "token_blocks"),
            body_bytes=total("bytes", "body_parts") + total("request_body", "calls"),
            copied_prompt_bytes=copied_prompts,
            copied_body_bytes=copied_bodies,
            differences=differences,
        )
    conn.close()
    return size


def _conversation(number: int) -> Iterator[_Turn]:
    """One episode's turns, each prompt the one before, its answer, and something new. The same every time."""
    drawn = random.Random(number)

    def ids(count: int) -> array[int]:
        # Few tokens are frequent and most are rare, as in text: uniform in the logarithm of the id.
        return token_ids([int(VOCABULARY ** drawn.random()) for _ in range(count)])

    def text(tokens: Sequence[int]) -> str:
        return " ".join(_word(token) for token in tokens)

    prompt = ids(SYSTEM_TOKENS)
    messages = [{"role": "system", "content": text(prompt)}]
    for _ in range(TURNS):
        num_answer = drawn.randint(*ANSWER_TOKENS)
        asked, answer = ids(TURN_TOKENS - num_answer), ids(num_answer)
        prompt = prompt + asked
        messages.append({"role": "user", "content": text(asked)})
        body = json.dumps({"model": "gpt-4o", "temperature": 1.0, "messages": messages}).encode()
        values = logprobs([-drawn.expovariate(2.0) for _ in answer])
        yield _Turn(prompt, answer, values, body)
        prompt = prompt + answer
        messages.append({"role": "assistant", "content": text(answer)})


def _word(token: int) -> str:
    """A made-up word of the token's own: as many letters as a token has on average, with its space."""
    letters = []
    while len(letters) < LETTERS_PER_TOKEN - 1:
        token, letter = divmod(token, 26)
        letters.append(chr(97 + letter))
    return "".join(letters)


def _entries(number: int) -> Iterator[LogEntry]:
    for turn, said in enumerate(_conversation(number)):
        call = f"{number:06}-{turn:02}"
        yield intent(call, f"episode-{number}", task=f"task-{number // 8}", body=said.body)
        message = {"role": "assistant", "content": " ".join(_word(token) for token in said.answer)}
        yield end(call, said.prompt, choice(said.answer, said.values, message=message))


def _differences(database: Database, number: int) -> int:
    with database.read() as conn:
        (episode,) = load_episodes(conn, [f"episode-{number}"])
        skeletons = conn.execute(
            sa.select(calls.c.request_body).where(calls.c.episode_id == episode.id).order_by(calls.c.ordinal)
        ).scalars()
        bodies = load_bodies(conn, list(skeletons))
    return sum(
        call.prompt_ids != said.prompt
        or call.choices[0].completion_ids != said.answer
        or call.choices[0].behavior_logprobs != said.values
        or body != said.body
        for call, body, said in zip(episode.calls, bodies, _conversation(number), strict=True)
    )


def _write_copies(log: Path, copies: Path, num_episodes: int) -> tuple[int, int, int]:
    """A log without sharing beside the first: bytes of prompts, bytes of requests, tokens of prompts."""
    with sqlite3.connect(log) as source, sqlite3.connect(copies) as target:
        source.backup(target)
        target.execute("DELETE FROM token_blocks")
        target.execute("DELETE FROM body_parts")
        target.execute("CREATE TABLE prompts (call_id TEXT PRIMARY KEY, ids BLOB NOT NULL) WITHOUT ROWID")
        prompts = bodies = tokens = 0
        for number in range(num_episodes):
            for turn, said in enumerate(_conversation(number)):
                call = f"{number:06}-{turn:02}"
                packed, request = pack_ids(said.prompt), zlib.compress(said.body)
                target.execute("INSERT INTO prompts VALUES (?, ?)", (call, packed))
                target.execute("UPDATE calls SET request_body = ? WHERE id = ?", (request, call))
                prompts, bodies, tokens = (
                    prompts + len(packed),
                    bodies + len(request),
                    tokens + len(said.prompt),
                )
    source.close()
    target.close()
    return prompts, bodies, tokens


def _compact(file: Path) -> None:
    conn = sqlite3.connect(file)
    conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    conn.execute("VACUUM")
    conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    conn.close()
