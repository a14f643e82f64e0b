"""SQLite's write-ahead log stays small under readers that overlap all the time."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.log_rows import end, intent
from fakes.store_behaviours import write

from lightning_rl.store import wal
from lightning_rl.store.database import Database
from lightning_rl.store.schema import calls

LIMIT_BYTES = 256 * 1024


def largest_wal(tmp_path: Path, *, keeps: bool) -> int:
    """Bytes, of a writer of 4 MiB beside three readers of which one at least is always reading."""
    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    if not keeps:
        database._wal = None
    stop = threading.Event()

    def read(number: int) -> None:
        time.sleep(0.01 * number)
        while not stop.is_set():
            with database.read() as conn:
                conn.execute(sa.select(sa.func.count()).select_from(calls)).scalar()
                time.sleep(0.03)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for reader in readers:
        reader.start()
    largest = 0
    for number in range(60):
        prompt = [number * 16_384 + i for i in range(16_384)]
        write(database, intent(f"c{number}", "e"), end(f"c{number}", prompt))
        largest = max(largest, (tmp_path / "log.db-wal").stat().st_size)
    stop.set()
    for reader in readers:
        reader.join()
    database.close()
    return largest


@pytest.mark.slow
def test_the_wal_is_started_over_between_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "MAX_WAL_BYTES", LIMIT_BYTES)
    monkeypatch.setattr(wal, "LOOK_EVERY_SEC", 0.0)
    monkeypatch.setattr(wal, "WAIT_FOR_READERS_MS", 2000)
    for name in ("kept", "left"):
        (tmp_path / name).mkdir()
    kept = largest_wal(tmp_path / "kept", keeps=True)
    left = largest_wal(tmp_path / "left", keeps=False)
    assert kept < 4 * LIMIT_BYTES
    assert left > 2 * kept  # SQLite alone never finds the moment


def test_a_reader_that_stays_costs_attempts_further_and_further_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "MAX_WAL_BYTES", 0)
    attempts: list[float] = []
    now = [1000.0]
    monkeypatch.setattr(wal, "monotonic", lambda: now[0])
    inner: Callable[..., bool] = wal.checkpoint

    def counted(connection: object, wait_ms: int, busy_timeout_ms: int) -> bool:
        attempts.append(now[0])
        return inner(connection, 10, busy_timeout_ms)

    monkeypatch.setattr(wal, "checkpoint", counted)
    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    write(database, intent("c0", "e"))
    attempts.clear()
    with database.read() as conn:
        conn.execute(sa.select(calls.c.id)).all()
        for number in range(1, 60):
            now[0] += 1.0
            write(database, intent(f"c{number}", "e"))
    pauses = [after - before for before, after in pairwise(attempts)]
    assert pauses == [2.0, 4.0, 8.0, 16.0]
    now[0] += 60.0
    write(database, intent("last", "e"))
    assert (tmp_path / "log.db-wal").stat().st_size == 0
    database.close()
