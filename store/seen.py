"""An episode as whoever judges it sees it: what was asked and answered, in words, and no token.

Plain frozen values, read in a few queries; a request that is no JSON has no messages.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ..errors import UnknownEpisodeError
from ..records import CallKind, CallStatus, EpisodeStatus, Purpose, Reward
from .bodies import load_bodies, unpack_json
from .messages import Message, messages_of, text_of
from .read import load_rewards
from .schema import calls, choices, episodes, groups
from .statements import chunks


@dataclass(frozen=True, slots=True)
class JudgeAccess:
    """Where a judge's own model calls go: through the proxy, recorded with kind `judge`, in no episode."""

    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True)
class SeenAnswer:
    index: int
    message: Message | None  # None where none was put together
    finish_reason: str | None
    used: bool | None  # None: nobody said

    @property
    def text(self) -> str:
        return "" if self.message is None else text_of(self.message)


@dataclass(frozen=True, slots=True)
class SeenCall:
    id: str
    ordinal: int
    agent: str | None
    kind: CallKind
    status: CallStatus
    request: Mapping[str, Any]  # as the agent sent it; empty where it was no JSON object
    messages: tuple[Message, ...]  # of the request
    answers: tuple[SeenAnswer, ...]

    @property
    def answer(self) -> SeenAnswer | None:
        """The one that the episode went on with: the first that was used, else the first."""
        used = [answer for answer in self.answers if answer.used]
        return next(iter(used or self.answers), None)


@dataclass(frozen=True, slots=True)
class SeenEpisode:
    id: str
    task: str | None
    batch: str | None
    purpose: Purpose
    status: EpisodeStatus
    tags: Mapping[str, str]
    calls: tuple[SeenCall, ...]  # by ordinal, all kinds
    rewards: tuple[Reward, ...]  # by time, superseded ones included
    judge: JudgeAccess | None = None

    @property
    def agents(self) -> tuple[str, ...]:
        """In the order of their first call."""
        return tuple(dict.fromkeys(call.agent for call in self.calls if call.agent is not None))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation of the last policy call, its answer at the end."""
        last = next((call for call in reversed(self.calls) if call.kind is CallKind.POLICY), None)
        if last is None:
            return ()
        answer = last.answer
        return last.messages + (() if answer is None or answer.message is None else (answer.message,))

    @property
    def answer(self) -> str:
        """The text of the last message of the conversation."""
        return text_of(self.messages[-1]) if self.messages else ""


def load_seen(conn: sa.Connection, ids: Iterable[str], judge: JudgeAccess | None = None) -> list[SeenEpisode]:
    """In the order asked for. UnknownEpisodeError if one is not there."""
    wanted = list(dict.fromkeys(ids))
    rows = {}
    for chunk in chunks(wanted):
        query = sa.select(episodes, groups.c.batch).outerjoin(groups, groups.c.id == episodes.c.group_id)
        rows.update({row.id: row for row in conn.execute(query.where(episodes.c.id.in_(chunk)))})
    for name in wanted:
        if name not in rows:
            raise UnknownEpisodeError(f"no episode {name!r} in the log; check its name and the database")
    its_calls = _load_calls(conn, wanted)
    its_rewards = load_rewards(conn, wanted)
    return [
        SeenEpisode(
            id=name,
            task=rows[name].task_id,
            batch=rows[name].batch,
            purpose=Purpose(rows[name].purpose),
            status=EpisodeStatus(rows[name].status),
            tags=rows[name].tags,
            calls=tuple(its_calls[name]),
            rewards=its_rewards[name],
            judge=judge,
        )
        for name in wanted
    ]


_CALL = (
    calls.c.id,
    calls.c.episode_id,
    calls.c.ordinal,
    calls.c.agent,
    calls.c.kind,
    calls.c.status,
    calls.c.request_body,
)
_ANSWER = (choices.c.call_id, choices.c.index, choices.c.message, choices.c.finish_reason, choices.c.used)


def _load_calls(conn: sa.Connection, episode_ids: list[str]) -> dict[str, list[SeenCall]]:
    rows = [
        row
        for chunk in chunks(episode_ids)
        for row in conn.execute(sa.select(*_CALL).where(calls.c.episode_id.in_(chunk)))
    ]
    rows.sort(key=lambda row: (row.ordinal, row.id))
    answers: dict[str, list[SeenAnswer]] = defaultdict(list)
    for chunk in chunks([row.id for row in rows]):
        query = sa.select(*_ANSWER).where(choices.c.call_id.in_(chunk)).order_by(choices.c.index)
        for call_id, index, message, finish_reason, used in conn.execute(query):
            packed = None if message is None else unpack_json(message)
            answers[call_id].append(SeenAnswer(index, packed, finish_reason, used))
    with_body = [row for row in rows if row.request_body is not None]
    bodies = load_bodies(conn, [row.request_body for row in with_body])
    requests = {row.id: _document(body) for row, body in zip(with_body, bodies, strict=True)}
    found: dict[str, list[SeenCall]] = defaultdict(list)
    for row in rows:
        request = requests.get(row.id, {})
        found[row.episode_id].append(
            SeenCall(
                id=row.id,
                ordinal=row.ordinal,
                agent=row.agent,
                kind=CallKind(row.kind),
                status=CallStatus(row.status),
                request=request,
                messages=messages_of(request) or (),
                answers=tuple(answers[row.id]),
            )
        )
    return found


def _document(body: bytes) -> Mapping[str, Any]:
    try:
        doc = json.loads(body)
    except ValueError:
        return {}
    return doc if isinstance(doc, dict) else {}
