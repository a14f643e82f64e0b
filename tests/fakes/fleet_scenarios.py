"""Several proxies on one log: what must hold on every database. Scenarios, run on SQLite and Postgres.

Each proxy here is a whole one without HTTP: live policies, engines, its place in the fleet, its publisher.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.fake_engine import BASE, FakeEngine, trained_version, write_folder
from fakes.log_rows import intent, reward
from fakes.waiting import until

from lightning_rl.errors import EngineError
from lightning_rl.proxy.live.engines import Engines
from lightning_rl.proxy.live.gate import Gate
from lightning_rl.proxy.live.policies import LivePolicies
from lightning_rl.proxy.publishing import fleet as fleet_room
from lightning_rl.proxy.publishing.fleet import Member, Times
from lightning_rl.proxy.publishing.place import Handle
from lightning_rl.proxy.serving import _keep_in_touch, _work
from lightning_rl.records import VersionStatus, WeightsKind
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.store.append import append_entries
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import add_reward
from lightning_rl.store.policies import add_candidate, load_version

LORA, FULL = WeightsKind.LORA, WeightsKind.FULL
TIMES = Times(heartbeat_sec=0.1, fence_sec=0.8, gone_sec=1.2)
URLS = ["http://engine-0", "http://engine-1"]

Scenario = Callable[["Fleet"], Awaitable[None]]
SCENARIOS: list[Scenario] = []


def scenario(function: Scenario) -> Scenario:
    SCENARIOS.append(function)
    return function


class Proxy:
    """One proxy process, but for HTTP."""

    def __init__(self, fleet: Fleet, *, publishes: bool = True) -> None:
        self.fleet = fleet
        self.database = Database.open(fleet.url)
        self.settings = ProxySettings.load(
            engine_url=URLS, publish_poll_sec=0.01, publish=publishes, **fleet.settings
        )
        self.gate = Gate()
        self.live = LivePolicies("policy", {}, self.gate)
        self.engines = Engines(URLS)
        self.is_cut_off = False
        self.member = Member(
            cast("Database", _Cuttable(self)),
            self.live,
            self.engines,
            flush=self.flush,
            wants_lease=publishes,
            times=TIMES,
        )
        self.live.recall = self.member.recall
        self.flushed = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def flush(self) -> None:
        self.flushed += 1

    async def fingerprint_of(self, _: Any) -> str | None:
        return None

    def open_evaluation(self, version: Any, model: str) -> Any:
        raise AssertionError("no evaluation is set here")

    def start(self) -> None:
        self.gate.hold()
        for engine in self.engines.all:
            self.engines.withdraw(engine, is_up=False)
        handles = [Handle(f, s) for f, s in zip(self.fleet.fakes, self.engines.all, strict=True)]
        self.tasks = [
            asyncio.create_task(_keep_in_touch(self.member, 0.01)),
            asyncio.create_task(_work(cast("Any", self), self.member, handles)),
        ]

    async def crash(self) -> None:
        """Gone without a word."""
        await self._end_tasks()
        await asyncio.to_thread(self.member._thread.shutdown)

    async def stop(self) -> None:
        if self.tasks:
            await self._end_tasks()
            await self.member.stop()

    async def _end_tasks(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks = []

    async def call(self, episode: str | None, turns: int = 3) -> int:
        """A call as the relay makes it; what answers must be the version that its row names."""
        lease = await self.live.admit("policy", episode)
        try:
            version = lease.served.version
            assert version is not None
            if episode is None:
                self.fleet.admitted.append(version)
            else:
                entry = intent(f"c{len(self.fleet.calls)}-{random.random()}", episode=episode)
                self.fleet.calls.append((episode, version))
                await self.fleet.record(entry, version)
            model = lease.served.model
            assert model is not None
            lease.use(self.engines.choose(episode, model))
            assert lease.engine is not None
            fake = self.fleet.fakes[self.engines.all.index(lease.engine)]
            for _ in range(turns):
                ended = lease.version_now()
                if ended == version:
                    assert fake._weight_of(model) == float(version), "other weights than its row names"
                await asyncio.sleep(0.002)
            return version
        finally:
            lease.release()


class _Cuttable:
    """A database that a proxy can lose."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def read(self) -> Any:
        return self._through(self._proxy.database.read())

    def write(self) -> Any:
        return self._through(self._proxy.database.write())

    def _through(self, begun: Any) -> Any:
        from lightning_rl.errors import StoreError

        if self._proxy.is_cut_off:
            raise StoreError("the connection is cut")
        return begun


class Fleet:
    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        write_folder(folder / "base", 0.0)
        self.fakes = [FakeEngine(folder / "base") for _ in URLS]
        self.database = Database.open(url)
        self.proxies: list[Proxy] = []
        self.settings: dict[str, Any] = {}  # of proxies that are added from now on
        self.admitted: list[int] = []
        self.calls: list[tuple[str, int]] = []

    async def record(self, entry: Any, version: int) -> None:
        from dataclasses import replace

        def write() -> None:
            with self.database.write() as conn:
                append_entries(conn, [replace(entry, policy="policy", policy_version=version)])

        await asyncio.to_thread(write)

    def add(self, *, publishes: bool = True) -> Proxy:
        proxy = Proxy(self, publishes=publishes)
        self.proxies.append(proxy)
        proxy.start()
        return proxy

    async def two(self) -> tuple[Proxy, Proxy]:
        """A publisher and a follower, both serving."""
        first = self.add()
        await until(lambda: first.member.is_publisher and first.gate.is_open)
        second = self.add()
        await until(lambda: second.gate.is_open and len(second.engines.in_rotation) == 2)
        await until(lambda: len(first.member.others) == 1)
        return first, second

    def candidate(self, version: int, kind: WeightsKind, before: float | None = None) -> None:
        row = trained_version(self.folder, version, kind, before)
        with self.database.write() as conn:
            add_candidate(conn, row)

    def status(self, version: int) -> VersionStatus:
        with self.database.read() as conn:
            found = load_version(conn, "policy", version)
        assert found is not None
        return found.status

    @contextlib.asynccontextmanager
    async def traffic(self, *proxies: Proxy) -> AsyncIterator[None]:
        stop = asyncio.Event()

        async def one(proxy: Proxy) -> None:
            while not stop.is_set():
                with contextlib.suppress(EngineError):
                    await proxy.call(None)
                await asyncio.sleep(0.001)

        tasks = [asyncio.create_task(one(proxy)) for proxy in proxies for _ in range(2)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    async def end(self) -> None:
        for proxy in self.proxies:
            await proxy.stop()
        await asyncio.get_running_loop().shutdown_default_executor()  # what was cancelled may still run there
        for proxy in self.proxies:
            proxy.database.close()
        self.database.close()


def run(function: Scenario, url: str, folder: Path) -> None:
    async def inside() -> None:
        fleet = Fleet(url, folder)
        try:
            await function(fleet)
        finally:
            await fleet.end()

    asyncio.run(inside())


@scenario
async def test_the_second_proxy_follows_the_first(fleet: Fleet) -> None:
    first, second = await fleet.two()
    assert not second.member.is_publisher
    assert await second.call(None) == 0
    assert first.engines.is_shared
    assert second.engines.is_shared


@scenario
async def test_an_adapter_goes_live_in_both_and_none_is_asked_for_n_after_the_other_for_n_plus_1(
    fleet: Fleet,
) -> None:
    proxies = await fleet.two()
    async with fleet.traffic(*proxies):
        for version in (1, 2, 3):
            fleet.candidate(version, LORA)
            await until(lambda: all(p.live.live_version("policy") == version for p in proxies))  # noqa: B023
    assert fleet.admitted == sorted(fleet.admitted)
    assert set(fleet.admitted) == {0, 1, 2, 3}
    assert fleet.status(3) is VersionStatus.LIVE
    await until(lambda: all(fleet.status(old) is VersionStatus.RETIRED for old in (1, 2)))
    assert all(set(fake.adapters) == {"policy@3"} for fake in fleet.fakes)


@scenario
async def test_full_weights_wait_until_every_proxy_has_drained(fleet: Fleet) -> None:
    first, second = await fleet.two()
    running = await second.live.admit("policy", None)
    fleet.candidate(1, FULL)
    await until(lambda: second.gate.is_held and first.gate.is_held)
    assert not any(call.startswith("reload") for fake in fleet.fakes for call in fake.calls)
    running.release()
    await until(lambda: fleet.status(1) is VersionStatus.LIVE)
    await until(lambda: second.gate.is_open)
    assert await second.call(None) == await first.call(None) == 1


@scenario
async def test_full_weights_under_traffic(fleet: Fleet) -> None:
    proxies = await fleet.two()
    async with fleet.traffic(*proxies):
        for version in (1, 2):
            fleet.candidate(version, FULL)
            await until(lambda: all(p.live.live_version("policy") == version for p in proxies))  # noqa: B023
    assert fleet.admitted == sorted(fleet.admitted)
    assert set(fleet.admitted) == {0, 1, 2}


@scenario
async def test_pins_are_the_same_in_both(fleet: Fleet) -> None:
    first, second = await fleet.two()
    assert await first.call("e") == 0
    fleet.candidate(1, LORA)
    await until(lambda: second.live.live_version("policy") == 1 and second.gate.is_open)
    assert await second.call("e") == 0
    assert await second.call("new") == 1
    assert await first.call("new") == 1
    assert fleet.status(1) is VersionStatus.LIVE


@scenario
async def test_a_canary_draws_the_same_episodes_in_both_and_outlives_its_publisher(fleet: Fleet) -> None:
    fleet.settings = {"canary_share": 0.5, "canary_episodes": 2}
    first, second = await fleet.two()
    fleet.candidate(1, LORA)
    await until(lambda: second.live.canary_version("policy") == 1 and second.gate.is_open)
    names = [f"e{n}" for n in range(12)]
    drawn = [await second.call(name) for name in names]
    assert set(drawn) == {0, 1}
    assert [await first.call(name) for name in names] == drawn
    assert [await first.call(f"{name}-new") for name in names] == [
        await second.call(f"{name}-new") for name in names
    ]
    assert await second.call(None) == 0
    await first.crash()
    await until(lambda: second.member.is_publisher and second.gate.is_open)
    await until(lambda: second.live.canary_version("policy") == 1)
    assert fleet.status(1) is VersionStatus.CANARY
    assert [await second.call(name) for name in names] == drawn
    third = fleet.add()
    await until(lambda: third.gate.is_open and third.live.canary_version("policy") == 1)
    assert [await third.call(name) for name in names] == drawn
    with fleet.database.write() as conn:
        for name in names:
            add_reward(conn, reward(name, 1.0, final=True))
    await until(lambda: fleet.status(1) is VersionStatus.LIVE)
    await until(lambda: third.live.live_version("policy") == 1 and third.gate.is_open)
    assert await third.call("after") == 1


@scenario
async def test_an_old_adapter_stays_while_the_other_proxy_needs_it(fleet: Fleet) -> None:
    first, second = await fleet.two()
    fleet.candidate(1, LORA)
    await until(lambda: second.live.live_version("policy") == 1 and second.gate.is_open)
    assert await second.call("e") == 1
    await until(lambda: first.member.is_in_use("policy", 1))
    fleet.candidate(2, LORA)
    await until(lambda: second.live.live_version("policy") == 2 and second.gate.is_open)
    await asyncio.sleep(0.2)
    assert fleet.status(1) is VersionStatus.DRAINING
    assert all("policy@1" in fake.adapters for fake in fleet.fakes)
    second.live.end_episode("e")
    await until(lambda: fleet.status(1) is VersionStatus.RETIRED)
    assert second.live.loaded_versions("policy").keys() <= {0, 2}


@scenario
async def test_a_dead_publishers_lease_is_taken_over_and_its_work_is_taken_up(fleet: Fleet) -> None:
    first, second = await fleet.two()
    fleet.candidate(1, FULL)
    await until(lambda: fleet.status(1) is VersionStatus.PROBING or fleet.status(1) is VersionStatus.LIVE)
    await first.crash()
    await until(lambda: second.member.is_publisher)
    await until(lambda: second.gate.is_open and second.live.live_version("policy") == 1)
    assert fleet.status(1) is VersionStatus.LIVE
    assert await second.call(None) == 1
    assert [fake.weight for fake in fleet.fakes] == [1.0, 1.0]


@scenario
async def test_a_publisher_that_ends_in_order_hands_over_at_once(fleet: Fleet) -> None:
    first, second = await fleet.two()
    term = first.member.term
    assert term is not None
    await first.stop()
    await until(lambda: second.member.is_publisher)
    assert second.member.term == term + 1
    fleet.candidate(1, LORA)
    await until(lambda: fleet.status(1) is VersionStatus.LIVE)


@scenario
async def test_a_publisher_dies_at_any_point(fleet: Fleet) -> None:
    chance = random.Random(7)
    for version in (1, 2, 3):
        kind = FULL
        publisher = fleet.add()
        await until(lambda: any(p.member.is_publisher for p in fleet.proxies if p.tasks))
        other = fleet.add()
        await until(lambda: other.gate.is_open)  # noqa: B023
        fleet.candidate(version, kind)
        await asyncio.sleep(chance.random() * 0.1)
        for proxy in fleet.proxies:
            if proxy.tasks and proxy.member.is_publisher:
                await proxy.crash()
        alive = [p for p in fleet.proxies if p.tasks]
        await until(lambda: all(p.live.live_version("policy") == version for p in alive))  # noqa: B023
        await until(lambda: all(p.gate.is_open for p in alive))  # noqa: B023
        for proxy in alive:
            assert await proxy.call(None) == version
        assert publisher in fleet.proxies


@scenario
async def test_a_proxy_that_is_out_of_touch_admits_nothing_before_it_is_taken_for_gone(fleet: Fleet) -> None:
    first, second = await fleet.two()
    running = await second.live.admit("policy", None)
    second.is_cut_off = True
    fleet.candidate(1, FULL)
    await until(lambda: fleet.status(1) is VersionStatus.LIVE)
    assert second.gate.is_fenced  # before: the publisher waits longer than the fence
    held = asyncio.create_task(second.call(None))
    await asyncio.sleep(0.1)
    assert not held.done()
    assert running.version_now() is None  # nobody here knows which weights ended it
    second.is_cut_off = False
    assert await held == 1
    assert running.version_now() is None
    running.release()
    assert await first.call(None) == 1


@scenario
async def test_a_publisher_that_is_out_of_touch_stops_and_follows(fleet: Fleet) -> None:
    first, second = await fleet.two()
    first.is_cut_off = True
    await until(lambda: second.member.is_publisher)
    assert first.gate.is_fenced
    with pytest.raises(fleet_room.LeaseLostError):
        first.member.require_lease()
    fleet.candidate(1, FULL)
    await until(lambda: fleet.status(1) is VersionStatus.LIVE)
    first.is_cut_off = False
    await until(lambda: first.gate.is_open and first.live.live_version("policy") == 1)
    assert not first.member.is_publisher
    assert await first.call(None) == 1


@scenario
async def test_a_proxy_that_does_not_publish_serves_what_another_one_publishes(fleet: Fleet) -> None:
    follower = fleet.add(publishes=False)
    await until(lambda: follower.gate.is_open and follower.live.base_model == BASE)
    assert await follower.call(None) == 0
    publisher = fleet.add()
    await until(lambda: publisher.gate.is_open)
    fleet.candidate(1, LORA)
    await until(lambda: follower.live.live_version("policy") == 1 and follower.gate.is_open)
    assert await follower.call(None) == 1
    assert not follower.member.is_publisher


@scenario
async def test_a_follower_serves_on_when_nobody_publishes_any_more(fleet: Fleet) -> None:
    publisher = fleet.add()
    await until(lambda: publisher.gate.is_open)
    follower = fleet.add(publishes=False)
    await until(lambda: follower.gate.is_open)
    fleet.candidate(1, FULL)
    await until(lambda: follower.live.live_version("policy") == 1 and follower.gate.is_open)
    await publisher.stop()
    await until(lambda: not follower.member.has_publisher)
    await asyncio.sleep(0.3)
    assert await follower.call(None) == 1
    for fake in fleet.fakes:
        fake.restart()
    for engine in follower.engines.all:
        engine.is_suspect = True
    await until(lambda: follower.live.live_version("policy") == 0)
    assert await follower.call(None) == 0


@scenario
async def test_a_restarted_engine_gets_no_call_before_it_holds_what_is_live(
    fleet: Fleet,
) -> None:
    first, second = await fleet.two()
    fleet.candidate(1, FULL)
    await until(lambda: second.live.live_version("policy") == 1 and second.gate.is_open)
    fleet.fakes[0].is_up = False
    second.engines.refused(second.engines.all[0])  # a call of its found nobody there
    first.engines.refused(first.engines.all[0])
    fleet.fakes[0].restart()
    await until(lambda: len(second.engines.in_rotation) == len(first.engines.in_rotation) == 2)
    assert fleet.fakes[0].weight == 1.0
