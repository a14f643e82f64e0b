"""One GPU for engine and trainer: engines sleep while a run trains, and never longer than it does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_engine import BASE, FakeEngine, trained_version, write_folder
from fakes.own_gate import OwnGate
from fakes.waiting import until, wait_until

from lightning_rl.errors import PublishError
from lightning_rl.proxy.live.engines import Engines
from lightning_rl.proxy.live.gate import Gate
from lightning_rl.proxy.live.policies import LivePolicies
from lightning_rl.proxy.live.served import Served
from lightning_rl.proxy.publishing import rests as rests_room
from lightning_rl.proxy.publishing.place import Handle, Place
from lightning_rl.proxy.publishing.publisher import Publisher
from lightning_rl.records import VersionStatus, WeightsKind
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.settings.train import TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.store.policies import add_candidate, load_version
from lightning_rl.store.rests import rest_of, say_rest
from lightning_rl.store.run_owners import Owner, take
from lightning_rl.store.runs import create_run, end_run
from lightning_rl.trainer.rest import EngineRest

RUN = "run-1"


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_folder(folder / "base", 0.0)
        self.engine = FakeEngine(folder / "base")
        self.database = Database.open(f"sqlite:///{folder / 'log.db'}")
        owner = Owner("token", "host", 1, "process")
        with self.database.write() as conn:
            create_run(conn, RUN, "policy", {}, {})
            take(conn, RUN, owner, was=None, policy="policy")
        self.restart_proxy()

    def restart_proxy(self) -> None:
        settings = ProxySettings.load()
        self.live = LivePolicies("policy", {}, Gate())
        self.engines = Engines(settings.engine_url)
        place = Place(
            [Handle(self.engine, self.engines.all[0])], self.engines, self.live, OwnGate(self.live), 0.2
        )
        self.publisher = Publisher(self.database, place, settings)

    def say(self, state: Any) -> None:
        with self.database.write() as conn:
            say_rest(conn, RUN, state, source="test")

    def state(self) -> str | None:
        with self.database.read() as conn:
            found = rest_of(conn, RUN)
        return None if found is None else found.state

    async def until_asleep(self) -> None:
        await until(lambda: self.engine.asleep)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def run(world: World, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    try:
        asyncio.run(scenario())
    finally:
        world.database.close()


@pytest.mark.parametrize("kind", [WeightsKind.LORA, WeightsKind.FULL])
def test_the_engine_sleeps_until_the_step_is_handed_over_and_wakes_with_the_new_weights(
    world: World, kind: WeightsKind
) -> None:
    async def scenario() -> None:
        await world.publisher.step()
        running = await world.live.admit("policy", None)
        world.say("engine_rest")
        await world.publisher.step()
        assert not world.engine.asleep  # a call does not end: asked again at the next turn
        assert world.live.gate.is_open
        running.release()
        step = asyncio.create_task(world.publisher.step())
        await world.until_asleep()
        held = asyncio.create_task(world.live.admit("policy", None))
        await until(lambda: world.state() == "engine_asleep")
        assert not held.done()
        with world.database.write() as conn:
            add_candidate(conn, trained_version(world.folder, 1, kind))
            say_rest(conn, RUN, "engine_wake", source="test")
        await step
        assert not world.engine.asleep
        lease = await held
        assert lease.served == Served("policy", 1, BASE if kind is WeightsKind.FULL else "policy@1")
        lease.release()
        assert world.state() == "engine_awake"
        assert world.live.gate.is_open
        with world.database.read() as conn:
            row = load_version(conn, "policy", 1)
        assert row is not None
        assert row.status is VersionStatus.LIVE

    run(world, scenario)


@pytest.mark.parametrize("end", ["silent", "over"])
def test_a_trainer_that_is_gone_leaves_no_engine_asleep(
    world: World, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        world.say("engine_rest")
        step = asyncio.create_task(world.publisher.step())
        await world.until_asleep()
        if end == "silent":
            monkeypatch.setattr(rests_room, "SILENT_SEC", 0.0)
        else:
            with world.database.write() as conn:
                end_run(conn, RUN, "failed")
        await step
        assert not world.engine.asleep
        assert world.live.gate.is_open
        calls = len(world.engine.calls)
        await world.publisher.step()
        assert not any(call.startswith("sleep") for call in world.engine.calls[calls:])

    run(world, scenario)


def test_a_proxy_that_starts_wakes_an_engine_that_another_left_asleep(world: World) -> None:
    async def scenario() -> None:
        await world.engine.sleep(1)
        world.say("engine_rest")
        world.say("engine_asleep")
        world.restart_proxy()
        await world.publisher.step()
        assert not world.engine.asleep
        assert world.live.resolve("policy", None) == Served("policy", 0, BASE)

    run(world, scenario)


def test_an_engine_that_cannot_sleep_is_said_to_the_trainer_and_serves_on(world: World) -> None:
    async def scenario() -> None:
        world.engine.sabotage = "can't sleep"
        world.say("engine_rest")
        await world.publisher.step()
        assert world.state() == "engine_refused"
        assert world.live.gate.is_open

    run(world, scenario)


# --- the trainer's side ---


def shared(world: World, **changes: Any) -> EngineRest:
    settings = TrainSettings.load(
        model=Path(), db=world.database.url, **{"share_gpu": True, "publish_timeout_sec": 30} | changes
    )
    return EngineRest(world.database, settings, RUN)


def answer(world: World, state: Any) -> threading.Thread:
    """What a publisher says, once it was asked."""

    def wait_and_say() -> None:
        wait_until(lambda: world.state() == "engine_rest")
        world.say(state)

    thread = threading.Thread(target=wait_and_say)
    thread.start()
    return thread


def test_a_step_begins_when_the_engines_sleep_and_ends_their_rest_once(world: World) -> None:
    rest = shared(world)
    publisher = answer(world, "engine_asleep")
    rest.begin(lambda _: None)
    publisher.join()
    with world.database.write() as conn:
        rest.end_in(conn)
    assert world.state() == "engine_wake"
    world.say("engine_awake")
    rest.end()
    assert world.state() == "engine_awake"
    world.database.close()


def test_engines_that_cannot_sleep_end_the_run_in_one_line(world: World) -> None:
    rest = shared(world)
    publisher = answer(world, "engine_refused")
    with pytest.raises(PublishError, match="the GPU can't be shared"):
        rest.begin(lambda _: None)
    publisher.join()
    world.database.close()


def test_a_rest_that_nobody_gives_is_taken_back(world: World) -> None:
    with pytest.raises(PublishError, match="did not go to rest within"):
        shared(world, publish_timeout_sec=0.05).begin(lambda _: None)
    assert world.state() == "engine_wake"
    world.database.close()


def test_without_share_gpu_nothing_is_asked(world: World) -> None:
    rest = shared(world, share_gpu=False)
    rest.begin(lambda _: None)
    rest.end()
    assert world.state() is None
    world.database.close()
