"""What people ask of the publisher, a row per request, and what became of it.

A request for a version is carried out with the version's own status; this row says who asked, why, and how it
ended. One for the base model (version 0, which has no row of its own) is carried out from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from ..records import new_id, now_ms
from .schema import policy_requests
from .statements import optional_text, storable_json, storable_text

Verb = Literal["promote", "rollback"]
Outcome = Literal["live", "rejected", "superseded"]

_table = policy_requests
_waits: sa.ColumnElement[bool] = sa.literal_column("outcome IS NULL", sa.Boolean)  # as its index says it


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """`outcome` None: the publisher has not decided yet. `verdict`: its numbers, or why it was refused."""

    id: str
    policy: str
    version: int
    verb: Verb
    from_version: int
    source: str
    note: str | None
    outcome: Outcome | None
    verdict: Mapping[str, Any] | None
    created_at_ms: int
    decided_at_ms: int | None

    @property
    def by(self) -> str:
        """Who, and why: for one line."""
        return self.source if self.note is None else f"{self.source} ({self.note})"


def add_request(
    conn: sa.Connection,
    policy: str,
    version: int,
    verb: Verb,
    *,
    from_version: int,
    source: str,
    note: str | None,
) -> PolicyRequest:
    """Write it; older ones of the policy that still wait are superseded."""
    decide(conn, policy, None, "superseded", {"reason": f"{source} asked for version {version} instead"})
    request = PolicyRequest(
        id=new_id(),
        policy=policy,
        version=version,
        verb=verb,
        from_version=from_version,
        source=storable_text(source),
        note=optional_text(note),
        outcome=None,
        verdict=None,
        created_at_ms=now_ms(),
        decided_at_ms=None,
    )
    row = {name: getattr(request, name) for name in PolicyRequest.__dataclass_fields__}
    conn.execute(_table.insert(), row)
    return request


def load_request(conn: sa.Connection, request_id: str) -> PolicyRequest | None:
    return _first(conn, sa.select(_table).where(_table.c.id == request_id))


def newest_request(conn: sa.Connection, policy: str) -> PolicyRequest | None:
    return _first(
        conn, sa.select(_table).where(_table.c.policy == policy).order_by(_table.c.id.desc()).limit(1)
    )


def requests_of(conn: sa.Connection, policy: str) -> list[PolicyRequest]:
    """All of them, by age."""
    query = sa.select(_table).where(_table.c.policy == policy).order_by(_table.c.id)
    return [_request(row) for row in conn.execute(query)]


def waiting_requests(conn: sa.Connection) -> list[PolicyRequest]:
    """Of every policy, by age; at most one each."""
    return [_request(row) for row in conn.execute(sa.select(_table).where(_waits).order_by(_table.c.id))]


def waiting_request(conn: sa.Connection, policy: str) -> PolicyRequest | None:
    return _first(conn, sa.select(_table).where(_waits, _table.c.policy == policy))


def decide(
    conn: sa.Connection,
    policy: str,
    version: int | None,
    outcome: Outcome,
    verdict: Mapping[str, Any] | None,
) -> None:
    """What became of the requests that wait for this version (None: for any) of the policy."""
    which = [_waits, _table.c.policy == policy]
    if version is not None:
        which.append(_table.c.version == version)
    values: dict[str, Any] = {"outcome": outcome, "decided_at_ms": now_ms()}
    if verdict is not None:
        values["verdict"] = storable_json(verdict)
    conn.execute(_table.update().where(*which).values(values))


def _first(conn: sa.Connection, query: sa.Select[Any]) -> PolicyRequest | None:
    row = conn.execute(query).first()
    return None if row is None else _request(row)


def _request(row: sa.Row[Any]) -> PolicyRequest:
    return PolicyRequest(**row._mapping)
