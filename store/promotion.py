"""What a person may ask of the publisher: this version, or back to that one. Checked, then written as rows.

Nothing is loaded here: the version becomes a candidate again, and the publisher takes it through load, probe
and live like any other. A policy is asked one thing at a time: whatever else was on its way is withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import sqlalchemy as sa

from ..errors import UserError
from ..records import PolicyVersion, VersionStatus
from .events import add_event
from .policies import WAITING, lock_policy, policy_names, set_version_status, versions
from .policy_requests import PolicyRequest, Verb, add_request, decide, load_request, waiting_request
from .schema import events

BASE_VERSION = 0

Known = Mapping[int, PolicyVersion]
HasFolder = Callable[[str], bool]


def is_folder(path: str) -> bool:
    return Path(path).is_dir()


def ask_for_version(
    conn: sa.Connection,
    policy: str,
    version: int | None,
    verb: Verb,
    *,
    source: str,
    note: str | None = None,
    even_if_rejected: bool = False,
    has_folder: HasFolder = is_folder,
) -> PolicyRequest:
    """Write the request. `version` None: the one that was live before. `has_folder` looks at a path.

    UserError, before anything is written, for what can't be served.
    """
    lock_policy(conn, policy)
    known = {row.version: row for row in versions(conn, policy)}
    if not known:
        others = ", ".join(policy_names(conn)) or "none"
        raise UserError(f"the log holds no version of policy {policy!r}; policies that have one: {others}")
    live = next((v for v, row in known.items() if row.status is VersionStatus.LIVE), BASE_VERSION)
    if version is None:
        version = version_before(conn, known, policy, live)
    is_waiting = waiting_request(conn, policy) is not None or any(v.status in WAITING for v in known.values())
    if version not in {live, BASE_VERSION}:
        _require_servable(policy, version, known, even_if_rejected, has_folder)
    elif version == live and not is_waiting:
        raise UserError(f"{_name(policy, version)} is live already")
    request = add_request(conn, policy, version, verb, from_version=live, source=source, note=note)
    _withdraw_waiting(conn, known, request)
    if version == live:
        decide(conn, policy, version, "live", {"reason": "it was live; what was on its way is withdrawn"})
        return load_request(conn, request.id) or request
    asked = VersionStatus.CANDIDATE
    if version == BASE_VERSION:
        add_event(conn, "policy_version", f"{policy}/{version}", asked.value, None, source, note)
    else:
        set_version_status(conn, policy, version, asked, source=source, note=note)
    return request


def version_before(conn: sa.Connection, known: Known, policy: str, live: int) -> int:
    """What was live before `live` was for the first time; 0 is the base model.

    The first time, so that a second rollback goes on backwards, not to what was rolled back from.
    """
    if live == BASE_VERSION:
        raise UserError(
            f"the base model serves policy {policy!r}, and nothing was live before that; name a version "
            "(lightning policy show lists them)"
        )
    went_live = sa.select(events.c.subject_id).where(
        events.c.subject == "policy_version",
        events.c.subject_id.in_([f"{policy}/{version}" for version in (BASE_VERSION, *known)]),
        events.c.kind == VersionStatus.LIVE.value,
    )
    names = conn.execute(went_live.order_by(events.c.created_at_ms, events.c.id)).scalars()
    order = [int(name.rpartition("/")[2]) for name in names]
    first = order.index(live) if live in order else len(order)
    for version in reversed(order[:first]):
        rejected = version in known and known[version].status is VersionStatus.REJECTED
        if version != live and not rejected:
            return version
    return BASE_VERSION


def _require_servable(
    policy: str, version: int, known: Known, even_if_rejected: bool, has_folder: HasFolder
) -> None:
    name, row = _name(policy, version), known.get(version)
    if row is None:
        raise UserError(f"there is no {name}; it has {_listed(sorted(known))}, and 0 is the base model")
    if row.status in WAITING:
        raise UserError(f"{name} is on its way already: it is {row.status}")
    if row.status is VersionStatus.REJECTED and not even_if_rejected:
        why = (row.verdict or {}).get("reason") or "no reason given"
        raise UserError(f"{name} was rejected: {why}; to have it probed again, add --even-if-rejected")
    if row.path is None or not has_folder(row.path):
        left = [v for v, other in known.items() if other.path is not None and has_folder(other.path)]
        raise UserError(
            f"the folder of {name} is gone ({row.path}), so it can't be loaded; what can: "
            f"{_listed([BASE_VERSION, *left])} (0 is the base model)"
        )


def _withdraw_waiting(conn: sa.Connection, known: Known, request: PolicyRequest) -> None:
    """What had been live drains again; what never was is rejected, and whoever trained it is told why."""
    reason = f"{request.source} asked for version {request.version} while it was on its way"
    for row in known.values():
        if row.status not in WAITING or row.version == request.version:
            continue
        to = VersionStatus.REJECTED if row.live_at_ms is None else VersionStatus.DRAINING
        said = {"result": "withdrawn", "reason": reason}
        verdict = {**(row.verdict or {}), **said} if row.live_at_ms is None else None
        set_version_status(
            conn, row.policy, row.version, to, verdict=verdict, source=request.source, note=reason
        )


def _name(policy: str, version: int) -> str:
    return f"version {version} of policy {policy!r}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
