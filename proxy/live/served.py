"""What one call is served by, and the lease that it holds until its answer has ended.

Names and nothing else: which version is live is policies.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from ...errors import EngineError
from .engines import EngineState

BASE_VERSION = 0


class HeldTooLongError(EngineError):
    """A call has waited at the closed gate for as long as it may."""


class UnservedVersionError(EngineError):
    """A version is asked for by its name that serves no call (yet, any more, or ever)."""


def adapter_name(policy: str, version: int) -> str:
    """The name under which the engine knows one LoRA version; a new one per version, never used again."""
    return f"{policy}@{version}"


@dataclass(frozen=True, slots=True)
class Served:
    """What a call is served by. `policy` and `version` None: no policy of ours.

    `model` is the name to ask the engine for; None: what the agent wrote (or left out) is right already.
    """

    policy: str | None
    version: int | None
    model: str | None
    is_adapter: bool = field(default=False, compare=False)
    """Whether its name in the engine stands for this version alone."""

    def named(self, requested: str | None) -> Served:
        """As an answer to who has asked for that name."""
        return replace(self, model=None) if self.model == requested else self


class Admits(Protocol):
    """Who has admitted a call, and is told of its end."""

    num_doubts: int

    def version_now(self, served: Served, doubts: int | None = None) -> int | None: ...

    def ended(self, served: Served) -> None: ...


class Lease:
    """One admitted call: what serves it, and which engine, until the engine's answer has ended."""

    __slots__ = ("_doubts", "_live", "_released", "engine", "served")

    def __init__(self, live: Admits, served: Served) -> None:
        self._live = live
        self._released = False
        self._doubts = live.num_doubts
        self.served = served
        self.engine: EngineState | None = None

    def use(self, engine: EngineState) -> None:
        """The call is that engine's; it counts there until released, or until it moves to another."""
        if self.engine is not None:
            self.engine.in_flight -= 1
        self.engine = engine
        engine.in_flight += 1

    def version_now(self) -> int | None:
        """The version that its name stands for now: `policy_version_end` of a call. None: not known."""
        return self._live.version_now(self.served, self._doubts)

    def release(self) -> None:
        """The engine's answer has ended. May be called twice; the second does nothing."""
        if not self._released:
            self._released = True
            if self.engine is not None:
                self.engine.in_flight -= 1
            self._live.ended(self.served)
