"""The contract with TRL: signatures of the overridden methods, and gradients through its own loss.

Three computations of the same step must agree: the prefix tree, padded rows, and a loss written here by hand.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from fakes import tiny_models
from fakes.episodes import transition
from fakes.one_step import adapted, hand_gradient, make_trainer, recorded, relative, step_gradient
from fakes.reference_loss import CLIP_HIGH, CLIP_LOW, loss_by_hand, reference_logprobs

from lightning_rl.records import token_ids
from lightning_rl.trainer.batches.rows import merged_batches, rows_batches
from lightning_rl.trainer.batches.tree import tree_batches
from lightning_rl.trainer.steps import scoring
from lightning_rl.trainer.steps.trl_bridge import (
    ChunkedLogProbFunction,
    GRPOTrainer,
)


@pytest.fixture(params=["qwen3", "llama", "lora"])
def model(request):
    return adapted() if request.param == "lora" else getattr(tiny_models, request.param)()


@pytest.mark.parametrize(
    "packing",
    [
        (tree_batches, 30, scoring.HELD_LOGITS),
        (tree_batches, 4096, scoring.HELD_LOGITS),
        (tree_batches, 4096, 0),  # TRL's chunked head
        (rows_batches, 30, 0),
        (merged_batches, 30, 0),
        (merged_batches, 4096, scoring.HELD_LOGITS),
        (rows_batches, 4096, scoring.HELD_LOGITS),
    ],
)
def test_gradients_agree_with_a_loss_written_by_hand(model, packing, tmp_path, monkeypatch):
    pack, max_tokens, held_logits = packing
    monkeypatch.setattr(scoring, "HELD_LOGITS", held_logits)
    made = recorded(model)
    trainer = make_trainer(model, tmp_path)
    expected, expected_loss = hand_gradient(trainer.model, made)
    batches = pack(made, max_tokens)
    assert (len(batches) > 1) == (max_tokens == 30)
    found, loss = step_gradient(trainer, batches)
    assert relative(found, expected) <= 1e-4
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)


def test_metrics_are_of_the_weights_before_the_update(tmp_path):
    model = tiny_models.llama()
    made = recorded(model, drift=0.6)
    trainer = make_trainer(model, tmp_path)
    step_gradient(trainer, tree_batches(made, 40))
    gaps, clipped = [], 0
    with torch.no_grad():
        for t in made:
            log_ratio = reference_logprobs(model, t) - torch.tensor(list(t.behavior_logprobs))
            gaps += log_ratio.abs().tolist()
            ratio = log_ratio.exp()
            clipped += int(((ratio > 1 + CLIP_HIGH) & (t.advantage > 0)).sum())
            clipped += int(((ratio < 1 - CLIP_LOW) & (t.advantage < 0)).sum())
    metrics = trainer.metrics
    assert metrics.num_tokens == len(gaps)
    assert metrics.gap_mean == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert metrics.gap_max == pytest.approx(max(gaps), rel=1e-4)
    assert 0 < clipped == metrics.num_clipped
    assert (
        metrics.unique_tokens
        < metrics.call_tokens
        == sum(len(t.prompt_ids) + len(t.completion_ids) for t in made)
    )


@pytest.mark.parametrize("changes", [{"advantage": 0.0}, {"multiplier": 0.0}])
def test_nothing_to_learn_is_exactly_no_gradient(changes, tmp_path):
    model = tiny_models.qwen3()
    made = [transition(str(i), [3, 4], [5, 6 + i], **changes) for i in range(3)]
    found, loss = step_gradient(make_trainer(model, tmp_path), tree_batches(made, 4096))
    assert loss == 0.0
    assert torch.equal(found, torch.zeros_like(found))


def test_a_ratio_beyond_all_bounds_stays_finite(tmp_path):
    # the engine gave it 1e-60 and the model does not: exp() of the difference is infinite in float32
    model = tiny_models.qwen3()
    made = [
        transition("up", [3, 4], [5], behavior=[-140.0], advantage=1.0),
        transition("down", [3, 4], [6], behavior=[-140.0], advantage=-1.0),
        transition("plain", [3, 4], [7], behavior=[-1.0], advantage=1.0),
    ]
    found, loss = step_gradient(make_trainer(model, tmp_path), tree_batches(made, 4096))
    assert torch.isfinite(found).all()
    assert math.isfinite(loss)


def test_a_step_moves_the_weights_as_adam_does(tmp_path):
    made = recorded(tiny_models.llama())
    model = tiny_models.llama()
    trainer = make_trainer(model, tmp_path, max_grad_norm=0.05)
    trainer.steps = iter([tree_batches(made, 4096), tree_batches(made, 30)])
    trainer.train()

    expected = tiny_models.llama()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss_by_hand(expected, made).backward()
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        optimizer.step()
    assert trainer.metrics.grad_norm == pytest.approx(float(norm), rel=1e-3)
    moved = [
        (a - b).abs().max().item() for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    ]
    assert max(moved) < 2e-5  # of steps of 1e-3


def test_sequence_logprobs_score_every_position(tmp_path):
    model = tiny_models.qwen3()
    trainer = make_trainer(model, tmp_path)
    sequences = [token_ids([3, 4, 5, 6]), token_ids([3, 4, 9]), token_ids([3, 4, 5, 6])]
    found = trainer.sequence_logprobs(sequences, 4096)
    for ids, values in zip(sequences, found, strict=True):
        with torch.no_grad():
            expected = reference_logprobs(model, transition("x", ids[:1].tolist(), ids[1:].tolist()))
        assert list(values) == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("held_logits", [scoring.HELD_LOGITS, 0])
def test_the_entropy_is_of_the_distribution_that_was_sampled_from(held_logits, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "HELD_LOGITS", held_logits)
    model = tiny_models.llama()
    made = [transition("a", [3, 4], [5], temperature=0.7), transition("b", [3, 9], [6])]
    trainer = make_trainer(model, tmp_path)
    step_gradient(trainer, tree_batches(made, 4096))
    with torch.no_grad():
        expected = 0.0
        for t in made:
            logits = model(input_ids=torch.tensor([list(t.prompt_ids)])).logits[0, -1] / t.temperature
            expected += float(torch.distributions.Categorical(logits=logits).entropy())
    assert trainer.metrics.entropy_mean == pytest.approx(expected / 2, rel=1e-4)


def test_the_hooks_have_the_signatures_that_the_bridge_overrides():
    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert parameters(GRPOTrainer.get_train_dataloader) == ["self"]
    assert parameters(GRPOTrainer._prepare_inputs) == ["self", "generation_batch"]
    assert parameters(GRPOTrainer.training_step) == ["self", "model", "inputs", "num_items_in_batch"]
    assert parameters(GRPOTrainer.compute_loss)[:3] == ["self", "model", "inputs"]
    assert parameters(GRPOTrainer._get_per_token_logps_and_entropies)[:8] == [
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ]
    assert parameters(ChunkedLogProbFunction.forward) == [
        "ctx",
        "hidden",
        "weight",
        "bias",
        "targets",
        "temperature",
        "chunk_size",
        "final_logit_softcapping",
        "logit_scale",
        "outputs",
    ]


def test_the_loss_reads_what_the_bridge_hands_over():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    for name in ("prompt_ids", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"):
        assert f'inputs["{name}"]' in source
    assert 'inputs.get("old_per_token_logps")' in source
