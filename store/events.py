"""Judgements on rows: each is a row of its own, the changed column is a copy of the newest."""

from __future__ import annotations

from typing import Any, Literal

import sqlalchemy as sa

from ..records import new_id, now_ms
from .schema import events
from .statements import optional_text, storable_json, storable_text

Subject = Literal["episode", "call", "choice", "policy_version", "run"]


def add_event(  # noqa: PLR0917 - the order of the table's columns
    conn: sa.Connection,
    subject: Subject,
    subject_id: str,
    kind: str,
    value: Any,
    source: str,
    note: str | None = None,
) -> None:
    """`subject_id` of a choice is "CALL/INDEX", of a policy version "POLICY/VERSION"."""
    row = {
        "id": new_id(),
        "subject": subject,
        "subject_id": storable_text(subject_id),
        "kind": kind,
        "value": storable_json(value),
        "source": storable_text(source),
        "note": optional_text(note),
        "created_at_ms": now_ms(),
    }
    conn.execute(events.insert(), row)
