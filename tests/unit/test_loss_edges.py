"""What lies at the edges of a step, with KL and entropy on too: finite everywhere, and exactly nothing where
nothing belongs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.episodes import call, choice, episode, group, transition
from fakes.gradients import (
    OBJECTIVES,
    hand_gradient,
    make_model,
    make_trainer,
    recorded,
    relative,
    step_gradient,
)
from fakes.reference_loss import reference_logprobs

from lightning_rl.records import CallKind, Quarantine, Transition, logprobs
from lightning_rl.trainer.batches.packing import cheapest_batches
from lightning_rl.trainer.batches.tree import tree_batches
from lightning_rl.trainer.credit.registry import configure
from lightning_rl.trainer.planning.plan import PlanSettings, plan_step, transitions
from lightning_rl.trainer.planning.selection import SelectionRules
from lightning_rl.trainer.steps.objective import Objective
from lightning_rl.trainer.steps.shape import shape_of
from lightning_rl.trainer.steps.trl_bridge import RecordedTrainer

NAMES = tuple(OBJECTIVES)
WEIGHTS = ("full", pytest.param("lora", marks=pytest.mark.slow))


def plain(name: str) -> Objective:
    """Without KL and entropy."""
    return replace(OBJECTIVES[name], kl_weight=0.0, entropy_weight=0.0)


def step(trainer: RecordedTrainer, made: list[Transition]) -> tuple[torch.Tensor, float]:
    gradient, loss = step_gradient(trainer, cheapest_batches(made, 4096, shape_of(trainer.model)))
    assert torch.isfinite(gradient).all()
    assert math.isfinite(loss)
    for figure in ("gap_mean", "gap_max", "entropy_mean", "kl_mean", "loss"):
        assert math.isfinite(getattr(trainer.metrics, figure))
    return gradient, loss


def planned(*odd: Any) -> list[Transition]:
    """What a step trains of two episodes, the first of which has `odd` calls, too."""
    first = [call("a0", [3, 4], [5, 6]), *odd, call("a1", [3, 4, 5, 6, 9], [7])]
    second = [call("b0", [3, 4], [8, 6])]
    groups = [group("g", [episode("a", 1.0, calls=first), episode("b", 0.0, calls=second)])]
    settings = PlanSettings(SelectionRules("policy"), configure("dr_grpo"))
    plan = plan_step(groups, settings, run_id="r", step=0, from_version=0)
    assert plan.counts.choices_trained == 3
    return transitions(plan.manifest, groups)


EMPTY = (choice("odd", []),)
HALF = (choice("odd", [5, 7], quarantine=Quarantine.BAD_LOGPROB, behavior=[-1.0, float("-inf")]),)


@pytest.mark.parametrize("odd", [{"kind": CallKind.SIDE}, {"choices": EMPTY}, {"choices": HALF}])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_choice_without_an_advantage_is_as_if_it_were_not_there(
    name: str, weights: str, odd: dict[str, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(make_model(weights), tmp_path, OBJECTIVES[name])
    without, loss = step(trainer, planned())
    masked, same_loss = step(trainer, planned(replace(call("odd", [3, 4], [5, 7]), **odd)))
    assert without.abs().max() > 0
    assert torch.equal(masked, without)
    assert same_loss == loss


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_zero_advantage_is_exactly_no_gradient(name: str, weights: str, tmp_path: Path) -> None:
    trainer = make_trainer(make_model(weights), tmp_path, plain(name))
    made = recorded(make_model(weights), "episode")
    gradient, loss = step(trainer, [replace(t, advantage=0.0) for t in made])
    assert loss == 0.0
    assert torch.count_nonzero(gradient) == 0


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_zero_advantage_keeps_its_kl_and_its_entropy(name: str, weights: str, tmp_path: Path) -> None:
    model = make_model(weights)
    made = [replace(t, advantage=0.0) for t in recorded(model, "token")]
    expected, expected_loss = hand_gradient(model, made, OBJECTIVES[name])
    gradient, loss = step(make_trainer(make_model(weights), tmp_path, OBJECTIVES[name]), made)
    assert expected.norm() > 0
    assert relative(gradient, expected) <= 1e-4
    assert loss == pytest.approx(expected_loss, rel=1e-4)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_single_tokens(name: str, weights: str, tmp_path: Path) -> None:
    """One sampled token each, one of them after a prompt of one token."""
    model = make_model(weights)
    made = [
        transition("a", [3], [4], behavior=[-2.0], advantage=1.0, multiplier=0.5),
        transition("b", [3, 4, 5], [6], behavior=[-3.0], advantage=-1.0, multiplier=0.5),
    ]
    expected, _ = hand_gradient(model, made, OBJECTIVES[name])
    gradient, _ = step(make_trainer(make_model(weights), tmp_path, OBJECTIVES[name]), made)
    assert relative(gradient, expected) <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_very_long_completions(name: str, tmp_path: Path) -> None:
    """As long as the model can read, beside a short one; in more tokens than the budget of a micro-batch."""
    model = make_model("full")
    ids = [3 + (7 * k) % 60 for k in range(508)]
    made = []
    for call_id, completion, advantage in (("long", ids, 1.0), ("short", ids[:2], -1.0)):
        t = transition(call_id, [3, 4], completion, advantage=advantage, multiplier=0.5 / len(completion))
        with torch.no_grad():
            policy = reference_logprobs(model, t)
        made.append(replace(t, behavior_logprobs=logprobs((policy - 0.1).tolist())))
    expected, _ = hand_gradient(model, made, OBJECTIVES[name])
    trainer = make_trainer(make_model("full"), tmp_path, OBJECTIVES[name])
    for batches in (tree_batches(made, 64), cheapest_batches(made, 4096, shape_of(model))):
        gradient, loss = step_gradient(trainer, batches)
        assert math.isfinite(loss)
        assert relative(gradient, expected) <= 1e-4


FAR = -1e4  # nothing that a float32 can hold is exp() of its distance
ODD_RATIOS = {
    # behaviour, advantage: what becomes of the token's own term
    "infinite, praised": (FAR, 1.0),
    "infinite, blamed": (FAR, -1.0),
    "none at all, praised": (0.0, 1.0),
    "none at all, blamed": (0.0, -1.0),
}


@pytest.mark.parametrize("case", ODD_RATIOS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_ratios_beyond_all_bounds(name: str, weights: str, case: str, tmp_path: Path) -> None:
    behavior, advantage = ODD_RATIOS[case]
    made = [
        transition("odd", [3, 4], [5], behavior=[behavior], advantage=advantage),
        transition("plain", [3, 4], [6, 7], behavior=[-1.0, -1.0], advantage=0.5),
    ]
    step(make_trainer(make_model(weights), tmp_path, OBJECTIVES[name]), made)


@pytest.mark.parametrize("name", ["clip", "gspo"])
def test_an_infinite_ratio_beyond_the_clip_is_exactly_no_gradient(name: str, tmp_path: Path) -> None:
    made = [transition("odd", [3, 4], [5, 6], behavior=[FAR, FAR], advantage=1.0)]
    gradient, _ = step(make_trainer(make_model("full"), tmp_path, plain(name)), made)
    assert torch.count_nonzero(gradient) == 0


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name: str, weights: str, tmp_path: Path) -> None:
    made = recorded(make_model(weights), "episode")
    exact, _ = step(make_trainer(make_model(weights), tmp_path, OBJECTIVES[name]), made)
    trainer = make_trainer(make_model(weights).to(torch.bfloat16), tmp_path, OBJECTIVES[name], bfloat16=True)
    rounded, _ = step(trainer, made)
    assert torch.nn.functional.cosine_similarity(rounded.float(), exact, dim=0) > 0.9
    silent = make_trainer(make_model(weights).to(torch.bfloat16), tmp_path, plain(name), bfloat16=True)
    nothing, loss = step(silent, [replace(t, advantage=0.0) for t in made])
    assert loss == 0.0
    assert torch.count_nonzero(nothing) == 0
