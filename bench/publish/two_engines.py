"""Part two engines: one is killed at a random point of an update, again and again, and joins again.

Held against the log's own rows, in the order in which calls were admitted: after a call of version N + 1 no
call of N, but for episodes that began on N. A call that the dead engine was answering breaks off, and is in
the log as broken; every other call is answered.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from lightning_rl.records import VersionStatus, WeightsKind

from .clients import Clients, Heard
from .processes import Engine
from .rescoring import Rescored
from .stage import Stage, stage
from .weights import BASE, Trainer, Weights

NUM_STREAMS = 16
FIRST_UPDATE_SEC = 1.5  # how long an update may take, until one was seen


@dataclass
class TwoEngines:
    kills: int = 0
    killed_at: Counter[str] = field(default_factory=Counter)  # status of the version at that moment
    calls: int = 0
    broken: int = 0  # that the killed engine was answering
    refused: list[str] = field(default_factory=list)  # that the other engine could have answered
    lost: list[str] = field(default_factory=list)  # that the log does not hold as the client saw them
    backwards: list[str] = field(default_factory=list)  # admitted on N after another on N + 1
    not_live: list[str] = field(default_factory=list)
    rescored: list[Rescored] = field(default_factory=list)  # adapters, full weights
    start_sec: list[float] = field(default_factory=list)
    join_sec: list[float] = field(default_factory=list)
    num_harmed: int = 0
    """Of 16 calls after the same kill with the checks switched off: those that fail, or do not fit."""

    @property
    def is_met(self) -> bool:
        is_caught = not (self.refused or self.lost or self.backwards or self.not_live or self.mislabelled)
        return is_caught and self.num_harmed > 0

    @property
    def mislabelled(self) -> list[str]:
        return [call for rescored in self.rescored for call in rescored.mismatches]


async def play(
    folder: Path,
    trainer: Trainer,
    engines: Sequence[Engine],
    *,
    kills: int,
    on_each: Callable[[str], None],
    seed: int = 0,
) -> TwoEngines:
    """The first half of the updates are adapters, the rest full weights on a log of their own."""
    found = TwoEngines()
    chance = Random(seed)
    for kind, number in ((WeightsKind.LORA, kills // 2), (WeightsKind.FULL, kills - kills // 2)):
        async with stage(folder, trainer, [engine.url for engine in engines]) as scene:
            await scene.in_rotation(2)
            clients = scene.clients(num_streams=NUM_STREAMS, max_tokens=16)
            async with clients.calling():
                for _ in range(number):
                    await clients.more(NUM_STREAMS)
                    make = trainer.adapter if kind is WeightsKind.LORA else trainer.full
                    weights = await asyncio.to_thread(make, f"two-{found.kills}")
                    await _one_kill(scene, chance.choice(engines), weights, chance, found)
                    on_each(f"{found.kills} of {kills} kills")
            found.calls += len(clients.heard)
            _hold_against_log(scene, clients, found)
            found.rescored.append(await scene.rescored(clients.call_ids, 300))
    found.num_harmed = await harm_without_checks(folder, trainer, engines)
    return found


async def _one_kill(
    scene: Stage, victim: Engine, weights: Weights, chance: Random, found: TwoEngines
) -> None:
    typical = FIRST_UPDATE_SEC
    if done := [row for row in scene.claims if scene.row(row).status is not VersionStatus.REJECTED]:
        typical = max(0.3, scene.swap_ms(done[-1]) / 1000) if scene.row(done[-1]).verdict else typical
    version = await scene.hand_in(weights, before=scene.live_name())
    await asyncio.sleep(chance.uniform(0, min(typical, 3 * FIRST_UPDATE_SEC)))
    found.killed_at[scene.row(version).status.value] += 1
    victim.kill()
    found.kills += 1
    victim.end()
    victim.start()
    row = await scene.verdict(version)
    if row.status not in (VersionStatus.LIVE, VersionStatus.DRAINING):
        found.not_live.append(f"version {version}: {(row.verdict or {}).get('reason')}")
    found.start_sec.append(await victim.ready())
    found.join_sec.append(await scene.in_rotation(2))


async def harm_without_checks(folder: Path, trainer: Trainer, engines: Sequence[Engine]) -> int:
    """The same once more behind a proxy that sets no engine up again: calls that fail, or do not fit."""
    urls = [engine.url for engine in engines]
    async with stage(folder, trainer, urls, "judging,bringing") as scene:
        await scene.in_rotation(2)
        clients = scene.clients(num_streams=4, max_tokens=16)
        first, second = [await asyncio.to_thread(trainer.adapter, f"off-{number}") for number in (1, 2)]
        await scene.go_live(first, before=BASE)
        async with clients.calling():
            await clients.more(8)
            version = await scene.hand_in(second, before=first.name)
            engines[1].kill()
            engines[1].end()
            engines[1].start()
            await scene.verdict(version)
            await engines[1].ready()
            await scene.in_rotation(2)
        before = len(clients.failed)
        ids = await clients.ask_some(16)
        found = await scene.rescored(ids)
        return len(clients.failed) - before + len(found.mismatches)


def _hold_against_log(scene: Stage, clients: Clients, found: TwoEngines) -> None:
    with scene.database.read() as conn:
        rows = conn.exec_driver_sql(
            "SELECT id, episode_id, policy_version, status, upstream_id, error FROM calls ORDER BY id"
        ).all()
    first: dict[str, int] = {}  # episode -> the version that it began with
    newest = 0
    for row in rows:  # a call's id counts up at its admission
        if row.policy_version is None:
            continue
        pinned = first.setdefault(row.episode_id, row.policy_version)
        if row.policy_version < newest and pinned != row.policy_version:
            found.backwards.append(f"{row.id}: version {row.policy_version} after {newest}")
        elif row.policy_version < newest and row.id == _first_of(rows, row.episode_id):
            found.backwards.append(f"{row.id}: an episode began on {row.policy_version} after {newest}")
        newest = max(newest, row.policy_version)
    answered = {row.upstream_id for row in rows if row.status == "complete"}
    by_episode: dict[str, list[str]] = {}
    for row in rows:
        by_episode.setdefault(row.episode_id, []).append(row.status)
    for one in clients.heard:
        _account(one, answered, by_episode, found)


def _first_of(rows: Sequence[object], episode: str) -> str:
    return next(row.id for row in rows if row.episode_id == episode)  # type: ignore[attr-defined]


def _account(one: Heard, answered: set[str], by_episode: dict[str, list[str]], found: TwoEngines) -> None:
    if one.error is None:
        if one.call_id not in answered:
            found.lost.append(f"{one.call_id} was answered and is not in the log")
        return
    if one.error.startswith("503"):
        found.refused.append(f"{one.episode}: {one.error}")
        return
    found.broken += 1
    if "error" not in by_episode.get(one.episode, []):
        found.lost.append(f"{one.episode}: {one.error}; the log has {by_episode.get(one.episode)}")
