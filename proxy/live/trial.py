"""What an evaluation's calls see: the candidate where everybody else sees the policy that is live.

Owns which name leads to the candidate. No gate: while new weights are proven, an evaluation's calls are the
only ones that pass. Knows nothing of who evaluates, or whose calls may come in here (evaluation_door.py).
"""

from __future__ import annotations

from .policies import LivePolicies
from .served import Lease, Served, UnservedVersionError, adapter_name


class TrialPolicies:
    """Follows `incoming.CallPolicies`. `model`: the engine's name of the candidate."""

    num_doubts = 0

    def __init__(self, live: LivePolicies, policy: str, version: int, model: str) -> None:
        self._live = live
        self._policy, self._model = policy, model
        self._candidate = Served(policy, version, model)
        unserved = (policy,) if live.live_version(policy) is None else ()
        self._names = (adapter_name(policy, version), *unserved)

    @property
    def base_model(self) -> str | None:
        return self._live.base_model

    def visible_models(self) -> dict[str, str]:
        return {**self._live.visible_models(), self._policy: self._model}

    async def admit(
        self, requested_model: str | None, episode_id: str | None, agent: str | None = None
    ) -> Lease:
        return Lease(self, self.resolve(requested_model, episode_id, agent))

    def resolve(
        self, requested_model: str | None, episode_id: str | None, agent: str | None = None
    ) -> Served:
        """Whatever leads to the policy leads to the candidate; `policy@N` of a version
        that is loaded is that version, so that the two can be compared; other policies are what they are.
        A candidate of full weights lies where all others lay: they are not there to be asked."""
        found = self._candidate
        if requested_model not in self._names:
            other = self._live.resolve(requested_model, None, agent)
            if other.policy != self._candidate.policy or self._names_version(requested_model, other):
                self._require_still_there(other)
                return other
        model = None if found.model == requested_model else found.model
        return Served(found.policy, found.version, model)

    def version_now(self, served: Served, doubts: int | None = None) -> int | None:
        return served.version  # nothing is flipped while it is evaluated

    def ended(self, served: Served) -> None:
        """Nobody waits for it: the door cancels what is left when it closes."""

    def _require_still_there(self, other: Served) -> None:
        if other.version is not None and self._model == self._live.base_model:
            raise UnservedVersionError(
                f"{adapter_name(str(other.policy), other.version)!r} serves no calls while full weights of "
                f"{adapter_name(str(self._candidate.policy), self._candidate.version or 0)!r} are evaluated: "
                "they lie in its place"
            )

    @staticmethod
    def _names_version(requested: str | None, served: Served) -> bool:
        return served.version is not None and requested == adapter_name(str(served.policy), served.version)
