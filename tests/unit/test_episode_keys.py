"""Keys issued for episodes: whose call it is, what they admit, and that they stay nowhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.running_proxy import Running, ask, running_proxy

from lightning_rl.proxy.attribution import keys as keys_module

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
TOKEN = "token-of-the-proxy"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_proxy(tmp_path_factory.mktemp("keys"), token=TOKEN) as running:
        yield running


def api(running: Running, path: str, doc: Any, key: str = TOKEN) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    answer = ask(running.url, f"/lightning/api{path}", json.dumps(doc).encode(), headers)
    return answer.status, json.loads(answer.body)


def issue(running: Running, episode: str, **more: Any) -> str:
    api(running, "/episodes", {"episode": episode})
    status, doc = api(running, f"/episodes/{episode.replace('/', '%2F')}/keys", more)
    assert status == 200
    assert (doc["episode"], doc["agent"]) == (episode, more.get("agent"))
    return str(doc["key"])


def call(running: Running, headers: dict[str, str], path: str = CHAT, **more: Any) -> int:
    return ask(running.url, path, json.dumps(BODY | more).encode(), headers).status


def calls_of(running: Running, episode: str) -> list[dict[str, Any]]:
    api(running, "/episodes", {"episode": "flush"})  # a request to our API sees the calls before it
    return [row for row in running.rows("calls") if row["episode_id"] == episode]


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key", "Api-Key"])
def test_a_key_is_used_as_the_api_key(running: Running, header: str) -> None:
    episode = f"by/{header}"
    key = issue(running, episode, agent="writer")
    sent = {header: f"Bearer {key}" if header == "Authorization" else key}
    assert call(running, sent, metadata={"episode_id": "from-body"}) == 200
    (row,) = calls_of(running, episode)
    assert (row["attribution_rule"], row["agent"]) == ("key", "writer")
    assert row["attribution_conflict"] == "body says 'from-body'"


def test_path_and_header_are_stronger(running: Running) -> None:
    headers = {"Authorization": f"Bearer {issue(running, 'weaker')}"}
    assert call(running, headers, "/episodes/by-path" + CHAT) == 200
    assert call(running, headers | {"X-Lightning-Episode": "by-header"}) == 200
    assert [row["attribution_rule"] for row in calls_of(running, "by-path")] == ["path"]
    (row,) = calls_of(running, "by-header")
    assert (row["attribution_rule"], row["attribution_conflict"]) == ("header", "key says 'weaker'")
    assert calls_of(running, "weaker") == []


def test_a_key_admits_calls_and_nothing_else(running: Running) -> None:
    key = issue(running, "narrow")
    headers = {"Authorization": f"Bearer {key}"}
    assert call(running, headers) == 200
    assert ask(running.url, "/v1/models", headers=headers).status == 200
    num_received = len(running.engine.received)
    assert call(running, headers, "/tokenize") == 403
    assert ask(running.url, "/metrics", headers=headers).status == 403
    assert ask(running.url, CHAT, headers=headers, method="DELETE").status == 403
    for path in ("/episodes", "/rewards", "/episodes/narrow/keys"):
        assert api(running, path, {}, key)[0] == 401
    assert ask(running.url, "/lightning/api/status", headers=headers).status == 401
    assert len(running.engine.received) == num_received
    assert call(running, headers | {"X-Api-Key": TOKEN}, "/tokenize") == 200  # with the token, too


def test_keys_that_are_not_valid_are_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(running, {"Authorization": f"Bearer {keys_module.new_key()}"}) == 401
    key = issue(running, "short", expires_in_sec=60)
    assert call(running, {"X-Api-Key": key}) == 200
    later = keys_module.now_ms() + 61_000
    monkeypatch.setattr(keys_module, "now_ms", lambda: later)
    assert call(running, {"X-Api-Key": key}) == 401
    assert call(running, {"X-Api-Key": key, "Authorization": f"Bearer {TOKEN}"}) == 401
    assert len(calls_of(running, "short")) == 1


def test_without_a_token_an_unknown_episode_key_is_refused_and_other_keys_are_not(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as open_to_all:
        assert call(open_to_all, {"Authorization": f"Bearer {keys_module.new_key()}"}) == 401
        assert call(open_to_all, {"Authorization": "Bearer lk-of-some-other-product"}) == 200


def test_a_key_is_issued_for_running_episodes(running: Running) -> None:
    assert api(running, "/episodes/never-seen/keys", {})[0] == 404
    api(running, "/episodes", {"episode": "over"})
    api(running, "/episodes/over/end", {})
    status, doc = api(running, "/episodes/over/keys", {})
    assert status == 400
    assert "has ended" in doc["error"]["message"]
    assert api(running, "/episodes/over/keys", {"expires_in_sec": 0})[0] == 422


def test_keys_in_a_url_are_refused_before_anybody_writes_them_down(running: Running) -> None:
    key = issue(running, "url")
    headers = {"Authorization": f"Bearer {key}"}
    num_received = len(running.engine.received)
    for path in (
        f"{CHAT}?key={key}",
        f"{CHAT}?token={TOKEN}",
        f"/episodes/{key}{CHAT}",
        f"/episodes/{TOKEN}{CHAT}",
        f"{CHAT}?key=lk-abc",
        f"{CHAT}?a=b&Api-Key=x",
    ):
        assert call(running, headers, path) == 400
    assert call(running, {}, f"{CHAT}?api_key={TOKEN}") == 400  # and not 401: it is the place that is wrong
    assert len(running.engine.received) == num_received


def test_keys_are_neither_stored_nor_forwarded(tmp_path: Path) -> None:
    with running_proxy(tmp_path, token=TOKEN, engine_api_key="key-of-the-engine") as running:
        key = issue(running, "quiet")
        for header in ("Authorization", "X-Api-Key", "Api-Key"):
            for secret in (key, TOKEN):
                call(running, {header: f"Bearer {secret}" if header == "Authorization" else secret})
                call(running, {header: f"bearer  {secret}"}, stream=True)
        calls_of(running, "quiet")
        received = str(running.engine.received)
        assert "key-of-the-engine" in received
        for secret in (key, TOKEN):
            assert secret not in received
    log = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for secret in (key, TOKEN, "key-of-the-engine"):
        assert secret.encode() not in log
