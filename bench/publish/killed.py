"""Part killed: the proxy dies in the middle of a swap. Another one starts, serves what the log says, goes on.

Killed at random points of updates, adapters and full weights in turn. Calls that were on the way break off;
every call that the next proxy answers fits what its row claims, and the version ends up live.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from lightning_rl.records import VersionStatus, WeightsKind

from .clients import Clients
from .rescoring import Rescored
from .stage import Stage, stage
from .weights import Trainer

NUM_STREAMS = 8
LONGEST_UPDATE_SEC = 1.5


@dataclass
class Killed:
    kills: int = 0
    killed_at: Counter[str] = field(default_factory=Counter)
    not_live: list[str] = field(default_factory=list)
    cut: int = 0  # calls that were on the way
    rescored: list[Rescored] = field(default_factory=list)  # adapters, full weights
    back_sec: list[float] = field(default_factory=list)  # from the kill to the version being live

    @property
    def is_met(self) -> bool:
        return not self.not_live and not self.mislabelled

    @property
    def mislabelled(self) -> list[str]:
        return [call for rescored in self.rescored for call in rescored.mismatches]


async def play(
    folder: Path,
    trainer: Trainer,
    engine_url: str,
    *,
    kills: int,
    on_each: Callable[[str], None],
    seed: int = 0,
    num_streams: int = NUM_STREAMS,
) -> Killed:
    found = Killed()
    chance = Random(seed)
    for kind, number in ((WeightsKind.LORA, kills // 2), (WeightsKind.FULL, kills - kills // 2)):
        async with stage(folder, trainer, [engine_url]) as scene:
            clients = scene.clients(num_streams=num_streams, max_tokens=16)
            async with clients.calling():
                for _ in range(number):
                    await clients.more(num_streams)
                    await _one_kill(scene, clients, kind, chance, found)
                    on_each(f"proxy killed {found.kills} of {kills} times")
                await clients.more(num_streams)
            found.cut += len(clients.failed)
            found.rescored.append(await scene.rescored(clients.call_ids))
    return found


async def _one_kill(scene: Stage, clients: Clients, kind: WeightsKind, chance: Random, found: Killed) -> None:
    make = scene.trainer.adapter if kind is WeightsKind.LORA else scene.trainer.full
    weights = await asyncio.to_thread(make, f"killed-{found.kills}")
    version = await scene.hand_in(weights, before=scene.live_name())
    await _until_taken_up(scene, version)
    await asyncio.sleep(chance.uniform(0, LONGEST_UPDATE_SEC) * chance.random())
    found.killed_at[scene.row(version).status.value] += 1
    began = asyncio.get_running_loop().time()
    assert scene.proxy is not None
    clients.url = None
    await scene.proxy.kill()
    found.kills += 1
    clients.url = (await scene.start_proxy()).url
    row = await scene.verdict(version)
    if row.status is not VersionStatus.LIVE:
        found.not_live.append(f"version {version} is {row.status}: {row.verdict}")
    found.back_sec.append(asyncio.get_running_loop().time() - began)


async def _until_taken_up(scene: Stage, version: int) -> None:
    async with asyncio.timeout(60):
        while scene.row(version).status is VersionStatus.CANDIDATE:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.01)
