"""The cheaper of two layouts is chosen, and models that can't share get rows."""

from __future__ import annotations

import random

import pytest
from fakes import tiny_models
from fakes.episodes import transition

from lightning_rl.records import Transition
from lightning_rl.trainer.batches.packing import ModelShape, cheapest_batches, cost
from lightning_rl.trainer.batches.rows import RowsBatch, merged_batches
from lightning_rl.trainer.batches.tree import TreeBatch, tree_batches
from lightning_rl.trainer.steps.shape import shape_of

LARGE = ModelShape(per_token=1e8, per_pair=1e5, shares_prefixes=True)


def siblings(num: int, prompt_tokens: int, tail_tokens: int) -> list[Transition]:
    rng = random.Random(0)
    prompt = [rng.randrange(100) for _ in range(prompt_tokens)]
    return [
        transition(str(i), [*prompt, *(rng.randrange(100) for _ in range(tail_tokens))], [1, 2])
        for i in range(num)
    ]


def one_episode(num_calls: int) -> list[Transition]:
    """Plain continuation: one row holds every call, and a tree has nothing more to share."""
    rng = random.Random(0)
    prompt: list[int] = []
    made = []
    for i in range(num_calls):
        prompt = [*prompt, *(rng.randrange(100) for _ in range(200))]
        made.append(transition(str(i), prompt, [1, 2]))
        prompt = [*prompt, 1, 2]
    return made


def test_what_siblings_share_is_computed_once() -> None:
    batches = cheapest_batches(siblings(8, 500, 10), 4096, LARGE)
    assert all(isinstance(batch, TreeBatch) for batch in batches)


def test_plain_continuation_is_read_straight_through() -> None:
    batches = cheapest_batches(one_episode(10), 4096, LARGE)
    assert all(isinstance(batch, RowsBatch) for batch in batches)


def test_a_model_that_cant_share_gets_rows() -> None:
    shape = ModelShape(1e8, 1e5, shares_prefixes=False)
    assert all(isinstance(b, RowsBatch) for b in cheapest_batches(siblings(8, 500, 10), 4096, shape))


def test_costs_by_hand() -> None:
    shape = ModelShape(per_token=10.0, per_pair=1.0, shares_prefixes=True)
    made = [transition("a", [1, 2], [3]), transition("b", [1, 4], [3])]
    (rows,) = merged_batches(made, 100)
    assert cost(rows, shape) == pytest.approx(2 * 2 * (10 + 2 * 0.9))  # no padding, no mask
    (uneven,) = merged_batches([*made, transition("c", [5], [3])], 100)
    assert cost(uneven, shape) == pytest.approx(3 * 2 * (10 + 2 * 1.3))
    (tree,) = tree_batches(made, 100)
    # 3 tokens; one stretch of 64 queries, each against 64 keys, gathering counted as 16 queries more
    assert cost(tree, shape) == pytest.approx(3 * 10 + (0 + 64) * (64 + 16) * 1.3)


@pytest.mark.parametrize("make", [tiny_models.llama, tiny_models.qwen3])
def test_the_shape_of_a_model(make) -> None:
    model = make()
    shape = shape_of(model)
    matrices = sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.dim() > 1)
    assert matrices <= shape.per_token <= 1.1 * matrices
    assert shape.per_pair == 2 * 4 * 8 * 2
    assert shape.shares_prefixes


def test_nothing_makes_no_batches() -> None:
    assert list(cheapest_batches([], 100, LARGE)) == []
