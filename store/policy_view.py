"""Policies as a person looks at them: a list, one with its versions, one version, and two compared.

Every number comes from rows of this log: versions and their events, the steps that made them, and what their
calls and episodes came to (served.py). Knows no version folder and no proxy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from ..errors import UserError
from ..records import PolicyVersion, VersionStatus
from .policies import parent_of, policy_names, versions
from .policy_requests import PolicyRequest, requests_of
from .schema import events, manifest_choices, manifest_episodes, runs
from .served import NOTHING, Mean, ServedFacts, count_calls, load_served, marks_of, served_policies
from .verdicts import verdict_words

BASE_VERSION = 0
MAX_PARTS = 20
"""Tasks, or values of a tag, that a comparison names: those whose rewards differ most."""


@dataclass(frozen=True, slots=True)
class PolicyLine:
    policy: str
    live_version: int  # 0: the base model
    kind: str | None  # of the newest version; None: it has none
    num_versions: int
    num_calls: int
    num_episodes: int
    reward: Mean


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """What the step that made a version used."""

    from_version: int
    num_episodes: int
    num_groups: int
    num_choices: int  # that got a loss
    num_left_out: int


@dataclass(frozen=True, slots=True)
class ProbeChange:
    """How far the step moved the model over its probe. `kl`: mean of r - 1 - log r, r the change of a token's
    probability; in nats per token, of the sequences that it moved most."""

    kl: float
    rms: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class VersionFacts:
    version: int
    status: str
    kind: str | None  # None: the base model
    path: str | None
    run_id: str | None
    step: int | None
    created_at_ms: int | None
    live_at_ms: int | None
    verdict: Mapping[str, Any] | None
    words: str  # the verdict
    trained_on: TrainedOn | None
    probe: ProbeChange | None
    served: ServedFacts


@dataclass(frozen=True, slots=True)
class VersionEvent:
    status: str
    source: str
    note: str | None
    value: Any
    at_ms: int


@dataclass(frozen=True, slots=True)
class PolicyView:
    policy: str
    live_version: int
    versions: tuple[VersionFacts, ...]
    requests: tuple[PolicyRequest, ...]

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class VersionView:
    policy: str
    facts: VersionFacts
    events: tuple[VersionEvent, ...]

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Part:
    """The episodes of one task, or of one value of a tag, by the two versions."""

    name: str | None
    a: Mean
    b: Mean

    @property
    def delta(self) -> float | None:
        return None if self.a.mean is None or self.b.mean is None else self.b.mean - self.a.mean


@dataclass(frozen=True, slots=True)
class Comparison:
    """`settings`: those of the two runs that differ, each with both values."""

    policy: str
    a: VersionFacts
    b: VersionFacts
    settings: Mapping[str, tuple[Any, Any]]
    by: str  # "task", or the tag's key
    parts: tuple[Part, ...]
    num_parts: int  # that both versions served
    num_of_one: int  # that only one of them did

    def document(self) -> dict[str, Any]:
        found = asdict(self)
        for doc, part in zip(found["parts"], self.parts, strict=True):
            doc["delta"] = part.delta
        return found


def list_policies(conn: sa.Connection) -> list[PolicyLine]:
    """Every policy that has a version or has served a call, by name."""
    found = []
    for policy in sorted({*policy_names(conn), *served_policies(conn)}):
        known = versions(conn, policy)
        served = load_served(conn, policy)
        rewards = {one.id: one.reward for own in served.episodes.values() for one in own}
        found.append(
            PolicyLine(
                policy=policy,
                live_version=_live(known),
                kind=known[-1].kind.value if known else None,
                num_versions=len(known),
                num_calls=count_calls(conn, policy),
                num_episodes=len(rewards),
                reward=Mean.of([value for value in rewards.values() if value is not None]),
            )
        )
    return found


def load_policy(conn: sa.Connection, policy: str) -> PolicyView:
    """With all its versions, the base model first if it has served. UserError: there is no such policy."""
    known = versions(conn, policy)
    served = load_served(conn, policy).facts
    if not known and not served:
        raise _unknown(conn, policy)
    facts = [_facts(conn, row, served) for row in known]
    if BASE_VERSION in served and all(row.version != BASE_VERSION for row in known):
        facts.insert(0, _base_facts(_live(known), served))
    return PolicyView(policy, _live(known), tuple(facts), tuple(requests_of(conn, policy)))


def load_version_view(conn: sa.Connection, policy: str, version: int) -> VersionView:
    facts = _one(conn, policy, version)
    query = sa.select(events).where(
        events.c.subject == "policy_version", events.c.subject_id == f"{policy}/{version}"
    )
    rows = conn.execute(query.order_by(events.c.created_at_ms, events.c.id))
    said = tuple(VersionEvent(row.kind, row.source, row.note, row.value, row.created_at_ms) for row in rows)
    return VersionView(policy, facts, said)


def compare(conn: sa.Connection, policy: str, a: int, b: int, *, by_tag: str | None = None) -> Comparison:
    """What `b` did against `a`. UserError where one is not there."""
    first, second = _one(conn, policy, a), _one(conn, policy, b)
    served = load_served(conn, policy, [a, b]).episodes
    names = sorted({one.id for own in served.values() for one in own})
    marks = marks_of(conn, names, by_tag)
    values: dict[str | None, tuple[list[float], list[float]]] = {}
    for place, version in enumerate((a, b)):
        for one in served.get(version, ()):
            if one.reward is not None:
                values.setdefault(marks.get(one.id), ([], []))[place].append(one.reward)
    parts = [Part(name, Mean.of(old), Mean.of(new)) for name, (old, new) in values.items() if old and new]
    parts.sort(key=lambda part: (-abs(part.delta or 0.0), part.name or ""))
    return Comparison(
        policy=policy,
        a=first,
        b=second,
        settings=_differences(_settings(conn, first.run_id), _settings(conn, second.run_id)),
        by=by_tag or "task",
        parts=tuple(parts[:MAX_PARTS]),
        num_parts=len(parts),
        num_of_one=len(values) - len(parts),
    )


def probe_change(version: PolicyVersion) -> ProbeChange | None:
    moved = [
        after - before
        for sequence in version.probe
        for before, after in zip(sequence.logprobs_before, sequence.logprobs_after, strict=True)
    ]
    if not moved:
        return None
    kl = sum(math.expm1(change) - change for change in moved) / len(moved)
    return ProbeChange(kl, math.sqrt(sum(change**2 for change in moved) / len(moved)), len(moved))


def _one(conn: sa.Connection, policy: str, version: int) -> VersionFacts:
    known = versions(conn, policy)
    served = load_served(conn, policy, [version]).facts
    row = next((row for row in known if row.version == version), None)
    if row is not None:
        return _facts(conn, row, served)
    if version == BASE_VERSION and (known or served):
        return _base_facts(_live(known), served)
    if not known and not served:
        raise _unknown(conn, policy)
    has = ", ".join(str(row.version) for row in known) or "none"
    raise UserError(f"policy {policy!r} has no version {version}; it has {has}, and 0 is the base model")


def _unknown(conn: sa.Connection, policy: str) -> UserError:
    names = ", ".join(sorted({*policy_names(conn), *served_policies(conn)})) or "none yet"
    return UserError(f"the log holds no policy {policy!r}; it holds {names}")


def _live(known: list[PolicyVersion]) -> int:
    return next((row.version for row in known if row.status is VersionStatus.LIVE), BASE_VERSION)


def _facts(conn: sa.Connection, row: PolicyVersion, served: Mapping[int, ServedFacts]) -> VersionFacts:
    return VersionFacts(
        version=row.version,
        status=row.status.value,
        kind=row.kind.value,
        path=row.path,
        run_id=row.run_id,
        step=row.step,
        created_at_ms=row.created_at_ms,
        live_at_ms=row.live_at_ms,
        verdict=row.verdict,
        words=verdict_words(row.verdict, row.status),
        trained_on=_trained_on(conn, row),
        probe=probe_change(row),
        served=served.get(row.version, NOTHING),
    )


def _base_facts(live: int, served: Mapping[int, ServedFacts]) -> VersionFacts:
    status = VersionStatus.LIVE if live == BASE_VERSION else VersionStatus.RETIRED
    return VersionFacts(
        version=BASE_VERSION,
        status=status.value,
        kind=None,
        path=None,
        run_id=None,
        step=None,
        created_at_ms=None,
        live_at_ms=None,
        verdict=None,
        words="the base model",
        trained_on=None,
        probe=None,
        served=served.get(BASE_VERSION, NOTHING),
    )


def _trained_on(conn: sa.Connection, row: PolicyVersion) -> TrainedOn | None:
    parent = parent_of(conn, row)
    if parent is None:
        return None
    at, of = manifest_episodes.c, manifest_choices.c
    num_episodes, num_groups = conn.execute(
        sa.select(sa.func.count(), sa.func.count(at.group_id.distinct())).where(
            at.run_id == row.run_id, at.step == row.step
        )
    ).one()
    num_choices, num_trained = conn.execute(
        sa.select(sa.func.count(), sa.func.count(of.advantage)).where(
            of.run_id == row.run_id, of.step == row.step
        )
    ).one()
    return TrainedOn(parent, num_episodes, num_groups, num_trained, num_choices - num_trained)


def _settings(conn: sa.Connection, run_id: str | None) -> Mapping[str, Any]:
    if run_id is None:
        return {}
    return conn.execute(sa.select(runs.c.settings).where(runs.c.id == run_id)).scalar() or {}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    if not a or not b:
        return {}
    return {key: (a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)}
