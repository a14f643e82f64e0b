"""`lightning reward run`: a function over the log, concurrent, resumable, not stopped by a failure."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
from fakes.log_rows import choice, end, intent
from fakes.store_behaviours import write
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.errors import UserError
from lightning_rl.records import CallKind, EpisodeStatus, RewardTarget
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import add_reward, end_episode
from lightning_rl.store.reward_rows import rewards_of, unjudged_episodes
from lightning_rl.store.seen import load_seen
from lightning_rl.trainer.judging.judge import (
    Judgement,
    find_judge,
    judge_access,
    judge_all,
    judgements,
)


@pytest.fixture
def log(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/log.db"
    monkeypatch.setenv("LIGHTNING_DB", url)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    database = Database.open(url)
    for i in range(4):
        play(database, f"e{i}", f"answer {i}")
    yield database
    database.close()


def play(database: Database, name: str, answer: str, *, over: bool = True) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "2 + 2?"}], "model": "m"}).encode()
    last = choice(message={"role": "assistant", "content": answer})
    write(
        database,
        intent(f"{name}-0", name, task="t", batch="b", agent="planner", body=body, tags={"env": "x"}),
        end(f"{name}-0", (1, 2), last),
        intent(f"{name}-1", name, kind=CallKind.SIDE, agent="title"),
        end(f"{name}-1"),
    )
    if over:
        with database.write() as conn:
            end_episode(conn, name, by="api")


def rows(log: Database, episode: str):
    with log.read() as conn:
        return rewards_of(conn, episode)


def waiting(log: Database, source: str, **how) -> list[str]:
    with log.read() as conn:
        return unjudged_episodes(conn, source, **how)


def test_what_a_judge_sees(log):
    with log.read() as conn:
        (seen,) = load_seen(conn, ["e1"], judge_access("http://proxy:8400/v1", "secret"))
    assert (seen.id, seen.task, seen.batch, seen.status) == ("e1", "t", "b", EpisodeStatus.ENDED)
    assert seen.tags == {"env": "x"}
    assert seen.agents == ("planner", "title")
    assert [call.kind for call in seen.calls] == [CallKind.POLICY, CallKind.SIDE]
    assert seen.messages == (
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "answer 1"},
    )
    assert seen.answer == seen.calls[0].answer.text == "answer 1"
    assert seen.calls[0].request["model"] == "m"
    # through the proxy, in the name of an agent whose calls it takes for a judge's, and in no episode
    assert seen.judge.base_url == "http://proxy:8400/agents/judge/v1"
    assert seen.judge.api_key == "secret"


def test_every_unjudged_episode_is_judged_once(log):
    def judge(seen):
        return float(seen.answer.split()[1])

    report = judge_all(log, judge, waiting(log, "x"), "x", concurrency=3)
    assert report.as_json() == {
        "episodes": 4,
        "rewarded": 4,
        "rewards": 4,
        "no_opinion": 0,
        "failed": 0,
        "failures": [],
        "stopped": False,
    }
    assert [rows(log, f"e{i}")[0].value for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert waiting(log, "x") == []
    assert waiting(log, "x", again=True) == waiting(log, "y") == ["e0", "e1", "e2", "e3"]


def test_running_and_excluded_episodes_wait_and_a_superseded_reward_is_none(log):
    play(log, "running", "?", over=False)
    with log.write() as conn:
        end_episode(conn, "e0", status=EpisodeStatus.EXCLUDED, by="api")
        end_episode(conn, "e1", status=EpisodeStatus.FAILED, by="api")
        first = Judgement(1.0).reward("e2", "x")
        add_reward(conn, first)
        add_reward(conn, Judgement(1.0).reward("e3", "x"))
    assert waiting(log, "x") == ["e1"]
    with log.write() as conn:
        from dataclasses import replace

        add_reward(conn, replace(Judgement(0.0).reward("e2", "person"), supersedes=first.id))
    assert waiting(log, "x") == ["e1", "e2"]


def test_a_failure_concerns_its_episode_alone_and_the_next_run_goes_on(log):
    def shaky(seen):
        if seen.id in ("e1", "e2"):
            raise ValueError("no\nidea")
        return 1

    report = judge_all(log, shaky, waiting(log, "x"), "x", concurrency=2)
    assert [(one.episode_id, one.failure) for one in report.failures] == [
        ("e1", "ValueError: no idea"),
        ("e2", "ValueError: no idea"),
    ]
    assert waiting(log, "x") == ["e1", "e2"]
    again = judge_all(log, lambda seen: 0.5, waiting(log, "x"), "x", concurrency=2)
    assert len(again.rewarded) == 2
    assert waiting(log, "x") == []


def test_parts_none_and_what_cannot_be_read(log):
    said = {
        "e0": [Judgement(1.0, note="whole"), {"value": 0.5, "call": "e0-0"}, Judgement(0.2, agent="planner")],
        "e1": None,
        "e2": "much",
        "e3": [1.0, Judgement(1.0, call="e0-0")],  # not in this episode: neither of the two is kept
    }
    report = judge_all(log, lambda seen: said[seen.id], waiting(log, "x"), "x", concurrency=1)
    assert [row.target for row in rows(log, "e0")] == [
        RewardTarget.EPISODE,
        RewardTarget.CALL,
        RewardTarget.AGENT,
    ]
    assert report.as_json()["no_opinion"] == 1
    assert [one.failure for one in report.failures] == [
        "a judge gives a number, None, or a list of rewards; this one gave str",
        "episode 'e3' has no call 'e0-0'",
    ]
    assert rows(log, "e3") == ()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("1", "a judge gives a number, None, or a list of rewards; this one gave str"),
        (True, "a judge gives a number, None, or a list of rewards; this one gave bool"),
        (numpy.bool_(True), "a judge gives a number, None, or a list of rewards; this one gave bool"),
        (1j, "a judge gives a number, None, or a list of rewards; this one gave complex"),
        ([{"value": True}], "the value of a reward is a number; this one gave bool"),
        ({"value": None}, "the value of a reward is a number; this one gave NoneType"),
        (Judgement("1"), "the value of a reward is a number; this one gave str"),
        (
            [{"value": 1, "worth": 1}],
            "a reward has no key 'worth'; the keys: value, agent, call, choice, token_start, token_end, note",
        ),
        ({"note": "x"}, "a reward has a value; this one has note"),
        (
            {"value": 1, "call": "e0-0", "token_start": 1},
            "a range of tokens has a start and an end: token_end is missing beside 1",
        ),
        (
            {"value": 1, "call": "e0-0", "token_end": 2},
            "a range of tokens has a start and an end: token_start is missing beside 2",
        ),
        ({"value": 1, "token_end": 2}, "a reward about 'episode' can't name a call, a choice or tokens"),
    ],
)
def test_what_is_no_reward_is_a_failure_with_its_reason(log, said, why):
    report = judge_all(log, lambda seen: said, ["e0"], "x", concurrency=1)
    assert [one.failure for one in report.judged] == [why]
    assert rows(log, "e0") == ()


@pytest.mark.parametrize("said", [1, 1.0, numpy.float32(1), numpy.int64(1), Decimal(1), Fraction(1)])
def test_every_kind_of_number_is_one(said):
    assert judgements(said) == judgements([{"value": said}]) == [Judgement(1.0)]


def test_async_judges_run_beside_each_other(log):
    inside, met = set(), asyncio.Event()

    async def judge(seen):
        inside.add(seen.id)
        if len(inside) == 3:
            met.set()
        await asyncio.wait_for(met.wait(), 30)
        return 1

    report = judge_all(log, judge, waiting(log, "x"), "x", concurrency=3)
    assert len(report.rewarded) == 4


def test_plain_functions_run_beside_each_other_too(log):
    together = threading.Barrier(2, timeout=30)

    def judge(seen):
        together.wait()
        return 1

    assert len(judge_all(log, judge, waiting(log, "x"), "x", concurrency=2).rewarded) == 4


def test_ctrl_c_keeps_what_was_judged(log):
    def judge(seen):
        if seen.id == "e2":
            raise KeyboardInterrupt
        return 1

    report = judge_all(log, judge, waiting(log, "x"), "x", concurrency=1)
    assert report.stopped
    assert waiting(log, "x") == ["e2", "e3"]


@pytest.mark.parametrize("is_async", [False, True])
def test_judges_that_interrupt_stop_the_run_without_a_word_from_asyncio(log, caplog, is_async):
    def judge(seen):
        raise KeyboardInterrupt

    async def judge_async(seen):
        raise KeyboardInterrupt

    function = judge_async if is_async else judge
    report = judge_all(log, function, waiting(log, "x"), "x", concurrency=3)
    gc.collect()
    assert report.stopped
    assert [record.getMessage() for record in caplog.records] == []


JUDGES = """
def good(seen):
    return 1.0

def shaky(seen):
    if seen.id == "e1":
        raise RuntimeError("broken")
    return [{"value": 0.5, "note": "half"}]

def leaves(seen):
    raise SystemExit(3)

number = 3
"""


def run(*arguments: str):
    return CliRunner().invoke(app, ["reward", "run", *arguments], env={"COLUMNS": "200"})


def test_the_command(log, tmp_path):
    (tmp_path / "my_judges.py").write_text(JUDGES)
    looked = run("my_judges:shaky", "--dry-run", "--limit", "3")
    assert looked.exit_code == 1
    assert "half" in looked.stdout
    assert "nothing was written" in looked.stdout
    assert rows(log, "e0") == ()
    judged = run("my_judges:shaky", "--source", "half", "--json")
    doc = json.loads(judged.stdout)
    assert (doc["rewarded"], doc["failed"], doc["source"]) == (3, 1, "half")
    assert doc["failures"] == [{"episode": "e1", "why": "RuntimeError: broken"}]
    assert judged.exit_code == 1
    told = run("my_judges:good")
    assert told.exit_code == 0
    assert told.stdout == "good: 4 episodes judged, 4 rewarded (4 rows), 0 without an opinion, 0 failed\n"
    assert run("my_judges:good").stdout.startswith("good: 0 episodes judged")
    left = run("my_judges:leaves")
    assert "e0: SystemExit: 3" in left.stderr
    assert (left.exit_code, rows(log, "e0")[-1].source) == (1, "good")
    assert "--proxy-url 'nonsense': not a URL" in run("my_judges:good", "--proxy-url", "nonsense").stderr
    assert "1 not asked" in run("my_judges:shaky", "--source", "s2", "--limit", "3").stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_judges", "MODULE:FUNCTION"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("my_judges:none", "has no function 'none'"),
        ("my_judges:number", "has no function 'number'"),
        ("leaving_judges:f", "can't be imported: SystemExit"),
        ("bad_judges:f", "can't be imported: ZeroDivisionError"),
    ],
)
def test_a_function_that_is_not_there_is_one_line(log, tmp_path, name, message):
    (tmp_path / "my_judges.py").write_text(JUDGES)
    (tmp_path / "bad_judges.py").write_text("1 / 0")
    (tmp_path / "leaving_judges.py").write_text("raise SystemExit(3)")
    with pytest.raises(UserError, match=message):
        find_judge(name)
