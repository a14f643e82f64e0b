"""What the engines hold of one policy: the live version, older ones, and one on trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Self

from ...records import WeightsKind


@dataclass(frozen=True, slots=True)
class Canary:
    """A version on trial: `share` of the episodes that begin are its."""

    version: int
    share: float

    def takes(self, policy: str, episode_id: str) -> bool:
        """The same in every process, and drawn anew for each version."""
        drawn = blake2b(f"{policy}\x00{self.version}\x00{episode_id}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn) < self.share * 2**64


@dataclass(slots=True)
class Loaded:
    """What the engine holds of one policy. `names` has every version that can be asked for by name."""

    version: int
    kind: WeightsKind
    names: dict[int, str]
    canary: Canary | None = None

    def as_json(self) -> dict[str, Any]:
        names = {str(version): name for version, name in self.names.items()}
        document: dict[str, Any] = {"version": self.version, "kind": self.kind.value, "names": names}
        return document if self.canary is None else document | {"canary": asdict(self.canary)}

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> Self:
        return cls(
            document["version"],
            WeightsKind(document["kind"]),
            {int(version): name for version, name in document["names"].items()},
            Canary(**document["canary"]) if "canary" in document else None,
        )
