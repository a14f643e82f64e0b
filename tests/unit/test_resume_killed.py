"""Runs in processes of their own, killed with SIGKILL at random moments until they are through."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes import tiny_models
from fakes.killed_runs import assert_same_end, start
from fakes.recorded_log import play_group
from fakes.row_publisher import publishing

from lightning_rl.settings.train import TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.store.policies import versions
from lightning_rl.trainer.loop import train

pytestmark = pytest.mark.slow

GROUPS = 24  # so many that a fast machine isn't through before the kills are


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.qwen3())


@pytest.fixture
def log(tmp_path):
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    yield database
    database.close()


def play(log: Database, number: int) -> None:
    play_group(log, tiny_models.qwen3(), f"t{number}", [1.0, 1.0] if number % 5 == 4 else [1.0, 0.0])


def chosen(log: Database, model: Path, **changes):
    defaults = {
        "db": log.url,
        "model": model,
        "output": Path(log.url.removeprefix("sqlite:///")).parent / "runs",
        "learning_rate": 1e-3,
        "groups_per_step": 1,
        "publish": False,
        "progress": False,
    }
    return {**defaults, **changes}


def count(log: Database, query: str) -> int:
    with log.read() as conn:
        return int(conn.execute(sa.text(query)).scalar_one())


def killed_until_through(log: Database, given, dice: random.Random, kills: int) -> int:
    """Begin, kill at a moment that nobody chose, resume, and so on; after `kills` of them, let it end, unless
    it was through before. How many of the processes were killed while they trained."""
    hit = 0
    for _ in range(kills):
        process = start(given, resume="latest")
        done = count(log, "SELECT count(*) FROM step_manifests")
        until = time.monotonic() + 120
        while process.is_alive() and time.monotonic() < until:
            if count(log, "SELECT count(*) FROM step_manifests") > done:
                break
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.25))
        hit += process.is_alive()
        process.kill()
        process.join()
        if count(log, "SELECT count(*) FROM runs WHERE policy = 'policy' AND status = 'finished'"):
            return hit
    process = start(given, resume="latest")
    process.join(300)
    assert process.exitcode == 0
    return hit


KINDS = {
    "full": {"weights": "full", "epochs": 2},
    "lora": {"weights": "lora", "lora_rank": 4, "kl_weight": 0.1},
    "critic": {"weights": "full", "credit": "step_gae", "critic_learning_rate": 1e-2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_a_run_that_was_never_killed(log, model_folder, kind):
    for number in range(GROUPS):
        play(log, number)
    given = chosen(log, model_folder, **KINDS[kind])
    reference = train(TrainSettings.load(None, **given))
    with log.write() as conn:  # the reference is not what `latest` means
        conn.execute(sa.text("UPDATE runs SET policy = 'reference'"))
    hit = killed_until_through(log, given, random.Random(kind), 4)
    assert hit >= 2
    with log.read() as conn:
        run = conn.execute(sa.text("SELECT id FROM runs WHERE policy = 'policy'")).scalar_one()
    assert_same_end(reference.folder.parent / run, reference.folder)


def test_ten_kills_train_every_choice_once(log, model_folder):
    """Watching, while a publisher makes the versions live and new groups come."""
    play(log, 0)
    given = chosen(log, model_folder, weights="lora", lora_rank=4, publish=True, watch=True)
    dice, number, hit = random.Random(7), 1, 0
    with publishing(log.url) as published:
        for _ in range(10):
            process = start(given, resume="latest")
            done = count(log, "SELECT count(*) FROM step_manifests")
            for _ in range(2):
                play(log, number)
                number += 1
            until = time.monotonic() + 120
            while time.monotonic() < until and count(log, "SELECT count(*) FROM step_manifests") == done:
                time.sleep(0.002)
            time.sleep(dice.uniform(0, 0.4))
            hit += process.is_alive()
            process.kill()
            process.join()
        process = start({**given, "watch": False}, resume="latest")
        process.join(300)
        assert process.exitcode == 0
    assert hit == 10
    everything = count(log, "SELECT count(*) FROM choices")
    assert everything == number * 4
    assert count(log, "SELECT count(*) FROM manifest_choices") == everything
    assert count(
        log, "SELECT count(*) FROM (SELECT DISTINCT call_id, choice_index FROM manifest_choices) x"
    ) == (everything)
    assert count(log, "SELECT count(*) FROM step_manifests WHERE trained_at_ms IS NULL") == 0
    assert count(log, "SELECT count(*) FROM runs") == 1
    with log.read() as conn:
        assert [version.version for version in versions(conn, "policy")] == published
    assert len(published) == count(log, "SELECT count(*) FROM step_manifests WHERE to_version > 0")
