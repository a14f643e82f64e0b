"""The rows by which several proxies on one log agree: heartbeats, the publisher's lease, what is served.

Times are the database's: proxies' clocks may differ. Each function runs in the caller's transaction; those
that write take the lease's row first, so that Postgres writers follow each other. What the rows mean for
calls is the proxy's (proxy/publishing/fleet.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from .schema import calls, episodes, proxies, publisher_lease, serving_state
from .statements import chunks, insert_missing, names_in

Phase = Literal["open", "hold", "drain"]

_ROW = "publisher"  # the name of the one row in each of the two tables

_NOW = {
    "sqlite": sa.text("SELECT CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"),
    "postgresql": sa.text("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"),
}


@dataclass(frozen=True, slots=True)
class ProxyRow:
    """One proxy process. `uses`: (policy, version, whether a call is running) of what it still needs."""

    id: str
    host: str
    pid: int
    acked_seq: int
    uses: tuple[tuple[str, int, bool], ...]
    seen_at_ms: int = 0
    started_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class ServingState:
    """What the publisher has said last. `live` and `engines` are its own JSON."""

    seq: int
    term: int
    phase: Phase
    is_changing: bool
    live: Mapping[str, Any]
    engines: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FleetView:
    """All of it at one moment. `owner` None: nobody holds the lease (any more)."""

    now_ms: int
    owner: str | None
    state: ServingState | None
    proxies: tuple[ProxyRow, ...]

    def fresh(self, within_ms: int) -> tuple[ProxyRow, ...]:
        """Proxies whose heartbeat is not older than that."""
        return tuple(row for row in self.proxies if self.now_ms - row.seen_at_ms <= within_ms)


def database_now_ms(conn: sa.Connection) -> int:
    return int(conn.execute(_NOW[conn.dialect.name]).scalar_one())


def beat(conn: sa.Connection, row: ProxyRow) -> None:
    """The proxy lives, and has carried out `acked_seq`."""
    values = {
        "seen_at_ms": database_now_ms(conn),
        "acked_seq": row.acked_seq,
        "uses": [list(use) for use in row.uses],
    }
    if conn.execute(proxies.update().where(proxies.c.id == row.id).values(values)).rowcount:
        return
    started = {"id": row.id, "host": row.host, "pid": row.pid, "started_at_ms": values["seen_at_ms"]}
    insert_missing(conn, proxies, [{**values, **started}])


def leave(conn: sa.Connection, proxy_id: str) -> None:
    """The proxy ends in order: nobody waits for it, and its lease is free."""
    conn.execute(
        publisher_lease.update()
        .where(publisher_lease.c.owner == proxy_id)
        .values(owner=None, expires_at_ms=0)
    )
    conn.execute(proxies.delete().where(proxies.c.id == proxy_id))


def forget_gone(conn: sa.Connection, older_than_ms: int) -> None:
    """Rows of proxies that ended without a word, long ago."""
    conn.execute(proxies.delete().where(proxies.c.seen_at_ms < database_now_ms(conn) - older_than_ms))


def take_lease(conn: sa.Connection, proxy_id: str, ttl_ms: int) -> int | None:
    """Renew the lease, or take it if it is free or has expired: its term. None: somebody else holds it."""
    insert_missing(conn, publisher_lease, [{"name": _ROW, "owner": None, "term": 0, "expires_at_ms": 0}])
    row = conn.execute(sa.select(publisher_lease).with_for_update()).one()
    now = database_now_ms(conn)
    if row.owner not in (None, proxy_id) and row.expires_at_ms > now:
        return None
    term = int(row.term) if row.owner == proxy_id else int(row.term) + 1
    conn.execute(publisher_lease.update().values(owner=proxy_id, term=term, expires_at_ms=now + ttl_ms))
    return term


def holds_lease(conn: sa.Connection, proxy_id: str, term: int) -> bool:
    """Whether it is still this proxy's, in this term; locks it until the transaction ends."""
    row = conn.execute(sa.select(publisher_lease).with_for_update()).one_or_none()
    return (
        row is not None
        and (row.owner, row.term) == (proxy_id, term)
        and row.expires_at_ms > database_now_ms(conn)
    )


def write_state(conn: sa.Connection, state: ServingState) -> None:
    """Replace it; the caller has made sure that it holds the lease."""
    values = {
        "seq": state.seq,
        "term": state.term,
        "phase": state.phase,
        "is_changing": state.is_changing,
        "live": dict(state.live),
        "engines": dict(state.engines),
        "written_at_ms": database_now_ms(conn),
    }
    if not conn.execute(serving_state.update().values(values)).rowcount:
        insert_missing(conn, serving_state, [{"name": _ROW, **values}])


def view(conn: sa.Connection) -> FleetView:
    now = database_now_ms(conn)
    lease = conn.execute(sa.select(publisher_lease)).one_or_none()
    state = conn.execute(sa.select(serving_state)).one_or_none()
    rows: Sequence[sa.Row[Any]] = conn.execute(sa.select(proxies).order_by(proxies.c.id)).all()
    return FleetView(
        now_ms=now,
        owner=None if lease is None or lease.expires_at_ms <= now else lease.owner,
        state=None
        if state is None
        else ServingState(state.seq, state.term, state.phase, state.is_changing, state.live, state.engines),
        proxies=tuple(
            ProxyRow(
                id=row.id,
                host=row.host,
                pid=row.pid,
                acked_seq=row.acked_seq,
                uses=tuple((policy, version, running) for policy, version, running in row.uses),
                seen_at_ms=row.seen_at_ms,
                started_at_ms=row.started_at_ms,
            )
            for row in rows
        ),
    )


# --- what episodes are pinned to, wherever their calls came in ---


def find_pin(conn: sa.Connection, policy: str, episode_id: str) -> tuple[int, int] | None:
    """The version of the policy that the episode's newest call was served by, and when that began."""
    query = (
        sa.select(calls.c.policy_version, sa.func.min(calls.c.started_at_ms))
        .where(calls.c.episode_id == episode_id, calls.c.policy == policy)
        .group_by(calls.c.policy_version)
        .order_by(sa.func.max(calls.c.ordinal).desc())
        .limit(1)
    )
    row = conn.execute(query).first()
    return None if row is None or row[0] is None else (int(row[0]), int(row[1]))


_RUNNING = sa.select(episodes.c.id).where(names_in(episodes.c.id), episodes.c.status == "running")


def still_running(conn: sa.Connection, episode_ids: Sequence[str]) -> set[str]:
    """Those of the episodes that nobody has ended (or that the log does not hold yet)."""
    known = sa.select(episodes.c.id).where(names_in(episodes.c.id))
    found: set[str] = set()
    for chunk in chunks(sorted(set(episode_ids))):
        there = set(conn.execute(known, {"names": chunk}).scalars())
        found |= set(conn.execute(_RUNNING, {"names": chunk}).scalars()) | (set(chunk) - there)
    return found
