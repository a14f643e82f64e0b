"""Opening the log: URLs, engines, pragmas, transactions, and the one line that each failure gets.

Knows how to reach a database and bring its schema up to date; knows nothing of the rows in it.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy import event

from ..errors import StoreError, UserError
from . import upgrade
from .wal import WalKeeper

BUSY_TIMEOUT_MS = 30_000
"""How long a SQLite writer waits for another process's transaction. Ours last milliseconds."""

_POSTGRES_NAMES = ("postgresql", "postgres", "postgresql+psycopg")
_SQLITE_NAMES = ("sqlite", "sqlite+pysqlite")


def shown_url(url: str) -> str:
    """The URL as it may be printed: passwords masked, in the address and in the query."""
    masked = re.sub(r"(://[^/@:]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", masked)


class Database:
    """One log. Safe to share between threads; every transaction takes a connection of its own."""

    def __init__(self, url: str, engine: sa.Engine) -> None:
        self.url = url
        self.engine = engine
        self._writing = engine.execution_options(sqlite_begin="BEGIN IMMEDIATE")  # the same connections
        self._file: tuple[Path, tuple[int, int]] | None = None  # SQLite: the file, and which one it was
        self._wal: WalKeeper | None = None

    @classmethod
    def open(cls, url: str, *, migrate: bool = True, must_exist: bool = False) -> Self:
        """Connect, and upgrade the schema unless `migrate` is False (then SchemaError if it is not current).

        `must_exist`: a SQLite file that is not there is an error, not a new and empty log.
        """
        parsed = _parse(url)
        if parsed.drivername == "sqlite":
            _check_file(url, Path(str(parsed.database)), must_exist)
        database = cls(url, _create_engine(url, parsed))
        try:
            with _one_line_errors(url):
                if parsed.drivername == "sqlite":
                    _switch_to_wal(database.engine)
                if migrate:
                    upgrade.to_head(database.engine, shown_url(url))
                else:
                    upgrade.require_head(database.engine, shown_url(url))
        except BaseException:
            database.close()
            raise
        if parsed.drivername == "sqlite":
            file = Path(str(parsed.database)).absolute()
            database._file = (file, _identity(file))
            database._wal = WalKeeper(file)
        return database

    @property
    def shown_url(self) -> str:
        return shown_url(self.url)

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction whose queries all see one snapshot of the log."""
        with _one_line_errors(self.url), self.engine.connect() as conn:
            if conn.dialect.name == "postgresql":
                conn.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            with conn.begin():
                yield conn

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that commits at the end of the block and rolls back on any exception.

        On SQLite it takes the write lock at once (BEGIN IMMEDIATE): a transaction that reads first and then
        wants to write fails without waiting when somebody else has written in between.
        """
        self._require_same_file()
        with _one_line_errors(self.url), self._writing.connect() as conn:
            with conn.begin():
                yield conn
            if self._wal is not None:
                self._wal.after_commit(conn.connection.driver_connection, BUSY_TIMEOUT_MS)

    def close(self) -> None:
        self.engine.dispose()

    def _require_same_file(self) -> None:
        """An open connection goes on writing into a file that somebody has deleted: into nothing."""
        if self._file is None:
            return
        file, was = self._file
        if _identity(file) != was:
            raise StoreError(
                f"{self.shown_url}: {file} was removed or replaced while in use; "
                "put it back, or start the program anew with a new log"
            )


def _identity(file: Path) -> tuple[int, int]:
    """Which file it is, whatever its name; zeros: none."""
    try:
        found = file.stat()
    except OSError:
        return (0, 0)
    return (found.st_dev, found.st_ino)


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise StoreError(
            f"not a database URL: {shown_url(url)!r}; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from None
    if parsed.drivername in _SQLITE_NAMES:
        if parsed.database in (None, "", ":memory:") or str(parsed.database).startswith("file:"):
            raise StoreError(
                f"{shown_url(url)} names no file; the log must outlive the process: sqlite:///FILE"
            )
        return parsed.set(drivername="sqlite")
    if parsed.drivername in _POSTGRES_NAMES:
        return parsed.set(drivername="postgresql+psycopg")
    raise StoreError(
        f"{shown_url(url)}: {parsed.drivername!r} is not supported; use sqlite:///FILE or postgresql://…"
    )


def _check_file(url: str, file: Path, must_exist: bool) -> None:
    folder = file.absolute().parent
    shown = shown_url(url)
    if file.is_dir():
        raise StoreError(f"{shown} names a folder, not a file; add the file's name")
    if not folder.is_dir():
        raise StoreError(f"{shown}: there is no folder {folder}; create it or name another file")
    if not file.exists() and must_exist:
        raise StoreError(f"no log at {shown}; start `lightning proxy serve` first, or name the log with --db")
    # SQLite writes its -wal and -shm files beside the log, so the folder must be writable as well.
    effective = os.access in os.supports_effective_ids
    for path in (folder, file) if file.exists() else (folder,):
        if not os.access(path, os.W_OK, effective_ids=effective):
            raise StoreError(f"{shown}: no permission to write {path}; change its owner or name another file")


def _create_engine(url: str, parsed: sa.URL) -> sa.Engine:
    if parsed.drivername == "sqlite":
        engine = sa.create_engine(
            parsed, pool_size=8, max_overflow=32, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000}
        )
        event.listen(engine, "connect", _set_pragmas)
        event.listen(engine, "begin", _begin)
        return engine
    try:
        # pre_ping: a connection that a server restart has killed is replaced before it is used.
        return sa.create_engine(
            parsed, pool_size=8, max_overflow=32, pool_pre_ping=True, connect_args={"connect_timeout": 10}
        )
    except ImportError:
        raise StoreError(
            f"{shown_url(url)}: the Postgres driver is not installed; pip install 'lightning-rl[postgres]'"
        ) from None


def _set_pragmas(connection: Any, _record: Any) -> None:
    # The sqlite3 module would open transactions by its own rules (none before SELECT, DDL or PRAGMA);
    # None leaves BEGIN to us, see _begin.
    connection.isolation_level = None
    for pragma in (
        "foreign_keys = ON",
        # FULL syncs the WAL at every commit: a committed answer survives a power failure, not only
        # a kill of the process (for which NORMAL would do). The recorder commits in groups, so one sync pays
        # for many answers.
        "synchronous = FULL",
        f"journal_size_limit = {64 * 1024 * 1024}",  # bytes of WAL kept after a checkpoint
        # What is deleted is overwritten with zeros, also where an update moves a row.
        "secure_delete = ON",
        "temp_store = MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin(conn: sa.Connection) -> None:
    # Straight to the driver: it is the first statement of every transaction.
    connection: Any = conn.connection.driver_connection
    connection.execute(conn.get_execution_options().get("sqlite_begin", "BEGIN"))


def _switch_to_wal(engine: sa.Engine) -> None:
    """Readers beside a writer need WAL. The file remembers it; the first switch wants the file to itself."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    with engine.connect() as conn:
        cursor = conn.connection.cursor()  # the driver's own: the pragma is refused inside a transaction
        while True:
            try:
                # So that deletion can give pages back without a rewrite; chosen while the file is empty.
                if cursor.execute("PRAGMA page_count").fetchone() == (0,):
                    cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
                cursor.execute("PRAGMA journal_mode = WAL")
                cursor.close()
                return
            except sqlite3.OperationalError as error:  # SQLite does not wait for this lock by itself
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)


@contextmanager
def _one_line_errors(url: str) -> Iterator[None]:
    """Failures of the database's surroundings become a StoreError, values that it can't hold a UserError
    (trying again would not help); broken constraints stay bugs of ours."""
    try:
        yield
    except (sa.exc.DataError, OverflowError, UnicodeEncodeError) as error:
        raise UserError(_unstorable(error)) from error
    except (sa.exc.IntegrityError, sa.exc.ProgrammingError) as error:
        if getattr(error.orig, "sqlstate", None) in _NOT_OURS:
            raise StoreError(f"{shown_url(url)}: {_explain(str(error.orig))}") from error
        raise
    except sa.exc.DBAPIError as error:
        if str(getattr(error.orig, "sqlstate", None)).startswith(_TOO_LARGE):
            raise UserError(_unstorable(error)) from error
        raise StoreError(f"{shown_url(url)}: {_explain(str(error.orig))}") from error
    except sqlite3.Error as error:  # from a pragma, where SQLAlchemy is not yet in between
        raise StoreError(f"{shown_url(url)}: {_explain(str(error))}") from error
    except sa.exc.TimeoutError as error:
        raise StoreError(
            f"{shown_url(url)}: no free connection within 30 s; too many users at once"
        ) from error


_NOT_OURS = ("42501", "3F000", "42P01")
"""Postgres: no privilege, no schema, no table. Classed with bugs, made by whoever administers the server."""

_TOO_LARGE = "54"
"""Postgres: a limit of the program, such as an index entry of more than 2704 bytes."""


def _unstorable(error: Exception) -> str:
    said = str(error.orig if isinstance(error, sa.exc.DBAPIError) else error).split("\n")[0]
    return f"a value that the database can't hold ({said}); name a smaller or shorter one"


_NEXT_STEPS = (
    ("file is not a database", "that file is not a SQLite database; name another file"),
    ("malformed", "the file is damaged; restore a copy, or salvage it with `sqlite3 FILE .recover`"),
    ("database is locked", "another program has held the file's lock for too long; end it and try again"),
    ("readonly database", "no permission to write the file; change its owner or name another file"),
    ("unable to open", "the file can't be opened; check the path and its permissions"),
    ("full", "the disk is full; free some space, nothing that was committed is lost"),
    ("refused", "nothing listens there; start Postgres or correct host and port"),
    ("could not translate host name", "no such host; correct the host in the URL"),
    ("failed to resolve host", "no such host; correct the host in the URL"),
    ("No such file or directory", "no Postgres socket there; start Postgres or name its host"),
    ("timeout expired", "no answer within 10 s; correct host and port or check the network"),
    ("password authentication failed", "user or password is wrong; correct the URL"),
    ("no password supplied", "the server wants a password; put it into the URL or into ~/.pgpass"),
    ("permission denied", "the user may not create or write tables; grant it, or name another user"),
    ("does not exist", "create it (createdb NAME, createuser NAME) or correct the URL"),
    ("deadlock", "two writers waited for each other and one gave way; try again"),
)


def _explain(message: str) -> str:
    """The first line that says something, and what to do about it."""
    line = " ".join(message.split()) or "the database gave no reason"
    line = line if len(line) <= 300 else line[:300] + "…"
    for sign, step in _NEXT_STEPS:
        if sign in message:
            return f"{line}: {step}"
    return f"{line}; the connection or the database failed, try again when it is back"
