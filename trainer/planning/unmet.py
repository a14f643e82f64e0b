"""Names in the settings that nothing which was planned bears: misspelt, mostly, and then without effect.

Pure; who is told, and how often, is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...records import Group
from .plan import PlanSettings


@dataclass(slots=True)
class Met:
    """The agents that made a call and the sources that gave a reward, of the groups seen so far."""

    agents: set[str] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)

    def add(self, groups: Iterable[Group]) -> None:
        for group in groups:
            for episode in group.episodes:
                self.agents.update(call.agent for call in episode.calls if call.agent is not None)
                self.sources.update(reward.source for reward in episode.rewards)

    def notices(self, settings: PlanSettings, where: str) -> Iterator[str]:
        """One line for each setting with such names. `where`: what was planned."""
        selection = settings.selection
        for setting, what, named, met in (
            ("credit.agents", "call is of agent", settings.credit.agents, self.agents),
            ("train_agents", "call is of agent", selection.train_agents, self.agents),
            ("sources", "reward is of source", selection.source_weights, self.sources),
        ):
            unmet = sorted(set(named) - met)
            if unmet:
                names = " or ".join(map(repr, unmet))
                there = ", ".join(sorted(met)) or "none"
                yield f"no {what} {names} ({setting}) in {where}; there is: {there}"
