"""The cheaper of two layouts is chosen, and models that can't share get rows."""

from __future__ import annotations

import random

import pytest
from fakes import tiny_models
from fakes.episodes import transition

from lightning_rl.records import Transition
from lightning_rl.trainer.batches.packing import ModelShape, cheapest_batches, cost, dealt, num_rounds
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


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("max_tokens", [300, 700, 4096])
def test_ranks_get_equal_numbers_and_every_call_once(num_ranks: int, max_tokens: int) -> None:
    made = [*siblings(7, 200, 30), *(transition(f"x{i}", [i, 1, 2], [3]) for i in range(3))]
    batches = cheapest_batches(made, max_tokens, LARGE, num_ranks)
    alone = cheapest_batches(made, max_tokens, LARGE)
    assert num_rounds(len(batches), num_ranks) <= num_rounds(len(alone), num_ranks)
    parts = dealt(batches, LARGE, num_ranks)
    assert {len(part) for part in parts} == {num_rounds(len(batches), num_ranks)}
    of_calls = [batch for part in parts for batch in part if batch.call_tokens]
    assert len(of_calls) == len(batches)
    assert sorted(choice for batch in of_calls for choice in batch.choices) == sorted(
        (t.call_id, 0) for t in made
    )


def test_work_is_dealt_out_evenly() -> None:
    """One micro-batch for one rank is two halves for two."""
    made = [transition(str(i), [i, *range(20, 60)], [1, 2]) for i in range(8)]
    batches = cheapest_batches(made, 4096, LARGE, 2)
    costs = [sum(cost(batch, LARGE) for batch in part) for part in dealt(batches, LARGE, 2)]
    assert max(costs) <= 1.2 * min(costs)
    assert len(cheapest_batches(made, 4096, LARGE)) == 1


def test_a_rank_without_calls_computes_one_token_of_no_weight() -> None:
    (batch,) = cheapest_batches([transition("a", [1, 2], [3])], 100, LARGE, 2)
    (first,), (second,) = dealt([batch], LARGE, 2)
    assert first is batch
    assert isinstance(second, RowsBatch)
    assert (second.input_ids.size, second.call_tokens) == (1, 0)
    assert not second.terms.advantage.any()
    assert not second.terms.multiplier.any()
