"""Runs that die at each of their writes go on as if they had not; and which runs must not go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes import tiny_models
from fakes.killed_runs import POINTS, Died, assert_same_end, die, dying, start
from fakes.recorded_log import play_group
from fakes.row_publisher import publishing
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.errors import ModelMismatchError, PublishError, SettingsError, UserError
from lightning_rl.records import PolicyVersion, VersionStatus, WeightsKind, now_ms
from lightning_rl.settings.train import ResumeSettings, TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import add_reward
from lightning_rl.store.policies import add_candidate, set_version_status, versions
from lightning_rl.store.run_owners import SILENT_SEC, owned_run
from lightning_rl.trainer import owner, resume
from lightning_rl.trainer.loop import train
from lightning_rl.trainer.report import STEP_LOG, mend_log

GROUPS = 4
KINDS = {
    "full": {"weights": "full", "epochs": 2, "lr_schedule": "linear", "max_steps": GROUPS - 1},
    "lora": {"weights": "lora", "lora_rank": 4},
    "critic": {"weights": "lora", "lora_rank": 4, "credit": "step_gae", "critic_learning_rate": 1e-2},
}
QUICK = ("in the step", "in the transaction that finishes the step")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.qwen3())


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Groups of one step each; the third trains nothing."""
    file = tmp_path_factory.mktemp("played") / "log.db"
    database = Database.open(f"sqlite:///{file}")
    for i in range(GROUPS):
        play_group(database, tiny_models.qwen3(), f"t{i}", [1.0, 1.0] if i == 2 else [1.0, 0.0])
    database.close()
    return file


@pytest.fixture(scope="module")
def log(played, tmp_path_factory):
    """For runs that publish nothing: any number of them train the same groups."""
    yield from opened_copy(played, tmp_path_factory.mktemp("log"))


@pytest.fixture
def own_log(played, tmp_path):
    yield from opened_copy(played, tmp_path)


def opened_copy(played: Path, folder: Path):
    shutil.copyfile(played, folder / "log.db")
    database = Database.open(f"sqlite:///{folder / 'log.db'}")
    yield database
    database.close()


def settings(log: Database, model: Path, **changes) -> TrainSettings:
    defaults = {
        "db": log.url,
        "model": model,
        "output": Path(log.url.removeprefix("sqlite:///")).parent / "runs",
        "weights": "full",
        "learning_rate": 1e-3,
        "groups_per_step": 1,
        "publish": False,
        "progress": False,
    }
    return TrainSettings.load(None, **{**defaults, **changes})


def go_on(log: Database, run: str = "latest", **changes):
    return train(ResumeSettings.load(None, db=log.url, **changes), resume=run)


def trained_once(log: Database, run: str) -> bool:
    """Every choice of the log is in the run's manifests, once, and every manifest was trained."""
    with log.read() as conn:
        rows = conn.execute(
            sa.text("SELECT call_id, choice_index FROM manifest_choices WHERE run_id = :run"), {"run": run}
        ).all()
        everything = conn.execute(sa.text('SELECT call_id, "index" FROM choices')).all()
        untrained = sa.text(
            "SELECT count(*) FROM step_manifests WHERE run_id = :run AND trained_at_ms IS NULL"
        )
        assert conn.execute(untrained, {"run": run}).scalar() == 0
    return sorted(map(tuple, rows)) == sorted(map(tuple, everything))


@pytest.fixture(scope="module")
def references(log, model_folder):
    """The same runs, uninterrupted; made when they are first asked for."""
    made = {}

    def reference(kind: str) -> Path:
        if kind not in made:
            made[kind] = train(settings(log, model_folder, **KINDS[kind])).folder
        return made[kind]

    return reference


def cases():
    for kind in KINDS:
        for point in POINTS:
            is_quick = kind == "full" and point in QUICK
            yield pytest.param(
                (kind, point), marks=() if is_quick else pytest.mark.slow, id=f"{kind}: {point}"
            )


@pytest.mark.parametrize("case", list(cases()))
def test_a_run_that_dies_at_any_write_goes_on_exactly(log, model_folder, references, monkeypatch, case):
    kind, point = case
    reference = references(kind)
    with monkeypatch.context() as patch:
        dying(point, 2, die, patch.setattr)
        with pytest.raises(Died):
            train(settings(log, model_folder, **KINDS[kind]))
    summary = go_on(log)
    assert summary.status == "finished"
    assert_same_end(summary.folder, reference)
    assert trained_once(log, summary.run_id)
    steps = [json.loads(line)["step"] for line in (summary.folder / STEP_LOG).read_text().splitlines()]
    assert steps == list(range(GROUPS))
    assert len(list((summary.folder / "checkpoints").iterdir())) <= 2


def dies(
    log: Database, model: Path, monkeypatch, point: str = "in the step", at_call: int = 2, **changes
) -> str:
    """Its run's id."""
    with monkeypatch.context() as patch:
        dying(point, at_call, die, patch.setattr)
        patch.setattr(
            "lightning_rl.trainer.loop.end_run", lambda *args: None
        )  # a killed process says nothing
        with pytest.raises(Died):
            train(settings(log, model, **changes))
    with log.read() as conn:
        return (
            conn.execute(sa.text("SELECT id FROM runs ORDER BY created_at_ms DESC, id DESC"))
            .scalars()
            .first()
        )


def buried(log: Database, run: str) -> None:
    """The run's owner is a process that is no more."""
    with log.write() as conn:
        conn.execute(sa.text("UPDATE runs SET owner_pid = 4194305 WHERE id = :run"), {"run": run})


# as it was written


@pytest.mark.slow
def test_an_interrupted_step_is_trained_as_it_was_written(own_log, model_folder, monkeypatch):
    """Though its rewards are others by now; a critic, too, learns what the manifest says: from the calls
    within the bound alone (prompts have 7 and 12 tokens)."""
    chosen = KINDS["critic"] | {"max_sequence_tokens": 11}
    reference = train(settings(own_log, model_folder, **chosen)).folder
    run = dies(own_log, model_folder, monkeypatch, "before the step is computed", **chosen)
    buried(own_log, run)
    from fakes import log_rows

    with own_log.write() as conn:
        for number in range(2):
            add_reward(conn, log_rows.reward(f"t1-b-{number}", 7.0, final=True))
    summary = go_on(own_log, run)
    assert summary.run_id == run
    first = json.loads((reference / STEP_LOG).read_text().splitlines()[1])
    again = json.loads((summary.folder / STEP_LOG).read_text().splitlines()[1])
    assert first["choices_excluded"] == again["choices_excluded"] == {"too_long": 2}
    assert first["reward_mean"] == again["reward_mean"] == 0.5
    assert first["critic_loss"] == again["critic_loss"]
    assert_same_end(summary.folder, reference)


@pytest.mark.slow
def test_a_written_plan_goes_on_with_its_next_step(own_log, model_folder, tmp_path, monkeypatch):
    from lightning_rl.trainer.planning.dry_run import dry_run

    dry_run(settings(own_log, model_folder, manifests=tmp_path / "plan"))
    reference = train(settings(own_log, model_folder, manifests=tmp_path / "plan"))
    run = dies(own_log, model_folder, monkeypatch, manifests=tmp_path / "plan")
    buried(own_log, run)
    with pytest.raises(SettingsError, match=r"begun with manifests = .*/plan, and .*/other would change"):
        go_on(own_log, run, manifests=tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    summary = go_on(own_log, run, manifests="plan")
    assert_same_end(summary.folder, reference.folder)
    assert trained_once(own_log, run)


# publishing


@pytest.mark.slow
def test_a_version_that_waits_is_waited_for(own_log, model_folder, monkeypatch):
    chosen = {"publish": True, "publish_timeout_sec": 30}
    run = dies(own_log, model_folder, monkeypatch, "after the step is finished", at_call=1, **chosen)
    buried(own_log, run)
    with own_log.read() as conn:
        assert [(v.version, v.status) for v in versions(conn, "policy")] == [(1, VersionStatus.CANDIDATE)]
    with pytest.raises(PublishError, match="nobody has taken up version 1"):
        go_on(own_log, run, publish_timeout_sec=0.1)
    with publishing(own_log.url) as published:
        summary = go_on(own_log, run)
    assert published == [1, 2, 3]
    assert trained_once(own_log, summary.run_id)


@pytest.mark.slow
def test_a_rejected_version_ends_the_run(own_log, model_folder, monkeypatch, capsys):
    run = dies(own_log, model_folder, monkeypatch, "after the step is finished", at_call=1, publish=True)
    buried(own_log, run)
    with own_log.write() as conn:
        set_version_status(
            conn, "policy", 1, VersionStatus.REJECTED, verdict={"reason": "wrong weights"}, source="test"
        )
    with pytest.raises(UserError, match=r"version 1 of run .* was rejected \(wrong weights\)"):
        go_on(own_log, run)
    with publishing(own_log.url):
        train(settings(own_log, model_folder, publish=True, max_steps=1), fresh=True)
    told = capsys.readouterr().err
    assert "trains what that one has not (its version 1 was rejected)" in told
    assert "would have gone on" not in told


@pytest.mark.slow
def test_somebody_else_s_version_is_live(own_log, model_folder, monkeypatch, tmp_path):
    with publishing(own_log.url):
        run = dies(own_log, model_folder, monkeypatch, at_call=2, publish=True)
    buried(own_log, run)
    other = PolicyVersion(
        policy="policy",
        version=9,
        status=VersionStatus.CANDIDATE,
        kind=WeightsKind.FULL,
        path=str(tmp_path),
        checksum=None,
        probe=(),
        base_model=None,
        run_id=None,
        step=None,
        created_at_ms=now_ms(),
        verdict=None,
    )
    with own_log.write() as conn:
        add_candidate(conn, other)
    with pytest.raises(UserError, match=r"version 9 .*is candidate, which run .* did not make"):
        go_on(own_log, run)
    with own_log.write() as conn:
        set_version_status(conn, "policy", 9, VersionStatus.LIVE, source="test")
    with pytest.raises(UserError, match=r"version 9 is live, and run .* its own version 1"):
        go_on(own_log, run)
    with own_log.write() as conn:
        set_version_status(conn, "policy", 1, VersionStatus.LIVE, source="test")
    with publishing(own_log.url):
        assert go_on(own_log, run).steps_trained == GROUPS - 1


# one run at a time


def test_a_second_run_of_a_policy_is_refused_while_the_first_one_lives(own_log, model_folder, monkeypatch):
    run = dies(own_log, model_folder, monkeypatch, publish=True, at_call=1)  # its owner, this process, lives
    for chosen in ({}, {"fresh": True}):
        with pytest.raises(UserError, match=rf"run {run} is training policy .*process {os.getpid()} on"):
            train(settings(own_log, model_folder, publish=True), **chosen)
    with pytest.raises(UserError, match=rf"run {run} is being trained .*by process {os.getpid()}"):
        go_on(own_log, run)
    assert train(settings(own_log, model_folder)).status == "finished"  # publishes nothing


def test_a_step_that_another_program_has_planned_is_not_guessed_at(own_log, model_folder, monkeypatch):
    run = dies(own_log, model_folder, monkeypatch)
    buried(own_log, run)
    with own_log.write() as conn:
        conn.execute(
            sa.text("UPDATE step_manifests SET counts = '{\"moons\": 2}' WHERE trained_at_ms IS NULL")
        )
    with pytest.raises(UserError, match=rf"step 1 of run {run} was planned by another version of lightning"):
        go_on(own_log, run)


def test_an_interrupted_run_is_not_passed_over(own_log, model_folder, monkeypatch, capsys):
    with publishing(own_log.url):
        run = dies(own_log, model_folder, monkeypatch, publish=True, at_call=2)
        buried(own_log, run)
        wanted = rf"run {run} .* was interrupted after 1 step: go on with it \(--resume {run}\)"
        with pytest.raises(UserError, match=wanted):
            train(settings(own_log, model_folder, publish=True))
        again = train(settings(own_log, model_folder, publish=True), fresh=True)
        assert f"run {run} before this one was interrupted; this run begins anew" in capsys.readouterr().err
        with own_log.read() as conn:
            assert owned_run(conn, run).status == "failed"
            steps = sa.text(
                "SELECT count(*), count(DISTINCT call_id) FROM manifest_choices c JOIN step_manifests s"
                " ON s.run_id = c.run_id AND s.step = c.step WHERE s.trained_at_ms > 0"
            )
            everything = conn.execute(sa.text("SELECT count(*) FROM choices")).scalar()
            assert tuple(conn.execute(steps).one()) == (everything, everything)
        assert again.version == GROUPS - 1
        with pytest.raises(UserError, match="somebody has promoted or rolled back"):
            go_on(own_log, run)  # what it had begun was trained by the other one


def test_elsewhere_only_the_heartbeat_tells(own_log, model_folder, monkeypatch):
    run = dies(own_log, model_folder, monkeypatch, publish=True, at_call=1)
    for silent_sec, alive in ((SILENT_SEC - 5, True), (SILENT_SEC + 5, False)):
        with own_log.write() as conn:
            conn.execute(
                sa.text("UPDATE runs SET owner_host = 'far', seen_at_ms = :at"),
                {"at": now_ms() - silent_sec * 1000},
            )
            found = owned_run(conn, run)
        assert owner.lives(found) is alive
        assert "on far, seen" in owner.where(found)


def test_a_run_that_was_taken_over_writes_nothing_more(own_log, model_folder, monkeypatch):
    """A process that was silent for a minute and wakes up."""

    def take_away() -> None:
        with own_log.write() as conn:
            conn.execute(sa.text("UPDATE runs SET owner_token = 'another'"))

    with monkeypatch.context() as patch:
        dying("in the step", 2, take_away, patch.setattr)
        with pytest.raises(UserError, match="was taken over by another process"):
            train(settings(own_log, model_folder))
    with own_log.read() as conn:
        assert conn.execute(sa.text("SELECT status, owner_token FROM runs")).one() == ("running", "another")
        finished = conn.execute(sa.text("SELECT step FROM step_manifests WHERE trained_at_ms > 0")).scalars()
        assert list(finished) == [0]


def test_the_heart_beats_while_a_step_takes_long(own_log, model_folder, monkeypatch):
    beats = threading.Event()
    real = owner.hold

    def counted(conn, run, token):
        if threading.current_thread() is not threading.main_thread():
            beats.set()
        return real(conn, run, token)

    monkeypatch.setattr(owner, "BEAT_SEC", 0.01)
    monkeypatch.setattr(owner, "hold", counted)
    with monkeypatch.context() as patch:
        dying("in the step", 1, lambda: assert_soon(beats), patch.setattr)
        assert train(settings(own_log, model_folder)).status == "finished"


def assert_soon(event: threading.Event) -> None:
    assert event.wait(30)


# which run, and with what


def test_runs_that_cannot_be_resumed(own_log, model_folder, monkeypatch):
    with pytest.raises(SettingsError, match="no run of policy 'policy' to resume, and a new"):
        go_on(own_log)
    with pytest.raises(UserError, match="the log holds no run 'nobody'"):
        go_on(own_log, "nobody")
    finished = train(settings(own_log, model_folder)).run_id
    with pytest.raises(UserError, match=rf"run {finished} is finished: there is nothing to resume"):
        go_on(own_log)
    watching = ResumeSettings.load(None, db=own_log.url, watch=True)
    assert resume.find(own_log, "latest", watching) is None  # a service begins anew
    with own_log.write() as conn:
        conn.execute(sa.text("UPDATE runs SET status = 'failed', start_version = NULL"))
    with pytest.raises(UserError, match="older version of lightning, which kept no checkpoints"):
        go_on(own_log)


def test_latest_begins_a_run_where_there_is_none(own_log, model_folder):
    given = settings(own_log, model_folder).model_dump() | {"db": own_log.url}
    summary = train(ResumeSettings.load(None, **given), resume="latest")
    assert (summary.status, summary.steps_trained) == ("finished", GROUPS - 1)


@pytest.mark.slow
def test_settings_that_would_change_what_is_trained_are_refused(own_log, model_folder, monkeypatch):
    run = dies(own_log, model_folder, monkeypatch)
    buried(own_log, run)
    with pytest.raises(SettingsError, match=r"learning_rate = 0.001, and 0.1 would .*--learning-rate out"):
        go_on(own_log, learning_rate=0.1)
    with pytest.raises(SettingsError, match="begun with weights = full, and lora would change"):
        go_on(own_log, weights="lora")
    with pytest.raises(SettingsError, match=r"manifests = None, and .*/plan would .*--manifests out"):
        go_on(own_log, manifests="plan")
    summary = go_on(own_log, learning_rate=1e-3, max_steps=2, keep_versions=7)
    assert (summary.steps_trained, summary.status) == (2, "finished")


@pytest.mark.slow
def test_the_end_of_a_schedule_stays_where_it_was(own_log, model_folder, monkeypatch):
    buried(own_log, dies(own_log, model_folder, monkeypatch, **KINDS["full"]))
    with pytest.raises(SettingsError, match="begun with max_steps = 3, and 9 would change"):
        go_on(own_log, max_steps=9)


@pytest.mark.slow
def test_another_model_is_refused_and_a_moved_one_is_not(own_log, model_folder, tmp_path, monkeypatch):
    run = dies(own_log, model_folder, monkeypatch, **KINDS["lora"])
    buried(own_log, run)
    other = tiny_models.save(tmp_path / "other", tiny_models.qwen3(seed=1))
    with pytest.raises(ModelMismatchError, match=rf"is not the model that run {run} was begun with"):
        go_on(own_log, model=other)
    moved = shutil.copytree(model_folder, tmp_path / "moved")
    assert go_on(own_log, model=moved).status == "finished"


def test_a_missing_checkpoint_is_named(own_log, model_folder, monkeypatch):
    run = dies(own_log, model_folder, monkeypatch, at_call=3)
    buried(own_log, run)
    folder = Path(own_log.url.removeprefix("sqlite:///")).parent / "runs" / run
    shutil.rmtree(folder / "checkpoints" / "00001")
    with pytest.raises(UserError, match=rf"checkpoint of step 1 of run {run} is missing: no .*00001;"):
        go_on(own_log)
    (folder / "checkpoints" / "00000").rename(folder / "checkpoints" / "00001")
    with pytest.raises(UserError, match=rf"00001 is not step 1 of run {run}"):
        go_on(own_log)


@pytest.mark.slow
def test_a_copy_of_the_log_does_not_write_over_what_the_run_has_done_since(
    own_log, model_folder, monkeypatch, tmp_path
):
    run = dies(own_log, model_folder, monkeypatch, at_call=2)
    buried(own_log, run)
    file = Path(own_log.url.removeprefix("sqlite:///"))
    folder = file.parent / "runs" / run
    with closing(sqlite3.connect(file)) as log, closing(sqlite3.connect(tmp_path / "copy.db")) as other:
        log.backup(other)
    assert go_on(own_log, run).steps_trained == GROUPS - 1
    had = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    copy = ResumeSettings.load(None, db=f"sqlite:///{tmp_path}/copy.db")
    with pytest.raises(UserError, match=rf"run {run} has gone further .* 1 step of it: there is .*00002; "):
        train(copy, resume=run)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == had


@pytest.mark.slow
def test_an_environment_that_has_changed_is_told(own_log, model_folder, monkeypatch, capsys):
    run = dies(own_log, model_folder, monkeypatch)
    buried(own_log, run)
    with own_log.write() as conn:
        conn.execute(sa.text("UPDATE runs SET environment = json_set(environment, '$.torch', '1.0')"))
    go_on(own_log)
    said = capsys.readouterr().err
    assert f"run {run} goes on after 1 step; not to the last digit: torch 1.0 is" in said


def test_the_command(own_log, model_folder, monkeypatch):
    run = dies(own_log, model_folder, monkeypatch)
    buried(own_log, run)
    refused = CliRunner().invoke(app, ["train", "--db", own_log.url, "--resume", run, "--fresh"])
    assert (refused.exit_code, len(refused.stderr.strip().splitlines())) == (2, 1)
    done = CliRunner().invoke(
        app, ["train", "--db", own_log.url, "--resume", run[:20], "--json", "--no-progress"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["run"] == run


# signals


@pytest.mark.slow
def test_the_first_signal_stops_the_run_and_the_second_ends_the_process(own_log, model_folder, references):
    """The run waits for groups; it is stopped, resumed, and ended at once while it is being stopped."""
    reference = references("lora")
    chosen = {**settings(own_log, model_folder, **KINDS["lora"]).model_dump(), "watch": True}
    process = start(chosen)
    wait_for_steps(own_log, GROUPS)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    with own_log.read() as conn:
        run = conn.execute(sa.text("SELECT id FROM runs WHERE status = 'stopped'")).scalar_one()
    again = start({"db": own_log.url}, resume=run, point="the run ends", how="interrupt")
    wait_for_owner(own_log, run, again.pid)
    os.kill(again.pid, signal.SIGINT)
    again.join(60)
    assert again.exitcode == 130
    with own_log.read() as conn:
        assert owned_run(conn, run).status == "running"
    summary = go_on(own_log, run, watch=False)
    assert summary.status == "finished"
    assert_same_end(summary.folder, reference)


def wait_for_steps(log: Database, number: int) -> None:
    wait_until(log, "SELECT count(*) FROM step_manifests WHERE trained_at_ms > 0", number)


def wait_for_owner(log: Database, run: str, pid: int) -> None:
    wait_until(log, f"SELECT owner_pid FROM runs WHERE id = '{run}'", pid)


def wait_until(log: Database, query: str, value: int) -> None:
    for _ in range(1200):
        with log.read() as conn:
            if conn.execute(sa.text(query)).scalar() == value:
                return
        threading.Event().wait(0.05)
    raise AssertionError(f"{query} is never {value}")


def test_the_step_log_is_mended(tmp_path):
    lines = [{"step": 0, "a": 1}, {"step": 1, "a": 2}]
    (tmp_path / STEP_LOG).write_text('{"step": 0, "a": 1, "seconds": 3.0}\n{"step": 1, "a"')
    mend_log(tmp_path, lines)
    found = [json.loads(line) for line in (tmp_path / STEP_LOG).read_text().splitlines()]
    assert found == [{"step": 0, "a": 1, "seconds": 3.0}, {"step": 1, "a": 2}]
