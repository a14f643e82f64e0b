"""Part swaps: LoRA versions go live one after the other under 32 streams: none fails, none is mislabelled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .rescoring import Rescored
from .stage import stage
from .weights import BASE, Trainer

NUM_STREAMS = 32
MIN_RESCORED = 200
CALLS_PER_VERSION = 12  # answered before the next one comes


@dataclass(frozen=True, slots=True)
class Swaps:
    versions: int
    calls: int
    failed: list[str]
    swap_ms: list[int]
    rescored: Rescored
    num_moved_episodes: int
    """Episodes whose calls were served by different versions though the first one's was still loaded."""

    @property
    def p50_ms(self) -> float:
        return median(self.swap_ms)

    @property
    def is_met(self) -> bool:
        enough = self.rescored.num_calls >= min(MIN_RESCORED, self.calls)
        is_told_apart = self.rescored.nearest_other > 2 * self.rescored.worst_gap
        return not self.failed and not self.rescored.mismatches and enough and is_told_apart


async def play(
    folder: Path, trainer: Trainer, engine_url: str, num_versions: int, num_streams: int = NUM_STREAMS
) -> Swaps:
    async with stage(folder, trainer, [engine_url]) as scene:
        clients = scene.clients(num_streams=num_streams)
        times: list[int] = []
        before = BASE
        made = [await asyncio.to_thread(trainer.adapter, f"swap-{i + 1}") for i in range(num_versions)]
        async with clients.calling():
            await clients.more(num_streams)
            for weights in made:
                version = await scene.go_live(weights, before=before)
                times.append(scene.swap_ms(version))
                before = weights.name
                await clients.more(CALLS_PER_VERSION)
        found = await scene.rescored(clients.call_ids, max(MIN_RESCORED, 20 * num_versions))
        calls = scene.calls(clients.call_ids)
        moved = 0
        for ids in clients.by_episode().values():
            served = [calls[one].policy_version for one in ids if one in calls]
            moved += len(set(served)) > 1
        failed = [f"{one.episode}: {one.error}" for one in clients.failed]
        return Swaps(num_versions, len(clients.heard), failed, times, found, moved)
