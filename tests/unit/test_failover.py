"""The proxy in front of two engines: calls move where nobody listens, and rows name who served them."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_vllm import FakeVllm, serving
from fakes.running_proxy import ask
from fakes.waiting import wait_until

from lightning_rl.proxy.app import ProxyApp
from lightning_rl.proxy.serving import serve_policies
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.store.database import Database

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()


@contextlib.contextmanager
def proxy_before(
    folder: Path, *urls: str, background: Any = None
) -> Iterator[tuple[str, ProxyApp, Database]]:
    async def know_base(app: ProxyApp) -> None:
        app.live.set_base_model("base")

    database = Database.open(f"sqlite:///{folder}/log.db")
    settings = ProxySettings.load(engine_url=list(urls), db=database.url)
    app = ProxyApp(settings, database, background=[background or know_base])
    try:
        with serving(app, lifespan="on", http="httptools", timeout_graceful_shutdown=5) as url:
            yield url, app, database
    finally:
        database.close()


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def calls(database: Database) -> list[dict[str, Any]]:
    with database.read() as conn:
        rows = conn.exec_driver_sql("SELECT * FROM calls ORDER BY id").mappings()
        return [dict(row) for row in rows]


def test_an_episode_stays_at_its_engine_and_rows_name_it(tmp_path: Path) -> None:
    one, two = FakeVllm(), FakeVllm()
    with serving(one) as first, serving(two) as second:
        with proxy_before(tmp_path, first, second) as (url, _, _database):
            for episode in ("a", "b", "a", "b", "a", "b"):
                assert ask(url, f"/episodes/{episode}{CHAT}", BODY).status == 200
        assert len(one.received) == len(two.received) == 3
        by_episode: dict[str, set[str]] = {}
        for row in calls(Database.open(f"sqlite:///{tmp_path}/log.db")):
            by_episode.setdefault(row["episode_id"], set()).add(row["engine_url"])
        assert sorted(url for (url,) in by_episode.values()) == sorted([first, second])


def test_a_call_moves_on_where_nobody_listens_and_its_row_says_who_served_it(tmp_path: Path) -> None:
    engine, gone = FakeVllm(), nobody()
    with serving(engine) as there, proxy_before(tmp_path, gone, there) as (url, app, database):
        for number in range(4):
            assert ask(url, f"/episodes/e{number}{CHAT}", BODY).status == 200
        rows = calls(database)
        assert {row["engine_url"] for row in rows} == {there}
        assert {row["status"] for row in rows} == {"complete"}
        assert len(engine.received) == 4
        assert [state.is_up for state in app.engines.all] == [False, True]
        assert ask(url, "/v1/models").status == 200


def test_a_call_that_no_engine_hears_gets_502_and_the_next_ones_503(tmp_path: Path) -> None:
    with proxy_before(tmp_path, nobody(), nobody()) as (url, _, database):
        assert ask(url, f"/episodes/e{CHAT}", BODY).status == 502
        answer = ask(url, f"/episodes/e{CHAT}", BODY)
        assert answer.status == 503
        assert dict(answer.headers)["retry-after"] == "1"
        assert ask(url, "/healthz").status == 503
        (row,) = calls(database)
        assert row["status"] == "error"


def test_a_call_that_was_heard_is_not_asked_again(tmp_path: Path) -> None:
    breaking, other = FakeVllm(break_after_chunks=2), FakeVllm(break_after_chunks=2)
    body = json.dumps({**json.loads(BODY), "stream": True}).encode()
    with serving(breaking) as first, serving(other) as second:
        with proxy_before(tmp_path, first, second) as (url, _, _database):
            assert ask(url, f"/episodes/e{CHAT}", body).is_broken
        assert len(breaking.received) + len(other.received) == 1


def test_an_engine_that_is_back_is_used_again_once_it_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rl.proxy.engine_watch.LOOK_SEC", 0.01)
    with (
        serving(FakeVllm()) as first,
        serving(FakeVllm()) as second,
        proxy_before(tmp_path, first, second, background=serve_policies) as (url, app, database),
    ):
        assert ask(url, f"/episodes/a{CHAT}", BODY).status == 200
        for engine in app.engines.all:
            app.engines.refused(engine)
        wait_until(lambda: len(app.engines.in_rotation) == 2)
        assert ask(url, f"/episodes/a{CHAT}", BODY).status == 200
        assert all(row["fingerprint_id"] for row in calls(database))
