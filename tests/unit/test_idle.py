"""Episodes that have gone quiet end by themselves, if the settings say so."""

import threading
from pathlib import Path

from fakes.log_rows import end, intent
from fakes.running_proxy import ask, running_proxy
from fakes.store_behaviours import event_kinds, write

from lightning_rl.proxy.idle import end_idle, end_idle_episodes
from lightning_rl.records import now_ms
from lightning_rl.store.database import Database

LONG_AGO = now_ms() - 100_000


def test_two_proxies_that_look_at_once_end_each_episode_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/log.db"
    databases = [Database.open(url), Database.open(url)]
    for number in range(20):
        write(
            databases[0],
            intent(f"c{number}", f"e{number}", started_at_ms=LONG_AGO),
            end(f"c{number}", ended_at_ms=LONG_AGO),
        )
    ended: list[str] = []
    threads = [
        threading.Thread(target=lambda database=database: ended.extend(end_idle(database, 60)))
        for database in databases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == sorted(f"e{number}" for number in range(20))
    assert event_kinds(databases[0], "episode", "e7") == ["ended"]
    for database in databases:
        database.close()


def test_the_proxy_ends_what_is_idle_and_nothing_else(tmp_path: Path) -> None:
    with running_proxy(tmp_path, idle_timeout_sec=1.0, more=[end_idle_episodes]) as running:
        body = b'{"messages": [{"role": "user", "content": "x"}]}'
        assert ask(running.url, "/episodes/quiet/v1/chat/completions", body).status == 200
        assert ask(running.url, "/lightning/api/episodes", b'{"episode": "announced"}').status == 200
        for _ in range(100):
            rows = {row["id"]: (row["status"], row["ended_by"]) for row in running.rows("episodes")}
            if rows["quiet"][0] == "ended":
                break
            threading.Event().wait(0.1)
    assert rows == {"quiet": ("ended", "idle"), "announced": ("running", None)}


def test_without_the_setting_nothing_runs(tmp_path: Path) -> None:
    with running_proxy(tmp_path, more=[end_idle_episodes]) as running:
        task = running.proxy._tasks[-1]
        for _ in range(100):
            if task.done():
                break
            threading.Event().wait(0.02)
        assert task.done()
