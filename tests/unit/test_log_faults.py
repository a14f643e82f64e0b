"""The proxy while its SQLite file can't be written: a full disk, a file that somebody else has locked."""

import base64
import random
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.fault_checks import check_best_effort, check_loss_is_counted, check_required
from fakes.running_proxy import Running, running_proxy

from lightning_rl.proxy import recorder
from lightning_rl.store import database as database_module

Fault = Callable[[Running], tuple[Callable[[], None], Callable[[], None]]]

LARGE = base64.b64encode(random.Random(5).randbytes(600_000)).decode()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("a disk of a few MiB can't be mounted here (needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk(running: Running) -> tuple[Callable[[], None], Callable[[], None]]:
    filler = Path(str(running.database.engine.url.database)).parent / "filler"

    def fill() -> None:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(64 * 1024))

    return fill, filler.unlink


def full_file(running: Running) -> tuple[Callable[[], None], Callable[[], None]]:
    """SQLite's own limit of a file's size."""
    limit = ["PRAGMA max_page_count = 1000000"]
    sa.event.listen(running.database.engine, "checkout", lambda conn, *_: conn.execute(limit[0]))

    def fill() -> None:
        limit[0] = "PRAGMA max_page_count = 1"  # SQLite takes that for the size that it has

    def free() -> None:
        limit[0] = "PRAGMA max_page_count = 1000000"

    return fill, free


def locked_file(running: Running) -> tuple[Callable[[], None], Callable[[], None]]:
    other = sqlite3.connect(
        str(running.database.engine.url.database), isolation_level=None, check_same_thread=False
    )

    def free() -> None:
        other.execute("ROLLBACK")
        other.close()

    return lambda: other.execute("BEGIN IMMEDIATE") and None, free


FAULTS = pytest.mark.parametrize("fault", [full_file, locked_file])


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 200)
    monkeypatch.setattr(recorder, "LAST_RETRY_SEC", 0.2)


@FAULTS
def test_required_recording_holds_and_refuses_until_the_log_is_back(tmp_path: Path, fault: Fault) -> None:
    with running_proxy(tmp_path) as running:
        check_required(running, *fault(running), LARGE)


@FAULTS
def test_best_effort_serves_and_writes_later(tmp_path: Path, fault: Fault) -> None:
    with running_proxy(tmp_path, recording="best-effort") as running:
        check_best_effort(running, *fault(running), LARGE)


@FAULTS
def test_best_effort_counts_what_it_loses(
    tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_QUEUED", 4)
    with running_proxy(tmp_path, recording="best-effort") as running:
        check_loss_is_counted(running, *fault(running), LARGE)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    with running_proxy(small_disk) as running:
        check_required(running, *full_disk(running), LARGE)


def test_a_disk_that_is_really_full_with_best_effort(small_disk: Path) -> None:
    with running_proxy(small_disk, recording="best-effort") as running:
        check_best_effort(running, *full_disk(running), LARGE)
