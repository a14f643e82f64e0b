"""A bfloat16 copy that rounds the step away is counted, and said in one line with what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_models
from fakes.gradients import make_model, make_trainer, recorded
from fakes.recorded_log import play_group

from lightning_rl.settings.train import TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.trainer.batches.tree import tree_batches
from lightning_rl.trainer.loop import train
from lightning_rl.trainer.report import STEP_LOG, StepLine
from lightning_rl.trainer.step_figures import rounding_notice
from lightning_rl.trainer.steps import rounding
from lightning_rl.trainer.steps.making import served_as_bfloat16
from lightning_rl.trainer.steps.objective import Objective


def moved_share(weights: str, dtype: torch.dtype, learning_rate: float, folder: Path, **changes: Any) -> Any:
    """What the watch says of one step, and what all weights say."""
    model = make_model(weights)
    if weights == "full":
        model = model.to(dtype)
    trainer = make_trainer(model, folder, Objective(), learning_rate=learning_rate, **changes)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    gradients: dict[str, torch.Tensor] = {}

    def steps() -> Any:
        yield tree_batches(recorded(make_model(weights), "episode"), 4096)

    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: gradients.update({name: p.grad.clone()})
            )
    trainer.steps = steps()
    trainer.train()
    pulled = unmoved = 0
    for name, parameter in trainer.model.named_parameters():
        if name in gradients:
            has = gradients[name] != 0
            stayed = parameter.detach().to(torch.bfloat16) == before[name].to(torch.bfloat16)
            pulled, unmoved = pulled + int(has.sum()), unmoved + int((has & stayed).sum())
    return trainer.metrics.rounded_away, unmoved / pulled


@pytest.mark.slow
def test_a_step_that_is_too_small_for_bfloat16_is_counted(tmp_path: Path) -> None:
    watched, counted = moved_share("full", torch.bfloat16, 1e-6, tmp_path)
    assert watched == pytest.approx(counted)  # every tensor is smaller than the sample
    assert watched > 0.95
    watched, counted = moved_share("full", torch.bfloat16, 0.1, tmp_path)
    assert watched == pytest.approx(counted)
    assert watched < 0.2


def test_a_sample_of_larger_tensors_says_about_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "SAMPLED_PER_TENSOR", 100)
    watched, counted = moved_share("full", torch.bfloat16, 2e-4, tmp_path)
    assert 0.1 < counted < 0.9
    assert watched == pytest.approx(counted, abs=0.1)


@pytest.mark.slow
def test_full_precision_is_watched_only_where_bfloat16_is_served(tmp_path: Path) -> None:
    assert moved_share("full", torch.float32, 1e-6, tmp_path)[0] is None
    watched, counted = moved_share("full", torch.float32, 1e-6, tmp_path, served_as_bfloat16=True)
    assert watched == pytest.approx(counted)
    assert watched > 0.95


def test_where_bfloat16_is_served(tmp_path: Path) -> None:
    for stored, expected in (("bfloat16", True), ("float32", False)):
        (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
        full = TrainSettings.load(None, model=tmp_path, weights="full")
        assert served_as_bfloat16(full, on_gpu=True) is expected
        assert not served_as_bfloat16(full, on_gpu=False)  # our launcher serves in float32 there
        assert not served_as_bfloat16(TrainSettings.load(None, model=tmp_path), on_gpu=True)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.qwen3())


def run(folder: Path, model_folder: Path, **changes: Any) -> list[dict[str, Any]]:
    database = Database.open(f"sqlite:///{folder / 'log.db'}")
    for i in range(2):
        play_group(database, tiny_models.qwen3(), f"t{i}", [1.0, 0.0])
    settings = {"db": database.url, "model": model_folder, "output": folder / "runs", "groups_per_step": 1}
    settings |= {"publish": False, "progress": False}
    summary = train(TrainSettings.load(None, **settings, **changes))
    database.close()
    return [json.loads(line) for line in (summary.folder / STEP_LOG).read_text().splitlines()]


def test_a_run_says_it_once(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(tmp_path, model_folder, weights="full", dtype="bfloat16", learning_rate=1e-6)
    assert all(line["rounded_away"] > 0.95 for line in lines)
    said = [line for line in capsys.readouterr().err.splitlines() if "did not move" in line]
    assert len(said) == 1
    assert said[0].startswith("step 0: ")
    assert "use --dtype float32, --weights lora or a larger --learning-rate than 1e-06" in said[0]


@pytest.mark.parametrize(
    "changes", [{"weights": "full"}, {"weights": "lora", "dtype": "bfloat16", "lora_rank": 4}]
)
def test_float32_and_adapters_are_not_watched(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    """An adapter on a bfloat16 model has its own weights in float32."""
    lines = run(tmp_path, model_folder, learning_rate=1e-6, **changes)
    assert [line["rounded_away"] for line in lines] == [None, None]
    assert "did not move" not in capsys.readouterr().err


def test_the_notice_of_a_float32_run_says_that_nothing_is_lost(tmp_path: Path) -> None:
    settings = TrainSettings.load(None, model=tmp_path, weights="full")
    counts = dict.fromkeys(("groups", "groups_trained", "episodes", "episodes_trained", "choices"), 1)
    line = StepLine(
        step=3,
        from_version=0,
        to_version=1,
        reward_mean=0.5,
        episodes_excluded={},
        choices_trained=1,
        choices_excluded={},
        trained_tokens=1,
        lr=1e-5,
        rounded_away=0.93,
        **counts,
    )
    notice = rounding_notice(line, settings)
    assert notice is not None
    assert notice.startswith("step 3: 93% of the weights that had a gradient did not move once they are")
    assert "nothing is lost between steps" in notice
    assert "\n" not in notice
    assert rounding_notice(replace(line, rounded_away=0.2), settings) is None
