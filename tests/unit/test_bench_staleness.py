"""`make bench-staleness`: what it calls the truth is true, and it runs to its last line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench" / "trainer" / "staleness.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("bench_staleness", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_answer_is_counted_once_and_by_its_own_chance() -> None:
    bench = load()
    model, world = bench.new_model(3), bench.World()
    assert len({tuple(answer) for answer in world.answers.tolist()}) == 8**4
    with torch.no_grad():
        logps = world.answer_logprobs(model, 1)
        assert float(logps.sum(-1).exp().sum()) == pytest.approx(1.0, abs=1e-4)
        one = world.answers[1234]
        ids = torch.tensor([[*world.prompts[1], *one.tolist()]])
        plain = torch.log_softmax(model(input_ids=ids).logits[0, 1:-1], -1).gather(-1, one[:, None])[:, 0]
    assert torch.allclose(plain, logps[1234], atol=1e-5)
    word = torch.tensor([world.words[1]])
    assert float(world.reward(1, word)) == 1.0
    word[0, 0] = (word[0, 0] + 1) % 8
    assert float(world.reward(1, word)) == pytest.approx((3 / 4) ** 2)


def test_the_true_gradient_is_that_of_the_expected_reward() -> None:
    bench = load()
    model, world = bench.new_model(3).double(), bench.World()
    gradient = world.true_gradient(model)
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    direction = gradient / gradient.norm()

    def cost(step: float) -> float:
        torch.nn.utils.vector_to_parameters(flat + step * direction, model.parameters())
        with torch.no_grad():
            worth = [
                (world.answer_logprobs(model, task).sum(-1).exp() * world.rewards[task]).sum()
                for task in range(bench.TASKS)
            ]
        return -float(sum(worth)) / bench.TASKS / bench.ANSWER_TOKENS

    slope = (cost(1e-4) - cost(-1e-4)) / 2e-4
    assert slope == pytest.approx(float(gradient.norm()), rel=1e-4)


@pytest.mark.slow
def test_it_runs() -> None:
    command = [sys.executable, str(BENCH), "--seeds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["seeds"] == 2
    assert 0 <= last["closer_truncate"] <= 1
    assert last["median_cosine_fresh"] > 0.8  # of the weights of now, without a bias
    for way in ("off", "truncate", "mask"):
        assert last[f"median_distance_{way}"] > 0
