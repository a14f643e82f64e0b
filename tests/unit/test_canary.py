"""Canaries: who is served by one, and what its episodes' rewards make of it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_engine import BASE, FakeEngine, trained_version, write_folder
from fakes.log_rows import intent, reward
from fakes.own_gate import OwnGate
from fakes.query_plans import explaining, full_scans
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.errors import PublishError
from lightning_rl.proxy.live.engines import Engines
from lightning_rl.proxy.live.gate import Gate
from lightning_rl.proxy.live.policies import LivePolicies
from lightning_rl.proxy.live.served import Served, UnservedVersionError
from lightning_rl.proxy.publishing import canary as canary_room
from lightning_rl.proxy.publishing.canary import Plan, judge
from lightning_rl.proxy.publishing.place import Handle, Place
from lightning_rl.proxy.publishing.publisher import Publisher
from lightning_rl.records import PolicyVersion, Purpose, VersionStatus, WeightsKind, now_ms
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.settings.train import TrainSettings
from lightning_rl.store.append import append_entries
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import add_reward, create_episode
from lightning_rl.store.outcomes import outcomes
from lightning_rl.store.policies import add_candidate, load_version, set_version_status
from lightning_rl.store.promotion import ask_for_version
from lightning_rl.store.schema import episodes
from lightning_rl.trainer.candidate import Handover

LORA, FULL = WeightsKind.LORA, WeightsKind.FULL
CANARY, LIVE, REJECTED = VersionStatus.CANARY, VersionStatus.LIVE, VersionStatus.REJECTED
PLAN = Plan(0.5, 4, 0.1, 100, "reject", since_ms=1_000_000)


# --- the rule ---


def test_nothing_is_decided_before_both_have_enough_episodes() -> None:
    assert judge(PLAN, [0.0] * 3, [1.0] * 9, 1_000_001) is None
    assert judge(PLAN, [0.0] * 9, [1.0] * 3, 1_000_001) is None
    assert judge(PLAN, [0.0] * 4, [1.0] * 4, 1_000_001) is not None


def test_a_canary_is_rejected_below_tolerance_and_a_standard_error() -> None:
    live = [0.5, 0.5, 0.5, 0.5]
    for value, passes in ((0.5, True), (0.41, True), (0.39, False)):
        decision = judge(PLAN, [value] * 4, live, 1_000_001)
        assert decision is not None
        assert decision.is_promoted is passes
    # Variances 1/3 and 1/3 over 4 each: an error of sqrt(1/6) = 0.41, so 0.5 - 0.1 - 0.41 < 0.
    decision = judge(PLAN, [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0], 1_000_001)
    assert decision is not None
    assert not decision.is_promoted  # only one side varies: 0.5 - 0.1 - sqrt(1/12) = 0.11
    assert decision.numbers["standard_error"] == pytest.approx(math.sqrt(1 / 12))
    decision = judge(PLAN, [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0], 1_000_001)
    assert decision is not None
    assert decision.is_promoted
    assert decision.reason == "its mean reward is 0.25 over 4 episodes, the live version 0.5 over 4"


@pytest.mark.parametrize("policy", ["reject", "promote"])
def test_at_the_time_out_the_stated_policy_decides(policy: Any) -> None:
    plan = Plan(0.5, 4, 0.1, 100, policy, since_ms=1_000_000)
    assert judge(plan, [], [], 1_099_999) is None
    decision = judge(plan, [0.0] * 4, [1.0] * 3, 1_100_000)
    assert decision is not None
    assert decision.is_promoted is (policy == "promote")
    assert "4 episodes of it and 3 of the live version" in decision.reason


# --- who is served ---


def on_trial(share: float) -> LivePolicies:
    live = LivePolicies("policy", {}, Gate())
    live.set_base_model(BASE)
    live.resolve("policy", "old")
    live.set_canary("policy", 1, "policy@1", share)
    return live


def test_a_share_of_the_episodes_that_begin_is_the_canarys() -> None:
    live = on_trial(0.25)
    drawn = {f"e{n}": live.resolve("policy", f"e{n}").version for n in range(2000)}
    assert 0.2 < sum(version == 1 for version in drawn.values()) / len(drawn) < 0.3
    again = on_trial(0.25)  # another process
    again.apply(live.snapshot())
    assert {name: again.resolve("policy", name).version for name in drawn} == drawn
    assert live.resolve("policy", "old").version == 0
    assert live.resolve("policy", None).version == 0
    assert live.live_version("policy") == 0


def test_another_version_draws_other_episodes() -> None:
    one, other = on_trial(0.5), LivePolicies("policy", {}, Gate())
    other.set_base_model(BASE)
    other.set_canary("policy", 2, "policy@2", 0.5)
    names = [f"e{n}" for n in range(200)]
    first = {name for name in names if one.resolve("policy", name).version == 1}
    second = {name for name in names if other.resolve("policy", name).version == 2}
    assert first != second


def test_a_canary_beside_plain_weights_ends_calls_with_its_own_version() -> None:
    live = on_trial(1.0)
    served = live.resolve("policy", "new")
    assert served == Served("policy", 1, "policy@1")
    assert live.version_now(served) == 1
    assert live.version_now(live.resolve("policy", None)) == 0


def test_episodes_of_a_canary_that_is_taken_out_go_on_with_the_live_version() -> None:
    live = on_trial(1.0)
    assert live.resolve("policy", "new").version == 1
    live.drop("policy", 1)
    assert live.canary_version("policy") is None
    assert live.resolve("policy", "new") == Served("policy", 0, BASE)
    assert live.resolve("policy", "newer") == Served("policy", 0, BASE)
    with pytest.raises(UnservedVersionError):
        live.resolve("policy@1", None)
    assert "canary" not in live.snapshot()["policies"]["policy"]


# --- the way of one ---


class World:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        write_folder(folder / "base", 0.0)
        self.engine = FakeEngine(folder / "base")
        self.database = Database.open(f"sqlite:///{folder / 'log.db'}")
        self.settings = ProxySettings.load(
            **{"canary_share": 0.5, "canary_episodes": 3, "canary_tolerance": 0.1} | settings
        )
        self.num_episodes = 0
        self.restart_proxy()

    def restart_proxy(self, *, share: float | None = None) -> None:
        settings = (
            self.settings if share is None else self.settings.model_copy(update={"canary_share": share})
        )
        self.live = LivePolicies("policy", {}, Gate())
        self.engines = Engines(settings.engine_url)
        place = Place(
            [Handle(self.engine, self.engines.all[0])], self.engines, self.live, OwnGate(self.live), 0.2
        )
        self.publisher = Publisher(self.database, place, settings)

    def candidate(self, version: int, kind: WeightsKind = LORA) -> None:
        with self.database.write() as conn:
            add_candidate(conn, trained_version(self.folder, version, kind))

    def row(self, version: int) -> PolicyVersion:
        with self.database.read() as conn:
            found = load_version(conn, "policy", version)
        assert found is not None
        return found

    def status(self, version: int) -> VersionStatus:
        return self.row(version).status

    def episodes(self, version: int, *values: float) -> None:
        """That have ended, served by that version."""
        with self.database.write() as conn:
            for value in values:
                self.num_episodes += 1
                name = f"episode-{self.num_episodes}"
                append_entries(conn, [intent(f"call-{name}", name, version=version)])
                add_reward(conn, reward(name, value, final=True))

    async def step(self) -> None:
        self.publisher.rotation.hurry()
        self.publisher.canaries._judged_at_sec = float("-inf")
        await self.publisher.step()
        assert self.live.gate.is_open


def run(world: World, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    try:
        asyncio.run(scenario())
    finally:
        world.database.close()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_canary_that_does_well_goes_live(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1)
        await world.step()
        assert world.status(1) is CANARY
        assert world.live.canary_version("policy") == 1
        assert world.live.live_version("policy") == 0
        assert (world.row(1).verdict or {})["waits_sec"] == 3600
        world.episodes(0, 0.5, 0.5, 0.5)
        world.episodes(1, 0.9, 0.9)
        await world.step()
        assert world.status(1) is CANARY
        world.episodes(1, 0.9)
        await world.step()
        assert world.status(1) is LIVE
        assert world.live.resolve("policy", "new") == Served("policy", 1, "policy@1")
        assert world.live.canary_version("policy") is None
        verdict = world.row(1).verdict
        assert verdict is not None
        assert verdict["result"] == "follows"
        assert verdict["canary"]["canary_mean"] == pytest.approx(0.9)
        assert "waits_sec" not in verdict

    run(world, scenario)


def test_a_canary_that_does_worse_is_rejected_and_unloaded_when_its_calls_have_ended(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1)
        await world.step()
        name = next(f"e{n}" for n in range(99) if world.live.resolve("policy", f"e{n}").version == 1)
        running = await world.live.admit("policy", name)
        world.episodes(0, 0.5, 0.5, 0.5)
        world.episodes(1, 0.1, 0.1, 0.1)
        await world.step()
        assert world.status(1) is REJECTED
        verdict = world.row(1).verdict
        assert verdict is not None
        assert verdict["reason"].startswith("as a canary, its mean reward is 0.1 over 3 episodes")
        assert world.live.resolve("policy", name) == Served("policy", 0, BASE)
        assert set(world.engine.adapters) == {"policy@1"}  # a call is being answered
        assert running.version_now() == 1
        running.release()
        await world.step()
        assert world.engine.adapters == {}
        assert world.engines.holding.adapters == {}

    run(world, scenario)


def test_other_candidates_wait_until_a_canary_is_judged(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1)
        await world.step()
        world.candidate(2)
        await world.step()
        assert (world.status(1), world.status(2)) == (CANARY, VersionStatus.CANDIDATE)
        world.episodes(0, 0.5, 0.5, 0.5)
        world.episodes(1, 0.5, 0.5, 0.5)
        await world.step()
        assert (world.status(1), world.status(2)) == (LIVE, CANARY)
        world.episodes(2, 0.0, 0.0, 0.0)
        await world.step()
        assert (world.status(1), world.status(2)) == (LIVE, REJECTED)
        await world.step()
        assert set(world.engine.adapters) == {"policy@1"}

    run(world, scenario)


def test_a_canary_goes_on_by_its_own_plan_when_the_proxy_or_the_engine_is_restarted(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1)
        await world.step()
        drawn = [world.live.resolve("policy", f"e{n}").version for n in range(50)]
        world.restart_proxy(share=0)  # the settings of later versions
        world.engine.restart()
        await world.step()
        assert world.status(1) is CANARY
        assert set(world.engine.adapters) == {"policy@1"}
        assert [world.live.resolve("policy", f"e{n}").version for n in range(50)] == drawn
        world.engine.restart()  # behind a proxy that goes on
        await world.step()
        assert world.live.canary_version("policy") == 1
        assert set(world.engine.adapters) == {"policy@1"}
        world.episodes(0, 0.5, 0.5, 0.5)
        world.episodes(1, 0.5, 0.5, 0.5)
        await world.step()
        assert world.status(1) is LIVE

    run(world, scenario)


def test_a_canary_whose_folder_is_gone_is_rejected_and_the_live_version_comes_back(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1)
        await world.step()
        (Path(str(world.row(1).path)) / "adapter_model.safetensors").unlink()
        world.engine.restart()
        world.engine.sabotage = "other weights"
        world.restart_proxy()
        (Path(str(world.row(1).path)) / "adapter_model.safetensors").write_bytes(
            (world.folder / "base" / "model.safetensors").read_bytes()
        )
        await world.step()
        assert world.status(1) is REJECTED
        assert world.live.resolve("policy", "new") == Served("policy", 0, BASE)

    run(world, scenario)


def test_whoever_asks_for_another_version_ends_the_canary(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1)
        await world.step()
        assert world.status(1) is CANARY
        with world.database.write() as conn:
            ask_for_version(conn, "policy", 0, "rollback", source="somebody")
        assert world.status(1) is REJECTED
        await world.step()
        assert world.live.canary_version("policy") is None
        assert world.engine.adapters == {}
        assert (world.row(1).verdict or {})["reason"].startswith("somebody asked for version 0")

    run(world, scenario)


def test_a_version_that_served_before_needs_no_canary_to_come_back(world: World) -> None:
    async def scenario() -> None:
        for version in (1, 2):
            world.candidate(version)
            await world.step()
            world.episodes(version - 1, 0.5, 0.5, 0.5)
            world.episodes(version, 0.5, 0.5, 0.5)
            await world.step()
            assert world.status(version) is LIVE
        with world.database.write() as conn:
            ask_for_version(conn, "policy", 1, "rollback", source="somebody")
        await world.step()
        assert world.status(1) is LIVE
        assert world.live.live_version("policy") == 1

    run(world, scenario)


def test_full_weights_are_refused_where_canaries_are_wanted(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, FULL)
        await world.step()
        assert world.status(1) is REJECTED
        assert "can't serve a share" in (world.row(1).verdict or {})["reason"]
        assert world.engine.weight == 0.0

    run(world, scenario)


def test_full_weights_in_the_log_are_one_line_at_the_start(world: World) -> None:
    world.candidate(1, FULL)
    world.database.close()
    variables = {
        "LIGHTNING_DB": f"sqlite:///{world.folder / 'log.db'}",
        "LIGHTNING_PROXY_CANARY_SHARE": "0.1",
    }
    result = CliRunner().invoke(app, ["proxy", "serve", "--port", "0"], env=variables)
    assert result.exit_code != 0
    assert "version 1 of 'policy' is full weights" in f"{result.output}{result.exception}"


# --- what counts ---


def test_only_whole_rewarded_training_episodes_of_the_version_count(world: World) -> None:
    world.episodes(1, 0.1, 0.2, 0.3)
    world.episodes(0, 0.9)
    with world.database.write() as conn:
        append_entries(conn, [intent("m0", "mixed", version=0), intent("m1", "mixed", version=1)])
        add_reward(conn, reward("mixed", 5.0, final=True))
        create_episode(conn, episode_id="exam", purpose=Purpose.EVAL)
        append_entries(conn, [intent("x", "exam", version=1), intent("r", "running", version=1)])
        add_reward(conn, reward("exam", 7.0, final=True))
        add_reward(conn, reward("running", 8.0))
        append_entries(conn, [intent("o", "other", policy="writer", version=1)])
        add_reward(conn, reward("other", 9.0, final=True))
        assert sorted(outcomes(conn, "policy", 1, limit=100)) == [0.1, 0.2, 0.3]
        assert len(outcomes(conn, "policy", 1, limit=2)) == 2
        assert outcomes(conn, "policy", 1, since_ms=2**50, limit=9) == []
    world.database.close()


def test_an_episode_counts_by_its_end_however_early_it_was_announced(world: World) -> None:
    """Both sides: a batch may be announced before either version was made, and played with both."""
    since_ms = now_ms()
    with world.database.write() as conn:
        for name, version, value, ended_at_ms in (
            ("played-by-it", 1, 0.75, since_ms + 2),
            ("by-the-other", 0, 0.5, since_ms + 2),
            ("before-it", 1, 0.25, since_ms - 1),  # of an earlier trial of the same version
            ("also-before", 0, 0.0, since_ms - 1),
        ):
            append_entries(conn, [intent(f"call-{name}", name, version=version)])
            add_reward(conn, reward(name, value, final=True))
            times = {"created_at_ms": since_ms - 5000, "ended_at_ms": ended_at_ms}
            conn.execute(episodes.update().where(episodes.c.id == name).values(times))
        assert outcomes(conn, "policy", 1, since_ms=since_ms, limit=9) == [0.75]
        assert outcomes(conn, "policy", 0, since_ms=since_ms, limit=9) == [0.5]
        older = {"created_at_ms": since_ms - 9000}
        conn.execute(episodes.update().where(episodes.c.id == "played-by-it").values(older))
        assert outcomes(conn, "policy", 1, limit=1) == [0.75]  # ended last, announced first
    world.database.close()


def test_a_batch_that_was_announced_before_the_canary_decides_about_it(world: World) -> None:
    async def scenario() -> None:
        names = [f"episode-{number}" for number in range(1, 8)]
        with world.database.write() as conn:
            for name in names:
                create_episode(conn, episode_id=name, task_id="t", batch="b", expected_size=len(names))
            append_entries(conn, [intent("running", "running", version=0)])
            conn.execute(episodes.update().values(created_at_ms=now_ms() - 60_000))
        world.candidate(1)
        await world.step()
        assert world.status(1) is CANARY
        world.episodes(1, 0.1, 0.1, 0.1)
        world.episodes(0, 0.5, 0.5)
        await world.step()
        assert world.status(1) is CANARY
        with world.database.write() as conn:  # began with the live version, which it stays with
            add_reward(conn, reward("running", 0.6, final=True))
        await world.step()
        assert world.status(1) is REJECTED
        numbers = (world.row(1).verdict or {})["canary"]
        assert (numbers["canary_episodes"], numbers["live_episodes"]) == (3, 3)
        assert numbers["live_mean"] == pytest.approx(1.6 / 3)

    run(world, scenario)


def test_what_decides_is_read_through_an_index(world: World) -> None:
    world.episodes(1, 0.5)
    with explaining(world.database) as plans, world.database.read() as conn:
        assert outcomes(conn, "policy", 1, since_ms=1, limit=9) == [0.5]
    assert full_scans(plans, ("calls", "episodes", "rewards")) == []
    world.database.close()


# --- the trainer ---


def test_the_trainer_waits_as_long_as_gates_and_canaries_may_take(world: World) -> None:
    world.candidate(1)
    with world.database.write() as conn:
        set_version_status(conn, "policy", 1, CANARY, verdict={"waits_sec": 600}, source="test")
    settings = TrainSettings.load(model=Path(), db=world.database.url, publish_timeout_sec=0.05)
    handover = Handover(world.database, settings, "run", world.folder, serves=0)
    seen: list[VersionStatus] = []

    def decide() -> None:
        database = Database.open(world.database.url)
        with database.write() as conn:
            set_version_status(conn, "policy", 1, LIVE, source="test")
        database.close()

    later = threading.Timer(0.5, decide)
    later.start()
    handover.await_verdict(world.row(1), seen.append)
    later.join()
    assert seen == [CANARY, LIVE]
    with world.database.write() as conn:
        set_version_status(
            conn, "policy", 1, VersionStatus.PROBING, verdict={"waits_sec": 600}, source="test"
        )
    with pytest.raises(PublishError, match=r"still probing after 0\.05 s"):
        handover.await_verdict(world.row(1), seen.append)
    world.database.close()


def test_looks_at_the_log_are_seconds_apart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def counted(*args: Any, **more: Any) -> list[float]:
        looks.append(1)
        return []

    monkeypatch.setattr(canary_room, "outcomes", counted)
    monkeypatch.setattr(canary_room, "LOOK_SEC", 3600.0)

    async def scenario() -> None:
        world.candidate(1)
        await world.step()
        looks.clear()
        await world.step()
        assert len(looks) == 2  # of the canary, and of the live version
        for _ in range(3):
            await world.publisher.step()
        assert len(looks) == 2

    run(world, scenario)
