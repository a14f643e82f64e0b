"""`lightning reward` and `lightning db` as a person types them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.log_rows import end, intent
from fakes.store_behaviours import write
from typer.testing import CliRunner

from lightning_rl.errors import LightningError, StoreError, UnknownEpisodeError, UserError
from lightning_rl.records import Episode, EpisodeStatus, Reward, RewardTarget, now_ms
from lightning_rl.store import read
from lightning_rl.store.commands import db_app, reward_app
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import add_reward
from lightning_rl.store.rewards import resolve
from lightning_rl.store.upgrade import HEAD

app = typer.Typer()
app.add_typer(reward_app, name="reward")
app.add_typer(db_app, name="db")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def error(*arguments: str) -> BaseException:
    result = run(*arguments)
    assert isinstance(result.exception, LightningError)
    return result.exception


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path}/log.db"
    monkeypatch.setenv("LIGHTNING_DB", url)
    opened = Database.open(url)
    write(opened, intent("c1", agent="planner"), end("c1"))
    yield opened
    opened.close()


def episode(database: Database) -> Episode:
    with database.read() as conn:
        return read.load_episodes(conn, ["ep"])[0]


def test_a_reward_is_written_and_ends_the_episode(database: Database) -> None:
    result = run("reward", "ep", "0.5", "--source", "judge", "--note", "fine")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("ep: 0.5 from judge, final (")
    (row,) = episode(database).rewards
    assert (row.value, row.source, row.note, row.final) == (0.5, "judge", "fine", True)
    assert episode(database).status is EpisodeStatus.ENDED


@pytest.mark.parametrize(
    "arguments",
    [
        ("ep", "-1.5", "--not-final"),
        ("--not-final", "ep", "-1.5"),
        ("give", "ep", "-1.5", "--not-final"),
        ("ep", "--not-final", "--", "-1.5"),
    ],
)
def test_negative_values_and_any_order_of_options(database: Database, arguments: tuple[str, ...]) -> None:
    result = run("reward", *arguments)
    assert result.exit_code == 0, result.output
    assert [row.value for row in episode(database).rewards] == [-1.5]
    assert episode(database).status is EpisodeStatus.RUNNING


def test_rewards_of_an_agent_and_of_a_call(database: Database) -> None:
    assert run("reward", "ep", "1", "--agent", "planner").exit_code == 0
    assert run("reward", "ep", "2", "--call", "c1").exit_code == 0

    def about(row: Reward) -> tuple[RewardTarget, str | None]:
        return row.target, row.agent or row.call_id

    assert [about(row) for row in episode(database).rewards] == [
        (RewardTarget.AGENT, "planner"),
        (RewardTarget.CALL, "c1"),
    ]


def test_a_range_of_tokens_of_one_answer_and_a_row_that_replaces_another(database: Database) -> None:
    first = run("reward", "ep", "1", "--call", "c1", "--tokens", "0:2")
    assert "about call c1 choice 0 tokens 0-2 (" in first.output
    assert run("reward", "ep", "0", "--call", "c1", "--choice", "0").exit_code == 0
    name = episode(database).rewards[0].id
    same = ("--call", "c1", "--tokens", "0:2", "--supersedes", name)
    assert run("reward", "ep", "-2", "--source", "human", *same).exit_code == 0
    rows = episode(database).rewards
    assert [row.target for row in rows] == [RewardTarget.TOKENS, RewardTarget.CALL, RewardTarget.TOKENS]
    assert (rows[0].token_start, rows[0].token_end, rows[2].supersedes) == (0, 2, name)
    for wrong, said in (
        (("--tokens", "0:2"), "name it with --call"),
        (("--call", "c1", "--tokens", "much"), "START:END"),
        (("--call", "c1", "--tokens", "0:99"), "not a range within the 2 tokens"),
        (("--call", "c1", "--choice", "5"), "has no choice 5"),
        (("--supersedes", "nothing"), "no reward 'nothing' to supersede"),
        (("--supersedes", name), "is about call c1 choice 0 tokens 0-2, and one about episode can't"),
    ):
        assert said in str(error("reward", "ep", "1", *wrong))
    assert len(episode(database).rewards) == 3


def test_a_row_that_a_later_dated_one_outdoes_is_told(database: Database) -> None:
    ahead = Reward("fut", "ep", RewardTarget.EPISODE, 1.0, "cli", now_ms() + 3_600_000)
    with database.write() as conn:
        add_reward(conn, ahead)
    told = run("reward", "ep", "0")
    assert (told.exit_code, told.stderr.count("\n")) == (0, 1)
    assert "this does not count, being older than fut, which is dated ahead" in told.stderr
    assert run("reward", "ep", "0", "--source", "human").stderr == ""
    assert run("reward", "ep", "0", "--supersedes", "fut").stderr == ""
    assert resolve(episode(database).rewards).value == 0.0


def test_mistakes_are_one_line_and_write_nothing(database: Database, tmp_path: Path) -> None:
    unknown = error("reward", "nobody", "1")
    assert isinstance(unknown, UnknownEpisodeError)
    assert (
        str(unknown) == "no episode 'nobody' in the log (the newest is 'ep'); check its name and the database"
    )
    for value in ("nan", "inf", "-inf"):
        assert "finite" in str(error("reward", "ep", value))
    assert isinstance(error("reward", "ep", "1", "--agent", "writer"), UserError)
    assert isinstance(error("reward", "ep", "1", "--call", "c1", "--agent", "planner"), UserError)
    elsewhere = error("reward", "ep", "1", "--db", f"sqlite:///{tmp_path}/new.db")
    assert isinstance(elsewhere, StoreError)
    assert not (tmp_path / "new.db").exists()
    assert run("reward", "ep", "much").exit_code == 2
    assert run("reward", "ep", "1", "--sorce", "x").exit_code == 2
    assert episode(database).rewards == ()


def test_db_upgrade_and_check(database: Database, tmp_path: Path) -> None:
    new = f"sqlite:///{tmp_path}/new.db"
    result = run("db", "check", "--json", "--db", new)
    assert result.exit_code == 2
    assert json.loads(result.output)["current"] is False
    assert isinstance(error("db", "check", "--db", new), StoreError)
    result = run("db", "upgrade", "--json", "--db", new)
    assert json.loads(result.output) == {"db": new, "schema": HEAD, "current": True}
    assert run("db", "upgrade", "--db", new).output == f"{new}: schema {HEAD} is current\n"
    result = run("db", "check", "--json", "--db", new)
    assert result.exit_code == 0
    assert json.loads(result.output) == {"db": new, "schema": HEAD, "current": True, "problem": None}
    assert run("db", "check").output.endswith(f"schema {HEAD} is current\n")
