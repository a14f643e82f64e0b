"""The dry run: what it writes, what it says, and that it needs nothing but the log. No torch in this file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import log_rows
from fakes.log_rows import choice, end, intent
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.errors import NothingToTrainError, SettingsError, UserError
from lightning_rl.records import CallKind, Purpose, Quarantine, now_ms
from lightning_rl.settings.train import DryRunSettings
from lightning_rl.store.append import append_entries, create_episode
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import add_reward, end_episode
from lightning_rl.trainer.planning import manifest_files
from lightning_rl.trainer.planning.dry_run import dry_run
from lightning_rl.trainer.planning.manifest_files import read_plan


@pytest.fixture
def log(tmp_path):
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    yield database
    database.close()


def play(log: Database, task: str, rewards, *, calls: int = 2) -> None:
    """A group; each episode with a side call and a quarantined first call, and `calls` good ones."""
    for number, value in enumerate(rewards):
        name = f"{task}-{number}"
        with log.write() as conn:
            create_episode(conn, episode_id=name, task_id=task, batch="b", expected_size=len(rewards))
            entries = []
            for k in range(calls):
                entries += [intent(f"{name}-{k}", name, task=task, batch="b", agent="a"), end(f"{name}-{k}")]
            odd = choice(quarantine=Quarantine.PENALTIES)
            entries += [intent(f"{name}-odd", name, task=task, batch="b"), end(f"{name}-odd", (1,), odd)]
            side = intent(f"{name}-side", name, task=task, batch="b", kind=CallKind.SIDE)
            append_entries(conn, [*entries, side, end(f"{name}-side")])
            if value is None:
                end_episode(conn, name, by="api")
            else:
                add_reward(conn, log_rows.reward(name, value, final=True))
        until = now_ms() + 1
        while now_ms() < until:  # two ends in one millisecond would be ordered by name
            time.sleep(0.001)


def settings(log: Database, **changes) -> DryRunSettings:
    folder = Path(log.url.removeprefix("sqlite:///")).parent
    return DryRunSettings.load(
        **{"db": log.url, "output": folder / "runs", "groups_per_step": 2, "manifests": folder / "plan"}
        | changes
    )


def test_every_step_is_planned_written_and_read_back(log):
    play(log, "t0", [1.0, 0.0])
    play(log, "t1", [1.0, 1.0])
    play(log, "t2", [0.25, 0.0, None])
    found = dry_run(settings(log, credit="dr_grpo"))
    first, second = found.plan.steps
    assert (first.counts.groups_trained, first.counts.choices_trained) == (1, 4)
    assert (first.manifest.from_version, second.manifest.from_version) == (0, 1)
    assert found.plan.settings["credit"] == {"rule": "dr_grpo"}
    read = read_plan(found.plan.folder)
    assert [step.counts for step in read.steps] == [step.counts for step in found.plan.steps]
    for ours, theirs in zip(found.plan.steps, read.steps, strict=True):
        assert theirs.manifest.choices == ours.manifest.choices
        assert theirs.manifest.returns == ours.manifest.returns
        assert theirs.manifest.reward_ids == ours.manifest.reward_ids
    with log.read() as conn:
        import sqlalchemy as sa

        assert conn.execute(sa.text("select count(*) from runs")).scalar() == 0  # the log is only read


def test_json_lines_say_the_same_as_parquet(log, monkeypatch):
    pytest.importorskip("pyarrow")
    play(log, "t0", [1 / 3, 0.1])
    parquet = dry_run(settings(log))
    kept = read_plan(parquet.plan.folder)
    monkeypatch.setattr(manifest_files, "file_kind", lambda: "jsonl")
    monkeypatch.setattr("lightning_rl.trainer.planning.dry_run.file_kind", lambda: "jsonl")
    lines = dry_run(settings(log))
    rows = [json.loads(line) for line in (lines.plan.folder / "choices.jsonl").read_text().splitlines()]
    assert {row["why"] for row in rows if row["reason"] is None} == {"trained"}
    assert "penalties changed the distribution" in {row["why"] for row in rows}
    assert (parquet.files, lines.files) == ("parquet", "jsonl")
    assert not list(lines.plan.folder.glob("*.parquet"))  # the folder is written over whole
    assert read_plan(lines.plan.folder) == kept


def test_a_policy_step_stops_where_the_run_would(log):
    for i in range(4):
        play(log, f"t{i}", [1.0, 0.0] if i else [1.0, 1.0])
    found = dry_run(settings(log, groups_per_step=1, max_steps=2))
    assert [step.trains for step in found.plan.steps] == [False, True, True]


def test_groups_of_one_are_compared_with_what_ended_before(log):
    """Live traffic: one episode per task. The log alone makes the baseline, however the steps are cut."""
    for i, value in enumerate([0.0, 1.0, 0.0, 1.0, 1.0]):
        play(log, f"t{i}", [value], calls=1)
    nobody = dry_run(settings(log))
    assert not any(step.trains for step in nobody.plan.steps)
    rule = "running_baseline min_history=2 decay=0.5"

    def advantages(groups_per_step):
        found = dry_run(settings(log, credit=rule, groups_per_step=groups_per_step))
        return {
            row.episode_id: row.advantage if row.reason is None else row.reason
            for step in found.plan.steps
            for row in step.manifest.choices
            if row.call_id.endswith("-0-0")
        }

    wanted = {
        "t0-0": "no_baseline_yet",
        "t1-0": "no_baseline_yet",
        "t2-0": pytest.approx(0 - 1 / 1.5),
        "t3-0": pytest.approx(1 - 0.5 / 1.75),
        "t4-0": pytest.approx(1 - 1.25 / 1.875),
    }
    assert advantages(1) == advantages(5) == wanted


def run(*arguments: str):
    return CliRunner().invoke(app, ["train", "--dry-run", *arguments], env={"COLUMNS": "200"})


def test_the_command_prints_a_table_and_explains(log, tmp_path):
    play(log, "t0", [1.0, 0.0])
    play(log, "t1", [1.0])
    folder = str(tmp_path / "out")
    shown = run("--db", log.url, "--manifests", folder, "--credit", "dr_grpo", "--explain", "t0-0")
    assert shown.exit_code == 0, shown.output
    assert "side_call" in shown.output
    assert "a side call of the agent's program" in shown.output
    assert "+0.5000" in shown.output
    assert "t0-0: reward test=1" in shown.output
    assert f"lightning train --manifests {folder}" in shown.output
    printed = run("--db", log.url, "--manifests", folder, "--json", "--explain", "t0-1-odd")
    doc = json.loads(printed.stdout)
    assert doc["steps_trained"] == 1
    (row,) = doc["explained"]
    assert (row["reason"], row["advantage"], row["why"]) == (
        "penalties",
        None,
        "penalties changed the distribution",
    )


def test_the_printed_command_starts_where_the_plan_does(log, tmp_path):
    play(log, "t0", [1.0, 0.0])
    folder = str(tmp_path / "my plan")
    arguments = ("--db", log.url, "--manifests", folder, "--max-steps", "1")
    base = run(*arguments, "--from-base").stdout
    assert f"lightning train --manifests '{folder}' --model FOLDER --from-base --db {log.url}" in base
    assert "--from-base" not in run(*arguments).stdout


def test_large_numbers_stay_short(log, tmp_path):
    play(log, "t0", [1e100, -1e100])
    shown = run("--db", log.url, "--manifests", str(tmp_path / "p"), "--credit", "dr_grpo").stdout
    assert "1e+100" in shown
    assert "00000000" not in shown


def test_it_says_why_an_episode_is_in_no_step(log):
    play(log, "t0", [1.0, 0.0])
    with log.write() as conn:
        create_episode(conn, episode_id="running", task_id="t9", batch="b")
        append_entries(conn, [intent("c9", "running", task="t9", batch="b"), end("c9")])
        append_entries(conn, [intent("c8", "alone"), end("c8")])
        create_episode(conn, episode_id="exam", task_id="t8", batch="b", purpose=Purpose.EVAL)
        append_entries(conn, [intent("c7", "exam", task="t8", batch="b"), end("c7")])
        end_episode(conn, "exam", by="api")
    whys = {
        name: {row.why for row in dry_run(settings(log), explain=name).explained}
        for name in ("running", "alone", "exam")
    }
    assert whys == {
        "running": {"episode running of its group has not ended"},
        "exam": {"the episode was made for evaluation"},
        "alone": {"the episode has no task, so it is in no group (X-Lightning-Task)"},
    }
    with pytest.raises(UserError, match="'nobody' is no episode of the log"):
        dry_run(settings(log), explain="nobody")


def test_mistakes_are_one_line(log, tmp_path):
    with pytest.raises(NothingToTrainError, match="point an agent at the proxy"):
        dry_run(settings(log))
    play(log, "t0", [1.0, 0.0])
    with pytest.raises(SettingsError, match="can't --watch"):
        dry_run(settings(log, watch=True))
    with pytest.raises(SettingsError, match="reads a critic's values"):
        dry_run(settings(log, credit="step_gae"))
    own = {"rule": "grpo", "agents": {"writer": {"rule": "step_gae"}}}
    with pytest.raises(SettingsError, match="the credit rule 'step_gae' of agent 'writer' reads"):
        dry_run(settings(log, credit=own))
    with pytest.raises(SettingsError, match="--from-base and --max-staleness"):
        dry_run(settings(log, from_base=True, max_staleness=1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="no dry run; name another folder"):
        dry_run(settings(log, manifests=tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    with pytest.raises(UserError, match="holds no dry run"):
        read_plan(tmp_path / "mine")
    (tmp_path / "mine" / "plan.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="another version"):
        read_plan(tmp_path / "mine")
    assert run("--db", log.url, "--explain", "x", "--watch").exit_code != 0


def test_agents_that_made_no_call_train_nothing_and_that_is_told(log, tmp_path):
    play(log, "t0", [1.0, 0.0])
    arguments = ("--db", log.url, "--manifests", str(tmp_path / "p"), "--no-progress")
    told = run(*arguments, "--train-agent", "nobody")
    assert told.exit_code == 0
    assert "nothing would be trained (calls of agent 'nobody' only)" in told.stderr
    assert "manifests of 1 step in" in told.stdout
    assert "train exactly these" not in told.stdout
    assert "nothing would" not in run(*arguments, "--train-agent", "a").stderr


def test_names_that_nothing_bears_are_told_once(log, tmp_path):
    play(log, "t0", [1.0, 0.0])
    play(log, "t1", [1.0, 0.0])
    file = tmp_path / "typos.toml"
    file.write_text(
        'train_agents = ["a", "planer"]\n[sources]\nhumna = 2\ntest = 1\n'
        '[credit.agents.writr]\nrule = "rloo"\n'
    )
    arguments = ("--db", log.url, "--manifests", str(tmp_path / "p"), "--config", str(file))
    told = run(*arguments)
    assert told.exit_code == 0, told.output
    expected = [
        "no call is of agent 'writr' (credit.agents) in what was planned; there is: a",
        "no call is of agent 'planer' (train_agents) in what was planned; there is: a",
        "no reward is of source 'humna' (sources) in what was planned; there is: test",
    ]
    assert [line for line in told.stderr.splitlines() if line.startswith("no ")] == expected
    assert json.loads(run(*arguments, "--json").stdout)["notices"] == expected
    assert dry_run(settings(log, credit="rloo", train_agents=["a"], sources={"test": 2})).notices == ()


@pytest.mark.slow
def test_it_needs_no_torch(log, tmp_path):
    play(log, "t0", [1.0, 0.0])
    program = (
        "import sys; from lightning_rl.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as exit: assert not exit.code, exit.code\n"
        "bad = {'torch', 'transformers', 'trl', 'fastapi'} & set(sys.modules); assert not bad, bad"
    )
    arguments = ["train", "--dry-run", "--db", log.url, "--manifests", str(tmp_path / "p"), "--json"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True)
    assert json.loads(done.stdout)["steps_trained"] == 1
