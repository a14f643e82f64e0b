"""`lightning episodes list|show` as a person types them."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.log_rows import choice, end, intent, reward
from fakes.store_behaviours import write
from typer.testing import CliRunner

from lightning_rl.errors import LightningError, UnknownEpisodeError, UserError
from lightning_rl.records import CallKind, EpisodeStatus, Quarantine, RewardTarget, now_ms
from lightning_rl.store import append
from lightning_rl.store.commands import episodes_app
from lightning_rl.store.commands.times import moment_ms
from lightning_rl.store.database import Database

app = typer.Typer()
app.add_typer(episodes_app, name="episodes")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["episodes", *arguments])


def document(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def ids(*arguments: str) -> list[str]:
    return [row["id"] for row in document("list", *arguments)["episodes"]]


def error(*arguments: str) -> BaseException:
    result = run(*arguments)
    assert isinstance(result.exception, LightningError)
    assert "\n" not in str(result.exception)
    return result.exception


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path}/log.db"
    monkeypatch.setenv("LIGHTNING_DB", url)
    opened = Database.open(url)
    for number in range(5):
        name = f"e{number}"
        write(
            opened,
            intent(
                f"c{number}", name, task=f"t{number % 2}", tags={"run": str(number)}, started_at_ms=number
            ),
            end(f"c{number}"),
        )
    yield opened
    opened.close()


def test_pages_go_on_where_the_last_one_ended(database: Database) -> None:
    first = document("list", "--limit", "2")
    assert [row["id"] for row in first["episodes"]] == ["e4", "e3"]
    write(database, intent("new", "newest"))
    second = document("list", "--limit", "2", "--after", first["next"])
    third = document("list", "--limit", "2", "--after", second["next"])
    assert [row["id"] for page in (second, third) for row in page["episodes"]] == ["e2", "e1", "e0"]
    assert third["next"] is None
    assert isinstance(error("list", "--after", "nobody"), UnknownEpisodeError)
    for limit in ("0", "1001"):
        assert "1 to 1000" in str(error("list", "--limit", limit))


def test_filters_hold_all_together(database: Database) -> None:
    write(database, intent("w", "e1", agent="writer"))
    with database.write() as conn:
        append.add_reward(conn, reward("e1", 0.5, final=True))
        append.mark_gap(conn, "e2", source="recorder")
        append.end_episode(conn, "e3", status=EpisodeStatus.FAILED, by="runner")
    write(database, intent("late", "e1"))
    assert ids("--task", "t1") == ["e3", "e1"]
    assert ids("--task", "t1", "--status", "ended") == ["e1"]
    assert ids("--agent", "writer") == ["e1"]
    assert ids("--tag", "run=4") == ["e4"]
    assert ids("--tag", "run=4", "--tag", "x=1") == []
    assert ids("--unrewarded") == ["e4", "e3", "e2", "e0"]
    assert ids("--gaps") == ["e2"]
    assert ids("--late-calls") == ["e1"]
    assert ids("--policy", "policy", "--purpose", "train", "--batch", "") == ["e4", "e3", "e2", "e1", "e0"]
    assert ids("--policy", "other") == ids("--purpose", "eval") == ids("--since", "1h") == []
    (line,) = document("list", "--status", "ended")["episodes"]
    assert (line["reward"], line["num_calls"], line["ended_by"]) == (0.5, 3, "reward")
    table = run("list").stdout
    assert "failed" in table
    assert "ended (gap)" not in table


def test_the_unattributed_bin_is_a_list_of_its_own(database: Database) -> None:
    write(database, intent("u1", None), intent("u2", None), end("u1"))
    found = document("list", "--unattributed", "--limit", "1")
    assert ([row["id"] for row in found["calls"]], found["next"]) == (["u2"], "u2")
    (row,) = document("list", "--unattributed", "--after", "u2")["calls"]
    assert (row["id"], row["status"], row["num_prompt_tokens"]) == ("u1", "complete", 3)
    assert isinstance(error("list", "--unattributed", "--task", "t0"), UserError)


def test_mistakes_are_one_line(database: Database) -> None:
    assert "choose one of running, ended" in str(error("list", "--status", "done"))
    assert "KEY=VALUE" in str(error("list", "--tag", "x"))
    assert "no time" in str(error("list", "--since", "yesterday"))
    assert "too far back" in str(error("list", "--since", "99999999999d"))
    assert isinstance(error("show", "nobody"), UnknownEpisodeError)


def test_show_is_a_tree_of_calls_with_what_they_were_worth(database: Database) -> None:
    write(
        database,
        intent("a", "ep", agent="planner", task="t"),
        end("a", [1, 2, 3], choice([7, 8], [-1, -1])),
        intent("b", "ep", parent_call_id="a", kind=CallKind.SIDE),
        intent("c", "ep", parent_call_id="a", conflict="body says 'x'"),
        end("c", [1, 2, 3, 4], choice([9], [-1], quarantine=Quarantine.PENALTIES, finish_reason="length")),
        intent("d", "ep", parent_call_id="c"),
        intent("e", "ep", parent_call_id="elsewhere"),
    )
    with database.write() as conn:
        append.add_reward(conn, reward("ep", 1.0, "human", note="good"))
        append.add_reward(conn, reward("ep", 0.0, "judge"))
        append.add_reward(conn, reward("ep", 0.25, target=RewardTarget.CALL, call_id="a"))
        append.end_episode(conn, "ep", by="api", note="over")
        append.add_event(conn, "choice", "c/0", "used", True, "runner")
    found = document("show", "ep")
    assert [(call["id"], call["depth"]) for call in found["calls"]] == [
        ("a", 0),
        ("b", 1),
        ("c", 1),
        ("d", 1),
        ("e", 0),
    ]
    assert found["reward"]["value"] == 0.5
    assert "human=1" in found["reward"]["path"]
    assert len(found["rewards"]) == 3
    assert {event["kind"] for event in found["events"]} == {"ended", "used"}
    (answer,) = found["calls"][2]["choices"]
    assert (answer["num_tokens"], answer["finish_reason"], answer["quarantine"]) == (1, "length", "penalties")
    shown = run("show", "ep").stdout
    for words in (
        "planner 3 in -> 2 out, stop, policy/0",
        "[side]",
        "4 in -> 1 out, length, policy/0, choice 0 not trainable: penalties, body says 'x'",
        "0.25 from test about call a",
        "ended, by api: over",
    ):
        assert words in shown


def test_times_as_people_type_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for days in (30, 90, 150, 210):  # across changes of the clock
        monkeypatch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        assert now_ms() - moment_ms(f"{days}d") == pytest.approx(days * 86_400_000, abs=5000)
    monkeypatch.undo()
    time.tzset()
    assert now_ms() - moment_ms("2h") == pytest.approx(2 * 3600 * 1000, abs=5000)
    assert moment_ms("2026-11-30T16:00:00+00:00") == 1796054400000
