"""Curation as a person types it, and as a program asks for it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.log_rows import end, intent
from fakes.running_proxy import ask, running_proxy
from fakes.store_behaviours import write
from typer.testing import CliRunner

from lightning_rl.errors import LightningError
from lightning_rl.records import CallKind, Episode, EpisodeStatus
from lightning_rl.store import read
from lightning_rl.store.commands import calls_app, episodes_app
from lightning_rl.store.database import Database
from lightning_rl.store.verify import verify

app = typer.Typer()
app.add_typer(episodes_app, name="episodes")
app.add_typer(calls_app, name="calls")


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def error(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, LightningError)
    return str(result.exception)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path}/log.db"
    monkeypatch.setenv("LIGHTNING_DB", url)
    opened = Database.open(url)
    write(opened, intent("c1", agent="title"), end("c1"), intent("c2", "other"), intent("u1", None))
    yield opened
    opened.close()


def episode(database: Database, name: str = "ep") -> Episode:
    with database.read() as conn:
        return read.load_episodes(conn, [name])[0]


def test_what_becomes_of_episodes(database: Database) -> None:
    for word, status in (
        ("end", EpisodeStatus.ENDED),
        ("fail", EpisodeStatus.FAILED),
        ("exclude", EpisodeStatus.EXCLUDED),
        ("include", EpisodeStatus.ENDED),
    ):
        found = run("episodes", word, "ep", "other", "--note", "so", "--json")
        assert found == {"episodes": ["ep", "other"], "status": status}
        assert {episode(database).status, episode(database, "other").status} == {status}
    assert "no episode 'nobody'" in error("episodes", "fail", "ep", "nobody")
    assert episode(database).status is EpisodeStatus.ENDED, "all of them or none"


def test_tags_assignments_kinds_and_used_answers(database: Database) -> None:
    run("episodes", "tag", "ep", "split=train", "x=1")
    assert run("episodes", "untag", "ep", "x", "nothere") == "ep: removed x; had no nothere\n"
    assert run("episodes", "tag", "ep", "split=train") == "ep: tags split=train\n"
    assert "its agents: 'title'" in error("calls", "kind", "side", "--episode", "ep", "--agent", "nobody")
    assert "no episode 'nobody'" in error("calls", "kind", "side", "--episode", "nobody")
    assert episode(database).tags == {"split": "train"}
    assert run("episodes", "assign", "ep", "u1", "--agent", "a", "--json")["ordinals"] == [1]
    assert "is in episode 'ep' already" in error("episodes", "assign", "other", "u1")
    assert run("calls", "kind", "side", "c1") == "1 of 1 call changed to side\n"
    assert run("calls", "kind", "judge", "--episode", "ep", "--agent", "a", "--json")["changed"] == 1
    run("calls", "used", "c1", "0", "--unused")
    calls = episode(database).calls
    assert [call.kind for call in calls] == [CallKind.SIDE, CallKind.JUDGE]
    assert calls[0].choices[0].used is False
    run("episodes", "exclude", "ep")
    run("episodes", "include", "ep")
    assert list(verify(database).faults) == []
    for arguments in (("side",), ("side", "c1", "--episode", "ep"), ("side", "c1", "--agent", "a")):
        assert "name calls by their ids" in error("calls", "kind", *arguments)
    assert "choose one of policy, side" in error("calls", "kind", "title", "c1")


def test_one_call_can_be_looked_at_in_an_episode_or_in_the_bin(database: Database) -> None:
    shown = run("calls", "show", "u1")
    assert "call u1, in no episode" in shown
    assert "on /v1/chat/completions" in shown
    run("episodes", "assign", "ep", "u1")
    shown = run("calls", "show", "u1")
    assert "call u1, of episode ep" in shown
    assert "assigned call u1 episode=ep, ordinal=1, rule_was=" in shown
    assert run("calls", "show", "c1", "--json")["call"]["kind"] == "policy"
    assert "no call 'x'" in error("calls", "show", "x")


def test_a_new_episode_gets_no_name_that_a_path_could_not_carry(database: Database) -> None:
    for name, words in (("", "is empty"), ("x" * 300, "longer than 256"), ("a\nb", "control characters")):
        assert words in error("episodes", "assign", name, "u1", "--create")
        assert words in error("episodes", "assign", "ep", "u1", "--agent", name)
    assert len(episode(database).calls) == 1


def test_the_same_through_the_api_of_the_proxy(tmp_path: Path) -> None:
    with running_proxy(tmp_path, idle_timeout_sec=None) as running:

        def post(path: str, doc: Any) -> Any:
            answer = ask(running.url, f"/lightning/api{path}", json.dumps(doc).encode())
            return answer.status, json.loads(answer.body)

        write(
            running.database, intent("c1", "a/b"), end("c1"), intent("u1", None), intent("j1", agent="judge")
        )
        assert post("/episodes/a/b/end", {"status": "excluded"})[0] == 200
        assert post("/episodes/a/b/include", {"note": "fine"})[1]["status"] == "ended"
        assert post("/episodes/a/b/tags", {"set": {"k": "v", "l": "w"}, "remove": ["l"]})[0] == 200
        assert post("/episodes/" + "y" * 300 + "/calls", {"calls": ["u1"], "create": True})[0] == 400
        assert post("/episodes/a/b/calls", {"calls": ["u1"]})[1]["ordinals"] == [1]
        assert post("/episodes/a/b/calls", {"calls": ["u1"]})[0] == 400
        for key in ("", 'a"b', "k" * 300):
            assert post("/episodes", {"episode": "new", "tags": {key: "x"}})[0] == 422
            assert post("/episodes/a/b/tags", {"set": {key: "x"}})[0] == 422
        assert post("/calls/c1/kind", {"kind": "side"})[0] == 200
        assert post("/calls/c1/kind", {"kind": "title"})[0] == 422
        assert post("/calls/c1/choices/0/used", {"used": False})[0] == 200
        found = episode(running.database, "a/b")
        page = json.loads(ask(running.url, "/lightning/api/episodes?status=ended&limit=1").body)
        assert [row["id"] for row in page["episodes"]] == ["a/b"]
        assert json.loads(ask(running.url, "/lightning/api/unattributed").body)["calls"] == []
    assert (found.status, found.tags, len(found.calls)) == (EpisodeStatus.ENDED, {"k": "v"}, 2)
    assert (found.calls[0].kind, found.calls[0].choices[0].used) == (CallKind.SIDE, False)
