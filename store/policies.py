"""Policy versions and their way from candidate to retired, one event per step of it.

The trainer and people add and mark rows; the publisher in the proxy is the one that acts on them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ..errors import PublishError, UserError
from ..records import PolicyVersion, ProbeSequence, VersionStatus, WeightsKind, logprobs, now_ms, token_ids
from .bodies import pack_json, unpack_json
from .events import add_event
from .policy_requests import decide
from .schema import policy_versions, step_manifests
from .statements import insert_missing, storable_json

IN_HAND = (
    VersionStatus.CANDIDATE,
    VersionStatus.LOADING,
    VersionStatus.PROBING,
    VersionStatus.EVALUATING,
)
"""The publisher has it in hand, or takes it up next (anew, where a publisher was killed)."""

WAITING = (*IN_HAND, VersionStatus.CANARY)
"""On its way: nobody knows yet whether it will be live."""

_table = policy_versions
_key = (_table.c.policy, _table.c.version)


class WithdrawnError(PublishError):
    """A person asked for another version while this one was on its way."""


def add_candidate(conn: sa.Connection, version: PolicyVersion) -> None:
    """Add the row, with the status that it has. UserError if the number is taken."""
    row = {
        "policy": version.policy,
        "version": version.version,
        "status": version.status.value,
        "kind": version.kind.value,
        "path": version.path,
        "checksum": version.checksum,
        "probe": pack_json([_probe_row(sequence) for sequence in version.probe]),
        "base_model": version.base_model,
        "run_id": version.run_id,
        "step": version.step,
        "verdict": None if version.verdict is None else storable_json(version.verdict),
        "created_at_ms": version.created_at_ms,
        "live_at_ms": now_ms() if version.status is VersionStatus.LIVE else None,
    }
    if load_version(conn, version.policy, version.version) is not None:
        raise UserError(f"policy {version.policy!r} has a version {version.version} already; number it anew")
    insert_missing(conn, _table, [row])
    name = f"{version.policy}/{version.version}"
    add_event(conn, "policy_version", name, version.status.value, None, version.run_id or "store")


def next_version(conn: sa.Connection, policy: str) -> int:
    """One above the highest there ever was, at least 1: version 0 is the base model."""
    highest = conn.execute(sa.select(sa.func.max(_table.c.version)).where(_table.c.policy == policy)).scalar()
    return max(1, (highest or 0) + 1)


def load_version(conn: sa.Connection, policy: str, version: int) -> PolicyVersion | None:
    return _first(conn, _table.c.policy == policy, _table.c.version == version)


def live_version(conn: sa.Connection, policy: str) -> PolicyVersion | None:
    return _first(conn, _table.c.policy == policy, _table.c.status == VersionStatus.LIVE.value)


def versions(conn: sa.Connection, policy: str) -> list[PolicyVersion]:
    """All of them, by number."""
    return _all(conn, _table.c.policy == policy)


def versions_with_status(conn: sa.Connection, *statuses: VersionStatus) -> list[PolicyVersion]:
    """Of every policy, by policy and number."""
    return _all(conn, _table.c.status.in_([status.value for status in statuses]))


def policy_names(conn: sa.Connection) -> list[str]:
    return list(conn.execute(sa.select(_table.c.policy).distinct().order_by(_table.c.policy)).scalars())


def set_version_status(
    conn: sa.Connection,
    policy: str,
    version: int,
    status: VersionStatus,
    *,
    verdict: Mapping[str, Any] | None = None,
    source: str,
    note: str | None = None,
    expects: Collection[VersionStatus] | None = None,
) -> None:
    """Move it on, with an event. The version that was live until now drains from then on, and a request for
    this one is decided. `expects`: WithdrawnError unless its status is one of these."""
    found = lock_policy(conn, policy)
    if version not in found:
        raise UserError(f"policy {policy!r} has no version {version}")
    if expects is not None and found[version] not in expects:
        raise WithdrawnError(f"version {version} of policy {policy!r} is {found[version]} by now")
    if status is VersionStatus.LIVE:
        for other, had in found.items():
            if had is VersionStatus.LIVE and other != version:
                _set(conn, policy, other, VersionStatus.DRAINING, verdict=None, source=source)
    _set(conn, policy, version, status, verdict=verdict, source=source, note=note)
    if status is VersionStatus.LIVE:
        decide(conn, policy, version, "live", verdict)
    elif status is VersionStatus.REJECTED:
        decide(conn, policy, version, "rejected", verdict)


def set_base_live(
    conn: sa.Connection, policy: str, *, verdict: Mapping[str, Any] | None, source: str
) -> None:
    """The base model serves the policy from now on: no version is live, and the one that was drains."""
    for version, status in lock_policy(conn, policy).items():
        if status is VersionStatus.LIVE:
            _set(conn, policy, version, VersionStatus.DRAINING, verdict=None, source=source)
    add_event(conn, "policy_version", f"{policy}/0", VersionStatus.LIVE.value, verdict, source)
    decide(conn, policy, 0, "live", verdict)


def lock_policy(conn: sa.Connection, policy: str) -> dict[int, VersionStatus]:
    """Every version's status, which nobody else changes until this transaction ends."""
    rows = sa.select(*_key, _table.c.status).where(_table.c.policy == policy).order_by(_table.c.version)
    return {row.version: VersionStatus(row.status) for row in conn.execute(rows.with_for_update())}


def parent_of(conn: sa.Connection, version: PolicyVersion) -> int | None:
    """The version whose weights its step changed; None: no step of this log made it."""
    if version.run_id is None or version.step is None:
        return None
    query = sa.select(step_manifests.c.from_version).where(
        step_manifests.c.run_id == version.run_id, step_manifests.c.step == version.step
    )
    return conn.execute(query).scalar()


def _set(
    conn: sa.Connection,
    policy: str,
    version: int,
    status: VersionStatus,
    *,
    verdict: Mapping[str, Any] | None,
    source: str,
    note: str | None = None,
) -> None:
    values: dict[str, Any] = {"status": status.value}
    if verdict is not None:
        values["verdict"] = storable_json(verdict)
    if status is VersionStatus.LIVE:
        values["live_at_ms"] = now_ms()
    if status in (VersionStatus.RETIRED, VersionStatus.REJECTED):
        values["retired_at_ms"] = now_ms()
    conn.execute(_table.update().where(_table.c.policy == policy, _table.c.version == version).values(values))
    add_event(conn, "policy_version", f"{policy}/{version}", status.value, verdict, source, note)


def _first(conn: sa.Connection, *where: sa.ColumnElement[bool]) -> PolicyVersion | None:
    found = _all(conn, *where)
    return found[0] if found else None


def _all(conn: sa.Connection, *where: sa.ColumnElement[bool]) -> list[PolicyVersion]:
    rows: Sequence[sa.Row[Any]] = conn.execute(sa.select(_table).where(*where).order_by(*_key)).all()
    return [_version(row) for row in rows]


def _version(row: sa.Row[Any]) -> PolicyVersion:
    return PolicyVersion(
        policy=row.policy,
        version=row.version,
        status=VersionStatus(row.status),
        kind=WeightsKind(row.kind),
        path=row.path,
        checksum=row.checksum,
        probe=tuple(_probe(sequence) for sequence in unpack_json(row.probe)) if row.probe else (),
        base_model=row.base_model,
        run_id=row.run_id,
        step=row.step,
        created_at_ms=row.created_at_ms,
        verdict=row.verdict,
        live_at_ms=row.live_at_ms,
    )


def _probe_row(sequence: ProbeSequence) -> dict[str, list[Any]]:
    """JSON's doubles hold every 32-bit float exactly."""
    return {
        "ids": sequence.ids.tolist(),
        "before": sequence.logprobs_before.tolist(),
        "after": sequence.logprobs_after.tolist(),
    }


def _probe(row: Mapping[str, list[Any]]) -> ProbeSequence:
    return ProbeSequence(token_ids(row["ids"]), logprobs(row["before"]), logprobs(row["after"]))
