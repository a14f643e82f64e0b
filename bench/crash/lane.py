"""One log after the other: load on it, kills at random instants, a check after each.

While a proxy serves, the next one is started already, on the same log: a kill costs no waiting, and a proxy
that starts beside a dying one is what a supervisor makes, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from check import Checked, check
from clients import Seen, Target, agent
from processes import Proxy

NUM_AGENTS = 12
KILLS_PER_LOG = 15
MIN_ALIVE_SEC, MAX_ALIVE_SEC = 0.1, 1.4
RECOVERY_TIMEOUT_SEC = 120.0


@dataclass(slots=True)
class Tally:
    """What a lane has done and found."""

    kills: int = 0
    server_crashes: int = 0
    sent: int = 0
    delivered: int = 0
    cut: int = 0
    missing: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    intents_missing: list[str] = field(default_factory=list)
    verify_failures: int = 0
    faults: list[str] = field(default_factory=list)
    rows: int = 0
    open_rows: int = 0


@dataclass(slots=True)
class Lane:
    """`crash_every`: with which kill (each n-th) the database's server is crashed as well; 0: never."""

    name: str
    folder: Path
    engine_url: str
    record: Path
    durability: str
    new_log: Callable[[], str]
    pool: ProcessPoolExecutor
    on_kill: Callable[[], None]
    server: Any = None
    crash_every: int = 0
    tally: Tally = field(default_factory=Tally)

    async def run(self, kills: int) -> None:
        rng = random.Random()
        while self.tally.kills < kills:
            await self._one_log(min(KILLS_PER_LOG, kills - self.tally.kills), rng)

    async def _one_log(self, kills: int, rng: random.Random) -> None:
        db = await asyncio.to_thread(self.new_log)
        seen, target = Seen(), Target()
        proxy = await self._start(db)
        checked: Checked | None = None
        async with self._agents(target, seen):
            for number in range(kills):
                standby = asyncio.create_task(self._start(db))
                target.url = proxy.url
                await asyncio.sleep(rng.uniform(MIN_ALIVE_SEC, MAX_ALIVE_SEC))
                nth = self.tally.kills + 1
                crashes_server = self.crash_every > 0 and nth % self.crash_every == 0
                if crashes_server:
                    await self._crash_server(rng, seen, proxy)
                assert not proxy.has_ended, f"{self.name}: a proxy ended by itself"
                target.url = None
                proxy.kill()
                seen.killed(could_write=not crashes_server)
                await proxy.gone()
                self.tally.kills += 1
                self.on_kill()
                checked = await self._check(db, seen)
                proxy = await standby
                if number == kills - 1:
                    proxy.kill()
                    await proxy.gone()
        assert checked is not None
        self.tally.sent += len(seen.sent)
        self.tally.delivered += len(seen.delivered)
        self.tally.cut += len(seen.cut)
        self.tally.rows += checked.num_rows
        self.tally.open_rows += checked.open_rows
        self.tally.missing += checked.missing
        self.tally.inexact += checked.inexact
        self.tally.unexplained += checked.unexplained
        self.tally.intents_missing += checked.intents_missing

    async def _check(self, db: str, seen: Seen) -> Checked:
        """What is missing is added up at the log's end, when all its kills are behind it."""
        loop = asyncio.get_running_loop()
        arguments = (db, str(self.record), set(seen.sent), set(seen.delivered), dict(seen.cut))
        checked = await loop.run_in_executor(self.pool, check, *arguments)
        self.tally.verify_failures += bool(checked.faults)
        self.tally.faults += checked.faults
        return checked

    async def _start(self, db: str) -> Proxy:
        """Once more, as a supervisor would, where the server happens to be down."""
        deadline = time.monotonic() + (RECOVERY_TIMEOUT_SEC if self.server is not None else 0)
        while True:
            try:
                return await Proxy.start(self.folder, db, self.engine_url, self.durability)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise

    async def _crash_server(self, rng: random.Random, seen: Seen, proxy: Proxy) -> None:
        """Postgres goes down under load, comes back, and the proxy goes on by itself; or dies in between."""
        sign = rng.choice((signal.SIGQUIT, signal.SIGKILL))
        await asyncio.to_thread(self.server.stop, sign)
        self.tally.server_crashes += 1
        await asyncio.sleep(rng.uniform(0, 0.5))
        await asyncio.to_thread(_restart, self.server)
        if rng.random() < 0.5:
            return  # the proxy is killed while it still holds what it could not write
        before = len(seen.delivered)
        deadline = time.monotonic() + RECOVERY_TIMEOUT_SEC
        while len(seen.delivered) < before + NUM_AGENTS:
            assert time.monotonic() < deadline, f"{proxy.url} does not serve again though Postgres is back"
            await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def _agents(self, target: Target, seen: Seen) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks = [
                asyncio.create_task(agent(session, target, seen, f"{self.name}-{number}"))
                for number in range(NUM_AGENTS)
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
        faults = [e for e in ended if isinstance(e, Exception) and not isinstance(e, asyncio.CancelledError)]
        if faults:
            raise faults[0]


def _restart(server: Any) -> None:
    """After kill -9 its children live on for a moment, and the port and the memory with them."""
    for attempt in range(100):
        try:
            server.start()
        except AssertionError:
            if attempt == 99:
                raise
            time.sleep(0.2)
        else:
            return
