"""Which version each episode of a policy began with: it stays there, until the pin is too old.

In this process alone; what other processes have pinned is in the log (`policies.Recall`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Pin:
    version: int
    at_sec: float  # by the clock


class Pins:
    def __init__(self, max_age_sec: float, clock: Callable[[], float]) -> None:
        self._max_age_sec, self._clock = max_age_sec, clock
        self._pins: dict[tuple[str, str], _Pin] = {}  # by (policy, episode), oldest first

    def __contains__(self, key: tuple[str, str]) -> bool:
        """Also of one that is too old: the episode is no new one."""
        return key in self._pins

    def __iter__(self) -> Iterator[tuple[str, str, int]]:
        """(policy, episode, version)"""
        return ((policy, episode, pin.version) for (policy, episode), pin in self._pins.items())

    def version_of(self, policy: str, episode_id: str) -> int | None:
        pin = self._pins.get((policy, episode_id))
        return pin.version if pin is not None and pin.at_sec > self._horizon() else None

    def set(self, policy: str, episode_id: str, version: int) -> None:
        self._pins.pop((policy, episode_id), None)  # so that the order stays oldest first
        self._pins[policy, episode_id] = _Pin(version, self._clock())

    def recall(self, policy: str, episode_id: str, version: int, age_sec: float) -> None:
        """One that another process has set, so long ago."""
        self._pins.setdefault((policy, episode_id), _Pin(version, self._clock() - age_sec))

    def forget(self, policy: str, episode_id: str) -> None:
        self._pins.pop((policy, episode_id), None)

    def drop_old(self) -> None:
        horizon = self._horizon()
        while self._pins:
            oldest = next(iter(self._pins))
            if self._pins[oldest].at_sec > horizon:
                break
            del self._pins[oldest]

    def _horizon(self) -> float:
        return self._clock() - self._max_age_sec
