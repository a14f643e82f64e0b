"""A candidate's way: load -> probe (-> evaluation) -> live, or rejected with its reason while the old version
keeps serving.

Owns every status from `loading` on, and what becomes of a version during which an engine went away. How
weights are swapped is in swap.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import sqlalchemy as sa

from ...engine.client import EngineGoneError
from ...errors import EngineError, PublishError, StoreError
from ...records import PolicyVersion, VersionStatus, WeightsKind
from ...store.policies import IN_HAND, WithdrawnError, live_version, load_version, set_base_live
from ...store.policy_requests import PolicyRequest, decide, load_request
from ..live.engines import Holding
from .arrival import check_version_files
from .canary import Plan
from .evaluation import Evaluation
from .place import BusyError, Handle, Place, RejectedError, verdict_of, what_is_missing
from .swap import Hooks, add_adapter, back_to_base, replace_weights
from .version_log import SOURCE, Notices, VersionLog
from .way_back import base_version, with_probe_from

MAX_TRIES = 2  # at a version during which the engine went away

logger = logging.getLogger("lightning.publisher")


class Candidates:
    """`policy`: the proxy's own, the only one whose full weights may replace the engine's."""

    def __init__(
        self,
        place: Place,
        log: VersionLog,
        notices: Notices,
        *,
        policy: str,
        evaluation: Evaluation | None = None,
        canary: Plan | None = None,
    ) -> None:
        self._canary = canary
        self._evaluation = evaluation
        self._place = place
        self._log = log
        self._notices = notices
        self._policy = policy
        self._tries: Counter[tuple[str, int]] = Counter()

    async def publish(self, version: PolicyVersion) -> None:
        what = f"version {version.version} of {version.policy!r}"
        canary = self._place.live.canary_version(version.policy)
        if canary is not None:
            self._notices.say(f"{what} waits until version {canary} is no canary any more")
            return
        logger.info("%s: loading from %s", what, version.path)
        key = (version.policy, version.version)
        try:
            await self._set_status(version, VersionStatus.LOADING)
            await self._while_others_hurry(partial(self._load, version))
        except EngineGoneError as error:
            # Perhaps a restart at a bad moment: it is taken up again, but not for ever.
            self._tries[key] += 1
            if self._tries[key] >= MAX_TRIES:
                await self._reject(version, what, f"the engine went away {MAX_TRIES} times: {error}", {})
            raise
        except BusyError as error:
            await self._set_status(version, VersionStatus.CANDIDATE)
            self._notices.say(f"{what} waits: {error}")
        except StoreError:
            raise
        except WithdrawnError as error:
            logger.info("%s: withdrawn: %s", what, error)
        except EngineError as error:
            await self._reject(version, what, str(error), verdict_of(error))
        else:
            self._tries.pop(key, None)
            is_canary = self._place.live.canary_version(version.policy) == version.version
            logger.info("%s: %s", what, "a canary" if is_canary else "live")

    async def serve_base(self, request: PolicyRequest) -> None:
        """Back to the base model: no version of the policy is live any more."""
        what = f"the base model for {request.policy!r}"
        logger.info("%s: asked for by %s", what, request.by)
        try:
            await self._while_others_hurry(partial(self._go_back_to_base, request))
        except BusyError as error:
            self._notices.say(f"{what} waits: {error}")
        except (EngineGoneError, StoreError):
            raise
        except WithdrawnError as error:
            logger.info("%s: withdrawn: %s", what, error)
        except EngineError as error:
            logger.warning("%s: rejected, the version that is live keeps serving: %s", what, error)
            verdict = verdict_of(error)
            await self._log.write(lambda conn: decide(conn, request.policy, 0, "rejected", verdict))
        else:
            logger.info("%s: live", what)

    async def _while_others_hurry(self, change: Callable[[], Awaitable[None]]) -> None:
        await self._place.fleet.prepare(is_changing=True)
        try:
            await change()
        finally:
            await self._place.fleet.prepare(is_changing=False)

    async def _load(self, version: PolicyVersion) -> None:
        if version.path is None:
            raise PublishError("it names no folder")
        if version.kind is WeightsKind.FULL:
            self._require_full_fits(version)
        first = next(h for h in self._place.handles if h.state in self._place.engines.in_rotation)
        await check_version_files(version, await first.client.base_model())
        previous = await self._log.read(partial(live_version, policy=version.policy))
        probed = await self._log.read(lambda conn: with_probe_from(conn, version, previous))

        plan = self._canary_plan(version)

        async def accepted(verdict: Mapping[str, Any]) -> None:
            if plan is None:
                await self._set_status(version, VersionStatus.LIVE, verdict)
            else:
                kept = {**verdict, "canary": asdict(plan.begun()), "waits_sec": plan.max_sec}
                await self._set_status(version, VersionStatus.CANARY, kept)

        async def proven(model: str, holds: Holding, verdict: Mapping[str, Any]) -> Mapping[str, Any]:
            if _has_served(version):  # what was found of it then still holds
                kept = {name: doc for name, doc in (version.verdict or {}).items() if name == "evaluation"}
                return {**verdict, **kept}
            if self._evaluation is None:
                return verdict
            return await self._evaluate(self._evaluation, version, model, holds, verdict)

        share = None if plan is None else plan.share
        hooks = Hooks(lambda: self._set_status(version, VersionStatus.PROBING), accepted, share, proven)
        swap = add_adapter if version.kind is WeightsKind.LORA else replace_weights
        await swap(self._place, probed, previous, hooks)

    async def _go_back_to_base(self, request: PolicyRequest) -> None:
        previous = await self._log.read(lambda conn: live_version(conn, request.policy))

        async def accepted(verdict: Mapping[str, Any]) -> None:
            def write(conn: sa.Connection) -> None:
                now = load_request(conn, request.id)
                if now is None or now.outcome is not None:
                    raise WithdrawnError("another version was asked for meanwhile")
                set_base_live(conn, request.policy, verdict=verdict, source=SOURCE)

            await self._log.write(write)

        if previous is None:
            await accepted({"reason": "no version was live by then"})
            return
        base = await self._log.read(lambda conn: base_version(conn, previous))
        swap = back_to_base if previous.kind is WeightsKind.LORA else replace_weights
        await swap(self._place, base, previous, Hooks(_nothing, accepted))

    def _canary_plan(self, version: PolicyVersion) -> Plan | None:
        """None: it goes live at once."""
        if self._canary is None or _has_served(version):
            return None
        if version.kind is WeightsKind.FULL:
            raise PublishError(
                "full weights can't serve a share of the episodes: train an adapter, or set no canary_share"
            )
        # A policy that nothing serves has nothing to compare with, and its calls nowhere else to go.
        return None if self._place.live.live_version(version.policy) is None else self._canary

    def _require_full_fits(self, version: PolicyVersion) -> None:
        """Full weights are under everything that the engine serves."""
        if version.policy != self._policy:
            raise PublishError(
                f"full weights would replace {self._policy!r} under the engine's base name; "
                "train a LoRA for a second policy"
            )
        live = self._place.live
        others = sorted({*live.policies} - {self._policy})
        adapters = sorted(self._place.engines.holding.adapters)
        if others or adapters:
            raise PublishError(
                f"full weights would change the base model under {', '.join(adapters or others)}: one engine "
                "serves full weights of one policy, or adapters of several"
            )

    async def _set_status(
        self, version: PolicyVersion, status: VersionStatus, verdict: Mapping[str, Any] | None = None
    ) -> None:
        await self._log.set_status(version, status, verdict, expects=IN_HAND)

    async def _evaluate(
        self,
        gate: Evaluation,
        version: PolicyVersion,
        model: str,
        holds: Holding,
        verdict: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Raises RejectedError, EngineGoneError where no engine holds it any more, WithdrawnError."""
        place, policy, number = self._place, version.policy, version.version

        async def is_there(handle: Handle) -> None:
            missing = await what_is_missing(handle.client, holds, handle.state.lacks)
            if missing is not None:
                raise EngineGoneError(f"the engine at {handle.state.url} was restarted: {missing}")

        async def still_there() -> None:
            place.fleet.require_lease()
            row = await self._log.read(lambda conn: load_version(conn, policy, number))
            if row is None or row.status is not VersionStatus.EVALUATING:
                raise WithdrawnError(f"version {number} of policy {policy!r} is not wanted any more")
            await place.on_each(is_there)

        until = {**verdict, "waits_sec": gate.timeout_sec}
        await self._set_status(version, VersionStatus.EVALUATING, until)
        await place.fleet.prepare(is_changing=False)  # not for the next minutes
        if version.kind is WeightsKind.LORA:
            await place.fleet.release()  # after an engine's rest; the old version serves meanwhile
        logger.info("version %d of %r: evaluated, for at most %.0f s", number, policy, gate.timeout_sec)
        found = await gate.run(version, model, still_there)
        seen = {**verdict, "evaluation": found.doc}
        if found.reason is not None:
            raise RejectedError(found.reason, {**seen, "result": "evaluation"})
        await place.fleet.prepare(is_changing=True)
        return seen

    async def _reject(
        self, version: PolicyVersion, what: str, reason: str, verdict: Mapping[str, Any]
    ) -> None:
        self._tries.pop((version.policy, version.version), None)
        try:
            await self._set_status(
                version, VersionStatus.REJECTED, {"result": "rejected", **verdict, "reason": reason}
            )
        except WithdrawnError as error:
            logger.info("%s: withdrawn: %s", what, error)
        else:
            logger.warning("%s: rejected, the old version keeps serving: %s", what, reason)


def _has_served(version: PolicyVersion) -> bool:
    """Proven and live before: who goes back to it does not wait for another evaluation."""
    return version.live_at_ms is not None and "slope" in (version.verdict or {})


async def _nothing() -> None:
    """The base model has no row whose status could say so."""
