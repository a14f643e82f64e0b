"""Which weights answer which model name: the proxy's view of what is live.

Owns the map policy -> version -> name in the engine, and who is sent where by it. The publisher writes it,
the relay reads it; neither I/O nor SQL here. One event loop, no locks: every method runs to its end without
a pause.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from ...errors import EngineError
from ...records import WeightsKind
from .gate import Gate
from .loaded import Canary, Loaded
from .naming import Naming
from .pins import Pins
from .served import BASE_VERSION, HeldTooLongError, Lease, Served, UnservedVersionError, adapter_name

Recall = Callable[[str, str], Awaitable[tuple[int, float] | None]]
"""(policy, episode) -> the version that it is pinned to, and for how many seconds; None: to none."""


_VERSION_NAME = re.compile(r"[A-Za-z0-9._-]+@[0-9]+")
"""The form of `adapter_name`: names that only we give."""


class LivePolicies:
    """What is live, per policy. Empty until the publisher has seen the engine (`set_base_model`).

    Full weights: the engine's base name is the policy, at the version last loaded. LoRA: each version has a
    name of its own (version 0: the base name), and an episode stays on the version that it began with while
    that is still loaded and the pin is not older than `pin_max_age_sec`.
    """

    def __init__(
        self,
        policy: str,
        aliases: Mapping[str, str],
        gate: Gate,
        *,
        agent_policies: Mapping[str, str] | None = None,
        pin_max_age_sec: float = 3600,
        hold_max_sec: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gate = gate
        self._policy = policy
        self._naming = Naming(policy, dict(aliases), dict(agent_policies or {}))
        self._declared = set(self._naming.policies)
        self._hold_max_sec = hold_max_sec
        self._base_model: str | None = None
        self._loaded: dict[str, Loaded] = {}
        self._pins = Pins(pin_max_age_sec, clock)
        self._in_flight: Counter[tuple[str, int]] = Counter()
        self._changes = 0
        self.num_doubts = 0
        """How often this proxy was out of touch while others may have changed full weights."""
        self.recall: Recall | None = None
        """Asked, where several versions are loaded, of an episode that this process does not know."""

    # --- the relay's side ---

    async def admit(
        self, requested_model: str | None, episode_id: str | None, agent: str | None = None
    ) -> Lease:
        """Wait at the gate, then fix what serves the call. Raises EngineError as `resolve` does."""
        await self._enter(requested_model, episode_id, agent)
        try:
            served = self.resolve(requested_model, episode_id, agent)
        except BaseException:
            self.gate.leave()
            raise
        if served.policy is not None and served.version is not None:
            self._in_flight[served.policy, served.version] += 1
        return Lease(self, served)

    def resolve(
        self, requested_model: str | None, episode_id: str | None, agent: str | None = None
    ) -> Served:
        """Find what serves `requested_model` now; pins the episode. No model means the default policy.

        Names that are neither ours nor aliased are left to the engine. Raises EngineError when a policy is
        asked for and the engine has not been seen (yet, or since it went away); UnservedVersionError for the
        name of a version that serves nobody: the engine may hold it, unproven or rejected.
        """
        name = self._meant(requested_model, agent)
        served = self._serve(name, episode_id) if self._is_policy(name) else self._explicit(name)
        return served.named(requested_model)

    def _meant(self, requested_model: str | None, agent: str | None) -> str:
        """A name of ours, or one that is the engine's business. Whoever names a policy gets that one; the
        default policy and the base model give way to the agent's own policy."""
        name = self._policy if requested_model is None else self._target(requested_model)
        if name not in {self._policy, self._base_model}:
            return name
        if (its_own := self._naming.policy_of(agent)) is not None:
            return its_own
        # Whoever asks for the engine's base name gets the policy exactly where the policy lives there.
        own = self._loaded.get(self._policy)
        return self._policy if own is not None and own.names.get(own.version) == name else name

    async def _enter(self, requested_model: str | None, episode_id: str | None, agent: str | None) -> None:
        """Pass the gate, knowing the episode's pin; what was asked before a change is asked again."""
        asked_at = -1
        while True:
            await self._pass_gate()
            policy = None
            if self.recall is not None and episode_id is not None and asked_at != self._changes:
                policy = self._unknown_pin(self._meant(requested_model, agent), episode_id)
            if policy is None or episode_id is None or self.recall is None:
                return
            self.gate.leave()  # asking takes a while, in which the gate may close
            asked_at = self._changes
            found = await self.recall(policy, episode_id)
            if found is not None:
                self._pins.recall(policy, episode_id, *found)

    async def _pass_gate(self) -> None:
        if self.gate.is_open or math.isinf(self._hold_max_sec):
            await self.gate.enter()
            return
        try:
            async with asyncio.timeout(self._hold_max_sec):
                await self.gate.enter()
        except TimeoutError:
            raise HeldTooLongError(
                f"calls were held for {self._hold_max_sec:g} s while the engine's weights change; try again"
            ) from None

    def _unknown_pin(self, name: str, episode_id: str) -> str | None:
        """The policy whose pin another process may know; None: the pin is known, or there is no choice."""
        loaded = self._loaded.get(name)
        if loaded is None or len(loaded.names) == 1 or (name, episode_id) in self._pins:
            return None
        return name

    def version_now(self, served: Served, doubts: int | None = None) -> int | None:
        """The version that the name in `served` stands for at this moment. None: nobody here can know."""
        loaded = self._loaded.get(served.policy) if served.policy is not None else None
        if loaded is None or loaded.kind is WeightsKind.LORA or served.is_adapter:
            return served.version
        if doubts is not None and (doubts != self.num_doubts or self.gate.is_fenced):
            return None
        return loaded.version

    def end_episode(self, episode_id: str) -> None:
        """An ended episode needs no pin."""
        for policy in self._loaded:
            self._pins.forget(policy, episode_id)

    def visible_models(self) -> dict[str, str]:
        """Policy name -> engine's model name, for /v1/models."""
        return {policy: loaded.names[loaded.version] for policy, loaded in self._loaded.items()}

    # --- the publisher's side ---

    @property
    def base_model(self) -> str | None:
        """The engine's own served name of its base model; None while the engine has not been seen."""
        return self._base_model

    def set_base_model(self, name: str) -> None:
        """The engine is there and holds its base weights: version 0 of every policy that is known."""
        self._base_model = name
        self._changes += 1
        for policy in self._declared:
            kind = WeightsKind.FULL if policy == self._policy else WeightsKind.LORA
            self._loaded.setdefault(policy, Loaded(BASE_VERSION, kind, {BASE_VERSION: name}))

    def declare(self, policies: Iterable[str]) -> None:
        """They are served by the base model, as version 0, while no version of theirs is live."""
        self._declared.update(policies)

    def forget_engine(self) -> None:
        """The engine went away: what it held is gone, and calls to policies are refused until it is back."""
        self._changes += 1
        self._base_model = None
        self._loaded.clear()

    def set_live(self, policy: str, version: int, kind: WeightsKind, model: str) -> None:
        """From now on `policy` is `version`, which the engine serves as `model`.

        A LoRA version joins those already loaded; full weights replace everything that the name stood for.
        """
        held = self._loaded.get(policy)
        keep = kind is WeightsKind.LORA and held is not None
        names = dict(held.names) if keep and held is not None else {}
        names[version] = model
        self._changes += 1
        self._loaded[policy] = Loaded(version, kind, names)
        if kind is WeightsKind.FULL:
            self._base_is_theirs(policy, version)

    @property
    def policies(self) -> list[str]:
        return list(self._loaded)

    def set_canary(self, policy: str, version: int, model: str, share: float) -> None:
        """From now on that share of the episodes that begin is served by `version`, an adapter."""
        loaded = self._loaded[policy]
        loaded.names[version] = model
        loaded.canary = Canary(version, share)
        self._changes += 1

    def canary_version(self, policy: str) -> int | None:
        loaded = self._loaded.get(policy)
        return loaded.canary.version if loaded and loaded.canary else None

    def live_version(self, policy: str) -> int | None:
        loaded = self._loaded.get(policy)
        return loaded.version if loaded else None

    def loaded_versions(self, policy: str) -> dict[int, str]:
        """Version -> name in the engine, the live one included."""
        loaded = self._loaded.get(policy)
        return dict(loaded.names) if loaded else {}

    def is_answering(self, policy: str, version: int) -> bool:
        """Whether a call in flight is served by this version."""
        return self._in_flight.get((policy, version), 0) > 0

    def is_in_use(self, policy: str, version: int) -> bool:
        """Whether a call in flight or an episode's pin still needs this version."""
        self._pins.drop_old()
        if self.is_answering(policy, version):
            return True
        return any((of, pinned) == (policy, version) for of, _, pinned in self._pins)

    def drop(self, policy: str, version: int) -> None:
        """This version is about to be unloaded: nobody is sent there any more."""
        loaded = self._loaded.get(policy)
        assert loaded is None or loaded.version != version, "the live version is not dropped"
        if loaded is not None:
            loaded.names.pop(version, None)
            if loaded.canary is not None and loaded.canary.version == version:
                loaded.canary = None

    # --- the side of those who share it with other proxies ---

    def snapshot(self) -> dict[str, Any]:
        """What is live, as JSON."""
        return {
            "base_model": self._base_model,
            "policies": {policy: loaded.as_json() for policy, loaded in self._loaded.items()},
        }

    def apply(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what the publisher says is live."""
        self._changes += 1
        self._base_model = snapshot["base_model"]
        self._loaded = {policy: Loaded.of_json(doc) for policy, doc in snapshot["policies"].items()}

    def uses(self) -> dict[tuple[str, int], bool]:
        """Versions that calls in flight (True) or only pins (False) of this process need."""
        self._pins.drop_old()
        pinned = {(policy, version): False for policy, _, version in self._pins}
        return pinned | dict.fromkeys(self._in_flight, True)

    def pinned_to_older(self) -> dict[str, list[str]]:
        """Episodes by policy that are pinned to a version that is loaded, but not the live one."""
        found: dict[str, list[str]] = {}
        for policy, episode, version in self._pins:
            loaded = self._loaded.get(policy)
            if loaded is not None and version != loaded.version and version in loaded.names:
                found.setdefault(policy, []).append(episode)
        return found

    # --- inside ---

    def ended(self, served: Served) -> None:
        """A call that `admit` has let in; the lease says so, once."""
        if served.policy is not None and served.version is not None:
            key = (served.policy, served.version)
            self._in_flight[key] -= 1
            if self._in_flight[key] == 0:
                del self._in_flight[key]
        self.gate.leave()

    def _base_is_theirs(self, policy: str, version: int) -> None:
        """Full weights lie under the base name: what others had there is the base model no more."""
        for other, loaded in list(self._loaded.items()):
            if other != policy and version != BASE_VERSION:
                loaded.names.pop(BASE_VERSION, None)
                if loaded.version == BASE_VERSION:
                    del self._loaded[other]

    def _is_policy(self, name: str) -> bool:
        return name in self._declared or name in self._loaded

    def _target(self, requested: str) -> str:
        """Names of ours win over aliases."""
        if (
            requested == self._base_model
            or self._is_policy(requested)
            or self._loaded_version(requested) is not None
        ):
            return requested
        return self._naming.alias_of(requested)

    def _serve(self, policy: str, episode_id: str | None) -> Served:
        loaded = self._loaded.get(policy)
        if loaded is None:
            raise EngineError(
                f"no version of {policy!r} is live: the engine is not reachable (yet), or it is being set up"
            )
        version = loaded.version if episode_id is None else self._pinned(episode_id, policy, loaded)
        return self._served(policy, version, loaded.names[version])

    def _pinned(self, episode_id: str, policy: str, loaded: Loaded) -> int:
        self._pins.drop_old()
        pinned = self._pins.version_of(policy, episode_id)
        if pinned is not None and pinned in loaded.names:
            return pinned
        version, is_new = loaded.version, (policy, episode_id) not in self._pins
        if is_new and loaded.canary is not None and loaded.canary.takes(policy, episode_id):
            version = loaded.canary.version
        self._pins.set(policy, episode_id, version)
        return version

    def _explicit(self, name: str) -> Served:
        """`policy@N` of a loaded version, or a name that is the engine's business."""
        found = self._loaded_version(name)
        if found is not None:
            return found
        if _VERSION_NAME.fullmatch(name) and name != self._base_model:
            raise UnservedVersionError(
                f"{name!r} serves no calls: no such version is live, or kept for episodes that began on it"
            )
        return Served(None, None, name)

    def _loaded_version(self, name: str) -> Served | None:
        for policy, loaded in self._loaded.items():
            for version, model in loaded.names.items():
                own_name = model if model != self._base_model else None
                if name in (own_name, adapter_name(policy, version)):
                    return self._served(policy, version, model)
        return None

    def _served(self, policy: str, version: int, model: str) -> Served:
        return Served(policy, version, model, is_adapter=model != self._base_model)
