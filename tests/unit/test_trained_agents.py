"""Two roles, one of them trained: what the manifest says of the other one, and what its tokens pull at."""

from __future__ import annotations

import random

import pytest
import torch
from fakes import tiny_models
from fakes.episodes import call, choice, episode, group
from fakes.reference_loss import CLIP, loss_by_hand

from lightning_rl.trainer.batches.tree import tree_batches
from lightning_rl.trainer.credit.registry import configure
from lightning_rl.trainer.planning.plan import PlanSettings, plan_step, transitions
from lightning_rl.trainer.planning.selection import SelectionRules
from lightning_rl.trainer.steps.trl_bridge import BridgeSettings, RecordedTrainer


def play() -> list:
    """Episodes in which a planner and a writer take turns, each reading what the other wrote."""
    rng = random.Random(3)
    made = []
    for number in range(4):
        prompt, calls = [3, 4, 5], []
        for turn in range(4):
            answer = [rng.randrange(6, 60) for _ in range(3)]
            name, agent = f"e{number}-c{turn}", ("planner", "writer")[turn % 2]
            recorded = choice(name, answer, behavior=[-4.0] * 3)
            calls.append(call(name, prompt, answer, agent=agent, choices=(recorded,)))
            prompt = [*prompt, *answer, 9]
        made.append(episode(f"e{number}", float(number % 2), calls=calls))
    return [group("g", made)]


def plan(groups: list, *agents: str):
    rules = SelectionRules("policy", train_agents=frozenset(agents))
    settings = PlanSettings(rules, configure("turn_discount gamma=0.5"))
    return plan_step(groups, settings, run_id="r", step=0, from_version=0)


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).clone()


def by_hand(model, trained: list) -> torch.Tensor:
    model.zero_grad()
    loss_by_hand(model, trained).backward()
    return gradient(model)


def test_the_other_roles_tokens_have_no_gradient(tmp_path):
    groups = play()
    planned = plan(groups, "planner")
    rows = {row.call_id: row for row in planned.manifest.choices}
    for name, row in rows.items():
        trained = row.agent == "planner"
        assert (row.advantage is not None, row.reason) == (trained, None if trained else "other_agent"), name
        assert (row.multiplier > 0) == trained
    made = transitions(planned.manifest, groups)
    assert {t.call_id for t in made} == {name for name, row in rows.items() if row.agent == "planner"}

    torch.manual_seed(0)
    model = tiny_models.qwen3()
    bridge = BridgeSettings(tmp_path, 1e-3, CLIP, 1.0, 0, on_gpu=False, bfloat16=False)
    trainer = RecordedTrainer(model, tiny_models.tokenizer(), bridge)
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    trainer.training_step(trainer.model, {"micro_batches": [*tree_batches(made, 2048)]})
    ours = gradient(trainer.model)

    # The planner's terms alone, to the last one; the writer's would have pulled elsewhere.
    planners = by_hand(model, made)
    assert float((ours - planners).norm() / planners.norm()) < 1e-4
    both = plan(groups)
    writers = [t for t in transitions(both.manifest, groups) if rows[t.call_id].agent == "writer"]
    assert len(writers) == 8
    pull = by_hand(model, writers)
    assert float(pull.norm()) > 1e-3 * float(planners.norm())


def test_the_trained_roles_advantages_are_what_they_were():
    groups = play()
    alone = {row.call_id: row.advantage for row in plan(groups, "planner").manifest.choices}
    both = {row.call_id: row.advantage for row in plan(groups).manifest.choices}
    assert all(alone[name] == pytest.approx(both[name]) for name in alone if alone[name] is not None)
