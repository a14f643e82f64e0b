"""Rewards over HTTP: one, many, shown; and a judge whose own calls go through the proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.running_proxy import Running, ask, running_proxy
from openai import AsyncOpenAI, OpenAI

from lightning_rl.store.reward_rows import unjudged_episodes
from lightning_rl.store.seen import SeenEpisode
from lightning_rl.trainer.judging.judge import judge_access, judge_all

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with running_proxy(tmp_path) as running:
        for name in ("a", "b"):
            assert ask(running.url, f"/episodes/{name}{CHAT}", json.dumps(BODY).encode()).status == 200
        yield running


def api(running: Running, path: str, body: bytes | None = None) -> tuple[int, Any]:
    answer = ask(running.url, f"/lightning/api/rewards{path}", body)
    return answer.status, json.loads(answer.body)


def post(running: Running, **doc: Any) -> tuple[int, Any]:
    return api(running, "", json.dumps(doc).encode())


def test_one_reward_and_what_it_comes_to(running: Running) -> None:
    status, given = post(running, episode="a", value=0.5, source="judge", note="half")
    assert status == 200
    assert (given["episode"], given["target"], given["final"]) == ("a", "episode", True)
    status, shown = api(running, "/a")
    assert (status, shown["value"], shown["path"]) == (200, 0.5, "judge=0.5")
    (row,) = shown["rows"]
    assert (row["reward"], row["note"], row["fate"]) == (given["reward"], "half", "counts")
    assert api(running, "/nobody")[0] == 404


def test_an_id_makes_it_safe_to_repeat(running: Running) -> None:
    assert post(running, id="r1", episode="a", value=1)[0] == 200
    assert post(running, id="r1", episode="a", value=1)[0] == 200
    status, refused = post(running, id="r1", episode="a", value=0)
    assert status == 400
    assert refused["error"]["message"].startswith("reward 'r1' is there already, its value 1.0, not 0.0; ")
    assert "nothing was written" not in refused["error"]["message"], "that is said of lines"
    status, refused = post(running, id="r2", episode="nobody", value=0)
    assert (status, refused["error"]["message"][:20]) == (404, "no episode 'nobody' ")
    assert len(api(running, "/a")[1]["rows"]) == 1


def test_an_episode_shows_the_tokens_that_a_reward_is_about(running: Running) -> None:
    (call,) = [row["id"] for row in running.rows("calls") if row["episode_id"] == "a"]
    assert post(running, episode="a", value=1, call=call, token_start=1, token_end=3)[0] == 200
    shown = json.loads(ask(running.url, "/lightning/api/episodes/a").body)
    (row,) = shown["rewards"]
    assert (row["call"], row["token_start"], row["token_end"]) == (call, 1, 3)


def test_many_or_none(running: Running) -> None:
    lines = [json.dumps({"episode": name, "value": 1, "source": "tests"}) for name in "ab"]
    status, found = api(running, "/import", "\n".join(lines).encode())
    assert (status, found) == (200, {"added": 2, "known": 0})
    lines.append(json.dumps({"episode": "nobody", "value": 1}))
    status, refused = api(running, "/import", "\n".join(lines).encode())
    assert status == 404
    assert refused["error"]["message"].startswith("line 3: no episode 'nobody'")
    assert len(api(running, "/a")[1]["rows"]) == 1
    assert api(running, "/import", b"\xff")[0] == 400


@pytest.mark.parametrize("is_async", [False, True])
def test_a_judges_own_calls_are_recorded_outside_the_episode(running: Running, is_async: bool) -> None:
    for name in ("a", "b"):
        ask(running.url, f"/lightning/api/episodes/{name}/end", b"{}")

    def judge(seen: SeenEpisode) -> float:
        assert seen.judge is not None
        with OpenAI(base_url=seen.judge.base_url, api_key=seen.judge.api_key) as client:
            answer = client.chat.completions.create(model="base", messages=[*seen.messages])  # type: ignore[list-item]
        return float(bool(answer.choices[0].message.content))

    async def judge_async(seen: SeenEpisode) -> float:
        assert seen.judge is not None
        async with AsyncOpenAI(base_url=seen.judge.base_url, api_key=seen.judge.api_key) as client:
            answer = await client.chat.completions.create(model="base", messages=[*seen.messages])  # type: ignore[list-item]
        return float(bool(answer.choices[0].message.content))

    with running.database.read() as conn:
        ids = unjudged_episodes(conn, "judge")
    function = judge_async if is_async else judge
    access = judge_access(running.url, None)
    report = judge_all(running.database, function, ids, "judge", concurrency=2, access=access)
    assert [(one.episode_id, one.failure) for one in report.judged] == [("a", None), ("b", None)]
    api(running, "/a")  # a request to our API sees the calls before it
    judges = [row for row in running.rows("calls") if row["kind"] == "judge"]
    assert [(row["agent"], row["episode_id"]) for row in judges] == [("judge", None)] * 2
    assert {row["num_calls"] for row in running.rows("episodes")} == {1}
