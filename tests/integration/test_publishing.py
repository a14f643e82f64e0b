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
from publish.weights import TorchTrainer, tiny_llama

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
