"""Keeping SQLite's write-ahead log small.

SQLite copies the WAL into the file by itself every thousand pages, but starts it over only in a moment
when no reader needs it: under readers that overlap all the time it would grow for ever. So whoever
commits looks at its size now and then, and once it is large asks for that moment: readers that come
meanwhile read from the file, those that are there are waited for briefly. A reader that stays for longer
(a check of the whole log, an export) keeps the WAL until it is done, and costs a short attempt now and then.
"""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from time import monotonic
from typing import Any

MAX_WAL_BYTES = 16 * 1024 * 1024
LOOK_EVERY_SEC = 1.0
WAIT_FOR_READERS_MS = 100
LAST_PAUSE_SEC = 30.0

logger = logging.getLogger("lightning.store")


class WalKeeper:
    """Of one file. Safe to share between threads: at worst two of them look at the same time."""

    def __init__(self, file: Path) -> None:
        self._wal = file.with_name(file.name + "-wal")
        self._look_at = 0.0  # monotonic
        self._pause_sec = LOOK_EVERY_SEC

    def after_commit(self, connection: Any, busy_timeout_ms: int) -> None:
        """Start the WAL over if it has grown large. `connection`: the driver's, without a transaction."""
        now = monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_SEC
        try:
            if self._wal.stat().st_size <= MAX_WAL_BYTES:
                return
            is_done = checkpoint(connection, WAIT_FOR_READERS_MS, busy_timeout_ms)
        except (OSError, sqlite3.Error) as error:  # what was committed stays so: this can wait
            logger.debug("the WAL could not be started over: %s", error)
            is_done = False
        self._pause_sec = LOOK_EVERY_SEC if is_done else min(2 * self._pause_sec, LAST_PAUSE_SEC)
        self._look_at = now + self._pause_sec


def checkpoint(connection: Any, wait_ms: int, busy_timeout_ms: int) -> bool:
    """Copy everything into the file and cut the WAL to nothing; False where a reader was in the way."""
    cursor = connection.cursor()
    try:
        cursor.execute(f"PRAGMA busy_timeout = {wait_ms}")
        busy, _, _ = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {busy_timeout_ms}")
        cursor.close()
