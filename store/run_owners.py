"""Who trains a run: one process at a time, known by its heartbeat, and one publishing run per policy.

Every write of a run goes through `hold` in its own transaction, so that a process that was taken for dead
writes nothing any more. Whether an owner lives is the trainer's judgement (trainer/owner.py); where only the
heartbeat tells, SILENT_SEC is everybody's bound. Ages are by the database's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..errors import UserError
from ..records import now_ms
from .fleet import database_now_ms
from .schema import runs
from .statements import storable_text

SILENT_SEC = 60.0
"""After so long without a heartbeat nobody trains it: trainers, sleeping engines and tables judge by it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """One process. `process` tells it from a later one with its pid on its host."""

    token: str
    host: str
    pid: int
    process: str


@dataclass(frozen=True, slots=True)
class OwnedRun:
    """A run with whoever trains it, or did. `owner` None: an older version of this program wrote it."""

    id: str
    policy: str
    status: str  # "running" | "finished" | "stopped" | "failed"
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    start_version: int | None
    owner: Owner | None
    silent_ms: int | None  # since its owner's last heartbeat


def publishing_run(conn: sa.Connection, policy: str) -> OwnedRun | None:
    """The run that owns the policy: it has not ended, and may have died."""
    return _first(conn, runs.c.owned_policy == policy)


def latest_run(conn: sa.Connection, policy: str) -> OwnedRun | None:
    return _first(conn, runs.c.policy == storable_text(policy))


def owned_run(conn: sa.Connection, run_id: str) -> OwnedRun | None:
    return _first(conn, runs.c.id == storable_text(run_id))


def take(conn: sa.Connection, run: str, owner: Owner, *, was: str | None, policy: str | None) -> None:
    """Become the owner of a run whose owner has been `was` (a token); `policy`: the one that it publishes.

    UserError where somebody else was quicker.
    """
    values = {
        "status": "running",
        "ended_at_ms": None,
        "owned_policy": policy,
        "owner_token": owner.token,
        "owner_host": owner.host,
        "owner_pid": owner.pid,
        "owner_process": owner.process,
        "seen_at_ms": database_now_ms(conn),
    }
    had = runs.c.owner_token.is_(None) if was is None else runs.c.owner_token == was
    try:
        changed = conn.execute(runs.update().where(runs.c.id == run, had).values(values)).rowcount
    except IntegrityError:
        raise UserError(f"another run of policy {policy!r} has begun at this moment") from None
    if changed != 1:
        raise UserError(f"another process has taken up run {run} at this moment")


def hold(conn: sa.Connection, run: str, token: str) -> bool:
    """Whether the run is still this process's; a heartbeat, too. On Postgres it locks the row."""
    values = {"seen_at_ms": database_now_ms(conn)}
    mine = runs.update().where(runs.c.id == run, runs.c.owner_token == token, runs.c.status == "running")
    return conn.execute(mine.values(values)).rowcount == 1


def give_up(conn: sa.Connection, run: str, was: str | None) -> None:
    """The run has died: it failed, and owns its policy no more."""
    had = runs.c.owner_token.is_(None) if was is None else runs.c.owner_token == was
    values = {"status": "failed", "ended_at_ms": now_ms(), "owned_policy": None}
    conn.execute(runs.update().where(runs.c.id == run, had).values(values))


def _first(conn: sa.Connection, where: sa.ColumnElement[bool]) -> OwnedRun | None:
    query = sa.select(runs).where(where).order_by(runs.c.created_at_ms.desc(), runs.c.id.desc()).limit(1)
    row = conn.execute(query).first()
    if row is None:
        return None
    owner = None
    if row.owner_token is not None:
        owner = Owner(row.owner_token, row.owner_host, row.owner_pid, row.owner_process)
    silent_ms = None if row.seen_at_ms is None else max(0, database_now_ms(conn) - row.seen_at_ms)
    return OwnedRun(
        id=row.id,
        policy=row.policy,
        status=row.status,
        settings=row.settings,
        environment=row.environment,
        start_version=row.start_version,
        owner=owner,
        silent_ms=silent_ms,
    )
