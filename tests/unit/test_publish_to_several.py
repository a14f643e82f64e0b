"""New versions on several engines: all or none, and no call sees anything else."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from fakes.fake_engine import BASE, FakeEngine, trained_version, write_folder
from fakes.own_gate import OwnGate

from lightning_rl.errors import EngineError
from lightning_rl.proxy.live.engines import Engines, EngineState
from lightning_rl.proxy.live.gate import Gate
from lightning_rl.proxy.live.policies import LivePolicies
from lightning_rl.proxy.live.served import Served
from lightning_rl.proxy.publishing.place import Handle, Place
from lightning_rl.proxy.publishing.publisher import Publisher
from lightning_rl.records import PolicyVersion, VersionStatus, WeightsKind
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.store.database import Database
from lightning_rl.store.policies import add_candidate, load_version

LORA, FULL = WeightsKind.LORA, WeightsKind.FULL


class Cluster:
    """A database, engines, a publisher, and callers that check what they get."""

    def __init__(self, folder: Path, num_engines: int) -> None:
        self.folder = folder
        write_folder(folder / "base", 0.0)
        self.fakes = [FakeEngine(folder / "base") for _ in range(num_engines)]
        self.database = Database.open(f"sqlite:///{folder / 'log.db'}")
        self.live = LivePolicies("policy", {}, Gate())
        self.engines = Engines([f"http://engine-{i}" for i in range(num_engines)])
        self.handles = [Handle(f, s) for f, s in zip(self.fakes, self.engines.all, strict=True)]
        self.settings = ProxySettings.load(publish_poll_sec=0.001)
        place = Place(self.handles, self.engines, self.live, OwnGate(self.live), hold_timeout_sec=5)
        self.publisher = Publisher(self.database, place, self.settings)
        self.admitted: list[int] = []  # versions, in the order of admission, of calls without an episode
        self.served = 0
        self.failed = 0

    def fake_of(self, state: EngineState) -> FakeEngine:
        return self.fakes[self.engines.all.index(state)]

    def candidate(self, version: int, kind: WeightsKind, before: float | None = None) -> None:
        row = trained_version(self.folder, version, kind, before)
        with self.database.write() as conn:
            add_candidate(conn, row)

    def row(self, version: int) -> PolicyVersion:
        with self.database.read() as conn:
            found = load_version(conn, "policy", version)
        assert found is not None
        return found

    def status(self, version: int) -> VersionStatus:
        return self.row(version).status

    async def steps(self, number: int = 1) -> None:
        for _ in range(number):
            self.publisher.rotation.hurry()
            await self.publisher.step()
            assert self.live.gate.is_open

    async def call(self, episode: str | None, turns: int) -> None:
        """One call, as the relay makes it: what answers must be the version that its row names."""
        lease = await self.live.admit("policy", episode)
        try:
            if episode is None:
                assert lease.served.version is not None
                self.admitted.append(lease.served.version)
            model = lease.served.model
            assert model is not None
            lease.use(self.engines.choose(episode, model))
            tried: list[EngineState] = []
            while lease.engine is not None and not self.fake_of(lease.engine).is_up:
                self.engines.refused(lease.engine)
                tried.append(lease.engine)
                lease.use(self.engines.choose(episode, model, tried=tried))
            assert lease.engine is not None
            fake = self.fake_of(lease.engine)
            for _ in range(turns):
                if not fake.is_up:
                    self.failed += 1  # it had begun: its client sees the stream break
                    return
                assert fake._weight_of(model) == float(lease.served.version or 0)
                await asyncio.sleep(0)
            self.served += 1
        finally:
            lease.release()

    async def callers(self, stop: asyncio.Event, seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            episode = chance.choice([None, None, f"e{chance.randrange(6)}"])
            try:
                await self.call(episode, chance.randrange(1, 6))
            except EngineError:  # refused with 503: no engine is left
                await asyncio.sleep(0)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, 2)
    yield cluster
    cluster.database.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def inside() -> None:
        await scenario()

    asyncio.run(inside())


def weights(cluster: Cluster) -> list[float]:
    return [fake.weight for fake in cluster.fakes]


def adapters(cluster: Cluster) -> list[set[str]]:
    return [set(fake.adapters) for fake in cluster.fakes]


def test_full_weights_and_adapters_go_live_on_every_engine(pair: Cluster) -> None:
    async def scenario() -> None:
        pair.candidate(1, FULL)
        await pair.steps()
        assert pair.status(1) is VersionStatus.LIVE
        assert weights(pair) == [1.0, 1.0]
        assert set((pair.row(1).verdict or {})["engines"]) == {"http://engine-0", "http://engine-1"}
        pair.candidate(2, LORA, before=1.0)
        await pair.steps()
        assert adapters(pair) == [{"policy@2"}, {"policy@2"}]
        assert pair.live.resolve("policy", None) == Served("policy", 2, "policy@2")

    run(scenario)


@pytest.mark.parametrize("kind", [LORA, FULL])
@pytest.mark.parametrize("sabotage", ["other weights", "same weights"])
def test_what_one_engine_rejects_is_rejected_for_all(pair: Cluster, kind: WeightsKind, sabotage: str) -> None:
    async def scenario() -> None:
        await pair.steps()
        pair.fakes[1].sabotage = sabotage
        pair.candidate(1, kind)
        await pair.steps()
        assert pair.status(1) is VersionStatus.REJECTED
        pair.fakes[1].sabotage = None
        await pair.steps()
        assert weights(pair) == [0.0, 0.0]
        assert adapters(pair) == [set(), set()]
        assert len(pair.engines.in_rotation) == 2

    run(scenario)


@pytest.mark.parametrize("kind", [LORA, FULL])
def test_an_engine_that_joins_later_gets_what_is_live_before_any_call(
    pair: Cluster, kind: WeightsKind
) -> None:
    async def scenario() -> None:
        pair.fakes[1].is_up = False
        pair.candidate(1, kind)
        await pair.steps()
        assert pair.status(1) is VersionStatus.LIVE
        assert [engine.url for engine in pair.engines.in_rotation] == ["http://engine-0"]
        pair.fakes[1].restart()
        assert [engine.url for engine in pair.engines.in_rotation] == ["http://engine-0"]
        await pair.steps()
        assert len(pair.engines.in_rotation) == 2
        assert weights(pair) == ([1.0, 1.0] if kind is FULL else [0.0, 0.0])
        assert adapters(pair)[1] == ({"policy@1"} if kind is LORA else set())

    run(scenario)


def test_an_engine_that_joins_gets_the_older_adapters_that_episodes_are_pinned_to(pair: Cluster) -> None:
    async def scenario() -> None:
        pair.candidate(1, LORA)
        await pair.steps()
        pair.live.resolve("policy", "e1")
        pair.candidate(2, LORA)
        await pair.steps()
        pair.fakes[1].restart()
        await pair.steps()
        assert adapters(pair)[1] == {"policy@1", "policy@2"}
        pair.fakes[1].restart()
        shutil.rmtree(pair.folder / "v1")
        await pair.steps()
        assert len(pair.engines.in_rotation) == 2
        assert pair.engines.all[1].lacks == {"policy@1"}
        await pair.steps(2)
        assert len(pair.engines.in_rotation) == 2

    run(scenario)


def test_episodes_keep_their_version_when_every_engine_was_restarted(pair: Cluster) -> None:
    async def scenario() -> None:
        pair.candidate(1, LORA)
        await pair.steps()
        pair.live.resolve("policy", "e1")
        pair.candidate(2, LORA)
        await pair.steps()
        for fake in pair.fakes:
            fake.restart()
        await pair.steps()
        assert pair.live.resolve("policy", "e1").version == 1
        assert pair.live.resolve("policy", "e2").version == 2
        assert adapters(pair) == [{"policy@1", "policy@2"}] * 2

    run(scenario)


def test_an_engine_with_another_base_model_stays_out(pair: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        await pair.steps()
        pair.fakes[1].is_up = False
        await pair.steps()
        pair.fakes[1].restart()
        pair.fakes[1].name = "other"
        await pair.steps()
        assert [engine.url for engine in pair.engines.in_rotation] == ["http://engine-0"]

    run(scenario)
    assert "serves 'other', not 'base' as the others" in caplog.text


def test_an_engine_that_was_restarted_between_two_looks_is_found_out(pair: Cluster) -> None:
    async def scenario() -> None:
        pair.candidate(1, FULL)
        await pair.steps()
        pair.fakes[0].restart()
        await pair.steps()
        assert weights(pair) == [1.0, 1.0]
        assert len(pair.engines.in_rotation) == 2

    run(scenario)


@pytest.mark.parametrize("seed", range(40))
def test_an_engine_dies_at_a_random_point_of_an_update(pair: Cluster, seed: int) -> None:
    """All or none, no call on N after one on N+1, none by weights that its row does not name."""
    chance = random.Random(seed)
    kind = chance.choice([LORA, FULL])

    async def scenario() -> None:
        await pair.steps()
        stop = asyncio.Event()
        callers = [asyncio.create_task(pair.callers(stop, seed * 100 + i)) for i in range(6)]
        for version in (1, 2, 3):
            victim = chance.choice(pair.fakes)
            victim.dies_at = len(victim.calls) + chance.randrange(1, 30)
            pair.candidate(version, kind)
            await pair.steps(2)
            victim.dies_at = None
            if not victim.is_up:
                assert pair.status(version) is VersionStatus.LIVE  # the other one has it
                victim.restart()
            await pair.steps(2)
            assert pair.status(version) is VersionStatus.LIVE
            assert len(pair.engines.in_rotation) == 2
            for fake in pair.fakes:
                assert fake._weight_of(f"policy@{version}" if kind is LORA else BASE) == float(version)
        stop.set()
        await asyncio.gather(*callers)
        assert pair.admitted == sorted(pair.admitted)
        assert set(pair.admitted) == {0, 1, 2, 3}
        assert pair.served > 100
        assert pair.live.gate.in_flight == 0
        assert all(engine.in_flight == 0 for engine in pair.engines.all)

    run(scenario)


def test_the_fake_checks_what_it_should(pair: Cluster) -> None:
    """A call by other weights than its row names fails the test: the callers above can fail."""

    async def scenario() -> None:
        await pair.steps()
        for fake in pair.fakes:
            fake.weight = 1.0
        with pytest.raises(AssertionError):
            await pair.call(None, 1)

    run(scenario)


def test_an_engine_that_is_away_is_told_once_and_so_is_its_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.publisher")

    async def scenario() -> None:
        cluster = Cluster(tmp_path, 2)
        await cluster.steps()
        caplog.clear()
        cluster.fakes[1].is_up = False
        for _ in range(3):
            await cluster.steps()  # with a look at the engines
            await cluster.publisher.step()  # without
            await cluster.publisher.step()
        cluster.fakes[1].restart()
        await cluster.steps(2)
        cluster.database.close()

    asyncio.run(scenario())
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "the engine is not reachable: connection refused"),
        ("INFO", "the engine at http://engine-1 is in rotation"),
    ]


def test_an_engine_that_can_not_join_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        cluster = Cluster(tmp_path, 2)
        cluster.fakes[1].is_up = False
        await cluster.steps()
        cluster.fakes[1].restart()
        cluster.fakes[1].name = "other"
        caplog.clear()
        for _ in range(3):
            cluster.publisher.rotation.hurry()
            await cluster.publisher.step()
            await cluster.publisher.step()
        cluster.database.close()

    asyncio.run(scenario())
    assert len([r for r in caplog.records if "serves 'other', not 'base'" in r.message]) == 1
