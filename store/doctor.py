"""One look at a whole log before any training time is spent: what is there, what can be trained, what can't.

Puts together what exclusions.py counts, what drift_sample.py finds, and what the newest groups' rewards say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from ..records import EpisodeStatus, Purpose, Quarantine
from .drift_sample import DriftSummary, examine
from .exclusions import CallCounts, Exclusion, count_calls, episode_exclusions
from .read import load_rewards
from .rewards import resolve
from .schema import episodes, groups
from .selection import EpisodeCounts, count_episodes
from .statements import chunks

MAX_GROUPS = 200
"""Newest groups whose rewards are compared."""


@dataclass(frozen=True, slots=True)
class GroupFindings:
    """Of the newest groups with ended training episodes."""

    examined: int
    in_log: int
    with_variance: int
    no_variance: int  # every episode was worth the same: nothing to learn from
    no_variance_values: tuple[tuple[float, int], ...]  # (what each was worth, groups), the commonest first
    lone: int  # one episode: nothing to compare it with
    unrewarded: int  # no episode has a reward
    no_variance_example: str | None = None  # a task


@dataclass(frozen=True, slots=True)
class Checkup:
    counts: CallCounts
    temperature_zero: int  # answers
    episodes: EpisodeCounts
    exclusions: tuple[Exclusion, ...]
    groups: GroupFindings
    drift: DriftSummary | None  # None: not asked for

    def document(self) -> dict[str, Any]:
        """As JSON says it, shares included."""
        counts = self.counts
        return {
            "calls": asdict(counts)
            | {
                "share_attributed": share(counts.attributed, counts.calls),
                "share_exact": share(counts.exact, counts.answers),
                "share_trainable": share(counts.trainable, counts.answers),
                "share_temperature_zero": share(self.temperature_zero, counts.answers),
            },
            "episodes": asdict(self.episodes),
            "exclusions": [asdict(exclusion) for exclusion in self.exclusions],
            "groups": asdict(self.groups),
            "drift": None if self.drift is None else asdict(self.drift),
        }


def share(part: int, whole: int) -> float | None:
    """None of nothing."""
    return None if whole == 0 else part / whole


def check_up(conn: sa.Connection, *, max_episodes: int = 50) -> Checkup:
    """`max_episodes`: how many conversations are compared turn by turn; 0: none."""
    counts, exclusions = count_calls(conn)
    greedy = [found.count for found in exclusions if found.reason == Quarantine.TEMPERATURE_ZERO.value]
    return Checkup(
        counts=counts,
        temperature_zero=sum(greedy),
        episodes=count_episodes(conn),
        exclusions=(*exclusions, *episode_exclusions(conn)),
        groups=_judge_groups(conn),
        drift=examine(conn, max_episodes=max_episodes) if max_episodes else None,
    )


def _judge_groups(conn: sa.Connection) -> GroupFindings:
    ended = sa.and_(
        episodes.c.group_id == groups.c.id,
        episodes.c.status == EpisodeStatus.ENDED.value,
        episodes.c.purpose == Purpose.TRAIN.value,
    )
    newest = (
        sa.select(groups.c.id, groups.c.task_id)
        .where(sa.exists().where(ended))
        .order_by(groups.c.created_at_ms.desc(), groups.c.id.desc())
        .limit(MAX_GROUPS)
    )
    tasks = {row.id: row.task_id for row in conn.execute(newest)}
    members: dict[str, list[str]] = defaultdict(list)
    for chunk in chunks(tasks):
        query = sa.select(episodes.c.group_id, episodes.c.id).where(
            episodes.c.group_id.in_(chunk),
            episodes.c.status == EpisodeStatus.ENDED.value,
            episodes.c.purpose == Purpose.TRAIN.value,
        )
        for group, name in conn.execute(query):
            members[group].append(name)
    given = load_rewards(conn, [name for names in members.values() for name in names])
    states: Counter[str] = Counter()
    values: Counter[float] = Counter()
    example = None
    for group, task in tasks.items():
        found = [resolve(given[name]).value for name in members[group]]
        worth = [value for value in found if value is not None]
        if not worth:
            states["unrewarded"] += 1
        elif len(worth) == 1:
            states["lone"] += 1
        elif min(worth) == max(worth):
            states["no_variance"] += 1
            values[worth[0]] += 1
            example = example or task
        else:
            states["with_variance"] += 1
    in_log = conn.execute(sa.select(sa.func.count()).select_from(groups)).scalar_one()
    return GroupFindings(
        examined=len(tasks),
        in_log=in_log,
        with_variance=states["with_variance"],
        no_variance=states["no_variance"],
        no_variance_values=tuple(values.most_common(3)),
        lone=states["lone"],
        unrewarded=states["unrewarded"],
        no_variance_example=example,
    )
