"""A run whose policy a person has promoted or rolled back meanwhile stops, and what it had is not lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import tiny_models
from fakes.recorded_log import play_group

from lightning_rl.errors import OvertakenError, UserError
from lightning_rl.records import VersionStatus
from lightning_rl.settings.train import TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.store.policies import (
    WAITING,
    load_version,
    set_base_live,
    set_version_status,
    versions,
    versions_with_status,
)
from lightning_rl.store.policy_requests import waiting_request
from lightning_rl.store.promotion import ask_for_version
from lightning_rl.store.run_view import list_runs, load_run
from lightning_rl.store.selection import trainable_group_ids
from lightning_rl.trainer.candidate import Handover
from lightning_rl.trainer.loop import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.qwen3())


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Database]:
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    for number in range(3):
        play_group(database, tiny_models.qwen3(), f"t{number}", [1.0, 0.0])
    yield database
    database.close()


def settings(log: Database, model: Path, **changes: Any) -> TrainSettings:
    defaults = {
        "db": log.url,
        "model": model,
        "output": Path(log.url.removeprefix("sqlite:///")).parent / "runs",
        "weights": "full",
        "groups_per_step": 1,
        "publish_timeout_sec": 60,
        "progress": False,
    }
    return TrainSettings.load(None, **{**defaults, **changes})


class Publisher:
    """What the one in the proxy does, without an engine: all that waits goes live, and `then` is told."""

    def __init__(self, log: Database, then: Callable[[int], None] = lambda version: None) -> None:
        self._log, self._then = log, then
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.wait(0.01):
            with self._log.write() as conn:
                waiting = versions_with_status(conn, *WAITING)
                for row in waiting:
                    set_version_status(
                        conn, row.policy, row.version, VersionStatus.LIVE, verdict={}, source="test"
                    )
                request = waiting_request(conn, "policy")
                if request is not None and request.version == 0:
                    set_base_live(conn, "policy", verdict=None, source="test")
                for row in waiting:
                    self._then(row.version)


def ask(log: Database, version: int) -> None:
    with log.write() as conn:
        ask_for_version(conn, "policy", version, "rollback", source="ann", note="worse")


def statuses(log: Database) -> dict[int, str]:
    with log.read() as conn:
        return {row.version: row.status.value for row in versions(conn, "policy")}


def test_a_rollback_between_two_steps_stops_the_run(log: Database, model_folder: Path) -> None:
    asked = threading.Event()

    def roll_back(version: int) -> None:
        if version == 1:
            asked.set()

    original = Handover.delete_old

    def after_the_first_step(self: Handover) -> None:
        assert asked.wait(30)
        ask(log, 0)
        original(self)

    with pytest.MonkeyPatch.context() as patch, Publisher(log, roll_back):
        patch.setattr(Handover, "delete_old", after_the_first_step)
        with pytest.raises(OvertakenError) as error:
            train(settings(log, model_folder))
    line = str(error.value)
    assert "ann (worse) has" in line
    assert "version 0" in line
    assert "this run goes on from version 1, so it stops" in line
    assert "\n" not in line
    (run,) = runs(log)
    assert (run.status, run.num_steps_trained) == ("stopped", 1)
    assert len(steps(log, run.id)) == 1, "no manifest of a step that nobody wants"
    assert list(statuses(log)) == [1]


def runs(log: Database) -> list[Any]:
    with log.read() as conn:
        return list_runs(conn)


def steps(log: Database, run_id: str) -> tuple[Any, ...]:
    with log.read() as conn:
        return load_run(conn, run_id).steps


def test_one_that_comes_while_a_step_is_trained_keeps_nothing_of_the_step(
    log: Database, model_folder: Path
) -> None:
    save = Handover.save
    folders: list[Path] = []

    def saving(self: Handover, *arguments: Any, **more: Any) -> Any:
        made = save(self, *arguments, **more)
        folders.append(Path(str(made.path)))
        if made.version == 2:
            ask(log, 0)
        return made

    with pytest.MonkeyPatch.context() as patch, Publisher(log):
        patch.setattr(Handover, "save", saving)
        with pytest.raises(OvertakenError):
            train(settings(log, model_folder))
    assert list(statuses(log)) == [1]
    assert [folder.is_dir() for folder in folders] == [True, False]
    with log.read() as conn:
        assert len(trainable_group_ids(conn, policy="policy", run_id="another")) == 2, "for the next run"


def test_a_run_that_waits_for_groups_stops_too(log: Database, model_folder: Path) -> None:
    done = threading.Event()

    def later() -> None:
        assert done.wait(60)
        time.sleep(0.1)
        ask(log, 0)

    thread = threading.Thread(target=later)
    with Publisher(log, lambda version: done.set() if version == 1 else None):
        thread.start()
        with pytest.raises(OvertakenError):
            train(settings(log, model_folder, watch=True, groups_per_step=3))
    thread.join()
    assert list(statuses(log)) == [1]


def test_it_is_resumed_once_its_own_version_is_live_again(log: Database, model_folder: Path) -> None:
    save = Handover.save

    def saving(self: Handover, *arguments: Any, **more: Any) -> Any:
        made = save(self, *arguments, **more)
        if made.version == 2:
            ask(log, 0)
        return made

    with Publisher(log):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Handover, "save", saving)
            with pytest.raises(OvertakenError):
                train(settings(log, model_folder))
        (run,) = runs(log)
        wait_until(lambda: statuses(log)[1] == "draining")
        with pytest.raises(UserError, match=r"no version is live, and run .* from its own version 1"):
            train(settings(log, model_folder), resume=run.id)
        ask(log, 1)
        wait_until(lambda: statuses(log)[1] == "live")
        summary = train(settings(log, model_folder), resume=run.id)
    assert (summary.status, summary.steps_trained, summary.version) == ("finished", 3, 3)
    assert statuses(log) == {1: "draining", 2: "draining", 3: "live"}


def test_a_run_from_the_base_model_does_not_mind_what_was_live(log: Database, model_folder: Path) -> None:
    with Publisher(log):
        train(settings(log, model_folder, max_steps=1))
        summary = train(settings(log, model_folder, max_steps=2, from_base=True))
    assert (summary.status, summary.version) == ("finished", 3)
    with log.read() as conn:
        row = load_version(conn, "policy", 3)
    assert row is not None
    assert row.status is VersionStatus.LIVE


def test_a_run_that_publishes_nothing_goes_on(log: Database, model_folder: Path) -> None:
    with Publisher(log):
        train(settings(log, model_folder, max_steps=1))
        ask(log, 0)
        wait_until(lambda: statuses(log)[1] == "draining")
    summary = train(settings(log, model_folder, publish=False))
    assert summary.status == "finished"


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)
