"""Opening SQLite logs, and what several users of one file do to each other."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.log_rows import end, intent, reward
from fakes.store_behaviours import write

from lightning_rl.errors import StoreError
from lightning_rl.records import CallDelivered
from lightning_rl.store import append, read
from lightning_rl.store.database import Database, shown_url
from lightning_rl.store.schema import calls, episodes


def refused(url: str, **how: bool) -> str:
    with pytest.raises(StoreError) as caught:
        Database.open(url, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("lightning.db", "not a database URL: 'lightning.db'; write sqlite:///FILE"),
        ("", "not a database URL"),
        ("mysql://me:hunter2@host/db", "'mysql' is not supported"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("postgresql://me:hunter2@127.0.0.1:1/db", "me:***@127.0.0.1:1/db: .*refused.*start Postgres"),
        ("postgresql://127.0.0.1:1/db?user=me&password=hunter2", "refused"),
        ("postgresql://me:hunter2@127.0.0.1:port/db", "not a database URL"),
    ],
)
def test_a_wrong_url_gets_one_line_without_the_password(url: str, words: str) -> None:
    import re

    message = refused(url)
    assert re.search(words.replace("***", r"\*\*\*"), message)
    assert "hunter2" not in message


def test_passwords_are_masked() -> None:
    assert shown_url("postgresql://me:a:b@c/d@host/x") == "postgresql://me:***@host/x"
    assert shown_url("postgresql://h/x?password=p&a=b") == "postgresql://h/x?password=***&a=b"
    assert shown_url("sqlite:////tmp/a@b.db") == "sqlite:////tmp/a@b.db"


def test_paths_that_cannot_hold_a_log_are_refused(tmp_path: Path) -> None:
    assert "create it" in refused(f"sqlite:///{tmp_path}/missing/log.db")
    assert "names a folder" in refused(f"sqlite:///{tmp_path}")
    text = tmp_path / "notes.db"
    text.write_text("not a database, " * 100)
    assert "not a SQLite database; name another file" in refused(f"sqlite:///{text}")
    assert text.read_text() == "not a database, " * 100
    assert "no log at" in refused(f"sqlite:///{tmp_path}/log.db", must_exist=True)
    assert list(tmp_path.iterdir()) == [text]


def test_a_file_or_folder_without_permission_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "log.db"
    Database.open(f"sqlite:///{file}").close()
    as_root = os.geteuid() == 0
    tmp_path.chmod(0o755)
    file.chmod(0o444)
    outer = [folder for folder in tmp_path.parents if folder.stat().st_uid == os.geteuid() and as_root]
    modes = {folder: folder.stat().st_mode for folder in outer if folder != Path("/")}
    for folder, mode in modes.items():
        folder.chmod(mode | 0o111)
    try:
        if as_root:
            os.seteuid(65534)
        assert f"no permission to write {tmp_path}" in refused(f"sqlite:///{file}")
        assert f"no permission to write {tmp_path}" in refused(f"sqlite:///{tmp_path}/new.db")
    finally:
        if as_root:
            os.seteuid(0)
        for folder, mode in modes.items():
            folder.chmod(mode)


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert "pip install 'lightning-rl[postgres]'" in refused("postgresql://me@host/db")


def test_a_locked_file_is_an_error_of_one_line_and_then_works(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    with database.write():
        other = Database.open(f"sqlite:///{tmp_path}/log.db")
        sa.event.listen(other.engine, "checkout", lambda c, *_: c.execute("PRAGMA busy_timeout = 50"))
        with pytest.raises(StoreError, match=r"database is locked.*end it and try again"):
            write(other, intent("c1"))
    write(other, intent("c1"))
    other.close()
    database.close()


def test_a_full_disk_is_an_error_of_one_line_and_then_works(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    limit = f"PRAGMA max_page_count = {1 + (tmp_path / 'log.db').stat().st_size // 4096}"
    sa.event.listen(database.engine, "checkout", lambda c, *_: c.execute(limit))
    with pytest.raises(StoreError, match="the disk is full"):
        write(database, intent("c0"), *(end(f"c{i}", range(i, i + 5000)) for i in range(20)))
    limit = "PRAGMA max_page_count = 100000"
    write(database, intent("c0"), end("c0"))
    with database.read() as conn:
        assert len(read.load_episodes(conn, ["ep"])[0].calls) == 1
    database.close()


def _record(url: str, name: str, count: int) -> None:
    database = Database.open(url)
    for number in range(count):
        call = f"{name}-{number}"
        write(database, intent(call, f"{name}-{number % 3}", task="t"))
        write(database, end(call, range(number, number + 400)), CallDelivered(call, True))
    database.close()


def _judge(url: str, name: str, count: int) -> None:
    database = Database.open(url)
    for number in range(count):
        with database.write() as conn:
            conn.execute(sa.select(sa.func.count()).select_from(episodes)).scalar()
            append.create_episode(conn, episode_id=f"{name}-0")
            append.add_reward(conn, reward(f"{name}-0", float(number)))
    database.close()


def _train(url: str, name: str, count: int) -> None:
    database = Database.open(url)
    for _ in range(count):
        with database.read() as conn:
            read.trainable_group_ids(conn, policy="policy", run_id=name)
            ids = conn.execute(sa.select(episodes.c.id)).scalars().all()
            time.sleep(0.002)
            for episode in read.load_episodes(conn, ids):
                assert [call.ordinal for call in episode.calls] == list(range(len(episode.calls)))
    database.close()


@pytest.mark.slow
def test_processes_share_one_file_without_being_locked_out(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/log.db"
    Database.open(url).close()
    context = multiprocessing.get_context("spawn")
    work = [(_record, "a", 30), (_record, "b", 30), (_judge, "a", 30), (_judge, "b", 30), (_train, "r", 15)]
    processes = [context.Process(target=job, args=(url, name, count)) for job, name, count in work]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(work)
    database = Database.open(url)
    with database.read() as conn:
        loaded = read.load_episodes(conn, [f"{name}-{i}" for name in "ab" for i in range(3)])
    assert [len(episode.calls) for episode in loaded] == [10] * 6
    assert all(call.delivered for episode in loaded for call in episode.calls)
    assert [len(episode.rewards) for episode in loaded] == [30, 0, 0, 30, 0, 0]
    database.close()


def test_a_killed_writer_leaves_whole_batches(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/log.db"
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from fakes.log_rows import *; from fakes.store_behaviours import write\n"
        "from lightning_rl.store.database import Database\n"
        "database = Database.open(sys.argv[1])\n"
        "for number in range(10**6):\n"
        "    name = f'c{number}'; write(database, intent(name), end(name)); print(number, flush=True)\n"
    )
    tests = Path(__file__).parent.parent
    command = [sys.executable, "-c", program, url, str(tests)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        committed = -1
        for line in process.stdout:
            committed = int(line)
            if committed == 50:
                process.kill()
    database = Database.open(url)
    with database.read() as conn:
        (episode,) = read.load_episodes(conn, ["ep"])
    assert len(episode.calls) in (committed + 1, committed + 2)
    assert all(len(call.choices) == 1 for call in episode.calls)
    database.close()


def test_the_trainer_s_reads_never_scan_calls_and_are_few(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    names = [f"e{i}" for i in range(64)]
    for name in names:
        write(database, intent(f"c-{name}", name, task="t"), end(f"c-{name}"))
    with database.write() as conn:
        for name in names:
            append.add_reward(conn, reward(name, final=True))
    statements: list[tuple[str, object]] = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *a: statements.append((a[2], a[3])))
    with database.read() as conn:
        assert len(read.load_episodes(conn, names)) == 64
    assert len(statements) == 5  # episodes, calls, choices, token blocks, rewards
    with database.read() as conn:
        (group,) = read.trainable_group_ids(conn, policy="policy", run_id="r")
        read.load_groups(conn, [group])
        read.count_groups(conn, policy="policy", run_id="r")
        read.count_episodes(conn)
        read.calls_by_upstream_ids(conn, ["chatcmpl-c-e1"])
    plans = _plans(database, statements)
    touching = [step for step in plans if "calls" in step]
    assert len(touching) >= 4
    large = ("SCAN calls", "SCAN choices", "SCAN token_blocks", "SCAN rewards")
    assert [step for step in plans if step.startswith(large)] == []
    # The check can fail: a query without an index on its condition scans.
    scan = str(sa.select(calls.c.id).where(calls.c.error == "x").compile(database.engine))
    assert _plans(database, [(scan, ("x",))])[0].startswith("SCAN calls")
    database.close()


def _plans(database: Database, statements: list[tuple[str, object]]) -> list[str]:
    with database.engine.connect() as conn:
        return [
            row[3]
            for text, values in list(statements)
            if text.startswith(("SELECT", "WITH"))
            for row in conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values).all()
        ]


def test_a_log_that_is_removed_under_a_writer_is_a_fault_not_a_success(tmp_path: Path) -> None:
    file = tmp_path / "log.db"
    database = Database.open(f"sqlite:///{file}")
    write(database, intent("a", "e"))
    file.unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match="removed or replaced"):
            write(database, intent("b", "e"))
    database.close()
