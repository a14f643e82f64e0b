"""Which weights answer which model name, and what an episode is pinned to."""

from __future__ import annotations

import asyncio

import pytest

from lightning_rl.errors import EngineError
from lightning_rl.proxy.live.gate import Gate
from lightning_rl.proxy.live.policies import LivePolicies
from lightning_rl.proxy.live.served import Served, UnservedVersionError
from lightning_rl.records import WeightsKind

LORA, FULL = WeightsKind.LORA, WeightsKind.FULL


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def seen(aliases: dict[str, str] | None = None, clock: Clock | None = None) -> LivePolicies:
    live = LivePolicies("policy", aliases or {}, Gate(), pin_max_age_sec=100, clock=clock or Clock())
    live.set_base_model("base")
    return live


def test_the_base_model_is_version_0_of_the_policy() -> None:
    live = seen()
    assert live.resolve("policy", None) == Served("policy", 0, "base")
    assert live.resolve("base", None) == Served("policy", 0, None)
    assert live.resolve(None, None) == Served("policy", 0, "base")
    assert live.live_version("policy") == 0


def test_an_alias_serves_the_policy_and_an_unknown_name_is_the_engines_business() -> None:
    live = seen({"gpt-*": "policy", "gpt-5*": "other", "gpt-4o": "base"})
    assert live.resolve("gpt-4.1", None) == Served("policy", 0, "base")
    assert live.resolve("gpt-5-mini", None).policy == "policy"  # the earlier pattern wins
    assert live.resolve("gpt-4o", None) == Served("policy", 0, "base")  # the exact one before any pattern
    assert live.resolve("claude-x", None) == Served(None, None, None)


def test_an_alias_cannot_hide_a_name_of_ours() -> None:
    live = seen({"*": "elsewhere"})
    assert live.resolve("policy", None).policy == "policy"
    assert live.resolve("base", None).policy == "policy"
    assert live.resolve("anything", None) == Served(None, None, "elsewhere")


def test_nothing_is_served_before_the_engine_was_seen_or_after_it_went() -> None:
    live = LivePolicies("policy", {"gpt-*": "policy"}, Gate())
    for name in ("policy", "gpt-4o", None):
        with pytest.raises(EngineError, match="not reachable"):
            live.resolve(name, None)
    assert live.resolve("text-embedder", None) == Served(None, None, None)
    live.set_base_model("base")
    live.set_live("policy", 3, FULL, "base")
    live.forget_engine()
    with pytest.raises(EngineError):
        live.resolve("policy", None)


def test_full_weights_take_over_the_base_name_and_every_episode() -> None:
    live = seen()
    before = live.resolve("policy", "e1")
    live.set_live("policy", 1, FULL, "base")
    assert before == Served("policy", 0, "base")
    assert live.resolve("policy", "e1") == Served("policy", 1, "base")
    assert live.resolve("base", None) == Served("policy", 1, None)
    assert live.version_now(before) == 1
    with pytest.raises(UnservedVersionError):  # it no longer exists anywhere
        live.resolve("policy@0", None)


def test_a_lora_version_is_flipped_to_and_running_episodes_stay() -> None:
    live = seen()
    assert live.resolve("policy", "old") == Served("policy", 0, "base")
    live.set_live("policy", 1, LORA, "policy@1")
    assert live.resolve("policy", "old") == Served("policy", 0, "base")
    assert live.resolve("policy", "new") == Served("policy", 1, "policy@1")
    live.set_live("policy", 2, LORA, "policy@2")
    assert live.resolve("policy", "new") == Served("policy", 1, "policy@1")
    assert live.resolve("policy", None) == Served("policy", 2, "policy@2")
    assert live.version_now(Served("policy", 1, "policy@1")) == 1


def test_the_base_by_its_own_name_is_no_policy_once_an_adapter_is_live() -> None:
    live = seen()
    live.set_live("policy", 1, LORA, "policy@1")
    assert live.resolve("base", None) == Served(None, None, None)
    assert live.resolve("policy@0", None) == Served("policy", 0, "base")
    assert live.resolve("policy@1", None) == Served("policy", 1, None)


def test_a_version_that_the_engine_may_hold_unproven_is_not_the_engines_business() -> None:
    live = seen({"mine@9": "policy"})
    for name in ("policy@7", "writer@1"):
        with pytest.raises(UnservedVersionError, match=name):
            live.resolve(name, None)
    assert live.resolve("mine@9", None) == Served("policy", 0, "base")
    assert live.resolve("someone@home", None) == Served(None, None, None)


def test_a_call_is_not_held_for_ever() -> None:
    async def run() -> None:
        live = LivePolicies("policy", {}, Gate(), hold_max_sec=0.01)
        live.set_base_model("base")
        live.gate.hold()
        with pytest.raises(EngineError, match="held for"):
            await live.admit("policy", None)
        assert (live.gate.waiting, live.gate.in_flight) == (0, 0)
        live.gate.open()
        (await live.admit("policy", None)).release()

    asyncio.run(run())


def test_a_dropped_version_moves_its_episodes_to_the_live_one() -> None:
    live = seen()
    live.set_live("policy", 1, LORA, "policy@1")
    live.resolve("policy", "e")
    live.set_live("policy", 2, LORA, "policy@2")
    assert live.is_in_use("policy", 1)
    live.drop("policy", 1)
    assert live.resolve("policy", "e") == Served("policy", 2, "policy@2")
    assert not live.is_in_use("policy", 1)


def test_pins_end_with_the_episode_and_with_age() -> None:
    clock = Clock()
    live = seen(clock=clock)
    live.set_live("policy", 1, LORA, "policy@1")
    live.resolve("policy", "ends")
    clock.now = 10
    live.resolve("policy", "ages")
    live.set_live("policy", 2, LORA, "policy@2")
    live.end_episode("ends")
    assert live.resolve("policy", "ends").version == 2
    clock.now = 109
    assert live.resolve("policy", "ages").version == 1
    clock.now = 110
    assert live.resolve("policy", "ages").version == 2
    assert not live.is_in_use("policy", 1)


def test_a_call_in_flight_keeps_its_version_in_use_until_released() -> None:
    async def run() -> None:
        live = seen()
        live.set_live("policy", 1, LORA, "policy@1")
        lease = await live.admit("policy", None)
        live.set_live("policy", 2, LORA, "policy@2")
        assert live.is_in_use("policy", 1)
        assert live.gate.in_flight == 1
        lease.release()
        lease.release()
        assert not live.is_in_use("policy", 1)
        assert live.gate.in_flight == 0

    asyncio.run(run())


def test_a_refused_call_leaves_the_gate() -> None:
    async def run() -> None:
        live = LivePolicies("policy", {}, Gate())
        with pytest.raises(EngineError):
            await live.admit("policy", None)
        assert live.gate.in_flight == 0

    asyncio.run(run())


def test_a_call_held_during_a_swap_gets_the_new_version() -> None:
    async def run() -> None:
        live = seen()
        live.gate.hold()
        held = asyncio.create_task(live.admit("policy", "e"))
        await asyncio.sleep(0)
        live.set_live("policy", 1, FULL, "base")
        live.gate.open()
        lease = await held
        assert lease.served == Served("policy", 1, "base")
        lease.release()

    asyncio.run(run())


def test_two_policies_pin_an_episode_separately() -> None:
    live = seen()
    live.set_live("planner", 4, LORA, "planner@4")
    live.set_live("writer", 7, LORA, "writer@7")
    assert live.resolve("planner", "e").version == 4
    assert live.resolve("writer", "e").version == 7
    live.set_live("writer", 8, LORA, "writer@8")
    assert live.resolve("writer", "e").version == 7
    assert live.resolve("planner", "e").version == 4
    assert live.visible_models() == {"policy": "base", "planner": "planner@4", "writer": "writer@8"}
