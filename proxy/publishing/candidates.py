"""A candidate's way: load -> probe -> live, or rejected with its reason while the old version keeps serving.

Owns every status from `loading` on, and what becomes of a version during which an engine went away. How
weights are swapped is in swap.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...engine.client import EngineGoneError
from ...errors import EngineError, PublishError, StoreError
from ...records import PolicyVersion, VersionStatus, WeightsKind
from ...store.policies import live_version
from .arrival import check_version_files
from .place import BusyError, Place, verdict_of
from .swap import Hooks, add_adapter, replace_weights
from .version_log import Notices, VersionLog

MAX_TRIES = 2  # at a version during which the engine went away

logger = logging.getLogger("lightning.publisher")


class Candidates:
    """`policy`: the proxy's own, the only one whose full weights may replace the engine's."""

    def __init__(self, place: Place, log: VersionLog, notices: Notices, *, policy: str) -> None:
        self._place = place
        self._log = log
        self._notices = notices
        self._policy = policy
        self._tries: Counter[tuple[str, int]] = Counter()

    async def publish(self, version: PolicyVersion) -> None:
        what = f"version {version.version} of {version.policy!r}"
        logger.info("%s: loading from %s", what, version.path)
        try:
            await self._log.set_status(version, VersionStatus.LOADING)
            await self._place.fleet.prepare(is_changing=True)
            try:
                await self._load(version)
            finally:
                await self._place.fleet.prepare(is_changing=False)
        except EngineGoneError as error:
            # Perhaps a restart at a bad moment: it is taken up again, but not for ever.
            self._tries[version.policy, version.version] += 1
            if self._tries[version.policy, version.version] >= MAX_TRIES:
                await self._reject(version, what, f"the engine went away {MAX_TRIES} times: {error}", {})
            raise
        except BusyError as error:
            await self._log.set_status(version, VersionStatus.CANDIDATE)
            self._notices.say(f"{what} waits: {error}")
        except StoreError:
            raise
        except EngineError as error:
            await self._reject(version, what, str(error), verdict_of(error))
        else:
            logger.info("%s: live", what)

    async def _load(self, version: PolicyVersion) -> None:
        if version.path is None:
            raise PublishError("it names no folder")
        if version.kind is WeightsKind.FULL and version.policy != self._policy:
            raise PublishError(
                f"full weights would replace {self._policy!r} under the engine's base name; "
                "train a LoRA for a second policy"
            )
        first = next(h for h in self._place.handles if h.state in self._place.engines.in_rotation)
        await check_version_files(version, await first.client.base_model())
        previous = await self._log.read(lambda conn: live_version(conn, version.policy))

        async def accepted(verdict: Mapping[str, Any]) -> None:
            await self._log.set_status(version, VersionStatus.LIVE, verdict)

        hooks = Hooks(lambda: self._log.set_status(version, VersionStatus.PROBING), accepted)
        swap = add_adapter if version.kind is WeightsKind.LORA else replace_weights
        await swap(self._place, version, previous, hooks)

    async def _reject(
        self, version: PolicyVersion, what: str, reason: str, verdict: Mapping[str, Any]
    ) -> None:
        logger.warning("%s: rejected, the old version keeps serving: %s", what, reason)
        await self._log.set_status(
            version, VersionStatus.REJECTED, {"result": "rejected", **verdict, "reason": reason}
        )
