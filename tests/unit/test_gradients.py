"""The gradient of a step, however it is laid out, against a loss written by hand: every objective, weighting,
kind of weights, with and without gradient checkpointing, in one micro-batch and in several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fakes.gradients import (
    EDGE,
    OBJECTIVES,
    distance_to_edges,
    hand_gradient,
    make_model,
    make_trainer,
    num_clipped,
    recorded,
    relative,
    step_gradient,
)

from lightning_rl.records import Transition
from lightning_rl.trainer.batches.packing import MicroBatch, cheapest_batches
from lightning_rl.trainer.batches.rows import merged_batches, rows_batches
from lightning_rl.trainer.batches.tree import tree_batches
from lightning_rl.trainer.steps.objective import Objective
from lightning_rl.trainer.steps.shape import shape_of

WEIGHTINGS = ("episode", "token", "constant")
PRODUCT = list(product(OBJECTIVES, WEIGHTINGS, ("full", "lora"), (False, True)))
QUICK = [
    ("clip", "episode", "full", True),
    ("gspo", "token", "lora", True),
    ("cispo", "constant", "full", False),
    ("sapo", "episode", "lora", False),
    ("clip", "token", "lora", False),
    ("sapo", "constant", "full", True),
]
AT_MOST = 1e-4


def layouts(model: Any, made: Sequence[Transition], max_tokens: int) -> dict[str, Sequence[MicroBatch]]:
    return {
        "chosen": cheapest_batches(made, max_tokens, shape_of(model)),
        "tree": tree_batches(made, max_tokens),
        "merged": merged_batches(made, max_tokens),
        "padded": rows_batches(made, max_tokens),
    }


def differences(
    objective: str, weighting: Any, weights: str, checkpointing: bool, folder: Path
) -> dict[tuple[str, int], tuple[float, float]]:
    """Of each layout and token budget: the gradient's relative difference from the one by hand, and the
    loss's."""
    alone = make_model(weights)
    by_hand = recorded(alone, weighting, by_hand=True)
    expected, expected_loss = hand_gradient(alone, by_hand, OBJECTIVES[objective])
    trainer = make_trainer(
        make_model(weights), folder, OBJECTIVES[objective], gradient_checkpointing=checkpointing
    )
    made = recorded(alone, weighting)
    found = {}
    for max_tokens in (12, 4096):
        for name, batches in layouts(trainer.model, made, max_tokens).items():
            assert (len(batches) > 1) == (max_tokens == 12)
            gradient, loss = step_gradient(trainer, batches)
            found[name, max_tokens] = relative(gradient, expected), abs(loss / expected_loss - 1)
    return found


def check(case: tuple[str, str, str, bool], folder: Path) -> None:
    for layout, (of_gradient, of_loss) in differences(*case, folder).items():
        assert of_gradient <= AT_MOST, (layout, of_gradient)
        assert of_loss <= AT_MOST, (layout, of_loss)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: "-".join(map(str, case)))
def test_a_few_of_all(case: tuple[str, str, str, bool], tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=lambda case: "-".join(map(str, case)))
def test_all_of_them(case: tuple[str, str, str, bool], tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_ratios_are_on_both_sides_of_the_clips_and_off_their_edges(name: str) -> None:
    assert distance_to_edges(OBJECTIVES[name]) > EDGE
    assert min(num_clipped(OBJECTIVES[name])[side] for side in ("above", "below")) >= 2


def test_weightings_and_objectives_are_told_apart() -> None:
    """Else the comparison above would prove little: no two of them have the same gradient."""
    model = make_model("full")
    found = [
        hand_gradient(model, recorded(model, weighting, by_hand=True), OBJECTIVES[objective])[0]
        for weighting, objective in (("episode", "clip"), ("token", "clip"), ("episode", "gspo"))
    ]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert relative(found[i] / found[i].norm(), found[j] / found[j].norm()) > 0.01


@pytest.mark.parametrize(("checkpointing", "times"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("weights", ["full", "lora"])
def test_checkpointing_computes_each_layer_a_second_time(
    weights: str, checkpointing: bool, times: int, tmp_path: Path
) -> None:
    """In the comparisons above as in a run's own train(), which switches it on by itself."""
    batches = tree_batches(recorded(make_model(weights), "episode"), 4096)
    for through_train in (False, True):
        trainer = make_trainer(
            make_model(weights), tmp_path, Objective(), gradient_checkpointing=checkpointing
        )
        body = trainer.model.get_base_model() if weights == "lora" else trainer.model
        seen = count_forwards(body.model.layers[0].mlp)
        if through_train:
            body.gradient_checkpointing_disable()
            trainer.steps = [batches]
            trainer.train()
        else:
            step_gradient(trainer, batches)
        assert len(seen) == times


def count_forwards(module: Any) -> list[int]:
    """Begun ones: the second is broken off as soon as it has what the backward pass needs."""
    seen: list[int] = []
    module.register_forward_pre_hook(lambda *_: seen.append(1))
    return seen
