"""One episode for people: its calls as a tree, what was said about them, and no token.

The tree is the calls' parents; a call whose parent is not in the episode is a root. A conversation is one
long chain, so only a branch counts as depth. Knows no terminal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa

from ..errors import UnknownEpisodeError, UserError
from ..records import Reward
from .listing import EpisodeLine
from .read import load_rewards
from .rewards import Resolution, resolve
from .schema import calls, choices, episodes, events, groups, manifest_episodes
from .statements import chunks, storable_text


@dataclass(frozen=True, slots=True)
class ChoiceFacts:
    index: int
    num_tokens: int
    finish_reason: str | None
    quarantine: str | None  # None: trainable
    used: bool | None


@dataclass(frozen=True, slots=True)
class CallFacts:
    """A call without its tokens; `depth` counts the branchings on the way from its root."""

    id: str
    ordinal: int | None
    depth: int
    parent_call_id: str | None
    agent: str | None
    kind: str
    attribution_rule: str
    attribution_conflict: str | None
    route: str
    streaming: bool
    policy: str | None
    policy_version: int | None
    policy_version_end: int | None
    retry_of: str | None
    unrecordable: str | None
    status: str
    http_status: int | None
    delivered: bool | None
    num_prompt_tokens: int | None
    error: str | None
    started_at_ms: int
    ended_at_ms: int | None
    choices: tuple[ChoiceFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class EventFacts:
    subject: str
    subject_id: str
    kind: str
    value: Any
    source: str
    note: str | None
    created_at_ms: int


@dataclass(frozen=True, slots=True)
class EpisodeView:
    line: EpisodeLine
    resolution: Resolution
    rewards: tuple[Reward, ...]
    calls: tuple[CallFacts, ...]  # parents before their children, siblings by ordinal
    events: tuple[EventFacts, ...]  # about the episode, its calls and their choices, by time
    trained_in: tuple[tuple[str, int], ...]  # (run, step) whose manifest names it

    def document(self) -> dict[str, Any]:
        """As JSON says it."""
        return {
            "episode": asdict(self.line),
            "reward": {"value": self.resolution.value, "path": self.resolution.path},
            "rewards": [asdict(reward) for reward in self.rewards],
            "calls": [asdict(call) for call in self.calls],
            "events": [asdict(event) for event in self.events],
            "trained_in": [{"run": run, "step": step} for run, step in self.trained_in],
        }


@dataclass(frozen=True, slots=True)
class CallView:
    """One call by itself; `episode_id` None: it is in the unattributed bin."""

    episode_id: str | None
    call: CallFacts
    events: tuple[EventFacts, ...]

    def document(self) -> dict[str, Any]:
        """As JSON says it."""
        return {
            "episode": self.episode_id,
            "call": asdict(self.call),
            "events": [asdict(event) for event in self.events],
        }


def load_call(conn: sa.Connection, call_id: str) -> CallView:
    """UserError where there is none."""
    name = storable_text(call_id)
    found = _calls(conn, calls.c.id == name)
    if not found:
        raise UserError(f"no call {call_id!r} in the log; check its id and the database")
    episode = conn.execute(sa.select(calls.c.episode_id).where(calls.c.id == name)).scalar()
    return CallView(episode, found[0], tuple(_events(conn, None, found)))


def load_view(conn: sa.Connection, episode_id: str) -> EpisodeView:
    """UnknownEpisodeError where there is none."""
    name = storable_text(episode_id)
    fields = [field for field in EpisodeLine.__dataclass_fields__ if field not in ("batch", "reward")]
    row = conn.execute(
        sa.select(*(episodes.c[field] for field in fields), groups.c.batch)
        .outerjoin(groups, groups.c.id == episodes.c.group_id)
        .where(episodes.c.id == name)
    ).first()
    if row is None:
        raise UnknownEpisodeError(
            f"no episode {episode_id!r} in the log; `lightning episodes list` shows which there are"
        )
    given = load_rewards(conn, [name])[name]
    resolution = resolve(given)
    found = _calls(conn, calls.c.episode_id == name)
    manifests = sa.select(manifest_episodes.c.run_id, manifest_episodes.c.step).where(
        manifest_episodes.c.episode_id == name
    )
    return EpisodeView(
        line=EpisodeLine(**row._mapping, reward=resolution.value),
        resolution=resolution,
        rewards=given,
        calls=tuple(as_tree(found)),
        events=tuple(_events(conn, name, found)),
        trained_in=tuple((run, step) for run, step in conn.execute(manifests.order_by("run_id", "step"))),
    )


def as_tree(found: Sequence[CallFacts]) -> Iterator[CallFacts]:
    """Parents before children, with their depth; a parent that is not there, or a circle, makes a root."""
    by_id = {call.id: call for call in found}
    order = sorted(found, key=lambda call: (call.ordinal or 0, call.id))
    # A parent comes before its child: what claims otherwise (an imported log may) is no tree.
    place = {call.id: index for index, call in enumerate(order)}
    children: dict[str | None, list[CallFacts]] = defaultdict(list)
    for call in order:
        parent = call.parent_call_id
        is_child = parent in by_id and parent is not None and place[parent] < place[call.id]
        children[parent if is_child else None].append(call)
    waiting = [(call, 0) for call in reversed(children[None])]
    while waiting:
        call, depth = waiting.pop()
        yield replace(call, depth=depth)
        inner = depth + (len(children[call.id]) > 1)
        waiting += [(child, inner) for child in reversed(children[call.id])]


def _calls(conn: sa.Connection, where: sa.ColumnElement[bool]) -> list[CallFacts]:
    names = [name for name in CallFacts.__dataclass_fields__ if name not in ("depth", "choices")]
    rows = conn.execute(sa.select(*(calls.c[name] for name in names)).where(where)).all()
    answers: dict[str, list[ChoiceFacts]] = defaultdict(list)
    columns = [choices.c[name] for name in ("call_id", *ChoiceFacts.__dataclass_fields__)]
    for chunk in chunks([row.id for row in rows]):
        for call, *rest in conn.execute(
            sa.select(*columns).where(choices.c.call_id.in_(chunk)).order_by(choices.c.index)
        ):
            answers[call].append(ChoiceFacts(*rest))
    return [CallFacts(**row._mapping, depth=0, choices=tuple(answers[row.id])) for row in rows]


def _events(conn: sa.Connection, episode_id: str | None, found: Sequence[CallFacts]) -> list[EventFacts]:
    subjects: Mapping[str, list[str]] = {
        "episode": [] if episode_id is None else [episode_id],
        "call": [call.id for call in found],
        "choice": [f"{call.id}/{choice.index}" for call in found for choice in call.choices],
    }
    columns = [events.c[name] for name in EventFacts.__dataclass_fields__]
    rows = [
        row
        for subject, ids in subjects.items()
        for chunk in chunks(ids)
        for row in conn.execute(
            sa.select(*columns, events.c.id).where(
                events.c.subject == subject, events.c.subject_id.in_(chunk)
            )
        )
    ]
    ordered = sorted(rows, key=lambda row: (row.created_at_ms, row.id))
    return [EventFacts(*row[:-1]) for row in ordered]
