"""Promote and roll back: rows that a person writes, and what the publisher makes of them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_engine import BASE
from fakes.publishing_world import World

from lightning_rl.errors import UserError
from lightning_rl.proxy.live.served import Served
from lightning_rl.records import VersionStatus, WeightsKind
from lightning_rl.store.policies import set_version_status

LORA, FULL = WeightsKind.LORA, WeightsKind.FULL
KINDS = pytest.mark.parametrize("kind", [LORA, FULL])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.database.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


async def live_with_history(world: World, kind: WeightsKind, number: int = 3) -> None:
    """Versions 1, 2, … were live one after the other, each trained from the one before."""
    for version in range(1, number + 1):
        world.candidate(version, float(version), version - 1.0, kind, parent=version - 1)
        await world.steps(2)
        assert world.status(version) is VersionStatus.LIVE


def served_weight(world: World) -> float:
    return world.engine._weight_of(str(world.live.resolve("policy", None).model))


# --- what may be asked ---


def refused(world: World, version: int | None, **said: Any) -> str:
    """The refusal's line; nothing was written."""
    before = (world.status(1), world.status(2), world.status(3))
    with pytest.raises(UserError) as error:
        world.ask(version, **said)
    assert (world.status(1), world.status(2), world.status(3)) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_served_is_refused_before_anything_is_written(world: World) -> None:
    async def scenario() -> None:
        with pytest.raises(UserError, match="no version of policy 'policy'"):
            world.ask(1)
        await live_with_history(world, LORA)
        assert "version 3 of policy 'policy' is live already" in refused(world, 3)
        assert "it has 1, 2, 3, and 0 is the base model" in refused(world, 7)
        shutil.rmtree(str(world.row(1).path))
        assert "is gone" in refused(world, 1)
        assert "what can: 0, 2, 3" in refused(world, 1)
        with world.database.write() as conn:
            set_version_status(conn, "policy", 2, VersionStatus.REJECTED, source="test")
        assert "was rejected: the engine's change is" in refused(world, 2)
        assert "--even-if-rejected" in refused(world, 2)
        world.ask(2, even_if_rejected=True)
        await world.steps()
        assert world.status(2) is VersionStatus.LIVE
        world.candidate(4, 4.0, 2.0, LORA)
        with pytest.raises(UserError, match="on its way already: it is candidate"):
            world.ask(4)

    run(scenario)


def test_without_a_number_a_rollback_goes_backwards_step_by_step(world: World) -> None:
    async def scenario() -> None:
        await live_with_history(world, LORA)
        for expected in (2, 1, 0):
            request = world.ask(None)
            assert request.version == expected
            await world.steps()
            assert world.outcome(request).outcome == "live"
            assert world.live.live_version("policy") == expected
        with pytest.raises(UserError, match="nothing was live before"):
            world.ask(None)

    run(scenario)


# --- what the publisher makes of it ---


@KINDS
def test_a_rollback_by_one_is_proven_by_the_probe_of_the_step_that_is_undone(
    world: World, kind: WeightsKind
) -> None:
    async def scenario() -> None:
        await live_with_history(world, kind)
        request = world.ask(2, note="worse answers")
        assert world.status(3) is VersionStatus.LIVE, "the publisher acts, not the row"
        await world.steps()
        assert (world.status(2), served_weight(world)) == (VersionStatus.LIVE, 2.0)
        verdict = world.outcome(request).verdict or {}
        assert verdict["result"] == "follows"
        assert verdict["slope"] == pytest.approx(1, abs=1e-3)
        await world.steps()
        assert world.status(3) is VersionStatus.RETIRED
        done = world.outcome(request)
        assert (done.from_version, done.outcome, done.by) == (3, "live", "ann (worse answers)")

    run(scenario)


@KINDS
def test_a_rollback_by_several_and_forward_again(world: World, kind: WeightsKind) -> None:
    async def scenario() -> None:
        await live_with_history(world, kind, 4)
        for version in (1, 4, 2):
            request = world.ask(version)
            await world.steps(2)
            assert world.outcome(request).outcome == "live", world.outcome(request).verdict
            assert (world.live.live_version("policy"), served_weight(world)) == (version, float(version))

    run(scenario)


@KINDS
@pytest.mark.parametrize("parents", [True, False])
@pytest.mark.parametrize("number", [1, 3])
def test_back_to_the_base_model(world: World, kind: WeightsKind, parents: bool, number: int) -> None:
    async def scenario() -> None:
        for version in range(1, number + 1):
            parent = version - 1 if parents else None
            world.candidate(version, float(version), version - 1.0, kind, parent=parent)
            await world.steps(2)
        request = world.ask(0)
        await world.steps(2)
        done = world.outcome(request)
        assert (done.outcome, (done.verdict or {})["result"]) == ("live", "follows"), done.verdict
        assert world.live.resolve("policy", None) == Served("policy", 0, BASE)
        assert (world.engine.weight, world.engine.label, world.engine.adapters) == (0.0, "default", {})
        assert world.status(number) is VersionStatus.RETIRED
        world.restart_proxy()
        world.engine.restart()
        await world.steps()
        assert world.live.resolve("policy", None) == Served("policy", 0, BASE)
        world.ask(number)
        await world.steps()
        assert (world.live.live_version("policy"), served_weight(world)) == (number, float(number))

    run(scenario)


@pytest.mark.parametrize(
    ("kind", "to", "sabotage"),
    [
        (FULL, 2, "same weights"),
        (FULL, 1, "same weights"),
        (FULL, 0, "same weights"),
        (FULL, 2, "other weights"),
        (FULL, 0, "other weights"),
        (FULL, 2, "cache stays"),
        (LORA, 1, "other weights"),
        (LORA, 1, "same weights"),
    ],
)
def test_a_sabotaged_rollback_is_rejected_and_the_version_that_was_live_serves(
    world: World, kind: WeightsKind, to: int, sabotage: str
) -> None:
    async def scenario() -> None:
        await live_with_history(world, kind)
        await world.steps(2)
        world.engine.sabotage = sabotage
        request = world.ask(to)
        await world.publisher.step()
        world.engine.sabotage = None
        done = world.outcome(request)
        assert done.outcome == "rejected", done.verdict
        assert (done.verdict or {})["reason"]
        await world.steps(2)
        assert (world.live.live_version("policy"), served_weight(world)) == (3, 3.0)
        assert world.status(3) is VersionStatus.LIVE

    run(scenario)


@pytest.mark.parametrize("parents", [True, False])
def test_a_rollback_over_a_small_step_is_not_believed_by_how_alike_the_versions_are(
    world: World, parents: bool
) -> None:
    async def scenario() -> None:
        weights = (0.0, 1.0, 2.0, 2.02)
        for version in range(1, 4):
            parent = version - 1 if parents else None
            world.candidate(version, weights[version], weights[version - 1], FULL, parent=parent)
            await world.steps(2)
        world.engine.sabotage = "same weights"
        request = world.ask(2)
        await world.publisher.step()
        assert (world.outcome(request).verdict or {})["result"] == "unchanged"
        world.engine.sabotage = None
        request = world.ask(2, even_if_rejected=True)
        await world.steps(2)
        assert (world.outcome(request).outcome, served_weight(world)) == ("live", 2.0)

    run(scenario)


def test_an_older_adapter_that_is_still_loaded_goes_live_at_once_and_its_episodes_stay(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0, LORA, parent=0)
        await world.steps()
        world.live.resolve("policy", "e1")
        world.candidate(2, 2.0, 1.0, LORA, parent=1)
        await world.steps()
        world.live.resolve("policy", "e2")
        assert world.status(1) is VersionStatus.DRAINING
        world.engine.calls.clear()
        world.ask(None)
        await world.steps(2)
        assert "load policy@1" not in world.engine.calls
        assert world.live.resolve("policy", "e3").version == 1
        assert world.live.resolve("policy", "e2").version == 2
        assert world.status(2) is VersionStatus.DRAINING

    run(scenario)


def test_episodes_keep_an_older_adapter_that_was_asked_for_when_the_engine_restarts(world: World) -> None:
    async def scenario() -> None:
        for version in (1, 2):
            world.candidate(version, float(version), version - 1.0, LORA, parent=version - 1)
            await world.steps()
            world.live.resolve("policy", f"e{version}")
        world.ask(1)
        world.engine.is_up = False
        await world.steps()
        world.engine.restart()
        await world.publisher.rotation.look()
        await world.publisher._place.fleet.release()
        assert world.live.resolve("policy", "e1").version == 1
        assert world.live.resolve("policy", "e2").version == 2
        assert set(world.engine.adapters) == {"policy@1", "policy@2"}

    run(scenario)


def test_an_older_adapter_that_fails_its_probe_is_taken_from_its_episodes(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0, LORA, parent=0)
        await world.steps()
        world.live.resolve("policy", "e1")
        world.candidate(2, 2.0, 1.0, LORA, parent=1)
        await world.steps()
        lease = await world.live.admit("policy", "e1")
        path, _ = world.engine.adapters["policy@1"]
        world.engine.adapters["policy@1"] = (path, 9.0)
        request = world.ask(1)
        await world.steps()
        assert world.outcome(request).outcome == "rejected"
        assert "policy@1" in world.engine.adapters, "a call is still answered by it"
        lease.release()
        await world.steps(2)
        assert set(world.engine.adapters) == {"policy@2"}
        assert world.live.resolve("policy", "e1").version == 2
        assert world.status(1) is VersionStatus.REJECTED

    run(scenario)


# --- several wishes at a time ---


def test_a_version_that_was_on_its_way_is_withdrawn(world: World) -> None:
    async def scenario() -> None:
        await live_with_history(world, LORA)
        world.candidate(4, 4.0, 3.0, LORA, parent=3)
        world.ask(2)
        assert world.status(4) is VersionStatus.REJECTED
        assert (world.row(4).verdict or {})["reason"] == ("ann asked for version 2 while it was on its way")
        await world.steps()
        assert world.live.live_version("policy") == 2

    run(scenario)


@KINDS
@pytest.mark.parametrize("first", [1, 0, 4])
def test_the_last_wish_counts_even_if_the_first_is_being_loaded(
    world: World, kind: WeightsKind, first: int
) -> None:
    async def scenario() -> None:
        await live_with_history(world, kind)
        if first == 4:
            world.candidate(4, 4.0, 3.0, kind, parent=3)
            request = None
        else:
            request = world.ask(first)
        score = world.engine.score

        async def ask_meanwhile(model: str, ids: Any, **more: Any) -> Any:
            world.engine.score = score  # type: ignore[method-assign]
            world.ask(2)
            return await score(model, ids, **more)

        world.engine.score = ask_meanwhile  # type: ignore[method-assign]
        await world.publisher.step()
        assert world.live.live_version("policy") in {2, 3}
        await world.steps(2)
        assert (world.live.live_version("policy"), served_weight(world)) == (2, 2.0)
        if request is not None:
            assert world.outcome(request).outcome == "superseded"
        if first:
            assert world.status(first) in {VersionStatus.RETIRED, VersionStatus.REJECTED}

    run(scenario)


def test_asking_for_what_is_live_withdraws_what_is_on_its_way(world: World) -> None:
    async def scenario() -> None:
        await live_with_history(world, LORA)
        first = world.ask(0)
        second = world.ask(3)
        assert (world.outcome(first).outcome, second.outcome) == ("superseded", "live")
        await world.steps()
        assert world.live.live_version("policy") == 3

    run(scenario)


def test_a_new_publisher_does_not_believe_that_a_version_is_live_that_the_log_has_rolled_back(
    world: World,
) -> None:
    async def scenario() -> None:
        await live_with_history(world, LORA, 1)
        seen = world.live.snapshot()
        world.ask(0)
        await world.steps()
        world.live.apply(seen)  # the old publisher died before it could tell
        await world.publisher.take_over(was_open=True)
        await world.steps()
        assert world.live.resolve("policy", None) == Served("policy", 0, BASE)

    run(scenario)


def test_an_engine_that_dies_in_the_middle_is_rolled_back_when_it_returns(world: World) -> None:
    async def scenario() -> None:
        await live_with_history(world, FULL)
        request = world.ask(0)
        world.engine.dies_at = len(world.engine.calls) + 8
        await world.publisher.step()
        assert world.outcome(request).outcome is None
        world.engine.restart()
        await world.steps(2)
        assert world.outcome(request).outcome == "live"
        assert (world.engine.weight, world.engine.label) == (0.0, "default")

    run(scenario)
