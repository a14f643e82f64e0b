"""What a run leaves in its folder and tells trackers of experiments."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from fakes import tiny_models
from fakes.recorded_log import play_group
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from lightning_rl.errors import SettingsError, UserError
from lightning_rl.settings.train import TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.store.runs import load_manifest
from lightning_rl.trainer.loop import train
from lightning_rl.trainer.planning.manifest_files import read_plan
from lightning_rl.trainer.report import STEP_LOG, StepLine, figures


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.qwen3())


@pytest.fixture
def log(tmp_path):
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    for task, rewards in (("t0", [1.0, 0.0]), ("t1", [1.0, 1.0]), ("t2", [0.5, 0.0])):
        play_group(database, tiny_models.qwen3(), task, rewards)
    yield database
    database.close()


def settings(log: Database, model: Path, **changes) -> TrainSettings:
    defaults = {
        "db": log.url,
        "model": model,
        "output": Path(log.url.removeprefix("sqlite:///")).parent / "runs",
        "weights": "full",
        "groups_per_step": 1,
        "publish": False,
        "progress": False,
    }
    return TrainSettings.load(None, **{**defaults, **changes})


def test_the_folder_holds_what_the_database_does(log, model_folder):
    summary = train(settings(log, model_folder))
    said = json.loads((summary.folder / "run.json").read_text())
    assert (said["run"], said["policy"], said["start_version"]) == (summary.run_id, "policy", 0)
    assert said["settings"]["groups_per_step"] == 1
    assert said["settings"]["learning_rate"] == 1e-5  # the defaults too
    assert {"torch", "trl", "python", "device"} <= said["environment"].keys()
    written = read_plan(summary.folder / "manifests")
    assert [step.trains for step in written.steps] == [True, False, True]
    with log.read() as conn:
        for number, step in enumerate(written.steps):
            kept = load_manifest(conn, summary.run_id, number)
            key = {(row.call_id, row.choice_index): row for row in kept.choices}
            assert {(row.call_id, row.choice_index): row for row in step.manifest.choices} == key
            assert step.manifest.returns == kept.returns
            assert step.manifest.reward_ids == kept.reward_ids
            assert step.manifest.from_version == kept.from_version
    # one step, as a plan of its own
    third = read_plan(summary.folder / "manifests" / "step-00002")
    assert [step.manifest.step for step in third.steps] == [0]
    assert third.steps[0].counts == written.steps[2].counts


@pytest.mark.slow
def test_a_run_trains_the_manifests_of_another_again(log, model_folder):
    first = train(settings(log, model_folder))
    again = train(settings(log, model_folder, manifests=first.folder / "manifests"))
    assert again.steps_trained == first.steps_trained == 2
    names = ("loss", "grad_norm", "reward_mean", "choices_trained")
    for ours, theirs in zip(lines(first.folder), lines(again.folder), strict=True):
        assert [ours[name] for name in names] == [theirs[name] for name in names]


def test_no_password_is_written(log, model_folder):
    from lightning_rl.trainer.place import RunPlace
    from lightning_rl.trainer.run_folder import write_run

    folder = Path(log.url.removeprefix("sqlite:///")).parent
    place = RunPlace("r", folder, 0)
    dumped = settings(log, model_folder).model_dump(mode="json", exclude={"db"})
    hidden = Database(f"postgresql://me:{'secret'}@host/log", log.engine).shown_url
    write_run(place, dumped, {}, shown_db=hidden)
    assert "secret" not in (folder / "run.json").read_text()
    assert json.loads((folder / "run.json").read_text())["db"] == "postgresql://me:***@host/log"
    with pytest.raises(UserError, match="set --output"):
        write_run(RunPlace("r", folder / "nowhere", 0), dumped, {}, shown_db=hidden)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / STEP_LOG).read_text().splitlines()]


class Tracker(TrainerCallback):
    """Keeps (optimizer steps so far, figures) of every call."""

    logged: list[tuple[int, dict]] = []  # noqa: RUF012 - transformers makes the instance

    def on_log(self, args, state, control, logs=None, **kwargs):
        Tracker.logged.append((state.global_step, dict(logs)))
        Tracker.args = args


@pytest.fixture
def tracker(monkeypatch):
    Tracker.logged = []
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "fake", Tracker)
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["fake"])
    return Tracker


def test_trackers_get_the_figures_of_each_step_by_optimizer_step(log, model_folder, tracker, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    summary = train(settings(log, model_folder, report_to=["fake"], epochs=2))
    ours = [(at, logged) for at, logged in tracker.logged if "episodes/all" in logged]
    assert [at for at, _ in ours] == [2, 2, 4]  # two epochs each; the second step trains nothing
    for (_, logged), line in zip(ours, lines(summary.folder), strict=True):
        assert logged["reward/mean"] == line["reward_mean"]
        assert logged["episodes/trained"] == line["episodes_trained"]
        assert logged.get("gap/mean") == line["gap_mean"]
        assert logged.get("policy/version") == line["to_version"]
    assert ours[1][1]["episodes/excluded/no_variance:all_solved"] == 2.0
    assert all(isinstance(value, float) for _, logged in ours for value in logged.values())
    theirs = [(at, logged) for at, logged in tracker.logged if "loss" in logged]
    assert [at for at, _ in theirs] == [1, 2, 3, 4]  # transformers' own: each optimizer step
    assert theirs[0][1]["grad_norm"] == pytest.approx(lines(summary.folder)[0]["grad_norm"], abs=1e-6)
    assert theirs[0][1].keys() == {"loss", "grad_norm", "learning_rate"}
    assert theirs[0][1]["learning_rate"] == 1e-5
    assert len(ours) + len(theirs) == len(tracker.logged)
    assert tracker.args.run_name == summary.run_id
    assert tracker.args.trackio_static_space_id is False


def test_nothing_is_tracked_by_default(log, model_folder, tracker):
    train(settings(log, model_folder))
    assert tracker.logged == []


def test_every_number_of_a_line_is_tracked():
    counts = dict.fromkeys(("groups", "groups_trained", "episodes", "episodes_trained"), 1)
    counts |= dict.fromkeys(("choices", "choices_trained", "trained_tokens"), 1)
    line = StepLine(
        step=0,
        from_version=0,
        to_version=None,
        reward_mean=None,
        episodes_excluded={"gap": 2},
        choices_excluded={},
        gap_mean=0.5,
        **counts,
    )
    found = figures(line)
    assert found["episodes/excluded/gap"] == 2.0
    assert found["gap/mean"] == 0.5
    assert "reward/mean" not in found  # None is no number
    assert found["step/micro_batches"] == 0.0  # a field that nobody named comes along


def test_a_tracker_that_is_not_there_is_one_line(log, model_folder, monkeypatch):
    with pytest.raises(SettingsError, match=r"report_to 'tensorbord': choose of .*tensorboard"):
        train(settings(log, model_folder, report_to=["tensorbord"]))
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", list)
    with pytest.raises(SettingsError, match="'tensorboard' needs its package: pip install tensorboard"):
        train(settings(log, model_folder, report_to=["tensorboard"]))
    with pytest.raises(SettingsError, match="pip install comet-ml"):
        train(settings(log, model_folder, report_to=["comet_ml"]))


def test_a_variable_names_several(log, model_folder, monkeypatch):
    monkeypatch.setenv("LIGHTNING_TRAIN_REPORT_TO", "tensorboard, wandb")
    assert settings(log, model_folder).report_to == ["tensorboard", "wandb"]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_files_lie_in_the_run_folder(log, model_folder):
    summary = train(settings(log, model_folder, report_to=["tensorboard"]))
    assert list((summary.folder / "tensorboard").glob("events.*"))
