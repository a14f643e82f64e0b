"""Many rewards at once: lines, all or nothing, ids that make it safe to repeat; and what came of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.log_rows import end, intent
from fakes.store_behaviours import write
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.errors import UserError
from lightning_rl.records import EpisodeStatus, Reward, RewardTarget, now_ms
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import add_reward
from lightning_rl.store.read import load_episodes
from lightning_rl.store.reward_lines import read_lines
from lightning_rl.store.reward_rows import import_rewards, rewards_of


@pytest.fixture
def log(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/log.db"
    monkeypatch.setenv("LIGHTNING_DB", url)
    database = Database.open(url)
    for name in ("a", "b"):
        call = f"{name}1"
        write(database, intent(call, name, agent="planner"), end(call))
    yield database
    database.close()


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, ["reward", *arguments], input=stdin, env={"COLUMNS": "250"})


def file_of(tmp_path: Path, *lines: object) -> str:
    file = tmp_path / "rewards.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(file)


def rows(log: Database, episode: str):
    with log.read() as conn:
        return rewards_of(conn, episode)


def test_every_level_in_one_file(log, tmp_path):
    file = file_of(
        tmp_path,
        {"episode": "a", "value": 1},
        "",
        {"episode": "b", "value": 0.5, "source": "human", "note": "fine", "final": False},
        {"episode": "a", "value": 0.1, "agent": "planner"},
        {"episode": "a", "value": 0.2, "call": "a1"},
        {"episode": "a", "value": 0.3, "call": "a1", "token_start": 0, "token_end": 2},
    )
    result = run("import", file, "--json")
    assert json.loads(result.stdout) == {"added": 5, "known": 0}
    assert [row.target for row in rows(log, "a")] == [
        RewardTarget.EPISODE,
        RewardTarget.AGENT,
        RewardTarget.CALL,
        RewardTarget.TOKENS,
    ]
    assert rows(log, "a")[0].source == "import"
    with log.read() as conn:
        a, b = load_episodes(conn, ["a", "b"])
    assert (a.status, b.status) == (EpisodeStatus.ENDED, EpisodeStatus.RUNNING)
    assert b.rewards[0].note == "fine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is no JSON: .*; nothing was written"),
        ("[1]", r"line 2: a line is one JSON object; nothing"),
        ({"value": 1}, r"line 2: field 'episode' is missing"),
        ({"episode": "a", "value": "NaN"}, r"line 2: field 'value' must be a number"),
        (
            {"episode": "a", "value": 1, "sorce": "x"},
            r"line 2: there is no field 'sorce'; the fields: episode, ",
        ),
        ({"valeu": 1, "episode": "a"}, "line 2: there is no field 'valeu'; the fields"),
        ({"episode": "a", "value": True}, "line 2: field 'value' must be a number"),
        ({"episode": "a", "value": 1, "source": ""}, "line 2: field 'source' is empty"),
        ({"episode": "a", "value": 1, "note": "a\x00b"}, "line 2: field 'note' has a NUL"),
        ({"episode": "a", "value": 1, "note": "a\ud800b"}, "line 2: field 'note' has a NUL or half char"),
        ("[" * 100_000, "line 2 is nested too deep"),
        ('{"episode": "a", "value": 2, "value": 3}', "line 2: field 'value' is there twice; nothing"),
        ('{"episode": "a", "value": ' + "1" * 5000 + "}", "line 2 has a number of too many digits"),
        ({"episode": "nobody", "value": 1}, r"line 2: no episode 'nobody' in the log.*; nothing was written"),
        ({"episode": "a", "value": 1, "call": "b1"}, r"line 2: episode 'a' has no call 'b1'"),
        ({"episode": "a", "value": 1, "supersedes": "x"}, r"line 2: episode 'a' has no reward 'x'"),
        ({"episode": "a", "value": 1e200}, r"line 2: a reward must be a finite number"),
        (
            {"episode": "a", "value": 1, "created_at_ms": 1796079261639000},
            "line 2: field 'created_at_ms' is milliseconds since 1970, and 1796079261639000 has yet to come",
        ),
        (
            {"episode": "a", "value": 1, "created_at_ms": 1796079261},
            "line 2: field 'created_at_ms' is milliseconds since 1970, .* is before the year 2000",
        ),
    ],
)
def test_one_wrong_line_and_nothing_is_written(log, tmp_path, line, message):
    file = file_of(tmp_path, {"episode": "a", "value": 1}, line, {"episode": "b", "value": 1})
    result = run("import", file)
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 2
    import re

    assert re.search(message, result.stderr)
    assert result.stderr.count("\n") == 1
    assert rows(log, "a") == rows(log, "b") == ()


def test_an_id_makes_it_safe_to_import_twice(log, tmp_path):
    file = file_of(
        tmp_path, {"id": "r1", "episode": "a", "value": 1}, {"episode": "a", "value": 2, "agent": "planner"}
    )
    assert run("import", file).stdout == "2 rewards added\n"
    assert run("import", file).stdout == "1 reward added, 1 was in the log already\n"
    assert len(rows(log, "a")) == 3  # the line without an id is another row
    other = file_of(tmp_path, {"episode": "b", "value": 1}, {"id": "r1", "episode": "a", "value": 0.5})
    result = run("import", other)
    assert "line 2: reward 'r1' is there already, its value 1.0, not 0.5" in result.stderr
    assert rows(log, "b") == ()
    twice = file_of(
        tmp_path, {"id": "r2", "episode": "b", "value": 1}, {"id": "r2", "episode": "b", "value": 2}
    )
    assert "line 2: reward 'r2'" in run("import", twice).stderr
    assert rows(log, "b") == ()


def test_a_line_may_supersede_one_before_it(log):
    lines = [
        json.dumps({"id": "r1", "episode": "a", "value": 1}),
        json.dumps({"id": "r2", "episode": "a", "value": 0, "supersedes": "r1", "source": "human"}),
    ]
    result = run("import", "-", stdin="\n".join(lines))
    assert result.stdout == "2 rewards added\n"
    shown = json.loads(run("show", "a", "--json").stdout)
    assert (shown["value"], shown["path"]) == (0.0, "human=0 (1 older or superseded)")


def test_of_two_lines_about_one_thing_the_later_is_newer(log):
    lines = [json.dumps({"episode": "a", "value": value}) for value in range(40)]
    with log.write() as conn:
        import_rewards(conn, read_lines(lines, "x"))
    assert json.loads(run("show", "a", "--json").stdout)["value"] == 39.0


def test_a_byte_order_mark_is_no_mistake(log, tmp_path):
    file = tmp_path / "windows.jsonl"
    file.write_text('{"episode": "a", "value": 1}\n', encoding="utf-8-sig")
    assert run("import", str(file)).stdout == "1 reward added\n"


def test_a_source_has_a_name(log, tmp_path):
    file = file_of(tmp_path, {"episode": "a", "value": 1})
    for arguments in (("import", file), ("a", "1"), ("run", "json:loads")):
        assert "--source is empty" in run(*arguments, "--source", "").stderr
    assert rows(log, "a") == ()


def test_unreadable_files_are_one_line(log, tmp_path):
    assert "can't read" in run("import", str(tmp_path / "none.jsonl")).stderr
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert "no UTF-8" in run("import", str(tmp_path / "bytes")).stderr


def test_show_says_what_became_of_every_row(log, tmp_path):
    file = file_of(
        tmp_path,
        {"id": "old", "episode": "a", "value": 0, "source": "judge", "created_at_ms": 10**12},
        {"id": "new", "episode": "a", "value": 0.5, "source": "judge"},
        {"id": "human", "episode": "a", "value": 1, "source": "human"},
        {
            "id": "part",
            "episode": "a",
            "value": 0.25,
            "call": "a1",
            "source": "judge",
            "note": "a good start",
        },
    )
    assert run("import", file).exit_code == 0
    config = tmp_path / "train.toml"
    config.write_text("[sources]\nhuman = 3.0\n")
    doc = json.loads(run("show", "a", "--json", "--config", str(config)).stdout)
    assert doc["value"] == 0.875
    assert doc["path"] == "mean of human=1 (weight 3), judge=0.5 = 0.875 (1 older or superseded)"
    assert [part["about"] for part in doc["parts"]] == ["episode", "call a1"]
    assert doc["parts"][0]["rewards"] == ["human", "new"]
    fates = {row["reward"]: row["fate"] for row in doc["rows"]}
    assert fates == {"old": "older than new", "new": "counts", "human": "counts", "part": "counts"}
    shown = run("show", "a")
    assert "0.75" in shown.stdout
    assert "older than new" in shown.stdout
    assert "good" in shown.stdout
    assert run("show", "b").stdout.startswith("b: no value   no reward")
    assert "no episode 'nobody'" in run("show", "nobody").stderr


def test_a_time_of_a_day_ahead_is_a_clock_that_is_wrong(log, tmp_path):
    soon = {"episode": "a", "value": 1, "created_at_ms": now_ms() + 86_000_000}
    assert run("import", file_of(tmp_path, soon)).exit_code == 0
    late = soon | {"created_at_ms": now_ms() + 87_000_000}
    assert "has yet to come" in run("import", file_of(tmp_path, late)).stderr


@pytest.mark.parametrize("at_ms", [1796079261639000, 4611686018427387904, -1, -(2**62)])
def test_any_time_that_a_log_holds_is_shown(log, at_ms):
    row = Reward("odd", "a", RewardTarget.EPISODE, 1.0, "x", at_ms)
    with log.write() as conn:
        add_reward(conn, row)
        conn.execute(sa.text("UPDATE episodes SET created_at_ms = :at"), {"at": at_ms})
        conn.execute(sa.text("UPDATE calls SET started_at_ms = :at"), {"at": at_ms})
    for command in (["reward", "show", "a"], ["episodes", "show", "a"], ["episodes", "list"]):
        result = CliRunner().invoke(app, command, env={"COLUMNS": "250"})
        assert result.exit_code == 0, result.exception
        if at_ms != -1:
            assert f"{at_ms} ms" in result.stdout


def test_ids_are_checked_by_the_function_too(log):
    with log.write() as conn, pytest.raises(UserError, match="line 7"):
        import_rewards(conn, read_lines(["\n"] * 6 + ['{"episode": "zz", "value": 1}'], "x"))
