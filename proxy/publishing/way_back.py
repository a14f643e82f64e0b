"""What proves a version that was served before: the probe of the step that is undone, read backwards.

A version's own probe says what its step changed. Going from N+1 back to N, the engine has to undo what step
N+1 did, and that is what the probe of N+1 knows. Where the steps between are several, the version's own probe
serves. The base model has no probe: the first step that left it has one.
"""

from __future__ import annotations

from dataclasses import replace

import sqlalchemy as sa

from ...records import PolicyVersion, ProbeSequence, VersionStatus
from ...store.policies import parent_of, versions
from ..live.served import BASE_VERSION

Probe = tuple[ProbeSequence, ...]


def backwards(probe: Probe) -> Probe:
    return tuple(ProbeSequence(one.ids, one.logprobs_after, one.logprobs_before) for one in probe)


def with_probe_from(conn: sa.Connection, version: PolicyVersion, live: PolicyVersion | None) -> PolicyVersion:
    """The version, with the probe that suits what serves now."""
    if live is not None and live.probe and parent_of(conn, live) == version.version:
        return replace(version, probe=backwards(live.probe))
    return version


def base_version(conn: sa.Connection, live: PolicyVersion) -> PolicyVersion:
    """The base model as a version of the live one's policy and kind; no probe where no step left it."""
    steps = [live, *versions(conn, live.policy)]
    parents = [parent_of(conn, step) for step in steps]
    from_base = [step for step, parent in zip(steps, parents, strict=True) if parent == BASE_VERSION]
    # A version that no step of this log made: the lowest was trained from the base model, as far as is known.
    unknown = [step for step, parent in zip(steps[1:], parents[1:], strict=True) if parent is None]
    first = next((step for step in (*from_base, *unknown) if step.probe), None)
    return PolicyVersion(
        policy=live.policy,
        version=BASE_VERSION,
        status=VersionStatus.CANDIDATE,
        kind=live.kind,
        path=None,
        checksum=None,
        probe=() if first is None else backwards(first.probe),
        base_model=None,
        run_id=None,
        step=None,
        created_at_ms=live.created_at_ms,
    )
