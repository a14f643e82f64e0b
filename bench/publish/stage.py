"""What every part plays on: a log, a proxy in front of engines, versions that are handed in like a trainer's.

Owns one log and one proxy process at a time. Which weights, and what is done to them, is the parts' matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.engine.client import EngineClient
from lightning_rl.records import Call, PolicyVersion, ProbeSequence, VersionStatus, logprobs, now_ms
from lightning_rl.store.database import Database
from lightning_rl.store.policies import add_candidate, load_version, next_version
from lightning_rl.store.read import calls_by_upstream_ids

from .clients import Clients
from .processes import Proxy
from .rescoring import Rescored, rescore, sample
from .weights import BASE, Trainer, Weights

POLICY = "policy"
VERDICT_TIMEOUT_SEC = 240.0
_WAITING = (VersionStatus.CANDIDATE, VersionStatus.LOADING, VersionStatus.PROBING)
_numbers = itertools.count()


class Stage:
    """`claims`: version -> what its candidate row promised, by the trainer's name."""

    def __init__(self, folder: Path, trainer: Trainer, engine_urls: Sequence[str], switched_off: str) -> None:
        self.folder = folder
        self.trainer = trainer
        self.engine_urls = list(engine_urls)
        self.switched_off = switched_off
        self.db = f"sqlite:///{folder / 'log.db'}"
        self.database = Database.open(self.db)
        self.claims: dict[int, str] = {}
        self.proxy: Proxy | None = None

    @property
    def url(self) -> str:
        assert self.proxy is not None
        return self.proxy.url

    async def start_proxy(self) -> Proxy:
        self.proxy = await Proxy.start(
            self.folder / "proxy.log", self.db, self.engine_urls, switched_off=self.switched_off
        )
        return self.proxy

    def clients(self, **settings: Any) -> Clients:
        return Clients(self.url, name=f"e{next(_numbers)}", **settings)

    # --- versions ---

    async def hand_in(
        self,
        weights: Weights,
        *,
        before: str,
        trainer: Trainer | None = None,
        promised: str | None = None,
        status: VersionStatus = VersionStatus.CANDIDATE,
    ) -> int:
        """A candidate row like the trainer's; gives its number.

        `before`: the weights before the step. `promised`: what the row's probe says is in the folder, if that
        is something else. `trainer`: who has scored the probe, if not this stage's.
        """
        scorer, promise = trainer or self.trainer, promised or weights.name
        version = await asyncio.to_thread(self._row, weights, before, scorer, promise, status)
        self.claims[version] = promise
        return version

    def _row(
        self, weights: Weights, before: str, scorer: Trainer, promised: str, status: VersionStatus
    ) -> int:
        probe = tuple(
            ProbeSequence(ids, logprobs(scorer.score(before, ids)), logprobs(scorer.score(promised, ids)))
            for ids in scorer.sequences
        )
        with self.database.write() as conn:
            version = next_version(conn, POLICY)
            row = PolicyVersion(
                policy=POLICY,
                version=version,
                status=status,
                kind=weights.kind,
                path=str(weights.path),
                checksum=weights.checksum,
                probe=probe,
                base_model=None,
                run_id=None,
                step=None,
                created_at_ms=now_ms(),
            )
            add_candidate(conn, row)
        return version

    def row(self, version: int) -> PolicyVersion:
        with self.database.read() as conn:
            found = load_version(conn, POLICY, version)
        assert found is not None
        return found

    async def verdict(self, version: int) -> PolicyVersion:
        """Wait until the publisher has decided."""
        async with asyncio.timeout(VERDICT_TIMEOUT_SEC):
            while (row := self.row(version)).status in _WAITING:  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.05)
        return row

    async def go_live(self, weights: Weights, *, before: str) -> int:
        """A version that nothing is wrong with; RuntimeError if it is refused."""
        version = await self.hand_in(weights, before=before)
        row = await self.verdict(version)
        if row.status is not VersionStatus.LIVE:
            raise RuntimeError(f"version {version} ({weights.name}) did not go live: {row.verdict}")
        return version

    def swap_ms(self, version: int) -> int:
        """From the candidate row to live."""
        with self.database.read() as conn:
            query = "SELECT live_at_ms - created_at_ms FROM policy_versions WHERE policy = ? AND version = ?"
            return int(conn.exec_driver_sql(query, (POLICY, version)).scalar_one())

    def live_name(self) -> str:
        """What the row that is live promised; the base where none is."""
        with self.database.read() as conn:
            query = "SELECT version FROM policy_versions WHERE policy = ? AND status = 'live'"
            live = conn.exec_driver_sql(query, (POLICY,)).scalars().all()
        return self.claims[max(live)] if live else BASE

    # --- calls ---

    def calls(self, ids: Sequence[str]) -> dict[str, Call]:
        with self.database.read() as conn:
            return calls_by_upstream_ids(conn, ids)

    async def rescored(self, ids: Sequence[str], number: int | None = None) -> Rescored:
        """All of these calls, or a sample of at least so many. A call that the log lacks is a mismatch."""

        def work() -> Rescored:
            calls = self.calls(ids)
            chosen = list(calls.values()) if number is None else sample(list(calls.values()), number)
            found = rescore(self.trainer, chosen, self.claims)
            found.mismatches += [f"{one} is not in the log" for one in ids if one not in calls]
            return found

        return await asyncio.to_thread(work)

    async def status(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            with urllib.request.urlopen(f"{self.url}/lightning/api/status", timeout=30) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found

        return await asyncio.to_thread(ask)

    async def _num_in_rotation(self) -> int:
        return sum(engine["in_rotation"] for engine in (await self.status())["engines"])

    async def in_rotation(self, number: int, timeout_sec: float = 300) -> float:
        """Wait until so many engines take calls; gives the seconds that it took."""
        began = time.monotonic()
        async with asyncio.timeout(timeout_sec):
            while await self._num_in_rotation() < number:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        return time.monotonic() - began


async def _forget_adapters(url: str) -> None:
    """Of an earlier log: their names would be this one's too."""
    async with EngineClient(url) as engine:
        for model in await engine.models():
            if model.parent is not None:
                await engine.unload_lora(model.name)


@contextlib.asynccontextmanager
async def stage(
    folder: Path, trainer: Trainer, engine_urls: Sequence[str], switched_off: str = ""
) -> AsyncIterator[Stage]:
    """A new log and a proxy on it, ended on the way out."""
    own = folder / f"stage{next(_numbers)}"
    own.mkdir(parents=True)
    for url in engine_urls:
        await _forget_adapters(url)
    made = Stage(own, trainer, engine_urls, switched_off)
    try:
        await made.start_proxy()
        yield made
    finally:
        if made.proxy is not None:
            await made.proxy.stop()
        made.database.close()
