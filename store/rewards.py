"""From the reward rows of an episode to the one number that credit starts from. Pure: no SQL, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..records import Reward, RewardTarget


@dataclass(frozen=True, slots=True)
class Resolution:
    """`value` None: nobody has said anything that stands, which is not zero.

    `reward_ids`: the rows that the value came from. `path`: how it came about, in words.
    """

    value: float | None
    reward_ids: tuple[str, ...]
    sources: tuple[str, ...]
    path: str


def resolve(rewards: Sequence[Reward]) -> Resolution:
    """Rows about the whole episode that no other row supersedes; the newest of each source; their mean."""
    superseded = {reward.supersedes for reward in rewards if reward.supersedes is not None}
    about = [reward for reward in rewards if reward.target is RewardTarget.EPISODE]
    newest: dict[str, Reward] = {}
    for reward in sorted(about, key=lambda reward: (reward.created_at_ms, reward.id)):
        if reward.id not in superseded:
            newest[reward.source] = reward
    if not newest:
        return Resolution(None, (), (), _why_none(rewards, about))
    used = [newest[source] for source in sorted(newest)]
    value = fmean(reward.value for reward in used)
    said = ", ".join(f"{reward.source}={reward.value:g}" for reward in used)
    older = len(about) - len(used)
    path = said if len(used) == 1 else f"mean of {said} = {value:g}"
    path += f" ({older} older or superseded)" if older else ""
    return Resolution(value, tuple(reward.id for reward in used), tuple(sorted(newest)), path)


def _why_none(rewards: Sequence[Reward], about: Sequence[Reward]) -> str:
    if about:
        return f"no reward: all {len(about)} rows about the episode are superseded"
    if rewards:
        return f"no reward about the episode ({len(rewards)} about parts of it)"
    return "no reward"
