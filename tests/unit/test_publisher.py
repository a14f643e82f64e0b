"""From candidate to live to retired, and what happens when something on the way is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_engine import BASE
from fakes.publishing_world import World
from fakes.waiting import until

from lightning_rl.proxy.live.served import Served
from lightning_rl.proxy.publishing.version_log import Notices
from lightning_rl.records import VersionStatus, WeightsKind
from lightning_rl.store.database import Database
from lightning_rl.store.policies import set_version_status

LORA, FULL = WeightsKind.LORA, WeightsKind.FULL


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.database.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def served(world: World, episode: str | None = None) -> Served:
    return world.live.resolve("policy", episode)


# --- full weights ---


def test_full_weights_go_live_and_the_old_version_retires(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0)
        await world.steps()
        assert world.status(1) is VersionStatus.LIVE
        assert served(world) == Served("policy", 1, BASE)
        assert world.engine.weight == 1.0
        verdict = world.row(1).verdict
        assert verdict is not None
        assert verdict["result"] == "follows"
        assert verdict["cache"] == "follows"
        assert verdict["slope"] == pytest.approx(1, abs=1e-3)
        assert verdict["held_ms"] >= 0
        world.candidate(2, 2.0, 1.0)
        await world.steps(2)
        assert world.status(2) is VersionStatus.LIVE
        assert world.status(1) is VersionStatus.RETIRED
        assert served(world).version == 2

    run(scenario)


@pytest.mark.parametrize(
    ("sabotage", "reason"),
    [
        ("same weights", "old weights"),
        ("other weights", "other weights"),
        ("cache stays", "prefix cache still answers for the old weights"),
        ("no development routes", "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_sabotaged_full_weights_are_rejected_and_the_old_ones_serve(
    world: World, sabotage: str, reason: str
) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0)
        await world.steps()
        world.engine.sabotage = sabotage
        world.candidate(2, 2.0, 1.0)
        await world.publisher.step()
        assert world.status(2) is VersionStatus.REJECTED
        verdict = world.row(2).verdict
        assert verdict is not None
        assert reason in verdict["reason"]
        world.engine.sabotage = None
        await world.steps()
        assert world.status(1) is VersionStatus.LIVE
        assert served(world) == Served("policy", 1, BASE)
        assert world.engine.weight == 1.0
        assert all(held == 1.0 for held in world.engine.cache.values())

    run(scenario)


def test_a_cache_that_cannot_be_emptied_rejects(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rl.proxy.publishing.swap.RESET_TRIES", 1)

    async def scenario() -> None:
        world.engine.sabotage = "reset refused"
        world.candidate(1, 1.0, 0.0)
        await world.steps()
        assert world.status(1) is VersionStatus.REJECTED
        assert "prefix cache" in str(world.row(1).verdict)
        assert served(world) == Served("policy", 0, BASE)
        assert world.engine.weight == 0.0

    run(scenario)


def test_calls_are_held_during_the_reload_and_none_sees_both(world: World) -> None:
    async def scenario() -> None:
        await world.steps()
        early = await world.live.admit("policy", None)
        world.candidate(1, 1.0, 0.0)
        publishing = asyncio.create_task(world.publisher.step())
        await until(lambda: not world.live.gate.is_open)
        late = asyncio.create_task(world.live.admit("policy", None))
        await asyncio.sleep(0.05)
        assert not late.done()
        assert "reload policy-1" not in world.engine.calls
        early.release()
        lease = await late
        assert (early.served.version, lease.served.version) == (0, 1)
        lease.release()
        await publishing

    run(scenario)


def test_a_version_waits_for_a_call_that_does_not_end_and_lets_the_others_go_on(world: World) -> None:
    async def scenario() -> None:
        await world.steps()
        stuck = await world.live.admit("policy", None)
        world.candidate(1, 1.0, 0.0)
        await world.steps()
        assert world.status(1) is VersionStatus.CANDIDATE
        assert not any(call.startswith("reload") for call in world.engine.calls)
        lease = await asyncio.wait_for(world.live.admit("policy", None), 1)
        assert lease.served.version == 0
        lease.release()
        stuck.release()
        await world.steps()
        assert world.status(1) is VersionStatus.LIVE

    run(scenario)


def test_files_are_looked_at_before_the_engine_hears_of_them(world: World) -> None:
    async def scenario() -> None:
        await world.steps()
        cut = Path(str(world.candidate(1, 1.0, 0.0).path)) / "model.safetensors"
        cut.write_bytes(cut.read_bytes()[:-3])
        changed = Path(str(world.candidate(2, 1.0, 0.0).path)) / "model.safetensors"
        changed.write_bytes(changed.read_bytes()[:-1] + b"\x41")
        world.candidate(3, 1.0, 0.0, path=str(world.folder / "nowhere"))
        world.candidate(4, 1.0, 0.0, probe=())
        world.candidate(5, 1.0, 0.0, path=None)
        await world.steps()
        reasons = [str((world.row(v).verdict or {})["reason"]) for v in range(1, 6)]
        assert [world.status(v) for v in range(1, 6)] == [VersionStatus.REJECTED] * 5
        assert "cut or damaged" in reasons[0]
        assert "not those that were trained" in reasons[1]
        assert "no such folder" in reasons[2]
        assert "no probe" in reasons[3]
        assert "names no folder" in reasons[4]
        assert not any(call.startswith("reload") for call in world.engine.calls)

    run(scenario)


def test_a_step_that_changed_nothing_is_indistinguishable_and_serves(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 0.0, 0.0)
        await world.steps()
        assert world.status(1) is VersionStatus.LIVE
        assert (world.row(1).verdict or {})["result"] == "indistinguishable"

    run(scenario)


def test_full_weights_of_another_policy_do_not_take_over_the_base_name(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0, policy="writer")
        await world.steps()
        assert world.row(1, "writer").status is VersionStatus.REJECTED
        assert world.engine.weight == 0.0

    run(scenario)


# --- adapters ---


def test_an_adapter_goes_live_beside_the_old_one_and_episodes_stay(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0, LORA)
        await world.steps()
        assert served(world, "e1") == Served("policy", 1, "policy@1")
        world.candidate(2, 2.0, 1.0, LORA)
        await world.steps()
        assert served(world, "e1").version == 1
        assert served(world, "e2").version == 2
        assert world.status(1) is VersionStatus.DRAINING
        assert set(world.engine.adapters) == {"policy@1", "policy@2"}
        world.live.end_episode("e1")
        await world.steps()
        assert world.status(1) is VersionStatus.RETIRED
        assert set(world.engine.adapters) == {"policy@2"}
        assert world.engine.weight == 0.0

    run(scenario)


def test_pins_do_not_keep_more_than_two_old_adapters(world: World) -> None:
    async def scenario() -> None:
        for version in range(1, 5):
            world.candidate(version, float(version), version - 1.0, LORA)
            await world.steps(2)
            served(world, f"e{version}")
        assert set(world.engine.adapters) == {"policy@2", "policy@3", "policy@4"}
        assert world.status(1) is VersionStatus.RETIRED
        assert served(world, "e1").version == 4
        assert served(world, "e2").version == 2

    run(scenario)


@pytest.mark.parametrize(
    ("sabotage", "reason"),
    [
        ("same weights", "old weights"),
        ("other weights", "other weights"),
        ("wrong root", "/elsewhere"),
        ("refuses", "max_lora_rank"),
    ],
)
def test_a_sabotaged_adapter_is_rejected_and_unloaded(world: World, sabotage: str, reason: str) -> None:
    async def scenario() -> None:
        world.engine.sabotage = sabotage
        world.candidate(1, 1.0, 0.0, LORA)
        await world.steps()
        assert world.status(1) is VersionStatus.REJECTED
        assert reason in str(world.row(1).verdict)
        assert served(world) == Served("policy", 0, BASE)

    run(scenario)


def test_two_policies_have_adapters_of_their_own(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0, LORA, policy="planner")
        world.candidate(1, 2.0, 0.0, LORA, policy="writer")
        await world.steps()
        assert world.live.resolve("planner", None) == Served("planner", 1, "planner@1")
        assert world.live.resolve("writer", None) == Served("writer", 1, "writer@1")
        assert served(world) == Served("policy", 0, BASE)

    run(scenario)


# --- engine and proxy come and go ---


def test_an_engine_that_dies_is_refused_and_brought_back_when_it_returns(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0)
        await world.steps()
        world.engine.is_up = False
        await world.steps()
        assert world.live.base_model is None
        world.engine.restart()
        assert world.engine.weight == 0.0
        await world.steps()
        assert world.engine.weight == 1.0
        assert served(world) == Served("policy", 1, BASE)

    run(scenario)


def test_adapters_come_back_with_the_engine(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0, LORA)
        await world.steps()
        world.engine.is_up = False
        await world.steps()
        world.engine.restart()
        await world.steps()
        assert set(world.engine.adapters) == {"policy@1"}
        assert served(world) == Served("policy", 1, "policy@1")

    run(scenario)


def test_a_proxy_that_starts_leaves_an_engine_alone_that_holds_the_live_version(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0)
        await world.steps()
        world.restart_proxy()
        world.engine.calls.clear()
        await world.steps()
        assert served(world) == Served("policy", 1, BASE)
        assert not any(call.startswith("reload") for call in world.engine.calls)

    run(scenario)


def test_a_label_is_not_believed(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0)
        await world.steps()
        world.engine.weight = 0.0  # somebody reloaded, the label stayed
        world.restart_proxy()
        await world.steps()
        assert world.engine.weight == 1.0

    run(scenario)


def test_a_proxy_with_a_new_log_gets_the_base_weights_back(world: World, tmp_path: Path) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0)
        await world.steps()
        world.database.close()
        world.database = Database.open(f"sqlite:///{tmp_path / 'new.db'}")
        world.restart_proxy()
        await world.steps()
        assert world.engine.weight == 0.0
        assert served(world) == Served("policy", 0, BASE)

    run(scenario)


def test_a_live_version_whose_folder_is_gone_gives_way_to_the_base_model(world: World) -> None:
    async def scenario() -> None:
        row = world.candidate(1, 1.0, 0.0)
        await world.steps()
        (Path(str(row.path)) / "model.safetensors").unlink()
        world.engine.restart()
        world.restart_proxy()
        await world.steps()
        assert world.status(1) is VersionStatus.REJECTED
        assert served(world) == Served("policy", 0, BASE)
        assert world.engine.weight == 0.0

    run(scenario)


@pytest.mark.parametrize("status", [VersionStatus.LOADING, VersionStatus.PROBING])
def test_a_version_that_a_crash_left_half_way_is_taken_up_again(world: World, status: VersionStatus) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0)
        with world.database.write() as conn:
            set_version_status(conn, "policy", 1, status, source="test")
        world.engine.weight, world.engine.label = 1.0, "loading policy/1"
        await world.steps()
        assert world.status(1) is VersionStatus.LIVE

    run(scenario)


def test_a_version_that_kills_the_engine_is_given_up(world: World) -> None:
    async def scenario() -> None:
        await world.steps()
        world.engine.sabotage = "dies"
        world.candidate(1, 1.0, 0.0)
        for _ in range(2):
            await world.steps()
            assert world.live.base_model is None
            world.engine.restart()
        world.engine.sabotage = None
        await world.steps()
        assert world.status(1) is VersionStatus.REJECTED
        assert served(world) == Served("policy", 0, BASE)

    run(scenario)


def test_calls_wait_until_the_first_look_at_the_engine_has_ended(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0)
        await world.steps()
        world.engine.restart()
        world.restart_proxy()
        world.live.set_base_model(BASE)  # as the proxy does when it checks the engine at start
        world.live.gate.hold()
        world.engines.withdraw(world.engines.all[0], is_up=False)
        running = asyncio.create_task(world.publisher.turn())
        await asyncio.sleep(0)
        lease = await asyncio.wait_for(world.live.admit("policy", None), 5)
        assert lease.served == Served("policy", 1, BASE)
        assert world.engine.weight == 1.0
        lease.release()
        await running

    run(scenario)


# --- rows that somebody flips by hand ---


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_version_marked_as_live_too_early_is_proven_first(world: World, is_wrong: bool) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0, LORA)
        await world.steps()
        world.candidate(2, 2.0, 1.0, LORA, status=VersionStatus.REJECTED)
        if is_wrong:
            world.engine.sabotage = "other weights"
        with world.database.write() as conn:
            set_version_status(conn, "policy", 2, VersionStatus.LIVE, source="somebody")
        assert world.status(1) is VersionStatus.DRAINING
        assert served(world).version == 1
        await world.steps()
        if is_wrong:
            assert served(world).version == 1
            assert world.status(1) is VersionStatus.LIVE
            assert world.status(2) is VersionStatus.REJECTED
            assert "policy@2" not in world.engine.adapters
        else:
            assert served(world).version == 2
            assert world.status(2) is VersionStatus.LIVE
            assert world.status(1) is not VersionStatus.LIVE

    run(scenario)


def test_of_two_rows_that_say_live_the_one_that_serves_is(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0, LORA)
        await world.steps()
        world.candidate(2, 2.0, 1.0, LORA)
        await world.steps(2)
        assert served(world).version == 2
        with world.database.write() as conn:
            conn.exec_driver_sql("UPDATE policy_versions SET status = 'live' WHERE version = 1")
        await world.steps(2)
        assert served(world).version == 2
        assert world.status(2) is VersionStatus.LIVE
        assert world.status(1) is VersionStatus.RETIRED

    run(scenario)


def test_a_fault_of_ours_is_told_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()

    def turn(fault: Exception | None) -> None:
        notices.begin()
        if fault is None:
            notices.end()
        else:
            notices.broke(fault)

    for fault in (KeyError("a"), KeyError("a"), KeyError("b"), None, KeyError("a")):
        turn(fault)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"publishing failed: KeyError('{key}'); going on" for key in "aba"]
