"""Canaries: a version that serves a share of the episodes that begin, until their rewards decide.

Owns the rule by which it is judged, and the way to live or out of the engines. What it is judged by is kept
with the version, so that whoever publishes by then goes by the same. live/policies.py draws the episodes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, variance
from typing import Any, Literal

from ...records import PolicyVersion, VersionStatus, now_ms
from ...settings.proxy import ProxySettings
from ...store.outcomes import outcomes
from ...store.policies import WithdrawnError, live_version, versions_with_status
from ..live.served import adapter_name
from .place import Place
from .version_log import Notices, VersionLog

LOOK_SEC = 2.0
MAX_EPISODES = 10_000  # of the canary's, should it wait that long

logger = logging.getLogger("lightning.publisher")


@dataclass(frozen=True, slots=True)
class Plan:
    """How one canary is judged. `since_ms` None: it has not begun."""

    share: float
    episodes: int
    tolerance: float
    max_sec: float
    at_timeout: Literal["reject", "promote"]
    since_ms: int | None = None

    @classmethod
    def of(cls, settings: ProxySettings) -> Plan | None:
        if settings.canary_share == 0:
            return None
        return cls(
            settings.canary_share,
            settings.canary_episodes,
            settings.canary_tolerance,
            settings.canary_max_sec,
            settings.canary_at_timeout,
        )

    @classmethod
    def in_verdict(cls, verdict: Mapping[str, Any] | None) -> Plan | None:
        """As it was kept when the canary began."""
        kept = (verdict or {}).get("canary")
        if not isinstance(kept, Mapping):
            return None
        try:
            return cls(**{name: kept[name] for name in cls.__dataclass_fields__})
        except KeyError:
            return None

    def begun(self) -> Plan:
        return replace(self, since_ms=now_ms())


@dataclass(frozen=True, slots=True)
class Decision:
    is_promoted: bool
    reason: str
    numbers: Mapping[str, Any]


def judge(plan: Plan, canary: Sequence[float], live: Sequence[float], at_ms: int) -> Decision | None:
    """None: too early to say.

    With at least `plan.episodes` rewards on both sides, the canary is rejected where its mean is below the
    live version's by more than the tolerance and one standard error of the difference of the two means,
    sqrt(s_c^2 / n_c + s_l^2 / n_l).
    """
    numbers: dict[str, Any] = {"canary_episodes": len(canary), "live_episodes": len(live)}
    if min(len(canary), len(live)) < plan.episodes:
        if at_ms < (plan.since_ms or 0) + plan.max_sec * 1000:
            return None
        seen = f"{len(canary)} episodes of it and {len(live)} of the live version have ended with a reward"
        reason = f"after {plan.max_sec:g} s only {seen}, of {plan.episodes} each"
        return Decision(plan.at_timeout == "promote", reason, numbers)
    means = fmean(canary), fmean(live)
    error = math.sqrt(_squared_error(canary) + _squared_error(live))
    numbers |= {"canary_mean": means[0], "live_mean": means[1], "standard_error": error}
    seen = f"{means[0]:.3g} over {len(canary)} episodes, the live version {means[1]:.3g} over {len(live)}"
    if means[0] < means[1] - plan.tolerance - error:
        allowed = f"{plan.tolerance:g} and a standard error of {error:.2g}"
        return Decision(False, f"its mean reward is {seen}: below by more than {allowed}", numbers)
    return Decision(True, f"its mean reward is {seen}", numbers)


def _squared_error(values: Sequence[float]) -> float:
    return variance(values) / len(values) if len(values) > 1 else 0.0


class Canaries:
    """All of one place. `look` at every turn, before new candidates."""

    def __init__(self, place: Place, log: VersionLog, notices: Notices) -> None:
        self._place = place
        self._log = log
        self._notices = notices
        self._judged_at_sec = float("-inf")
        self._leaving: set[tuple[str, int]] = set()  # that serve nobody new, and are loaded still

    async def look(self) -> None:
        live = self._place.live
        if live.base_model is None:
            return  # nothing serves: what the log says is brought back first
        rows = await self._log.read(lambda conn: versions_with_status(conn, VersionStatus.CANARY))
        wanted = {row.policy: row.version for row in rows}
        for policy in live.policies:
            version = live.canary_version(policy)
            if version is not None and wanted.get(policy) != version:
                logger.info("version %d of %r is not wanted any more", version, policy)
                await self._take_out(policy, version)
        is_time = time.monotonic() - self._judged_at_sec >= LOOK_SEC
        for row in rows:
            plan = Plan.in_verdict(row.verdict)
            if plan is None or live.canary_version(row.policy) != row.version:
                await self._log.set_status(
                    row, VersionStatus.CANDIDATE
                )  # somebody's hand: anew, from the start
            elif is_time:
                await self._judge(row, plan)
        if is_time:
            self._judged_at_sec = time.monotonic()
        await self._unload()

    async def _judge(self, row: PolicyVersion, plan: Plan) -> None:
        policy, now = row.policy, self._place.live.live_version(row.policy)
        assert now is not None, "a canary has a live version beside it"
        serving = await self._log.read(lambda conn: live_version(conn, policy))
        since_ms = 0 if serving is None else serving.created_at_ms  # none of its episodes ended before
        canary = await self._log.read(
            lambda conn: outcomes(conn, policy, row.version, since_ms=plan.since_ms or 0, limit=MAX_EPISODES)
        )
        live = await self._log.read(
            lambda conn: outcomes(conn, policy, now, since_ms=since_ms, limit=plan.episodes)
        )
        decision = judge(plan, canary, live, now_ms())
        if decision is None:
            return
        verdict = {key: value for key, value in (row.verdict or {}).items() if key != "waits_sec"}
        verdict["canary"] = {**asdict(plan), **decision.numbers, "reason": decision.reason}
        what = f"version {row.version} of {policy!r}"
        try:
            if decision.is_promoted:
                await self._promote(row, verdict)
                logger.info("%s: live: %s", what, decision.reason)
            else:
                verdict |= {"result": "canary", "reason": f"as a canary, {decision.reason}"}
                await self._take_out(policy, row.version, row, verdict)
                logger.warning("%s: rejected, the old version keeps serving: %s", what, decision.reason)
        except WithdrawnError as error:
            logger.info("%s: withdrawn: %s", what, error)  # the next look takes it out

    async def _promote(self, row: PolicyVersion, verdict: Mapping[str, Any]) -> None:
        place, name = self._place, adapter_name(row.policy, row.version)
        await place.fleet.hold(drains=False, timeout_sec=place.hold_timeout_sec)
        try:
            await self._log.set_status(row, VersionStatus.LIVE, verdict, expects=(VersionStatus.CANARY,))
            place.live.set_live(row.policy, row.version, row.kind, name)
        finally:
            await place.fleet.release()

    async def _take_out(
        self,
        policy: str,
        version: int,
        row: PolicyVersion | None = None,
        verdict: Mapping[str, Any] | None = None,
    ) -> None:
        """Its episodes go on with the live version. `row`: still to be rejected, with that verdict."""
        place = self._place
        await place.fleet.hold(drains=False, timeout_sec=place.hold_timeout_sec)
        try:
            if row is not None:
                await self._log.set_status(
                    row, VersionStatus.REJECTED, verdict, expects=(VersionStatus.CANARY,)
                )
            place.live.drop(policy, version)
            place.engines.holding = place.engines.holding.without_adapter(adapter_name(policy, version))
            self._leaving.add((policy, version))
        finally:
            await place.fleet.release()

    async def _unload(self) -> None:
        """Once no call is answered by it any more, of any proxy."""
        place = self._place
        for policy, version in sorted(self._leaving):
            if version in place.live.loaded_versions(policy):
                self._leaving.discard((policy, version))  # it came back
            elif place.fleet.is_told and not place.fleet.is_answering(policy, version):
                name = adapter_name(policy, version)
                await place.on_each(lambda handle, name=name: handle.client.unload_lora(name))  # type: ignore[misc]
                self._leaving.discard((policy, version))
