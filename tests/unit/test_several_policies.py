"""A LoRA per agent role on one base: each with its own name, history and pins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_engine import BASE
from fakes.publishing_world import World
from fakes.running_proxy import ask, running_proxy

from lightning_rl.errors import EngineError, SettingsError
from lightning_rl.proxy.live.gate import Gate
from lightning_rl.proxy.live.policies import LivePolicies
from lightning_rl.proxy.live.served import Served
from lightning_rl.records import VersionStatus, WeightsKind
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.settings.train import DryRunSettings
from lightning_rl.store.append import add_reward, create_episode, end_episode
from lightning_rl.trainer.planning.dry_run import dry_run

LORA, FULL = WeightsKind.LORA, WeightsKind.FULL
ROLES = {"plan*": "planner", "writer": "writer"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.restart_proxy(agent_policies=ROLES)
    yield world
    world.database.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


# --- names ---


def seen(aliases: dict[str, str] | None = None) -> LivePolicies:
    live = LivePolicies("policy", aliases or {}, Gate(), agent_policies=ROLES)
    live.set_base_model(BASE)
    return live


def test_an_agent_that_asks_for_the_default_gets_its_own_policy() -> None:
    live = seen({"gpt-*": "policy", "o1": "writer"})
    live.set_live("policy", 4, LORA, "policy@4")
    for asked in ("policy", "gpt-4o", BASE, None):
        assert live.resolve(asked, None, "planner-2") == Served("planner", 0, None if asked == BASE else BASE)
        assert live.resolve(asked, None, "writer").policy == "writer"
    assert live.resolve("gpt-4o", None, "critic") == Served("policy", 4, "policy@4")
    assert live.resolve("gpt-4o", None) == Served("policy", 4, "policy@4")


def test_whoever_names_a_policy_or_a_version_gets_that_one() -> None:
    live = seen({"o1": "writer"})
    live.set_live("policy", 4, LORA, "policy@4")
    assert live.resolve("writer", None, "planner") == Served("writer", 0, BASE)
    assert live.resolve("o1", None, "planner").policy == "writer"
    assert live.resolve("policy@4", None, "planner") == Served("policy", 4, None)
    assert live.resolve("embedder", None, "planner") == Served(None, None, None)


def test_pins_are_of_episode_and_policy() -> None:
    live = seen()
    for policy in ("planner", "writer"):
        live.set_live(policy, 1, LORA, f"{policy}@1")
    assert live.resolve(None, "e", "planner").version == 1
    live.set_live("planner", 2, LORA, "planner@2")
    live.set_live("writer", 2, LORA, "writer@2")
    assert live.resolve(None, "e", "planner") == Served("planner", 1, "planner@1")
    assert live.resolve(None, "e", "writer") == Served("writer", 2, "writer@2")
    assert live.pinned_to_older() == {"planner": ["e"]}
    live.end_episode("e")
    assert live.resolve(None, "e", "planner").version == 2


def test_another_proxy_is_told_of_all_of_them() -> None:
    live, other = seen(), LivePolicies("policy", {}, Gate(), agent_policies=ROLES)
    live.set_live("planner", 2, LORA, "planner@2")
    with pytest.raises(EngineError, match="no version of 'writer' is live"):
        other.resolve(None, None, "writer")
    other.apply(json.loads(json.dumps(live.snapshot())))
    assert other.resolve(None, None, "planner") == Served("planner", 2, "planner@2")
    assert other.resolve(None, None, "writer") == Served("writer", 0, BASE)


def test_the_base_model_is_nobodys_version_0_while_full_weights_lie_under_its_name() -> None:
    live = seen()
    live.set_live("planner", 1, LORA, "planner@1")
    live.set_live("policy", 3, FULL, BASE)
    with pytest.raises(EngineError, match="no version of 'writer' is live"):
        live.resolve("writer", None)
    assert live.loaded_versions("planner") == {1: "planner@1"}


def test_settings_say_what_a_policy_name_is(tmp_path: Path) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text('[agent_policies]\nplanner = "a b"\n')
    with pytest.raises(SettingsError, match=r"agent_policies\.planner': a policy's name is of letters"):
        ProxySettings.load(file)


# --- versions ---


def test_versions_of_two_policies_flip_and_roll_back_by_themselves(world: World) -> None:
    async def scenario() -> None:
        await world.steps()
        assert world.live.resolve(None, "e", "planner") == Served("planner", 0, BASE)
        for version in (1, 2):
            for policy in ("planner", "writer"):
                weight = float(version) if policy == "planner" else -float(version)
                before = 0.0 if version == 1 else weight / 2
                world.candidate(version, weight, before, LORA, policy=policy, parent=version - 1)
            await world.steps(2)
        assert world.live.resolve(None, "new", "planner") == Served("planner", 2, "planner@2")
        assert world.live.resolve(None, "e", "planner") == Served("planner", 0, BASE), "it began with that"
        assert world.live.resolve(None, "new", "critic") == Served("policy", 0, BASE)
        request = world.ask(None, "writer")
        await world.steps(2)
        assert world.outcome(request).outcome == "live"
        assert world.live.live_version("writer") == 1
        assert world.live.live_version("planner") == 2
        assert (world.status(2, "planner"), world.status(2, "writer")) == (
            VersionStatus.LIVE,
            VersionStatus.RETIRED,
        )
        assert set(world.engine.adapters) == {"planner@2", "writer@1"}

    run(scenario)


def test_a_proxy_that_starts_restores_both_and_those_at_the_base_model(world: World) -> None:
    async def scenario() -> None:
        for policy in ("planner", "writer", "old"):
            world.candidate(1, 1.0, 0.0, LORA, policy=policy, parent=0)
        await world.steps()
        world.ask(0, "old")
        await world.steps(2)
        world.engine.restart()
        world.restart_proxy(agent_policies=ROLES)
        await world.steps()
        assert world.live.resolve(None, None, "planner") == Served("planner", 1, "planner@1")
        assert world.live.resolve("writer", None) == Served("writer", 1, "writer@1")
        assert world.live.resolve("old", None) == Served("old", 0, BASE), "the log knows it"
        assert world.live.visible_models() == {
            "planner": "planner@1",
            "writer": "writer@1",
            "policy": BASE,
            "old": BASE,
        }

    run(scenario)


def test_full_weights_are_refused_where_others_are_served_by_the_same_engine(world: World) -> None:
    async def scenario() -> None:
        world.candidate(1, 1.0, 0.0, FULL)
        await world.steps()
        assert world.status(1) is VersionStatus.REJECTED
        assert "the base model under planner, writer" in str(world.row(1).verdict)
        assert world.engine.weight == 0.0

    run(scenario)


# --- from the first call to a step ---


def test_each_role_is_recorded_under_its_policy_and_trained_from_the_shared_log(tmp_path: Path) -> None:
    with running_proxy(tmp_path, agent_policies=ROLES) as running:
        with running.database.write() as conn:
            for number in range(2):
                create_episode(conn, episode_id=f"e{number}", task_id="t", batch="b", expected_size=2)
        for number in range(2):
            for agent in ("planner", "writer", "critic"):
                path = f"/episodes/e{number}/agents/{agent}/v1/chat/completions"
                body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "1 + 1?"}]}
                answer = ask(running.url, path, json.dumps(body).encode())
                assert answer.status == 200
                assert json.loads(answer.body)["model"] == "gpt-4o", "as it asked"
        with running.database.write() as conn:
            from fakes.log_rows import reward

            for number in range(2):
                add_reward(conn, reward(f"e{number}", float(number)))
                end_episode(conn, f"e{number}", by="api")
        rows = running.rows("calls")
        assert sorted({(row["agent"], row["policy"], row["policy_version"]) for row in rows}) == [
            ("critic", "policy", 0),
            ("planner", "planner", 0),
            ("writer", "writer", 0),
        ]
        shown = json.loads(ask(running.url, "/v1/models").body)
        assert {"policy", "planner", "writer"} <= {model["id"] for model in shown["data"]}
        for policy in ("planner", "writer"):
            settings = DryRunSettings.load(
                None, db=running.database.url, policy=policy, manifests=tmp_path / policy
            )
            (step,) = dry_run(settings).plan.steps
            trained = {c.agent for c in step.manifest.choices if c.advantage is not None}
            assert trained == {policy}
