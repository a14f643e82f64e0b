"""What a policy's versions did while they served: calls, tokens and rewards, by the version of each call.

Reads the index of calls by policy and version, and only that policy's rows. An episode counts for every
version that served one of its calls; with pinned episodes that is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import sqlalchemy as sa

from ..records import CallKind, CallStatus
from .read import load_rewards
from .rewards import resolve
from .schema import calls, choices, episodes
from .statements import chunks, storable_text


@dataclass(frozen=True, slots=True)
class Mean:
    """`se`: the standard error, over episodes (siblings of a group count as independent). None: too few."""

    num: int
    mean: float | None
    se: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        num = len(values)
        se = stdev(values) / math.sqrt(num) if num > 1 else None
        return cls(num, fmean(values) if values else None, se)


@dataclass(frozen=True, slots=True)
class ServedEpisode:
    """The part of an episode that one version served. Tokens over all its complete calls."""

    id: str
    version: int
    num_calls: int
    prompt_tokens: int
    completion_tokens: int
    reward: float | None  # of the whole episode, resolved


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """One version. Means of prompt and completion per call, of turns and tokens per episode."""

    num_calls: int  # complete calls of the policy's kind
    num_episodes: int
    reward: Mean
    completion_tokens: float | None
    prompt_tokens: float | None
    turns: Mean
    tokens: Mean  # generated

    @classmethod
    def of(cls, own: Sequence[ServedEpisode], num_calls: int, prompt: int, completion: int) -> ServedFacts:
        return cls(
            num_calls=num_calls,
            num_episodes=len(own),
            reward=Mean.of([one.reward for one in own if one.reward is not None]),
            completion_tokens=completion / num_calls if num_calls else None,
            prompt_tokens=prompt / num_calls if num_calls else None,
            turns=Mean.of([one.num_calls for one in own]),
            tokens=Mean.of([one.completion_tokens for one in own]),
        )


NOTHING = ServedFacts.of((), 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Served:
    """Of one policy: facts by version, and the episodes that they come from."""

    facts: Mapping[int, ServedFacts]
    episodes: Mapping[int, tuple[ServedEpisode, ...]]


def served_policies(conn: sa.Connection) -> list[str]:
    """Every policy that a call of the log was served by, found by leaps through the index."""
    found: list[str] = []
    first = sa.select(sa.func.min(calls.c.policy))
    name = conn.execute(first.where(calls.c.policy > "")).scalar()
    while name is not None:
        found.append(name)
        name = conn.execute(first.where(calls.c.policy > name)).scalar()
    return found


def count_calls(conn: sa.Connection, policy: str) -> int:
    """All of them, of every kind and status: from the index alone."""
    query = sa.select(sa.func.count()).where(calls.c.policy == storable_text(policy))
    return conn.execute(query).scalar_one()


def load_served(conn: sa.Connection, policy: str, versions: Sequence[int] | None = None) -> Served:
    """`versions` None: all that served."""
    tokens = sa.select(sa.func.sum(choices.c.num_tokens)).where(choices.c.call_id == calls.c.id)
    query = (
        sa.select(
            calls.c.policy_version,
            calls.c.episode_id,
            sa.func.count(),
            sa.func.coalesce(sa.func.sum(calls.c.num_prompt_tokens), 0),
            sa.func.coalesce(sa.func.sum(tokens.scalar_subquery()), 0),
        )
        .where(
            calls.c.policy == storable_text(policy),
            calls.c.policy_version.is_not(None),
            calls.c.kind == CallKind.POLICY.value,
            calls.c.status == CallStatus.COMPLETE.value,
        )
        .group_by(calls.c.policy_version, calls.c.episode_id)
    )
    if versions is not None:
        query = query.where(calls.c.policy_version.in_(versions))
    rows = conn.execute(query).all()
    rewards: dict[str, float | None] = {}
    names = sorted({row[1] for row in rows if row[1] is not None})
    for chunk in chunks(names):
        rewards |= {name: resolve(given).value for name, given in load_rewards(conn, chunk).items()}
    sums: dict[int, list[int]] = {}
    found: dict[int, list[ServedEpisode]] = {}
    for version, episode, count, prompt, completion in rows:
        total = sums.setdefault(version, [0, 0, 0])
        for place, value in enumerate((count, prompt, completion)):
            total[place] += int(value)
        own = found.setdefault(version, [])
        if episode is not None:
            one = ServedEpisode(episode, version, count, int(prompt), int(completion), rewards[episode])
            own.append(one)
    facts = {version: ServedFacts.of(found[version], *sums[version]) for version in sorted(sums)}
    return Served(facts, {version: tuple(own) for version, own in found.items()})


def marks_of(conn: sa.Connection, names: Sequence[str], tag: str | None) -> dict[str, str | None]:
    """Each episode's task, or its value of a tag. None: it has none."""
    column = episodes.c.task_id if tag is None else episodes.c.tags[tag].as_string()
    found: dict[str, str | None] = {}
    for chunk in chunks(names):
        query = sa.select(episodes.c.id, column).where(episodes.c.id.in_(chunk))
        found.update((row[0], row[1]) for row in conn.execute(query))
    return found
