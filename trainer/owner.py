"""The process that trains a run: how it is known, whether it lives, and its heartbeat.

On the machine where the owner ran, its process is looked at: dead is certain at once. Of another machine (or
another container) only the heartbeat tells, and silence means death after SILENT_SEC (store/run_owners.py).
"""

from __future__ import annotations

import os
import platform
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from ..errors import StoreError, UserError
from ..records import new_id
from ..store.database import Database
from ..store.run_owners import SILENT_SEC, OwnedRun, Owner, hold

BEAT_SEC = 5.0


def this_process() -> Owner:
    return Owner(new_id(), platform.node(), os.getpid(), f"{_machine()} {_started(os.getpid())}")


def lives(run: OwnedRun) -> bool:
    """Whether somebody trains the run at this moment."""
    owner = run.owner
    if run.status != "running" or owner is None:
        return False
    machine, _, started = owner.process.rpartition(" ")
    if (owner.host, machine) == (platform.node(), _machine()):
        return _started(owner.pid) == started
    return run.silent_ms is not None and run.silent_ms < SILENT_SEC * 1000


def where(run: OwnedRun) -> str:
    """ "process 4711 on worker-1, seen 3 s ago"."""
    if run.owner is None:
        return "a process of an older version"
    seen = "" if run.silent_ms is None else f", seen {run.silent_ms / 1000:.0f} s ago"
    return f"process {run.owner.pid} on {run.owner.host}{seen}"


class Ownership:
    """Of one run, while this process trains it: beats in a thread of its own, and vouches for every write."""

    def __init__(self, database: Database, run_id: str, owner: Owner) -> None:
        self._database, self._run_id, self._owner = database, run_id, owner
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run heartbeat", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._thread.start()
        except BaseException:  # a signal at this very moment
            self._over.set()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def vouch(self, conn: sa.Connection) -> None:
        """In the transaction of a write. UserError where another process has taken the run over."""
        if not hold(conn, self._run_id, self._owner.token):
            raise UserError(
                f"run {self._run_id} was taken over by another process, or given up, while this one was "
                "silent: it ends here and writes nothing more"
            )

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SEC):
            # A database that is away for a moment is the matter of the next write.
            with suppress(StoreError, sa.exc.SQLAlchemyError), self._database.write() as conn:
                hold(conn, self._run_id, self._owner.token)


def _machine() -> str:
    """Where a pid means a process: this boot of this machine, in this container."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.system()


def _started(pid: int) -> str | None:
    """When the process began, in the system's own count; None: there is none, or it waits to be buried."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            after_name = file.read().rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else after_name[19]
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return None
    import psutil  # where there is no /proc

    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return "unknown"
