"""Objectives, KL, entropy and corrections: gradients against a loss written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import tiny_models
from fakes.episodes import transition
from fakes.recorded_log import play_group
from fakes.reference_loss import loss_by_hand, reference_logprobs
from peft import LoraConfig, get_peft_model

from lightning_rl.records import Transition
from lightning_rl.settings.train import TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.trainer.batches.rows import merged_batches, rows_batches
from lightning_rl.trainer.batches.tree import tree_batches
from lightning_rl.trainer.loop import train
from lightning_rl.trainer.report import STEP_LOG
from lightning_rl.trainer.steps.objective import Objective, correction_weights
from lightning_rl.trainer.steps.trl_bridge import BridgeSettings, RecordedTrainer

OBJECTIVES = {
    "clip": Objective(),
    "gspo": Objective("gspo", clip_low=0.01, clip_high=0.02),
    "cispo": Objective("cispo", ratio_cap=1.1),
    "sapo": Objective("sapo"),
    "clip with KL and entropy": Objective(kl_weight=0.7, entropy_weight=0.3),
    "gspo with KL": Objective("gspo", kl_weight=0.5),
    "cispo with entropy": Objective("cispo", entropy_weight=0.2),
    "sapo with KL and entropy": Objective("sapo", kl_weight=0.1, entropy_weight=0.1),
}


def lora(model: Any) -> Any:
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def make_trainer(model: Any, folder: Path, objective: Objective, reference: Any = None) -> RecordedTrainer:
    settings = BridgeSettings(
        output=folder,
        learning_rate=1e-3,
        objective=objective,
        max_grad_norm=1.0,
        seed=0,
        on_gpu=False,
        bfloat16=False,
    )
    trainer = RecordedTrainer(model, tiny_models.tokenizer(), settings, reference)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def recorded(model: Any) -> list[Transition]:
    """Ratios on both sides of every clip, of single tokens (1.1, 1.28, 0.8) and of whole choices."""
    drifts = [
        (0.05, 0.05, 0.05),
        (-0.3, 0.3, 0.05),
        (-0.05, -0.05),
        (0.15, -0.02, 0.3),
        (-0.35, -0.3),
        (0.05,),
    ]
    made = []
    for i, drift in enumerate(drifts):
        t = transition(
            f"c{i}",
            [3, 4, 5, 6 + i % 2, *([9, 10] if i > 2 else [])],
            [11 + (i + k) % 3 for k in range(len(drift))],
            temperature=(1.0, 0.7)[i % 2],
            advantage=(1.5, -0.8, 0.5, -1.2, 0.9, -0.4)[i],
            multiplier=(0.02, 0.05, 0.1)[i % 3],
        )
        with torch.no_grad():
            policy = reference_logprobs(model, t).tolist()
        behavior = [min(p - d, 0.0) for p, d in zip(policy, drift, strict=True)]
        made.append(
            transition(
                t.call_id,
                t.prompt_ids,
                t.completion_ids,
                behavior=behavior,
                temperature=t.temperature,
                advantage=t.advantage,
                multiplier=t.multiplier,
            )
        )
    return made


def gradient_of(model: Any) -> torch.Tensor:
    found = [p.grad.reshape(-1) for p in model.parameters() if p.requires_grad and p.grad is not None]
    model.zero_grad()
    return torch.cat([g.clone() for g in found])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("pack", [tree_batches, rows_batches, merged_batches])
@pytest.mark.parametrize("weights", ["full", "lora"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_gradients(objective: Objective, weights: str, pack: Any, tmp_path: Path) -> None:
    reference_model = tiny_models.llama(seed=7)
    if weights == "full":
        model = tiny_models.llama()
        trainer = make_trainer(model, tmp_path, objective, reference_model)
    else:
        model = lora(tiny_models.llama())
        trainer = make_trainer(model, tmp_path, objective)
    model = trainer.model

    def reference(t: Transition) -> torch.Tensor:
        with torch.no_grad():
            if weights == "full":
                return reference_logprobs(reference_model, t)
            with model.disable_adapter():
                return reference_logprobs(model, t)

    made = recorded(model)
    expected_loss = loss_by_hand(model, made, objective, reference)
    expected_loss.backward()
    expected = gradient_of(model)
    for max_tokens in (14, 4096):
        loss = trainer.training_step(model, {"micro_batches": pack(made, max_tokens)})
        assert relative(gradient_of(model), expected) <= 1e-4
        assert float(loss) == pytest.approx(expected_loss.item(), rel=1e-4, abs=1e-6)


def test_what_is_clipped(tmp_path: Path) -> None:
    model = tiny_models.llama()
    made = recorded(model)
    found = {}
    for name in ("clip", "gspo", "cispo", "sapo"):
        trainer = make_trainer(tiny_models.llama(), tmp_path / name, OBJECTIVES[name])
        trainer.training_step(trainer.model, {"micro_batches": tree_batches(made, 4096)})
        found[name] = trainer.metrics.num_clipped
    # clip: of +0.3, -0.3, +0.3, -0.35, -0.3 only -0.3 with a negative A is beyond the clip that stops it.
    # gspo: the first choice's mean ratio is 1.051 with a positive A, all its three tokens; cispo: above 1.1.
    assert found == {"clip": 1, "gspo": 3, "cispo": 3, "sapo": 0}


def test_a_masked_choice_has_no_kl_and_no_entropy(tmp_path: Path) -> None:
    """Multiplier 0 is how a weight of nothing looks; a choice that is not trained is in no batch at all."""
    objective = Objective(kl_weight=1.0, entropy_weight=1.0)
    trainer = make_trainer(tiny_models.llama(), tmp_path, objective, tiny_models.llama(seed=7))
    made = [transition("c", [3, 4], [5, 6], multiplier=0.0)]
    loss = trainer.training_step(trainer.model, {"micro_batches": tree_batches(made, 4096)})
    assert float(loss) == 0.0
    assert float(gradient_of(trainer.model).abs().max()) == 0.0


def test_correction_weights_by_hand() -> None:
    old = np.array([-1.0, -1.0, -1.0], dtype=np.float32)
    behavior = np.array([-1.0, -2.0, -0.5], dtype=np.float32)
    assert correction_weights(old, behavior, "truncate", 2.0) == pytest.approx([1.0, 2.0, np.exp(-0.5)])
    assert correction_weights(old, behavior, "mask", 2.0) == pytest.approx([1.0, 0.0, np.exp(-0.5)])
    far = correction_weights(np.array([0.0], np.float32), np.array([-500.0], np.float32), "truncate", 2.0)
    assert far.tolist() == [2.0]


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_corrected_step(mode: Any, tmp_path: Path) -> None:
    """Before the first step the ratio is 1: what is left is -rho A grad log policy."""
    model = tiny_models.llama()
    trainer = make_trainer(model, tmp_path, Objective())
    made = recorded(model)
    total = torch.zeros(())
    for t in made:
        logps = reference_logprobs(model, t)
        rho = torch.exp(logps.detach() - torch.tensor(list(t.behavior_logprobs)))
        weight = rho.clamp(max=1.2) if mode == "truncate" else rho * (rho <= 1.2)
        total = total - t.multiplier * t.advantage * (weight * torch.exp(logps - logps.detach())).sum()
    total.backward()
    expected = gradient_of(model)
    batches = trainer.corrected(tree_batches(made, 4096), mode, 1.2)
    trainer.training_step(trainer.model, {"micro_batches": batches})
    assert trainer.metrics.gap_max == pytest.approx(0.35, abs=1e-3)  # against the behaviour all the same
    assert relative(gradient_of(model), expected) <= 1e-4


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.qwen3())


def run(tmp_path: Path, model_folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], Any]:
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    for i in range(2):
        play_group(database, tiny_models.qwen3(), f"t{i}", [1.0, 0.0])
    defaults: dict[str, Any] = {
        "db": database.url,
        "model": model_folder,
        "output": tmp_path / "runs",
        "weights": "full",
        "learning_rate": 1e-3,
        "groups_per_step": 1,
        "publish": False,
        "progress": False,
    }
    summary = train(TrainSettings.load(None, **{**defaults, **changes}))
    database.close()
    lines = [json.loads(line) for line in (summary.folder / STEP_LOG).read_text().splitlines()]
    return lines, summary


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["full", "lora"])
def test_a_run_with_everything_on(tmp_path: Path, model_folder: Path, weights: str) -> None:
    lines, summary = run(
        tmp_path,
        model_folder,
        weights=weights,
        kl_weight=0.1,
        entropy_weight=0.01,
        objective="sapo",
        epochs=2,
    )
    first, second = lines
    assert first["kl_mean"] == pytest.approx(0.0, abs=1e-6)  # the start is the reference
    assert second["kl_mean"] > 0
    assert first["gap_max"] < 1e-4  # of the first epoch
    assert summary.steps_trained == 2
    assert first["call_tokens_per_sec"] > first["unique_tokens_per_sec"] > 0


@pytest.mark.slow
def test_epochs_move_further(tmp_path: Path, model_folder: Path) -> None:
    moved = {}
    for epochs in (1, 3):
        folder = tmp_path / str(epochs)
        folder.mkdir()
        lines, _ = run(folder, model_folder, epochs=epochs, correction="off")
        moved[epochs] = lines[1]["gap_mean"]  # calls of the start, seen by the weights after one batch
    assert moved[3] > 1.5 * moved[1]
