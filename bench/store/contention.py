"""One log under everything at once: four proxies with 64 agents, eight reward writers, a trainer that reads.

Nothing may be lost: every answer whose end an agent saw, and every reward that was acknowledged, is in the
log. Nobody may hear that the database is locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import sqlalchemy as sa
from clients import Seen, Target, agent
from processes import Proxy, running_engine

from lightning_rl.store.database import Database
from lightning_rl.store.schema import calls, rewards
from lightning_rl.store.statements import existing

PROXIES, AGENTS, REWARD_WRITERS = 4, 64, 8
STOP_TIMEOUT_SEC = 60.0


@dataclass(slots=True)
class Contended:
    """What came of it on one database."""

    database: str
    seconds: float
    sent: int = 0
    delivered: int = 0
    rewards: int = 0
    steps_read: int = 0
    locked_errors: int = 0
    lost_rows: int = 0
    failures: list[str] = field(default_factory=list)  # of any other kind


async def contend(name: str, url: str, folder: Path, seconds: float) -> Contended:
    found = Contended(name, seconds)
    Database.open(url).close()  # the schema, once
    _made(folder)
    seen = Seen()
    with running_engine(folder) as (engine_url, _):
        proxies = [
            await Proxy.start(_made(folder / f"proxy-{number}"), url, engine_url, "commit")
            for number in range(PROXIES)
        ]
        try:
            beside = _start_beside(url, folder, seconds)
            await _talk(proxies, seen, seconds)
            outcomes = [_outcome(process, file) for process, file in beside]
        finally:
            for proxy in proxies:
                proxy.stop()
            await asyncio.gather(*(proxy.gone() for proxy in proxies))
    _judge(url, seen, outcomes, folder, found)
    return found


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _start_beside(url: str, folder: Path, seconds: float) -> list[tuple[subprocess.Popen[bytes], Path]]:
    script = str(Path(__file__).parent / "beside.py")
    started = []
    for number, role in enumerate(["trainer", *["rewards"] * REWARD_WRITERS]):
        file = folder / f"beside-{number}.json"
        process = subprocess.Popen([sys.executable, script, role, url, str(seconds), str(file)])
        started.append((process, file))
    return started


async def _talk(proxies: list[Proxy], seen: Seen, seconds: float) -> None:
    connector = aiohttp.TCPConnector(limit=AGENTS)
    async with aiohttp.ClientSession(connector=connector) as session:
        tasks = [
            asyncio.create_task(agent(session, Target(proxies[number % PROXIES].url), seen, f"agent{number}"))
            for number in range(AGENTS)
        ]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _outcome(process: subprocess.Popen[bytes], file: Path) -> dict[str, Any]:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_SEC)
    if process.poll() is None:
        process.kill()
    if not file.exists():
        return {"role": "?", "turns": 0, "rewards": [], "failures": ["a program beside the proxies died"]}
    outcome: dict[str, Any] = json.loads(file.read_text())
    return outcome


def _judge(url: str, seen: Seen, outcomes: list[dict[str, Any]], folder: Path, found: Contended) -> None:
    given = [reward for outcome in outcomes for reward in outcome["rewards"]]
    said = [failure for outcome in outcomes for failure in outcome["failures"]]
    for file in folder.glob("proxy-*/proxy.err"):
        said += [line for line in file.read_text().splitlines() if " ERROR " in line or " WARNING " in line]
    database = Database.open(url)
    try:
        with database.read() as conn:
            query = sa.select(calls.c.upstream_id).where(calls.c.status == "complete")
            recorded = set(conn.execute(query).scalars())
            kept = existing(conn, rewards.c.id, given)
    finally:
        database.close()
    found.sent, found.delivered, found.rewards = len(seen.sent), len(seen.delivered), len(given)
    found.steps_read = sum(outcome["turns"] for outcome in outcomes if outcome["role"] == "trainer")
    found.locked_errors = sum("locked" in line for line in said)
    found.failures = [line for line in said if "locked" not in line]
    lost_calls = {f"chatcmpl-{call}" for call in seen.delivered} - recorded
    found.lost_rows = len(lost_calls) + len(set(given) - kept)
