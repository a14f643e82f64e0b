"""Whole training runs on a tiny model and a SQLite log, and every mistake that a user can make."""

from __future__ import annotations

import json
import signal
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import log_rows, tiny_models
from fakes.recorded_log import play_group
from fakes.reference_loss import reference_logprobs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.engine.probes import PROBE_TEXT, tokenizer_probe
from lightning_rl.errors import (
    ModelMismatchError,
    NothingToTrainError,
    PublishError,
    SettingsError,
    StoreError,
    UserError,
)
from lightning_rl.records import Fingerprint, Purpose, VersionStatus
from lightning_rl.settings.train import TrainSettings
from lightning_rl.store.append import add_fingerprint, append_entries, create_episode
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import add_reward, end_episode
from lightning_rl.store.policies import load_version, set_version_status, versions
from lightning_rl.store.read import load_groups
from lightning_rl.store.rests import rests, say_rest
from lightning_rl.store.run_view import list_runs
from lightning_rl.store.runs import load_manifest
from lightning_rl.store.selection import trainable_group_ids
from lightning_rl.trainer.loop import train
from lightning_rl.trainer.planning.dry_run import dry_run
from lightning_rl.trainer.planning.plan import plan_step, transitions
from lightning_rl.trainer.planning.planner import plan_settings
from lightning_rl.trainer.report import STEP_LOG, StepLine, human
from lightning_rl.trainer.steps.models import shares_prefixes


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.qwen3())


@pytest.fixture
def log(tmp_path):
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    yield database
    database.close()


def settings(log: Database, model: Path, **changes) -> TrainSettings:
    defaults = {
        "db": log.url,
        "model": model,
        "output": Path(log.url.removeprefix("sqlite:///")).parent / "runs",
        "weights": "full",
        "learning_rate": 1e-3,
        "groups_per_step": 2,
        "publish": False,
        "progress": False,
    }
    return TrainSettings.load(None, **{**defaults, **changes})


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / STEP_LOG).read_text().splitlines()]


def weights_of(model) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.slow
def test_two_steps_of_full_weights(log, model_folder):
    model = tiny_models.qwen3()
    for i in range(3):
        play_group(log, model, f"t{i}", [1.0, 0.0, 0.0, 1.0])
    summary = train(settings(log, model_folder))
    assert (summary.status, summary.steps_trained, summary.version) == ("finished", 2, 2)
    first, second = lines(summary.folder)
    assert (first["groups"], second["groups"]) == (2, 1)  # oldest first, the last may be smaller
    assert (first["from_version"], first["to_version"], second["from_version"]) == (0, 1, 1)
    assert first["reward_mean"] == 0.5
    assert (first["episodes_trained"], first["choices_trained"], first["trained_tokens"]) == (8, 16, 40)
    assert first["gap_max"] < 1e-4  # sampled by the very weights that the step starts from
    assert second["gap_max"] > 1e-4  # the first step has moved them
    assert first["clip_fraction"] == 0.0
    assert first["grad_norm"] > 0
    assert first["call_tokens_per_sec"] > first["unique_tokens_per_sec"] > 0
    assert first["seconds"] >= first["train_sec"] > 0

    trained = AutoModelForCausalLM.from_pretrained(summary.folder / "versions" / "00002")
    start = AutoModelForCausalLM.from_pretrained(model_folder)
    assert 1e-5 < (weights_of(trained) - weights_of(start)).abs().max() < 2.5e-3  # two Adam steps of 1e-3
    with log.read() as conn:
        manifest = load_manifest(conn, summary.run_id, 0)
        assert versions(conn, "policy") == []
    assert {row.advantage is None for row in manifest.choices} == {False}
    assert sum(row.multiplier * 5 for row in manifest.choices if row.call_id.endswith("-0")) == pytest.approx(
        1
    )
    with sqlite3.connect(log.url.removeprefix("sqlite:///")) as raw:
        assert raw.execute("select status from runs").fetchall() == [("finished",)]
        assert raw.execute("select count(*) from step_manifests where trained_at_ms is null").fetchone() == (
            0,
        )
    raw.close()


def test_it_learns(log, model_folder):
    """After the step the good answers are likelier and the bad ones less, weighed as the loss does."""
    play_group(log, tiny_models.qwen3(), "t", [1.0, 0.0, 0.0, 1.0])
    chosen = settings(log, model_folder)
    with log.read() as conn:
        groups = load_groups(conn, trainable_group_ids(conn, policy="policy", run_id="x"))
    plan = plan_step(groups, plan_settings(chosen), run_id="x", step=0, from_version=0)
    made = transitions(plan.manifest, groups)
    summary = train(chosen)
    after = AutoModelForCausalLM.from_pretrained(summary.folder / "versions" / "00001")
    with torch.no_grad():
        moved = 0.0
        for t in made:
            change = reference_logprobs(after, t) - torch.tensor(list(t.behavior_logprobs))
            moved += t.advantage * t.multiplier * float(change.sum())
    assert moved > 0


def test_an_adapter_is_trained_published_and_continued(log, model_folder):
    model = tiny_models.qwen3()
    play_group(log, model, "t0", [1.0, 0.0])
    publisher = threading.Thread(target=publish_next, args=(log.url, 1))
    publisher.start()
    chosen = settings(log, model_folder, weights="lora", lora_rank=4, publish=True, groups_per_step=1)
    summary = train(chosen)
    publisher.join()
    assert summary.version == 1
    with log.read() as conn:
        version = load_version(conn, "policy", 1)
    assert version.status is VersionStatus.LIVE
    assert version.run_id == summary.run_id
    assert version.base_model == str(model_folder)
    assert version.checksum.startswith("sha256:")
    assert version.probe
    for sequence in version.probe:
        assert len(sequence.logprobs_before) == len(sequence.logprobs_after) == len(sequence.ids) - 1
        assert (
            max(abs(a - b) for a, b in zip(sequence.logprobs_before, sequence.logprobs_after, strict=True))
            > 0
        )

    with pytest.raises(NothingToTrainError, match="1 trained already; produce episodes in a new batch"):
        train(chosen)
    # the next run starts from the live adapter: recorded logprobs of the base now show a gap
    play_group(log, model, "t1", [1.0, 0.0])
    again = train(replace_settings(chosen, publish=False))
    assert lines(again.folder)[0]["from_version"] == 1
    assert lines(again.folder)[0]["gap_max"] > 1e-6
    assert again.version == 2
    based = train(replace_settings(chosen, publish=False, from_base=True))
    assert lines(based.folder)[0]["from_version"] == 0
    assert lines(based.folder)[0]["gap_max"] < 1e-4
    with pytest.raises(UserError, match="holds lora weights, but this run trains full"):
        train(replace_settings(chosen, weights="full"))
    for name, value in (("lora_rank", 8), ("lora_alpha", 3.0), ("lora_targets", ["q_proj"])):
        with pytest.raises(SettingsError, match=rf"live version's adapter has {name} = .*--from-base"):
            train(replace_settings(chosen, **{name: value}))


def test_an_adapter_sits_where_the_settings_say(log, model_folder):
    play_group(log, tiny_models.qwen3(), "t0", [1.0, 0.0])
    chosen = settings(
        log, model_folder, weights="lora", lora_rank=4, lora_alpha=4, lora_targets=["q_proj", "o_proj"]
    )
    summary = train(chosen)
    adapter = summary.folder / "versions" / "00001"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    assert sorted(config["target_modules"]) == ["o_proj", "q_proj"]
    names = list(load_file(adapter / "adapter_model.safetensors"))
    assert names
    assert all("q_proj" in name or "o_proj" in name for name in names)
    with pytest.raises(UserError, match=r"lora_targets = \['nothing'\]: Target modules"):
        train(replace_settings(chosen, from_base=True, lora_targets=["nothing"]))


def test_the_engines_rest_from_the_probe_to_the_handover(log, model_folder):
    play_group(log, tiny_models.qwen3(), "t0", [1.0, 0.0])
    seen = []

    def publish() -> None:
        """What the publisher does: the engines sleep when they are asked to, and wake for the candidate."""
        database = Database.open(log.url)
        until = time.monotonic() + 60
        while "engine_wake" not in seen and time.monotonic() < until:
            with database.read() as conn:
                found, offered = rests(conn), load_version(conn, "policy", 1)
            state = found[0].state if found else None
            if state is not None and state not in seen:
                assert (offered is not None) == (state == "engine_wake")  # one transaction hands both over
                seen.append(state)
            if state == "engine_rest":
                with database.write() as conn:
                    say_rest(conn, found[0].run_id, "engine_asleep", source="test")
            time.sleep(0.01)
        database.close()
        publish_next(log.url, 1)

    publisher = threading.Thread(target=publish)
    publisher.start()
    train(settings(log, model_folder, publish=True, share_gpu=True))
    publisher.join()
    assert seen == ["engine_rest", "engine_asleep", "engine_wake"]
    with pytest.raises(SettingsError, match="--share-gpu asks the proxy"):
        train(settings(log, model_folder, publish=False, share_gpu=True))


def replace_settings(chosen: TrainSettings, **changes) -> TrainSettings:
    return chosen.model_copy(update=changes)


def publish_next(url: str, number: int, status: VersionStatus = VersionStatus.LIVE, verdict=None) -> None:
    """What the publisher in the proxy does, without an engine."""
    database = Database.open(url)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with database.read() as conn:
            found = load_version(conn, "policy", number)
        if found is not None:
            assert Path(found.path).is_dir()
            with database.write() as conn:
                set_version_status(conn, "policy", number, status, verdict=verdict, source="test")
            break
        time.sleep(0.02)
    database.close()


@pytest.mark.slow
def test_a_version_that_nobody_publishes_says_so(log, model_folder):
    play_group(log, tiny_models.qwen3(), "t0", [1.0, 0.0])
    chosen = settings(log, model_folder, publish=True, publish_timeout_sec=0.2)
    with pytest.raises(PublishError, match=r"nobody has taken up version 1 .*lightning proxy serve --db"):
        train(chosen)
    (run,) = (chosen.output).iterdir()
    assert lines(run)[0]["to_version"] == 1
    assert (run / "versions" / "00001" / "model.safetensors").is_file()


def test_a_rejected_version_stops_the_run_with_the_reason(log, model_folder):
    play_group(log, tiny_models.qwen3(), "t0", [1.0, 0.0])
    verdict = {"reason": "the engine's logprobs did not move"}
    publisher = threading.Thread(target=publish_next, args=(log.url, 1, VersionStatus.REJECTED, verdict))
    publisher.start()
    with pytest.raises(PublishError, match=r"rejected.*the engine's logprobs did not move"):
        train(settings(log, model_folder, publish=True))
    publisher.join()
    with log.read() as conn:
        (run,) = list_runs(conn)
    assert (run.status, run.why is not None and "did not move" in run.why) == ("failed", True)


def test_watching_uses_up_what_it_cannot_train_and_ends_cleanly_on_sigterm(log, model_folder):
    model = tiny_models.qwen3()
    play_group(log, model, "same", [1.0, 1.0])
    play_group(log, model, "fine", [1.0, 0.0])
    database_file = log.url.removeprefix("sqlite:///")

    chosen = settings(log, model_folder, watch=True, groups_per_step=1)

    def stop_when_trained() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            time.sleep(0.05)
            said = [file.read_text().count("\n") for file in chosen.output.glob(f"*/{STEP_LOG}")]
            if said == [2]:
                break
        signal.pthread_kill(main, signal.SIGTERM)

    main = threading.main_thread().ident
    stopper = threading.Thread(target=stop_when_trained)
    stopper.start()
    before = signal.getsignal(signal.SIGTERM)
    summary = train(chosen)
    stopper.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert (summary.status, summary.steps_trained) == ("stopped", 1)
    empty, trained = lines(summary.folder)
    assert (empty["to_version"], empty["gap_mean"], empty["choices_trained"]) == (None, None, 0)
    assert empty["episodes_excluded"] == {"no_variance:all_solved": 2}
    assert (trained["step"], trained["to_version"]) == (1, 1)
    with sqlite3.connect(database_file) as raw:
        assert raw.execute("select status from runs").fetchall() == [("stopped",)]
    raw.close()


def test_max_steps_and_old_versions(log, model_folder):
    model = tiny_models.qwen3()
    for i in range(5):
        play_group(log, model, f"t{i}", [1.0, 0.0])
    summary = train(settings(log, model_folder, groups_per_step=1, max_steps=4, keep_versions=2))
    assert summary.steps_trained == 4
    assert sorted(p.name for p in (summary.folder / "versions").iterdir()) == ["00003", "00004"]


def test_a_model_that_cannot_share_prefixes_takes_padded_rows(log, tmp_path, capsys):
    torch.manual_seed(0)
    config = tiny_models.qwen3().config.to_dict() | {"use_sliding_window": True, "sliding_window": 4}
    config |= {"max_window_layers": 1, "layer_types": None}
    sliding = Qwen3ForCausalLM(Qwen3Config(**config))
    assert not shares_prefixes(sliding.config)
    folder = tiny_models.save(tmp_path / "sliding", sliding)
    play_group(log, sliding, "t0", [1.0, 0.0])
    summary = train(settings(log, folder))
    assert lines(summary.folder)[0]["gap_max"] < 1e-4
    assert "can't share prefixes" in capsys.readouterr().err


# mistakes


def test_an_empty_log(log, model_folder):
    with pytest.raises(NothingToTrainError, match=r"0 episodes.*point an agent at the proxy"):
        train(settings(log, model_folder))


def test_no_rewards(log, model_folder):
    for name in play_group(log, tiny_models.qwen3(), "t0", [None, None]):
        with log.write() as conn:
            end_episode(conn, name, by="api")
    with pytest.raises(NothingToTrainError, match=r"2 without a reward.*lightning reward EPISODE VALUE"):
        train(settings(log, model_folder))


@pytest.mark.parametrize(
    ("reward", "cause"),
    [(1.0, "every episode solved"), (0.0, "every episode failed"), (0.3, "equal rewards")],
)
def test_no_variance_names_the_cause(log, model_folder, reward, cause):
    for i in range(3):
        play_group(log, tiny_models.qwen3(), f"t{i}", [reward, reward])
    with pytest.raises(NothingToTrainError, match=f"no group has variance.*{cause}"):
        train(settings(log, model_folder))
    with sqlite3.connect(log.url.removeprefix("sqlite:///")) as raw:
        assert raw.execute("select count(*) from runs").fetchone() == (0,)
    raw.close()


def test_evaluation_episodes_are_never_trained(log, model_folder):
    with log.write() as conn:
        create_episode(conn, episode_id="e", task_id="t", purpose=Purpose.EVAL)
        append_entries(conn, [log_rows.intent("c", "e"), log_rows.end("c")])
        end_episode(conn, "e", by="api")
    with pytest.raises(NothingToTrainError, match="1 for evaluation"):
        train(settings(log, model_folder))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: folder / "nowhere", "no such model folder"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer in .* can't be loaded"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"?"), "model in .* can't be loaded"),
    ],
)
def test_a_model_folder_that_will_not_do(log, tmp_path, break_it, message):
    folder = tiny_models.save(tmp_path / "broken", tiny_models.qwen3())
    play_group(log, tiny_models.qwen3(), "t0", [1.0, 0.0])
    changed = break_it(folder)
    with pytest.raises(UserError, match=message) as caught:
        train(settings(log, changed if isinstance(changed, Path) else folder))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_another_tokenizer_than_the_engines(log, model_folder):
    right = tokenizer_probe(tiny_models.tokenizer()(PROBE_TEXT, add_special_tokens=False)["input_ids"])
    for number, (probe, fits) in enumerate([(right, True), (None, True), ("0" * 32, False)]):
        print_of = Fingerprint(f"f{number}", "vllm", "served-model", probe, None, None, None)
        with log.write() as conn:
            add_fingerprint(conn, print_of)
        play_group(
            log, tiny_models.qwen3(), f"t{number}", [1.0, 0.0], intents={"fingerprint_id": print_of.id}
        )
        if fits:
            train(settings(log, model_folder))
        else:
            with pytest.raises(
                ModelMismatchError, match=r"not the one that the log was recorded with.*served-model"
            ):
                train(settings(log, model_folder))


def test_ids_beyond_the_vocabulary(log, model_folder):
    with log.write() as conn:
        for name, value in (("a", 1.0), ("b", 0.0)):
            create_episode(conn, episode_id=name, task_id="t")
            append_entries(
                conn,
                [log_rows.intent(f"c{name}", name), log_rows.end(f"c{name}", (1, 2, 500))],
            )
            add_reward(conn, log_rows.reward(name, value, final=True))
    with pytest.raises(ModelMismatchError, match=r"token id 500, but the model in .* has only 64"):
        train(settings(log, model_folder))


def test_a_wrong_database(tmp_path, model_folder):
    with pytest.raises(StoreError):
        train(TrainSettings.load(None, db=f"sqlite:///{tmp_path / 'no.db'}", model=model_folder))


def test_the_command_prints_json_lines_and_one_line_errors(log, model_folder):
    play_group(log, tiny_models.qwen3(), "t0", [1.0, 0.0])
    arguments = ["train", "--db", log.url, "--model", str(model_folder), "--weights", "full", "--no-publish"]
    arguments += ["--output", str(model_folder.parent / "out"), "--json", "--no-progress"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    step, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert step["step"] == 0
    assert result.stdout.startswith('{"step"')
    assert last["status"] == "finished"
    wrong = CliRunner().invoke(app, [*arguments, "--policy", "other"])
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("lightning: nothing to train in sqlite:///")
    assert len(wrong.stderr.strip().splitlines()) == 1
    unknown = CliRunner().invoke(app, [*arguments, "--weighting", "rows"])
    assert unknown.exit_code == 2
    assert "weighting" in unknown.stderr


def test_human_lines_say_why():
    line = StepLine(
        step=4,
        from_version=2,
        to_version=3,
        reward_mean=0.5,
        groups=2,
        groups_trained=1,
        episodes=4,
        episodes_trained=2,
        episodes_excluded={"no_variance:all_solved": 2},
        choices=8,
        choices_trained=3,
        choices_excluded={"no_variance:all_solved": 4, "penalties": 1},
        trained_tokens=30,
        gap_mean=0.0012,
        gap_max=0.25,
        clip_fraction=0.01,
        grad_norm=0.5,
        lr=1e-5,
        call_tokens_per_sec=900.0,
        unique_tokens_per_sec=300.0,
        seconds=12.34,
    )
    assert human(line) == (
        "step 4 | reward 0.500 | episodes 2/4 (no_variance:all_solved 2) | "
        "choices 3/8 (no_variance:all_solved 4, penalties 1) | gap 0.0012 max 0.250 | clipped 1.0% | "
        "grad 0.5 | lr 1e-05 | 900 tokens/s (300 unique) | 12.3 s | version 3"
    )
    empty = human(replace(line, choices_trained=0, to_version=None, seconds=0.1))
    assert empty.endswith("| 0.1 s | no new version")


def test_the_run_trains_what_the_dry_run_wrote(log, model_folder, tmp_path):
    """The same manifests, planned by the run itself or read from the dry run's folder; to the last digit."""
    model = tiny_models.qwen3()
    for i, rewards in enumerate(([1.0, 0.0], [1.0, 1.0], [0.3, 0.1])):
        play_group(log, model, f"t{i}", rewards)
    chosen = {"groups_per_step": 1, "credit": "turn_discount", "manifests": tmp_path / "plan"}
    plan = dry_run(settings(log, model_folder, **chosen)).plan
    assert [step.trains for step in plan.steps] == [True, False, True]

    def manifests(summary):
        with log.read() as conn:
            found = [load_manifest(conn, summary.run_id, step) for step in range(3)]
        return [replace(manifest, run_id="") for manifest in found]

    def ordered(manifest):
        rows = sorted(manifest.choices, key=lambda row: (row.call_id, row.choice_index))
        return replace(manifest, run_id="", choices=tuple(rows))

    wanted = [ordered(step.manifest) for step in plan.steps]
    by_itself = train(settings(log, model_folder, **(chosen | {"manifests": None})))
    assert manifests(by_itself) == wanted
    as_written = train(settings(log, model_folder, **(chosen | {"credit": "turn_discount gamma=0.9"})))
    assert manifests(as_written) == wanted
    assert as_written.steps_trained == by_itself.steps_trained == 2
    with sqlite3.connect(log.url.removeprefix("sqlite:///")) as raw:
        stored = raw.execute("select settings from runs where id = ?", (as_written.run_id,)).fetchone()[0]
    raw.close()
    assert json.loads(stored)["credit"]["gamma"] == 0.9  # what decided it, in full


def test_a_written_plan_that_does_not_fit_is_refused(log, model_folder, tmp_path):
    play_group(log, tiny_models.qwen3(), "t0", [1.0, 0.0])
    chosen = settings(log, model_folder, manifests=tmp_path / "plan")
    dry_run(chosen)
    with pytest.raises(UserError, match="planned for policy 'policy', not 'other'"):
        train(settings(log, model_folder, manifests=tmp_path / "plan", policy="other"))
    header = json.loads((tmp_path / "plan" / "plan.json").read_text())
    (tmp_path / "plan" / "plan.json").write_text(json.dumps(header | {"start_version": 4}))
    with pytest.raises(UserError, match=r"planned from version 4 .* starts from version 0"):
        train(chosen)
    with pytest.raises(UserError, match="can't --watch"):
        train(settings(log, model_folder, manifests=tmp_path / "plan", watch=True))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"credit": "rloo"}, "planned with credit = {'rule': 'grpo', .*, and rloo would change"),
        ({"credit": "grpo eps=1"}, "and grpo eps=1 would change what it trains: leave credit out"),
        ({"train_agents": ["writer"]}, r"planned with train_agents = \['a', 'b'\], and \['writer'\] would"),
        ({"groups_per_step": 1}, "planned with groups_per_step = 2, and 1 would"),
        ({"sources": {"human": 3}}, "planned with sources = {'human': 2.0}, and"),
        ({"max_sequence_tokens": 9}, "planned with max_sequence_tokens = .*, and 9 would"),
    ],
)
def test_what_a_written_plan_has_decided_is_not_said_otherwise(log, model_folder, tmp_path, said, message):
    play_group(log, tiny_models.qwen3(), "t0", [1.0, 0.0])
    decided = {"credit": "grpo", "train_agents": ["a", "b"], "sources": {"human": 2}}
    dry_run(settings(log, model_folder, manifests=tmp_path / "plan", **decided))
    with pytest.raises(SettingsError, match=message):
        train(settings(log, model_folder, manifests=tmp_path / "plan", **said))
    same = {"credit": {"rule": "grpo", "eps": 0}, "train_agents": ["b", "a"], "max_steps": 1}
    with pytest.raises(NothingToTrainError):  # nobody is called a or b: the plan itself was taken
        train(settings(log, model_folder, manifests=tmp_path / "plan", **same))


def test_a_name_that_nothing_bears_is_told_in_the_first_step_alone(log, model_folder, capsys):
    for task in ("t0", "t1"):
        play_group(log, tiny_models.qwen3(), task, [1.0, 0.0])
    credit = {"rule": "grpo", "agents": {"writr": "rloo"}}
    summary = train(settings(log, model_folder, groups_per_step=1, credit=credit, sources={"humna": 2}))
    assert summary.steps_trained == 2
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("no call is of agent 'writr' (credit.agents) in step 0") == 1
    assert told.count("no reward is of source 'humna' (sources) in step 0") == 1


@pytest.mark.slow
def test_another_model_than_the_engine_s_is_said_once(log, model_folder, tmp_path, capsys):
    for task in ("t0", "t1"):
        play_group(log, tiny_models.qwen3(seed=5), task, [1.0, 0.0])
    train(settings(log, model_folder, groups_per_step=1))
    said = capsys.readouterr().err
    assert said.count("nats per token apart, though the log says that version 0 sampled") == 1
    assert "step 0: " in said
    # of the model itself there is nothing to say, nor once the weights have moved on
    other = tiny_models.save(tmp_path / "other", tiny_models.qwen3(seed=5))
    train(settings(log, other, groups_per_step=1, learning_rate=0.5))
    assert "nats per token" not in capsys.readouterr().err
