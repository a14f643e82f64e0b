"""Training runs and their step manifests: which choices a step trains, and from which reward rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from ..errors import UserError
from ..records import ManifestChoice, StepManifest, now_ms
from .events import add_event
from .schema import manifest_choices, manifest_episodes, runs, step_manifests
from .statements import storable_json


def create_run(  # noqa: PLR0917 - the order of the table's columns
    conn: sa.Connection,
    run_id: str,
    policy: str,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    start_version: int | None = None,
) -> None:
    if conn.execute(sa.select(runs.c.id).where(runs.c.id == run_id)).first() is not None:
        raise UserError(f"there is a run {run_id!r} already; name another")
    row = {
        "id": run_id,
        "policy": policy,
        "status": "running",
        "settings": storable_json(settings),
        "environment": storable_json(environment),
        "created_at_ms": now_ms(),
        "start_version": start_version,
    }
    conn.execute(runs.insert(), row)


def end_run(conn: sa.Connection, run_id: str, status: str, why: str | None = None) -> None:
    """`status`: finished, stopped or failed. Its policy is free from then on. `why` is kept as an event."""
    values = {"status": status, "ended_at_ms": now_ms(), "owned_policy": None}
    result = conn.execute(runs.update().where(runs.c.id == run_id).values(values))
    _found(result, f"run {run_id!r}")
    if why is not None:
        add_event(conn, "run", run_id, status, None, "trainer", why)


def add_manifest(
    conn: sa.Connection, manifest: StepManifest, counts: Mapping[str, Any] | None = None
) -> None:
    """Write what the step trains. Its episodes are those of its choices, returns and reward ids."""
    key = {"run_id": manifest.run_id, "step": manifest.step}
    header = key | {
        "policy": manifest.policy,
        "from_version": manifest.from_version,
        "created_at_ms": now_ms(),
        "counts": None if counts is None else storable_json(counts),
    }
    conn.execute(step_manifests.insert(), header)
    group_of: dict[str, str | None] = dict.fromkeys([*manifest.returns, *manifest.reward_ids])
    group_of.update((choice.episode_id, choice.group_id) for choice in manifest.choices)
    episode_rows = [
        key
        | {
            "episode_id": name,
            "group_id": group,
            "value": manifest.returns.get(name),
            "reward_ids": list(manifest.reward_ids.get(name, ())),
        }
        for name, group in group_of.items()
    ]
    choice_rows = [
        key
        | {
            "call_id": choice.call_id,
            "choice_index": choice.choice_index,
            "episode_id": choice.episode_id,
            "agent": choice.agent,
            "advantage": choice.advantage,
            "multiplier": choice.multiplier,
            "reason": choice.reason,
            "position": position,
        }
        for position, choice in enumerate(manifest.choices)
    ]
    if episode_rows:
        conn.execute(manifest_episodes.insert(), episode_rows)
    if choice_rows:
        conn.execute(manifest_choices.insert(), choice_rows)


def load_manifest(conn: sa.Connection, run_id: str, step: int) -> StepManifest:
    """As it was written, to the order of its choices. UserError where there is none."""
    header = conn.execute(sa.select(step_manifests).where(*_at(step_manifests, run_id, step))).first()
    if header is None:
        raise UserError(f"run {run_id!r} has no manifest for step {step}")
    by_episode = conn.execute(sa.select(manifest_episodes).where(*_at(manifest_episodes, run_id, step))).all()
    query = sa.select(manifest_choices).where(*_at(manifest_choices, run_id, step))
    query = query.order_by(
        manifest_choices.c.position, manifest_choices.c.call_id, manifest_choices.c.choice_index
    )
    group_of = {row.episode_id: row.group_id for row in by_episode}
    return StepManifest(
        run_id=run_id,
        step=step,
        policy=header.policy,
        from_version=header.from_version,
        choices=tuple(_choice(row, group_of[row.episode_id]) for row in conn.execute(query)),
        reward_ids={row.episode_id: tuple(row.reward_ids) for row in by_episode if row.reward_ids},
        returns={row.episode_id: row.value for row in by_episode if row.value is not None},
    )


def finish_step(
    conn: sa.Connection, run_id: str, step: int, *, to_version: int | None, metrics: Mapping[str, Any]
) -> None:
    """The step was trained: the version that it produced (None: none was published) and its line."""
    result = conn.execute(
        step_manifests.update()
        .where(*_at(step_manifests, run_id, step))
        .values(to_version=to_version, metrics=storable_json(metrics), trained_at_ms=now_ms())
    )
    _found(result, f"manifest for step {step} of run {run_id!r}")


@dataclass(frozen=True, slots=True)
class WrittenStep:
    """A step manifest's header. `trained_at_ms` None: the run was interrupted in it."""

    step: int
    from_version: int
    to_version: int | None
    trained_at_ms: int | None
    counts: Mapping[str, Any] | None
    metrics: Mapping[str, Any] | None


def steps_of(conn: sa.Connection, run_id: str) -> list[WrittenStep]:
    """All of them, in order."""
    table = step_manifests.c
    query = sa.select(*(table[field.name] for field in fields(WrittenStep)))
    rows = conn.execute(query.where(table.run_id == run_id).order_by(table.step))
    return [WrittenStep(**row._mapping) for row in rows]


def episodes_of(conn: sa.Connection, run_id: str, step: int) -> set[str]:
    """Every episode that the step was planned from, trained or not."""
    query = sa.select(manifest_episodes.c.episode_id).where(*_at(manifest_episodes, run_id, step))
    return set(conn.execute(query).scalars())


def _at(table: sa.Table, run_id: str, step: int) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return table.c.run_id == run_id, table.c.step == step


def _choice(row: sa.Row[Any], group_id: str | None) -> ManifestChoice:
    return ManifestChoice(
        call_id=row.call_id,
        choice_index=row.choice_index,
        episode_id=row.episode_id,
        group_id=group_id,
        agent=row.agent,
        advantage=row.advantage,
        multiplier=row.multiplier,
        reason=row.reason,
    )


def _found(result: sa.CursorResult[Any], what: str) -> None:
    if result.rowcount != 1:
        raise UserError(f"the log holds no {what}")
