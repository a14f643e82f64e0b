"""Training runs as a person looks at them, also while they go on: a list, one run with its steps, one step.

Reads rows of any run that wrote to this log, whatever machine it ran on; knows no run folder and no trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from ..errors import UserError
from .fleet import database_now_ms
from .schema import choices, events, groups, manifest_choices, manifest_episodes, runs, step_manifests
from .statements import storable_text

MAX_RUNS = 1000


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run of a list. None where no step has been finished."""

    id: str
    policy: str
    status: str  # "running" | "finished" | "stopped" | "failed"
    num_steps: int  # finished ones
    num_steps_trained: int  # those that made new weights
    from_version: int | None
    to_version: int | None
    first_reward: float | None  # mean over the judged episodes of the first finished step
    last_reward: float | None
    created_at_ms: int
    last_step_at_ms: int | None
    ended_at_ms: int | None
    silent_ms: int | None  # since the heartbeat of the process that trains it; None: nobody does
    why: str | None  # it failed, or was stopped


@dataclass(frozen=True, slots=True)
class StepFacts:
    step: int
    from_version: int
    to_version: int | None
    planned_at_ms: int
    trained_at_ms: int | None  # None: it is being trained, or the run ended in it
    metrics: Mapping[str, Any]  # the step's line (trainer/report.py); empty until it was trained


@dataclass(frozen=True, slots=True)
class RunView:
    line: RunLine
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: tuple[StepFacts, ...]

    def document(self) -> dict[str, Any]:
        shown = {"settings": dict(self.settings), "environment": dict(self.environment)}
        return asdict(self.line) | shown | {"steps": [asdict(step) for step in self.steps]}


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What a step made of one agent's choices. `agent` None: calls that named none."""

    agent: str | None
    num_choices: int
    num_trained: int
    trained_tokens: int  # of choices that the log still holds
    advantage_mean: float | None  # over its trained choices
    reasons: Mapping[str, int]  # of those that are not trained


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    id: str
    group_id: str | None
    task_id: str | None  # None too where the log no longer holds the group
    reward: float | None  # resolved, as the step used it
    num_choices: int
    num_trained: int
    advantage_mean: float | None
    reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepView:
    run_id: str
    facts: StepFacts
    agents: tuple[AgentFacts, ...]  # most choices first
    episodes: tuple[EpisodeFacts, ...]  # highest reward first, those without one last

    @property
    def reasons(self) -> dict[str, int]:
        """Of all choices that are not trained."""
        found: dict[str, int] = {}
        for agent in self.agents:
            for reason, count in agent.reasons.items():
                found[reason] = found.get(reason, 0) + count
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def document(self) -> dict[str, Any]:
        shown = {"run": self.run_id, **asdict(self.facts), "reasons": self.reasons}
        return shown | {
            "agents": [asdict(agent) for agent in self.agents],
            "episodes": [asdict(episode) for episode in self.episodes],
        }


def list_runs(conn: sa.Connection, *, policy: str | None = None, limit: int = 20) -> list[RunLine]:
    """The newest first."""
    if not 1 <= limit <= MAX_RUNS:
        raise UserError(f"--limit {limit}: choose one from 1 to {MAX_RUNS}")
    query = sa.select(runs).order_by(runs.c.created_at_ms.desc(), runs.c.id.desc()).limit(limit)
    if policy is not None:
        query = query.where(runs.c.policy == storable_text(policy))
    return _lines(conn, conn.execute(query).all())


def find_run(conn: sa.Connection, prefix: str | None) -> str:
    """The id that begins so; None: the latest run. UserError where that is none, or several."""
    query = sa.select(runs.c.id).order_by(runs.c.created_at_ms.desc(), runs.c.id.desc())
    if prefix is None:
        latest = conn.execute(query.limit(1)).scalar()
        if latest is None:
            raise UserError("the log holds no run yet; lightning train makes one")
        return str(latest)
    prefix = storable_text(prefix)
    found = conn.execute(query.where(runs.c.id.startswith(prefix, autoescape=True)).limit(4)).scalars().all()
    if len(found) == 1 or prefix in found:
        return prefix if prefix in found else str(found[0])
    if not found:
        raise UserError(f"the log holds no run {prefix!r}; lightning runs list shows those that it holds")
    several = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
    raise UserError(f"several runs begin with {prefix!r} ({several}); give more of the id")


def load_run(conn: sa.Connection, run_id: str) -> RunView:
    row = conn.execute(sa.select(runs).where(runs.c.id == run_id)).one()
    query = sa.select(step_manifests).where(step_manifests.c.run_id == run_id).order_by(step_manifests.c.step)
    steps = tuple(_step(found) for found in conn.execute(query))
    return RunView(_lines(conn, [row])[0], row.settings, row.environment, steps)


def load_step(conn: sa.Connection, run_id: str, step: int) -> StepView:
    """UserError where the run has no such step."""
    query = sa.select(step_manifests).where(step_manifests.c.run_id == run_id, step_manifests.c.step == step)
    header = conn.execute(query).first()
    if header is None:
        last = conn.execute(
            sa.select(sa.func.max(step_manifests.c.step)).where(step_manifests.c.run_id == run_id)
        ).scalar()
        has = "has no step yet" if last is None else f"has steps 0 to {last}"
        raise UserError(f"run {run_id} {has}: no step {step}")
    tallies = _tallies(conn, run_id, step)
    return StepView(run_id, _step(header), _agents(tallies), _episodes(conn, run_id, step, tallies))


@dataclass(frozen=True, slots=True)
class _Tally:
    """Choices of one agent in one episode with one fate."""

    episode_id: str
    agent: str | None
    reason: str | None  # None: trained
    count: int
    tokens: int
    advantages: float  # their sum


def _tallies(conn: sa.Connection, run_id: str, step: int) -> list[_Tally]:
    rows, of = manifest_choices, choices
    query = (
        sa.select(
            rows.c.episode_id,
            rows.c.agent,
            rows.c.reason,
            sa.func.count().label("count"),
            sa.func.coalesce(sa.func.sum(of.c.num_tokens), 0).label("tokens"),
            sa.func.coalesce(sa.func.sum(rows.c.advantage), 0.0).label("advantages"),
        )
        .select_from(
            rows.outerjoin(of, sa.and_(of.c.call_id == rows.c.call_id, of.c.index == rows.c.choice_index))
        )
        .where(rows.c.run_id == run_id, rows.c.step == step)
        .group_by(rows.c.episode_id, rows.c.agent, rows.c.reason)
    )
    return [_Tally(*row) for row in conn.execute(query)]


def _agents(tallies: list[_Tally]) -> tuple[AgentFacts, ...]:
    found = []
    for agent in {tally.agent for tally in tallies}:
        own = [tally for tally in tallies if tally.agent == agent]
        trained_tokens = sum(tally.tokens for tally in own if tally.reason is None)
        found.append(AgentFacts(agent, *_counts(own), trained_tokens, _mean(own), _reasons(own)))
    return tuple(sorted(found, key=lambda facts: (-facts.num_choices, facts.agent or "")))


def _episodes(conn: sa.Connection, run_id: str, step: int, tallies: list[_Tally]) -> tuple[EpisodeFacts, ...]:
    query = (
        sa.select(manifest_episodes, groups.c.task_id)
        .outerjoin(groups, groups.c.id == manifest_episodes.c.group_id)
        .where(manifest_episodes.c.run_id == run_id, manifest_episodes.c.step == step)
    )
    by_episode: dict[str, list[_Tally]] = {}
    for tally in tallies:
        by_episode.setdefault(tally.episode_id, []).append(tally)
    found = [
        EpisodeFacts(
            row.episode_id,
            row.group_id,
            row.task_id,
            row.value,
            *_counts(own),
            advantage_mean=_mean(own),
            reasons=_reasons(own),
        )
        for row in conn.execute(query)
        for own in [by_episode.get(row.episode_id, [])]
    ]
    return tuple(sorted(found, key=lambda facts: (facts.reward is None, -(facts.reward or 0.0), facts.id)))


def _counts(tallies: list[_Tally]) -> tuple[int, int]:
    """All choices, and those trained."""
    return sum(tally.count for tally in tallies), sum(t.count for t in tallies if t.reason is None)


def _mean(tallies: list[_Tally]) -> float | None:
    trained = [tally for tally in tallies if tally.reason is None]
    count = sum(tally.count for tally in trained)
    return sum(tally.advantages for tally in trained) / count if count else None


def _reasons(tallies: list[_Tally]) -> dict[str, int]:
    found: dict[str, int] = {}
    for tally in tallies:
        if tally.reason is not None:
            found[tally.reason] = found.get(tally.reason, 0) + tally.count
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _step(row: sa.Row[Any]) -> StepFacts:
    return StepFacts(
        step=row.step,
        from_version=row.from_version,
        to_version=row.to_version,
        planned_at_ms=row.created_at_ms,
        trained_at_ms=row.trained_at_ms,
        metrics=row.metrics or {},
    )


def _lines(conn: sa.Connection, found: Sequence[Any]) -> list[RunLine]:
    ids = [row.id for row in found]
    at = step_manifests.c
    summed = {
        row.run_id: row
        for row in conn.execute(
            sa.select(
                at.run_id,
                sa.func.count(at.trained_at_ms).label("num_steps"),
                sa.func.count(at.to_version).label("num_steps_trained"),
                sa.func.min(at.from_version).label("from_version"),
                sa.func.max(at.to_version).label("to_version"),
                sa.func.min(sa.case((at.trained_at_ms.is_not(None), at.step))).label("first"),
                sa.func.max(sa.case((at.trained_at_ms.is_not(None), at.step))).label("last"),
                sa.func.max(at.trained_at_ms).label("last_step_at_ms"),
            )
            .where(at.run_id.in_(ids))
            .group_by(at.run_id)
        )
    }
    ends = {(row.run_id, step) for row in summed.values() for step in (row.first, row.last)}
    said = {
        (row.run_id, row.step): (row.metrics or {}).get("reward_mean")
        for row in conn.execute(
            sa.select(at.run_id, at.step, at.metrics).where(sa.tuple_(at.run_id, at.step).in_(list(ends)))
        )
    }
    whys = _whys(conn, ids)
    now_ms = database_now_ms(conn)
    return [_line(row, summed.get(row.id), said, whys, now_ms) for row in found]


def _whys(conn: sa.Connection, ids: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    """The newest end of each run that somebody gave a reason for: its status, and the reason."""
    query = sa.select(events.c.subject_id, events.c.kind, events.c.note).where(
        events.c.subject == "run", events.c.subject_id.in_(ids), events.c.kind.in_(("failed", "stopped"))
    )
    rows = conn.execute(query.order_by(events.c.created_at_ms, events.c.id))
    return {row.subject_id: (row.kind, row.note) for row in rows}


def _line(
    row: Any,
    sums: Any,
    rewards: Mapping[tuple[str, int], float | None],
    whys: Mapping[str, tuple[str, str | None]],
    now_ms: int,
) -> RunLine:
    ended_as, why = whys.get(row.id, (None, None))
    beats = row.status == "running" and row.seen_at_ms is not None
    return RunLine(
        id=row.id,
        policy=row.policy,
        status=row.status,
        num_steps=sums.num_steps if sums else 0,
        num_steps_trained=sums.num_steps_trained if sums else 0,
        from_version=sums.from_version if sums else None,
        to_version=sums.to_version if sums else None,
        first_reward=rewards.get((row.id, sums.first)) if sums else None,
        last_reward=rewards.get((row.id, sums.last)) if sums else None,
        created_at_ms=row.created_at_ms,
        last_step_at_ms=sums.last_step_at_ms if sums else None,
        ended_at_ms=row.ended_at_ms,
        silent_ms=max(0, now_ms - row.seen_at_ms) if beats else None,
        why=why if ended_as == row.status else None,  # a run that was resumed since has another end
    )
