"""The newest conversations of a log, looked through for drift; how many they were is part of the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa

from ..records import CallStatus, TokenIds, token_ids
from .blocks import load_prompts, unpack_ids
from .bodies import load_bodies, unpack_json
from .drift import ADVICE, Cause, Drift, Turn, cause_of, extent
from .messages import Message, messages_of
from .schema import calls, choices, episodes
from .statements import chunks

MAX_TOKENS = 1_000_000
"""Prompt tokens of a sample: what is read and compared within a fraction of a second."""
MAX_EXPLAINED = 200
"""Drifts whose messages are read for the cause; the rest count as unknown."""


@dataclass(frozen=True, slots=True)
class DriftCount:
    cause: Cause
    count: int
    example: Drift
    advice: str


@dataclass(frozen=True, slots=True)
class DriftSummary:
    """Of the newest episodes with several calls. `pairs`: calls that have an earlier call to go on from."""

    episodes: int
    episodes_in_log: int  # with several calls
    calls: int
    pairs: int
    extending: int
    prompt_tokens: int  # of the pairs' later calls
    recomputed_tokens: int  # of those, what follows the point of divergence in prompts that drift
    causes: tuple[DriftCount, ...] = ()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A call of the sample: ids, and where its texts are."""

    id: str
    parent: str | None
    agent: str | None
    prompt: TokenIds
    completions: tuple[TokenIds, ...]
    body: bytes | None
    answers: tuple[bytes | None, ...]


@dataclass(slots=True)
class _Pair:
    episode_id: str
    before: _Recorded
    after: _Recorded
    at: int
    choice: int


_READ = (
    "id",
    "episode_id",
    "parent_call_id",
    "agent",
    "request_body",
    "prompt_block",
    "num_prompt_tokens",
)


@dataclass(slots=True)
class _Tally:
    pairs: int = 0
    extending: int = 0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    drifting: list[_Pair] = field(default_factory=list)


def examine(conn: sa.Connection, *, max_episodes: int = 50) -> DriftSummary:
    """Look at the newest episodes, as many as fit into MAX_TOKENS."""
    in_log = conn.execute(sa.select(sa.func.count()).where(episodes.c.num_calls > 1)).scalar_one()
    by_episode = _sample(conn, max_episodes)
    tally = _Tally()
    for name, recorded in by_episode.items():
        _compare(name, recorded, tally)
    causes = _explain(conn, tally.drifting)
    return DriftSummary(
        episodes=len(by_episode),
        episodes_in_log=in_log,
        calls=sum(len(recorded) for recorded in by_episode.values()),
        pairs=tally.pairs,
        extending=tally.extending,
        prompt_tokens=tally.prompt_tokens,
        recomputed_tokens=tally.recomputed_tokens,
        causes=tuple(causes),
    )


def _sample(conn: sa.Connection, max_episodes: int) -> dict[str, list[_Recorded]]:
    newest = (
        sa.select(episodes.c.id)
        .where(episodes.c.num_calls > 1)
        .order_by(episodes.c.created_at_ms.desc(), episodes.c.id.desc())
        .limit(max_episodes)
    )
    names = list(conn.execute(newest).scalars())
    rows: dict[str, list[Any]] = {name: [] for name in names}
    for chunk in chunks(names):
        query = sa.select(*(calls.c[name] for name in _READ)).where(
            calls.c.episode_id.in_(chunk),
            calls.c.status == CallStatus.COMPLETE.value,
            calls.c.prompt_block.is_not(None),
        )
        for row in conn.execute(query.order_by(calls.c.ordinal)):
            rows[row.episode_id].append(row)
    budget = MAX_TOKENS
    chosen: dict[str, list[Any]] = {}
    for name in names:
        budget -= sum(row.num_prompt_tokens or 0 for row in rows[name])
        if budget < 0 and chosen:
            break
        if len(rows[name]) > 1:
            chosen[name] = rows[name]
    listed = [row for its in chosen.values() for row in its]
    prompts = load_prompts(conn, {row.prompt_block for row in listed})
    answers = _answers(conn, [row.id for row in listed])
    return {name: [_recorded(row, prompts, answers) for row in its] for name, its in chosen.items()}


def _answers(conn: sa.Connection, ids: Sequence[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in ids}
    columns = (choices.c.call_id, choices.c.completion_ids, choices.c.message)
    for chunk in chunks(ids):
        query = sa.select(*columns).where(choices.c.call_id.in_(chunk)).order_by(choices.c.index)
        for row in conn.execute(query):
            found[row.call_id].append(row)
    return found


def _recorded(row: Any, prompts: Mapping[bytes, TokenIds], answers: Mapping[str, list[Any]]) -> _Recorded:
    its = [answer for answer in answers[row.id] if answer.completion_ids is not None]
    return _Recorded(
        id=row.id,
        parent=row.parent_call_id,
        agent=row.agent,
        prompt=prompts.get(row.prompt_block, token_ids()),
        completions=tuple(unpack_ids(answer.completion_ids) for answer in its),
        body=row.request_body,
        answers=tuple(answer.message for answer in its),
    )


def _compare(episode_id: str, recorded: Sequence[_Recorded], tally: _Tally) -> None:
    by_id = {call.id: call for call in recorded}
    last_of: dict[str | None, _Recorded] = {}
    for call in recorded:
        # The call whose messages it continues; where its history was changed there is none, and the agent's
        # last call is what it should have continued.
        before = by_id.get(call.parent or "") or last_of.get(call.agent)
        last_of[call.agent] = call
        if before is None or before.prompt == call.prompt:  # the same turn, asked again
            continue
        at, choice, is_whole = extent(before.prompt, before.completions, call.prompt)
        tally.pairs += 1
        tally.prompt_tokens += len(call.prompt)
        if is_whole:
            tally.extending += 1
        else:
            tally.recomputed_tokens += len(call.prompt) - at
            tally.drifting.append(_Pair(episode_id, before, call, at, choice))


def _explain(conn: sa.Connection, drifting: Sequence[_Pair]) -> list[DriftCount]:
    examined = drifting[:MAX_EXPLAINED]
    listed = {
        call.id: call for pair in examined for call in (pair.before, pair.after) if call.body is not None
    }
    bodies = dict(zip(listed, load_bodies(conn, [call.body or b"" for call in listed.values()]), strict=True))
    drifts: list[Drift] = []
    for pair in drifting:
        if len(drifts) < MAX_EXPLAINED:
            before, after = (_turn(call, bodies.get(call.id)) for call in (pair.before, pair.after))
            cause, detail = cause_of(before, after, pair.at, pair.choice)
        else:
            cause, detail = Cause.UNKNOWN, f"only {MAX_EXPLAINED} are looked into"
        drifts.append(
            Drift(
                episode_id=pair.episode_id,
                previous_call_id=pair.before.id,
                call_id=pair.after.id,
                cause=cause,
                detail=detail,
                at_token=pair.at,
                num_prompt_tokens=len(pair.after.prompt),
            )
        )
    counted = Counter(drift.cause for drift in drifts)
    first = {drift.cause: drift for drift in reversed(drifts)}
    return [DriftCount(cause, count, first[cause], ADVICE[cause]) for cause, count in counted.most_common()]


def _turn(call: _Recorded, body: bytes | None) -> Turn:
    doc = _json(body)
    answers: tuple[Message | None, ...] = tuple(
        None if packed is None else unpack_json(packed) for packed in call.answers
    )
    return Turn(
        call_id=call.id,
        agent=call.agent,
        prompt_ids=call.prompt,
        completions=call.completions,
        messages=messages_of(doc),
        tools=doc.get("tools") if isinstance(doc, dict) else None,
        answers=answers,
    )


def _json(body: bytes | None) -> Any:
    if body is None:
        return None
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
