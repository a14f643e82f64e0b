"""What the rewards of one episode come to, and how: for `lightning reward show` and the API. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..records import Reward
from .rewards import EPISODE, Part, Resolution, SourceWeights, fate_of_rows, part_of, resolve, resolve_parts


@dataclass(frozen=True, slots=True)
class RewardRow:
    reward: Reward
    about: Part
    fate: str  # "counts", or why it does not


@dataclass(frozen=True, slots=True)
class RewardView:
    episode_id: str
    resolution: Resolution  # of the episode as a whole
    parts: tuple[tuple[Part, Resolution], ...]  # of all that has a row that counts; the episode first
    rows: tuple[RewardRow, ...]  # by time

    def as_json(self) -> dict[str, Any]:
        return {
            "episode": self.episode_id,
            "value": self.resolution.value,
            "path": self.resolution.path,
            "parts": [
                {"about": part.describe(), **_named(part), "value": found.value, "path": found.path}
                | {"sources": list(found.sources), "rewards": list(found.reward_ids)}
                for part, found in self.parts
            ],
            "rows": [
                {"reward": row.reward.id, "about": row.about.describe(), "fate": row.fate}
                | {key: value for key, value in asdict(row.reward).items() if key not in ("id", "episode_id")}
                for row in self.rows
            ],
        }


def view_rewards(episode_id: str, rewards: Sequence[Reward], weights: SourceWeights) -> RewardView:
    fates = fate_of_rows(rewards, weights)
    parts = resolve_parts(rewards, weights)
    ordered = sorted(parts, key=lambda part: (part != EPISODE, part))
    return RewardView(
        episode_id=episode_id,
        resolution=resolve(rewards, weights),
        parts=tuple((part, parts[part]) for part in ordered),
        rows=tuple(RewardRow(reward, part_of(reward), fates[reward.id]) for reward in rewards),
    )


def _named(part: Part) -> dict[str, Any]:
    return {
        "target": part.target.value,
        "agent": part.agent or None,
        "call": part.call_id or None,
        "choice": None if part.choice_index < 0 else part.choice_index,
        "token_start": None if part.token_start < 0 else part.token_start,
        "token_end": None if part.token_end < 0 else part.token_end,
    }
