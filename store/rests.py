"""One GPU for engine and trainer: the rows by which a run asks the engines to rest, and is told that they do.

Each is an event of the run; the newest says how it stands. What sleeping means is the publisher's matter
(proxy/publishing/rests.py), when to ask for it the trainer's (trainer/rest.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from .events import add_event
from .fleet import database_now_ms
from .schema import events, runs

RestState = Literal["engine_rest", "engine_asleep", "engine_refused", "engine_wake", "engine_awake"]
"""The trainer asks for a rest, and for the end of it; the publisher says what it has done."""

_STATES = ("engine_rest", "engine_asleep", "engine_refused", "engine_wake", "engine_awake")


@dataclass(frozen=True, slots=True)
class Rest:
    """How it stands with one run. `silent_ms`: since its trainer's last heartbeat."""

    run_id: str
    state: RestState
    note: str | None
    silent_ms: int


def say_rest(
    conn: sa.Connection, run_id: str, state: RestState, *, source: str, note: str | None = None
) -> None:
    add_event(conn, "run", run_id, state, None, source, note)


def rest_of(conn: sa.Connection, run_id: str) -> Rest | None:
    """None: the run has ended, or never asked."""
    query = sa.select(runs.c.seen_at_ms).where(runs.c.id == run_id, runs.c.status == "running")
    row = conn.execute(query).first()
    said = conn.execute(
        sa.select(events.c.kind, events.c.note)
        .where(events.c.subject == "run", events.c.subject_id == run_id, events.c.kind.in_(_STATES))
        .order_by(events.c.created_at_ms.desc(), events.c.id.desc())
        .limit(1)
    ).first()
    if row is None or said is None:
        return None
    silent_ms = max(0, database_now_ms(conn) - (row.seen_at_ms or 0))
    return Rest(run_id, said.kind, said.note, silent_ms)


def rests(conn: sa.Connection) -> list[Rest]:
    """Of the runs that publish at the moment; at most one a policy."""
    owners = conn.execute(sa.select(runs.c.id).where(runs.c.owned_policy.is_not(None)).order_by(runs.c.id))
    found = [rest_of(conn, run_id) for run_id in owners.scalars().all()]
    return [rest for rest in found if rest is not None]
