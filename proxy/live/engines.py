"""The engines behind the proxy: which are in rotation, and which one takes a call.

Owns health as this process sees it, the count of calls at each engine, and episodes' engines. What an
engine holds is found out by others (publisher.py, engine_watch.py), who say so with `admit_engine`. No I/O;
one event loop, no locks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from ...errors import EngineError

MAX_EPISODES = 65_536
SHARED_SLACK = 4
"""Where several proxies share the engines, none sees all calls: a difference of so few calls is none, and the
episode's name decides, so that every proxy sends an episode to the same engine's prefix cache."""


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine, as this proxy sees it."""

    url: str
    is_up: bool = True  # the last connect succeeded, as far as is known
    in_rotation: bool = True  # it was seen, and holds what is live
    is_suspect: bool = False  # an answer of it broke off: look at once
    in_flight: int = 0
    fingerprint_id: str | None = None
    lacks: frozenset[str] = frozenset()  # older adapters that are loaded elsewhere, but not here


@dataclass(frozen=True, slots=True)
class Holding:
    """What an engine must hold to be in rotation: the label of its weights, and adapters by name."""

    label: str = "default"
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> folder

    def with_label(self, label: str) -> Holding:
        return Holding(label, self.adapters)

    def with_adapter(self, name: str, path: str) -> Holding:
        return Holding(self.label, {**self.adapters, name: path})

    def without_adapter(self, name: str) -> Holding:
        return Holding(self.label, {key: path for key, path in self.adapters.items() if key != name})


class Engines:
    """In the order of the settings. All count as up and in rotation until somebody has looked."""

    def __init__(self, urls: Sequence[str]) -> None:
        assert urls, "a proxy has at least one engine"
        self.all = [EngineState(url) for url in urls]
        self.holding = Holding()
        self.is_shared = False
        """Whether other proxies send calls to the same engines."""
        self._of_episode: OrderedDict[str, EngineState] = OrderedDict()
        self._turn = 0

    # --- a call's side ---

    def choose(
        self,
        episode_id: str | None,
        model: str | None,
        *,
        any_engine: bool = False,
        tried: Collection[EngineState] = (),
    ) -> EngineState:
        """Who takes a call: its episode's engine while that is in rotation, else the one with least to do.

        `model`: the engine's name of what is asked for. `any_engine`: nothing of ours is asked for, so that
        an engine out of rotation will do where no other is left. Raises EngineError where none is left.
        """
        if len(self.all) == 1:
            (only,) = self.all
            if not tried and (any_engine or (only.is_up and only.in_rotation and model not in only.lacks)):
                return only
            raise EngineError(self._none_left(tried))
        ready = [
            engine
            for engine in self.all
            if engine.is_up and engine.in_rotation and engine not in tried and model not in engine.lacks
        ]
        if not ready and any_engine:
            left = [engine for engine in self.all if engine not in tried]
            ready = [engine for engine in left if engine.is_up] or left
        if not ready:
            raise EngineError(self._none_left(tried))
        if episode_id is None:
            return self._least_loaded(ready)
        chosen = self._of_episode.get(episode_id)
        if chosen is None or chosen not in ready:
            chosen = self._for_episode(episode_id, ready)
            self._of_episode[episode_id] = chosen
            if len(self._of_episode) > MAX_EPISODES:
                self._of_episode.popitem(last=False)
        self._of_episode.move_to_end(episode_id)
        return chosen

    def _none_left(self, tried: Collection[EngineState]) -> str:
        if len(self.all) == 1:
            return f"the engine at {self.all[0].url} is not reachable, or it is being set up"
        what = "no other engine" if tried else "no engine"
        return f"{what} of {len(self.all)} is reachable and holds what is live"

    def _least_loaded(self, ready: Sequence[EngineState]) -> EngineState:
        self._turn += 1  # equals take turns
        shift = self._turn % len(ready)
        return min([*ready[shift:], *ready[:shift]], key=lambda engine: engine.in_flight)

    def _for_episode(self, episode_id: str, ready: Sequence[EngineState]) -> EngineState:
        least = min(engine.in_flight for engine in ready)
        limit = least + (SHARED_SLACK if self.is_shared else 0)
        free = [engine for engine in ready if engine.in_flight <= limit]
        if not self.is_shared:
            return self._least_loaded(free)
        return max(free, key=lambda engine: blake2b(f"{episode_id}\x00{engine.url}".encode()).digest())

    def end_episode(self, episode_id: str) -> None:
        self._of_episode.pop(episode_id, None)

    def refused(self, engine: EngineState) -> None:
        """Nobody listens there: it is out until it was seen again and holds what is live."""
        engine.is_up = False
        engine.in_rotation = False

    # --- the side of those who look ---

    @property
    def in_rotation(self) -> list[EngineState]:
        return [engine for engine in self.all if engine.is_up and engine.in_rotation]

    def admit_engine(
        self, engine: EngineState, *, fingerprint_id: str | None, lacks: Collection[str] = ()
    ) -> None:
        """It was seen, and holds what is live (older versions in `lacks` excepted)."""
        engine.is_up = engine.in_rotation = True
        engine.is_suspect = False
        engine.fingerprint_id = fingerprint_id
        engine.lacks = frozenset(lacks)

    def withdraw(self, engine: EngineState, *, is_up: bool) -> None:
        engine.is_up = is_up
        engine.in_rotation = False
        engine.is_suspect = False
