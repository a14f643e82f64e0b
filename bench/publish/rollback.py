"""Part rollback: back to the version before under load, by the command that a person would type."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rescoring import Rescored
from .stage import POLICY, Stage, stage
from .weights import BASE, Trainer

NUM_STREAMS = 16
TIMEOUT_SEC = 120.0


@dataclass(frozen=True, slots=True)
class RolledBack:
    said: str
    version: int | None
    """That serves after it, by the log's own rows of new calls."""
    wanted: int
    verdict: dict[str, Any]
    took_sec: float
    failed: list[str]
    rescored: Rescored

    @property
    def is_met(self) -> bool:
        is_proven = self.verdict.get("result") in ("follows", "indistinguishable")
        return self.version == self.wanted and is_proven and not self.failed and not self.rescored.mismatches


async def play(folder: Path, trainer: Trainer, engine_url: str) -> RolledBack:
    async with stage(folder, trainer, [engine_url]) as scene:
        clients = scene.clients(num_streams=NUM_STREAMS)
        made = [await asyncio.to_thread(trainer.adapter, f"back-{number}") for number in (1, 2)]
        async with clients.calling():
            await clients.more(NUM_STREAMS)
            first = await scene.go_live(made[0], before=BASE)
            await scene.go_live(made[1], before=made[0].name)
            await clients.more(NUM_STREAMS)
            began = asyncio.get_running_loop().time()
            said = await _command(scene)
            version = await _served(scene, first, clients)
            took = asyncio.get_running_loop().time() - began
            await clients.more(NUM_STREAMS)
        ids = await clients.ask_some(8)
        served = {call.policy_version for call in scene.calls(ids).values()}
        found = await scene.rescored(clients.call_ids)
        return RolledBack(
            said=said,
            version=served.pop() if len(served) == 1 else version,
            wanted=first,
            verdict=dict(scene.row(first).verdict or {}),
            took_sec=took,
            failed=[f"{one.episode}: {one.error}" for one in clients.failed],
            rescored=found,
        )


async def _command(scene: Stage) -> str:
    arguments = ["policy", "rollback", POLICY, "--db", scene.db]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "lightning_rl.cli",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"lightning {' '.join(arguments)}: {out.decode()}")
    return out.decode().strip()


async def _served(scene: Stage, wanted: int, clients: Any) -> int | None:
    """Ask until new calls are the wanted version's."""
    version: int | None = None
    deadline = asyncio.get_running_loop().time() + TIMEOUT_SEC
    while version != wanted and asyncio.get_running_loop().time() < deadline:
        ids = await clients.ask_some(1)
        version = next((call.policy_version for call in scene.calls(ids).values()), None)
    return version
