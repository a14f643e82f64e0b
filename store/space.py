"""What deletion leaves behind: pages that hold nothing, and copies of what was deleted.

SQLite overwrites deleted rows with zeros (`secure_delete`), gives free pages back step by step, and may keep
fragments of moved rows within its pages until the file is rewritten (`VACUUM`). Postgres keeps deleted rows
until its own `VACUUM`, and their bytes until the space is used again or the tables are rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ..errors import StoreError
from .database import BUSY_TIMEOUT_MS, Database
from .schema import metadata
from .wal import checkpoint

REWRITTEN_BYTES = 128 * 1024 * 1024
"""A SQLite file up to this size is rewritten unless one says otherwise: writers wait about a second."""
PAGES_PER_STEP = 500
READERS_WAIT_MS = 2000


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes on disk; None where they can't be told."""

    before_bytes: int | None
    after_bytes: int | None
    rewritten: bool
    advice: str | None


def give_back(database: Database, *, rewrite: bool | None) -> Space:
    """Free the space of what was deleted. `rewrite` None: as far as it holds nobody up."""
    if database.engine.dialect.name == "sqlite":
        return _give_back_file(database, rewrite)
    return _vacuum_tables(database, bool(rewrite))


def _give_back_file(database: Database, rewrite: bool | None) -> Space:
    file = Path(str(database.engine.url.database))
    before = file.stat().st_size
    rewrites = before <= REWRITTEN_BYTES if rewrite is None else rewrite
    advice = None
    with database.engine.connect() as conn:
        driver: Any = conn.connection.driver_connection
        if not _is_incremental(driver) and rewrites:
            driver.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect with the VACUUM
        if rewrites:
            try:
                driver.execute("VACUUM")
            except Exception as error:  # noqa: BLE001 - too busy or no space for a copy: nothing is lost
                rewrites, advice = False, f"the file could not be rewritten ({error}): do it when it is idle"
        if not rewrites:
            _free_pages(driver)
            advice = advice or (
                "fragments of deleted rows may be left within the file's pages; "
                "`lightning db prune --vacuum --yes` rewrites it, while writers wait"
            )
        if not checkpoint(driver, READERS_WAIT_MS, BUSY_TIMEOUT_MS):
            advice = "a reader still needs the write-ahead log, which holds deleted rows until it is done"
    return Space(before, file.stat().st_size, rewrites, advice)


def _is_incremental(driver: Any) -> bool:
    return bool(driver.execute("PRAGMA auto_vacuum").fetchone()[0] == 2)


def _free_pages(driver: Any) -> None:
    """In steps, each a short transaction of its own; does nothing where the file was made without."""
    free = driver.execute("PRAGMA freelist_count").fetchone()[0]
    while free and _is_incremental(driver):
        driver.execute(f"PRAGMA incremental_vacuum({PAGES_PER_STEP})").fetchall()
        left = driver.execute("PRAGMA freelist_count").fetchone()[0]
        if left >= free:
            return
        free = left


def _vacuum_tables(database: Database, rewrite: bool) -> Space:
    size = sa.text("SELECT pg_database_size(current_database())")
    try:
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            before = conn.execute(size).scalar_one()
            for table in metadata.sorted_tables:
                conn.exec_driver_sql(f"VACUUM {'(FULL)' if rewrite else ''} {table.name}")
            after = conn.execute(size).scalar_one()
    except sa.exc.DBAPIError as error:
        raise StoreError(
            f"{database.shown_url}: VACUUM failed: {error.orig}; run it as the tables' owner"
        ) from error
    advice = (
        None
        if rewrite
        else "the space is free for new rows; `lightning db prune --vacuum --yes` gives it back to the disk "
        "and leaves no copy of deleted rows, while writers wait"
    )
    return Space(before, after, rewrite, advice)
