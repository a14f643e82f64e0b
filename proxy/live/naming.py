"""What a request's model name means: names that agents have hard-coded, and policies by agent.

Pure, and fixed by the settings. Which names are ours at the moment is policies.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Naming:
    """`aliases`: model name (a shell pattern) -> what serves it. `by_agent`: agent (likewise) -> policy."""

    policy: str  # the default
    aliases: Mapping[str, str] = field(default_factory=dict)
    by_agent: Mapping[str, str] = field(default_factory=dict)

    @property
    def policies(self) -> frozenset[str]:
        """Those that the settings name."""
        return frozenset({self.policy, *self.by_agent.values()})

    def alias_of(self, requested: str) -> str:
        """An exact alias wins over a pattern, the earlier of two patterns over the later; else itself."""
        return self.aliases.get(requested) or _first(self.aliases, requested) or requested

    def policy_of(self, agent: str | None) -> str | None:
        """The policy that serves this agent, where it asks for the default one."""
        return None if agent is None else _first(self.by_agent, agent)


def _first(patterns: Mapping[str, str], name: str) -> str | None:
    return next((target for pattern, target in patterns.items() if fnmatchcase(name, pattern)), None)
