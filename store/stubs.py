"""Calls whose end came without their intent: what the log keeps of them, and how the intent completes it.

The answer must not be dropped because a row is missing; it waits in the unattributed bin, untrainable. Runs
within `append_entries` (store/append.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from ..records import CallEnd, CallKind, CallStatus, Quarantine, now_ms
from .events import add_event
from .schema import calls, choices, events
from .statements import insert_missing

NO_INTENT = "missing_intent"
"""Attribution rule of a call whose end came without its intent: it waits in the unattributed bin."""


def add_stubs(conn: sa.Connection, ends: dict[str, CallEnd], ids: list[str]) -> None:
    """Rows for these calls. Their answers in `ends` are replaced by quarantined ones."""
    if not ids:
        return
    rows = [
        {
            "id": name,
            "kind": CallKind.POLICY.value,
            "attribution_rule": NO_INTENT,
            "route": "",
            "dialect": "other",
            "streaming": False,
            "engine_url": "",
            "sampling": {},
            "retry_count": 0,
            "status": CallStatus.OPEN.value,
            "tags": {},
            "started_at_ms": (ends[name].first_byte_at_ms or ends[name].ended_at_ms)
            if name in ends
            else now_ms(),
        }
        for name in ids
    ]
    insert_missing(conn, calls, rows)
    for name in ids:
        if name in ends:  # its sampling parameters are not known, so nothing of it can be trained
            untouched = [choice.index for choice in ends[name].choices if choice.quarantine is None]
            ends[name] = _quarantined(ends[name])
        else:
            untouched = []
        add_event(conn, "call", name, NO_INTENT, {"quarantined": untouched}, "recorder")


def _quarantined(end: CallEnd) -> CallEnd:
    kept = tuple(
        replace(choice, quarantine=choice.quarantine or Quarantine.UNRECORDABLE) for choice in end.choices
    )
    return replace(end, choices=kept)


def complete_stub(conn: sa.Connection, row: dict[str, Any]) -> None:
    """The intent came after the end: fill it in, free the choices that only its absence quarantined."""
    conn.execute(
        calls.update()
        .where(calls.c.id == row["id"])
        .values({name: value for name, value in row.items() if name != "id"})
    )
    if row["unrecordable"] is None:
        ours = (choices.c.call_id == row["id"], choices.c.index.in_(_quarantined_by_us(conn, row["id"])))
        conn.execute(choices.update().where(*ours).values(quarantine=None))


def _quarantined_by_us(conn: sa.Connection, call_id: str) -> list[int]:
    """Choices that had no other reason."""
    query = sa.select(events.c.value).where(
        events.c.subject == "call", events.c.subject_id == call_id, events.c.kind == NO_INTENT
    )
    return [index for said in conn.execute(query).scalars() for index in said["quarantined"]]
