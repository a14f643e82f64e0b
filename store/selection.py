"""Which groups a run can train next, and counts that explain why a group can't be.

Only episodes made for training count here: those made for evaluation may share a task and a batch with them,
and neither hold the group up nor fill its seats. Episodes without a group (no task was named) are never
selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from ..records import EpisodeStatus, Purpose, RewardTarget, VersionStatus
from .schema import calls, episodes, groups, manifest_episodes, policy_versions, rewards

_ENDED = EpisodeStatus.ENDED.value
_in_group = sa.and_(episodes.c.group_id == groups.c.id, episodes.c.purpose == Purpose.TRAIN.value)
_rewarded = sa.exists().where(
    rewards.c.episode_id == episodes.c.id, rewards.c.target == RewardTarget.EPISODE.value
)


def _served_by(policy: str) -> sa.ColumnElement[bool]:
    """A call of the episode went to this policy (an episode's calls may go to several)."""
    return sa.exists().where(calls.c.episode_id == episodes.c.id, calls.c.policy == policy)


def _candidate(policy: str) -> sa.ColumnElement[bool]:
    """The group has an episode that ended well, without a gap, with a call of this policy."""
    return sa.exists().where(
        _in_group, episodes.c.status == _ENDED, episodes.c.has_gap.is_(False), _served_by(policy)
    )


_running = sa.exists().where(_in_group, episodes.c.status == EpisodeStatus.RUNNING.value)
_seats_taken = sa.select(sa.func.count()).select_from(episodes).where(_in_group).scalar_subquery()
_short = sa.and_(groups.c.expected_size.is_not(None), _seats_taken < groups.c.expected_size)
_unrewarded = sa.not_(sa.exists().where(_in_group, episodes.c.status == _ENDED, _rewarded))


def _trained(policy: str, run_id: str, again: bool) -> sa.ColumnElement[bool]:
    """In a manifest of this run or, unless `again`, of a step that made a version of the policy.

    A set that is made once, not a look-up for each group: most groups of an old log have been trained, and a
    watching trainer asks several times a second.
    """
    of_manifests = sa.select(episodes.c.group_id).where(
        episodes.c.id == manifest_episodes.c.episode_id, episodes.c.group_id.is_not(None)
    )
    trained = of_manifests.where(manifest_episodes.c.run_id == run_id)
    if not again:
        made_a_version = of_manifests.where(
            policy_versions.c.run_id == manifest_episodes.c.run_id,
            policy_versions.c.step == manifest_episodes.c.step,
            policy_versions.c.policy == policy,
            policy_versions.c.status != VersionStatus.REJECTED.value,
        )
        return groups.c.id.in_(sa.union(trained, made_a_version))
    return groups.c.id.in_(trained)


def trainable_group_ids(
    conn: sa.Connection, *, policy: str, run_id: str, again: bool = False, limit: int | None = None
) -> list[str]:
    """Groups that this run can train now, oldest first.

    A group is ready when none of its training episodes is running any more (failed and excluded ones are over
    too, and keep their seat), its expected size is reached where somebody said one, at least one episode
    ended without a gap, was served by the policy and at least one has a reward, and no episode of it has been
    trained: by this run or, unless `again`, into any version of the policy that was not rejected. Whether the
    rewards that are there suffice is the trainer's stated policy, not the log's.
    """
    query = (
        sa.select(groups.c.id)
        .where(
            _candidate(policy),
            sa.not_(_running),
            sa.not_(_short),
            sa.not_(_unrewarded),
            sa.not_(_trained(policy, run_id, again)),
        )
        .order_by(groups.c.created_at_ms, groups.c.id)
        .limit(limit)
    )
    return list(conn.execute(query).scalars())


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Groups with training episodes, each counted once under the first reason that holds it back."""

    ready: int
    trained: int  # by this run, or into a version of the policy
    running: int  # an episode is still running
    short: int  # fewer episodes than expected
    other_policy: int  # no episode that ended without a gap and was served by this policy
    unrewarded: int  # nobody has rewarded any ended episode

    def explain(self) -> str:
        """ "3 groups: 1 ready, 2 with an episode still running"."""
        words = {
            "ready": self.ready,
            "trained already": self.trained,
            "with an episode still running": self.running,
            "with fewer episodes than expected": self.short,
            "without an ended episode of this policy": self.other_policy,
            "without any reward": self.unrewarded,
        }
        total = sum(words.values())
        said = ", ".join(f"{count} {word}" for word, count in words.items() if count)
        return f"{total} group{'' if total == 1 else 's'}" + (f": {said}" if said else "")


def count_groups(conn: sa.Connection, *, policy: str, run_id: str, again: bool = False) -> GroupCounts:
    state = sa.case(
        (_trained(policy, run_id, again), "trained"),
        (_running, "running"),
        (_short, "short"),
        (sa.not_(_candidate(policy)), "other_policy"),
        (_unrewarded, "unrewarded"),
        else_="ready",
    )
    states = sa.select(state.label("state")).where(sa.exists().where(_in_group)).subquery()
    query = sa.select(states.c.state, sa.func.count()).group_by(states.c.state)
    found: dict[str, int] = {row[0]: row[1] for row in conn.execute(query)}
    return GroupCounts(**{name: found.get(name, 0) for name in GroupCounts.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """All episodes of the log; the statuses are of those made for training."""

    total: int
    evaluation: int
    running: int
    ended: int
    failed: int
    excluded: int
    unrewarded: int  # of the ended
    ungrouped: int  # of the ended: no task was named
    with_gap: int  # of the ended

    def explain(self) -> str:
        """ "10 episodes: 2 for evaluation, 3 running, 5 ended (1 without a reward)"."""
        parts = {
            "for evaluation": self.evaluation,
            "running": self.running,
            "failed": self.failed,
            "excluded": self.excluded,
            "ended": self.ended,
        }
        said = ", ".join(f"{count} {word}" for word, count in parts.items() if count)
        of_ended = {
            "without a reward": self.unrewarded,
            "without a task": self.ungrouped,
            "with a gap": self.with_gap,
        }
        more = ", ".join(f"{count} {word}" for word, count in of_ended.items() if count)
        counted = f"{self.total} episode{'' if self.total == 1 else 's'}"
        return counted + (f": {said}" if said else "") + (f" ({more})" if more else "")


def count_episodes(conn: sa.Connection) -> EpisodeCounts:
    ended = episodes.c.status == _ENDED
    query = sa.select(
        episodes.c.purpose,
        episodes.c.status,
        sa.func.count(),
        sa.func.count(sa.case((sa.and_(ended, sa.not_(_rewarded)), 1))),
        sa.func.count(sa.case((sa.and_(ended, episodes.c.group_id.is_(None)), 1))),
        sa.func.count(sa.case((sa.and_(ended, episodes.c.has_gap), 1))),
    ).group_by(episodes.c.purpose, episodes.c.status)
    rows = conn.execute(query).all()
    train = {row[1]: row for row in rows if row[0] == Purpose.TRAIN.value}
    of_ended = train.get(_ENDED, (None, None, 0, 0, 0, 0))
    return EpisodeCounts(
        total=sum(row[2] for row in rows),
        evaluation=sum(row[2] for row in rows if row[0] == Purpose.EVAL.value),
        **{status.value: train[status.value][2] if status.value in train else 0 for status in EpisodeStatus},
        unrewarded=of_ended[3],
        ungrouped=of_ended[4],
        with_gap=of_ended[5],
    )
