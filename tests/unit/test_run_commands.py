"""`lightning runs list|show` as a person types them, on runs that other programs wrote. No torch in here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fakes.log_rows import end, intent
from fakes.store_behaviours import write
from rich.console import Console
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.records import ManifestChoice, StepManifest
from lightning_rl.settings.train import TrainSettings
from lightning_rl.store.commands import run_plots, run_tables, tables
from lightning_rl.store.commands.run_tables import changed_settings
from lightning_rl.store.database import Database
from lightning_rl.store.run_owners import SILENT_SEC, OwnedRun, Owner, take
from lightning_rl.store.run_view import RunLine
from lightning_rl.store.runs import add_manifest, create_run, end_run, finish_step
from lightning_rl.trainer.owner import lives


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["runs", *arguments])


def said(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def document(*arguments: str) -> Any:
    return json.loads(said(*arguments, "--json"))


def fault(*arguments: str) -> str:
    """The one line that a mistake gets."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path}/log.db"
    monkeypatch.setenv("LIGHTNING_DB", url)
    opened = Database.open(url)
    yield opened
    opened.close()


def choice(episode: str, number: int, advantage: float | None, agent: str | None, reason: str | None = None):
    call = f"{episode}-{number}"
    return ManifestChoice(call, 0, episode, "g", agent, advantage, 0.0 if reason else 0.5, reason)


def manifest(run_id: str, step: int, episodes: int = 2, from_version: int = 0) -> StepManifest:
    """Each episode: the planner's call is trained, the writer's is a side call."""
    names = [f"s{step}-e{number}" for number in range(episodes)]
    rows = []
    for number, name in enumerate(names):
        rows.append(choice(name, 0, number - 0.5, "planner"))
        rows.append(choice(name, 1, None, "writer", "side_call"))
    returns = {name: float(number) for number, name in enumerate(names)}
    return StepManifest(run_id, step, "policy", from_version, tuple(rows), {}, returns)


def played(log: Database, run_id: str, rewards: list[float | None], *, policy="policy", ended="finished"):
    """One step per reward; `ended` None: the run goes on, with a step that is being trained."""
    settings = TrainSettings.load(model=Path("m"), learning_rate=3e-4, policy=policy)
    with log.write() as conn:
        create_run(conn, run_id, policy, settings.model_dump(mode="json", exclude={"db"}), {"torch": "2"})
        for step, reward in enumerate(rewards):
            add_manifest(conn, manifest(run_id, step, from_version=step))
            line = {
                "reward_mean": reward,
                "grad_norm": 0.5 + step,
                "gap_mean": 0.001,
                "episodes": 2,
                "episodes_trained": 2,
                "episodes_excluded": {"unrewarded": 1},
                "call_tokens_per_sec": 100.0,
            }
            finish_step(conn, run_id, step, to_version=step + 1, metrics=line)
        if ended is not None:
            end_run(conn, run_id, ended, "the disk is full" if ended == "failed" else None)
        else:
            add_manifest(conn, manifest(run_id, len(rewards), from_version=len(rewards)))


def test_the_list_says_where_each_run_came_from_and_to(log):
    played(log, "aa1", [0.25, None, 0.75])
    played(log, "ab2", [], policy="other", ended="failed")
    played(log, "b", [0.5], ended=None)
    newest, failed, oldest = document("list")["runs"]
    assert [row["id"] for row in (newest, failed, oldest)] == ["b", "ab2", "aa1"]
    assert (oldest["first_reward"], oldest["last_reward"]) == (0.25, 0.75)
    assert (oldest["from_version"], oldest["to_version"], oldest["num_steps"]) == (0, 3, 3)
    assert (newest["status"], newest["num_steps"], newest["last_reward"]) == ("running", 1, 0.5)
    assert (failed["num_steps"], failed["from_version"], failed["first_reward"]) == (0, None, None)
    assert (failed["why"], oldest["why"]) == ("the disk is full", None)
    assert "why: the disk is full" in said("show", "ab2")
    assert [row["id"] for row in document("list", "--policy", "other")["runs"]] == ["ab2"]
    assert [row["id"] for row in document("list", "--limit", "1")["runs"]] == ["b"]
    assert re.search(r"aa1 +policy +finished +3 +0 -> 3 +0\.250 -> 0\.750", said("list"))
    assert "choose one from 1" in fault("list", "--limit", "0")


def test_the_start_of_an_id_is_enough_unless_several_runs_have_it(log):
    assert "no run yet" in fault("show")
    assert "no run yet" in run("list").stderr
    played(log, "aa1", [0.5])
    played(log, "ab2", [0.5])
    played(log, "ab", [0.5])
    assert document("show")["id"] == "ab"
    assert document("show", "aa")["id"] == "aa1"
    assert document("show", "ab")["id"] == "ab"  # an id of its own, though another begins with it
    assert fault("show", "a") == (
        "lightning: several runs begin with 'a' (ab, ab2, aa1); give more of the id\n"
    )
    assert "holds no run '%'" in fault("show", "%")


def test_a_run_is_shown_while_it_goes_on(log):
    played(log, "aa1", [0.25, 0.5], ended=None)
    text = said("show")
    assert "learning_rate = 0.0003" in text
    assert "model = m" in text
    assert "groups_per_step" not in text  # as it is by default
    assert "torch = 2" in text
    assert "running, last step finished" in text
    assert re.search(r"^1 +1 -> 2 +0\.500 ", text, re.MULTILINE)
    assert re.search(r"^2 +2 -> - .* not finished", text, re.MULTILINE)
    found = document("show")
    assert [step["metrics"].get("reward_mean") for step in found["steps"]] == [0.25, 0.5, None]
    assert found["steps"][2]["trained_at_ms"] is None
    assert found["settings"]["groups_per_step"] == 8


def test_a_run_that_nobody_trains_any_more_is_told_from_one_that_goes_on(log):
    for name, silent_sec in (("alive", 2), ("dead", 3600)):
        played(log, name, [0.25], ended=None)
        with log.write() as conn:
            take(conn, name, Owner(name, "host", 1, "x"), was=None, policy=None)
            seen = sa.text("update runs set seen_at_ms = seen_at_ms - :ms where id = :id")
            conn.execute(seen, {"ms": silent_sec * 1000, "id": name})
    assert re.search(r"alive +policy +running ", said("list"))
    assert re.search(r"dead +policy +interrupted ", said("list"))
    assert "go on with it: lightning train --resume dead" in said("show", "dead")
    assert "go on with it" not in said("show", "alive")
    assert document("show", "dead")["silent_ms"] >= 3600_000
    assert document("show", "dead")["status"] == "running"  # what the row says


@pytest.mark.parametrize("ago_ms", [-1, 0])
def test_a_run_that_is_shown_as_interrupted_can_be_gone_on_with(ago_ms, capsys):
    """To the millisecond: what the table says and what `--resume` judges is one bound."""
    silent_ms = round(SILENT_SEC * 1000) + ago_ms
    line = RunLine("one", "policy", "running", 0, 0, None, None, None, None, 0, None, None, silent_ms, None)
    far = Owner("token", "far", 1, "another boot 1")
    run_tables.print_runs([line])
    is_alive = lives(OwnedRun("one", "policy", "running", {}, {}, 0, far, silent_ms))
    assert ("interrupted" in capsys.readouterr().out) is not is_alive
    assert is_alive is (ago_ms < 0)


def test_a_setting_that_this_program_does_not_know_is_shown():
    assert changed_settings({"seed": 0, "of_the_future": 0, "epochs": 2}) == {"of_the_future": 0, "epochs": 2}


def test_a_step_by_reasons_agents_and_episodes(log):
    write(log, intent("s0-e1-0", "s0-e1"), end("s0-e1-0"))  # of the others the log has no calls any more
    with log.write() as conn:
        create_run(conn, "r", "policy", {}, {})
        add_manifest(conn, manifest("r", 0, episodes=12))
    found = document("show", "r", "--step", "0")
    assert found["reasons"] == {"side_call": 12}
    planner, writer = found["agents"]
    assert (planner["agent"], planner["num_trained"], planner["trained_tokens"]) == ("planner", 12, 2)
    assert planner["advantage_mean"] == pytest.approx(5.0)  # of -0.5 … 10.5
    assert (writer["num_choices"], writer["num_trained"], writer["advantage_mean"]) == (12, 0, None)
    assert [row["reward"] for row in found["episodes"]] == sorted(map(float, range(12)), reverse=True)
    text = said("show", "r", "--step", "0")
    assert "… 2 more …" in text
    assert re.search(r"s0-e11 +- +11 +1/2 +\+10\.5000 +side_call 1", text)
    assert "s0-e0 " in text
    assert "s0-e5 " not in text
    assert "has steps 0 to 0: no step 7" in fault("show", "r", "--step", "7")
    assert "leave --plot" in fault("show", "r", "--step", "0", "--plot", "reward")


def test_plots_are_drawn_where_they_are_asked_for(log):
    played(log, "aa1", [0.25, None, 0.75])
    assert "mean reward:" not in said("show")  # into a pipe
    text = said("show", "--plot", "reward", "--plot", "call_tokens_per_sec", "--plot", "kl")
    assert "mean reward: 0.25 -> 0.75\n" in text
    assert "call_tokens_per_sec: 100 in every step that has it\n" in text
    assert "KL divergence to the base model: no step has it" in text
    assert "choose one of reward, gap, grad" in fault("show", "--plot", "rewards")
    assert run("show", "--plot", "rewards").stdout == ""  # said before a long table


def test_the_curve_is_where_the_numbers_are():
    from lightning_rl.store.run_view import StepFacts

    steps = [StepFacts(n, n, n + 1, 0, 1, {"reward_mean": value}) for n, value in enumerate([0.0, 1.0])]
    rows = run_plots.drawn(run_plots.FIGURES["reward"], steps, 60).splitlines()[1:]
    inked = [row for row in rows if re.search(r"[\u2801-\u28ff]", row)]
    first, last = inked[-1], inked[0]  # it goes up: the low value is left and below
    assert float(last.split("|")[0]) > 0.85
    assert float(first.split("|")[0]) < 0.15
    dots = re.compile(r"[\u2801-\u28ff]")
    assert rows[-1].split() == ["|", *"01234"]  # whole steps
    assert dots.search(first).start() < dots.search(last).start()


def test_a_narrow_terminal_gets_what_fits(log, monkeypatch):
    played(log, "0123456789abcdef", [0.25])
    played(log, "1123456789abcdef", [0.25])
    monkeypatch.setattr(run_tables, "terminal", lambda: Console(width=80))
    monkeypatch.setattr(tables, "terminal", lambda: Console(width=80))
    assert {"0123456789ab", "1123456789ab"} < {line.split()[0] for line in said("list").splitlines()}
    titles = r"^step +version +reward +episodes +tokens +gap +grad +tokens/s +left out"
    assert re.search(titles, said("show"), re.MULTILINE)
    played(log, "0123456789ab-twin", [0.25])
    assert re.search("^-twin ", said("list"), re.MULTILINE)  # begins as another one does: folded, not cut


def test_without_the_library_the_table_comes_and_a_word_of_what_to_install(log, monkeypatch):
    played(log, "aa1", [0.25])
    monkeypatch.setattr(run_plots, "find_spec", lambda name: None)
    result = run("show", "--plot", "reward")
    assert result.exit_code == 0
    assert "0 -> 1" in result.stdout
    assert result.stderr == "plots in the terminal need plotille: pip install 'lightning-rl[plot]'\n"
    assert "needs matplotlib: pip install 'lightning-rl[plot]'" in fault("show", "--png", "a.png")


@pytest.mark.slow
def test_pictures(log, tmp_path):
    pytest.importorskip("matplotlib")
    played(log, "aa1", [0.25, 0.5])
    said("show", "--png", str(tmp_path / "a.png"), "--svg", str(tmp_path / "a.svg"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert "a name that ends in .png" in fault("show", "--png", str(tmp_path / "a.jpg"))
    assert "No such file or directory" in fault("show", "--png", str(tmp_path / "nowhere" / "a.png"))
    played(log, "later", [])
    assert "finished no step yet" in fault("show", "later", "--svg", str(tmp_path / "b.svg"))
