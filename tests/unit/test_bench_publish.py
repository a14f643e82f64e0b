"""The parts of `make bench-publish`, on an engine whose weights are one number; each can fail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.fake_engine import write_folder
from fakes.fake_vllm import serving
from fakes.numbers_vllm import NumbersVllm, NumberTrainer

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from publish import killed, sabotage, swaps
from publish.sabotage import SABOTAGES

NUM_STREAMS = 3

pytestmark = pytest.mark.slow  # each starts proxies


@pytest.fixture
def engine_url(tmp_path: Path) -> Iterator[str]:
    write_folder(tmp_path / "base", 0.0)
    with serving(NumbersVllm(tmp_path / "base")) as url:
        yield url


def nothing(_: str) -> None:
    pass


def test_versions_go_live_under_load_and_no_call_is_mislabelled(tmp_path: Path, engine_url: str) -> None:
    done = asyncio.run(swaps.play(tmp_path, NumberTrainer(tmp_path / "v"), engine_url, 3, NUM_STREAMS))
    assert done.failed == []
    assert done.rescored.mismatches == []
    assert set(done.rescored.by_version) == {0, 1, 2, 3}
    assert done.rescored.nearest_other > 0.02
    assert done.is_met


def test_every_sabotage_is_caught_and_does_harm_where_nothing_is_checked(
    tmp_path: Path, engine_url: str
) -> None:
    trainer, foreign = NumberTrainer(tmp_path / "v"), NumberTrainer(tmp_path / "f", base=3.3)
    done = asyncio.run(
        sabotage.play(tmp_path, trainer, foreign, engine_url, on_each=nothing, num_streams=NUM_STREAMS)
    )
    assert [one.name for one in done.outcomes if not one.is_caught] == []
    assert [one.name for one in done.outcomes if not one.is_let_through] == []
    assert done.failed == []
    assert done.mislabelled == []
    assert done.num_caught == len(SABOTAGES)


def test_a_proxy_that_is_killed_in_the_middle_of_a_swap(tmp_path: Path, engine_url: str) -> None:
    done = asyncio.run(
        killed.play(
            tmp_path,
            NumberTrainer(tmp_path / "v"),
            engine_url,
            kills=4,
            on_each=nothing,
            num_streams=NUM_STREAMS,
        )
    )
    assert done.not_live == []
    assert done.mislabelled == []
    assert all(rescored.num_calls for rescored in done.rescored)
