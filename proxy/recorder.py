"""From the relay to the log: a bounded queue, one writer thread, group commits.

Owns the promise that nothing delivered is lost: an answer's end waits (`committed`) until the transaction
that holds it has been committed. Entries that nobody waits for ride along, at the latest after
`COMMIT_EVERY_SEC`. A batch that the database refuses is kept and tried again until it is in; meanwhile
`refusal` tells the relay what to do with new calls. Knows nothing of HTTP, and no SQL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import LightningError, StoreError
from ..records import CallDelivered, CallEnd, CallIntent, LogEntry
from ..store.append import Noted, append_entries, mark_gap
from .waiting_bytes import waiting_bytes

COMMIT_EVERY_SEC = 0.05
"""How long an intent may wait for company: after a crash, older calls are in the log as incomplete."""
MAX_BATCH = 256
MAX_QUEUED = 20_000
MAX_QUEUED_BYTES = 256 * 1024 * 1024
STALLED_AFTER_SEC = 5.0
"""A commit that takes longer than this counts as a database that can't be written."""
FIRST_RETRY_SEC = 0.1
LAST_RETRY_SEC = 2.0
STOP_TIMEOUT_SEC = 20.0
LOOK_FOR_FAULT_SEC = 0.5
STALLED = "the database has not answered for a while"
FULL = "the database can't keep up, the queue is full"

logger = logging.getLogger("lightning.recorder")


class WritableDatabase(Protocol):
    """The slice of store.database.Database that is used here."""

    def write(self) -> AbstractContextManager[Any]: ...


@dataclass(slots=True)
class _Waiting:
    """An entry on its way; `done` None: nobody waits for it."""

    entry: LogEntry | None  # None: a flush mark
    done: asyncio.Future[None] | None
    size: int


class Recorder:
    """Call everything but `_run` and what it uses from the event loop that `start` was called on."""

    def __init__(
        self,
        database: WritableDatabase,
        *,
        is_required: bool = True,
        append: Callable[[Any, Sequence[LogEntry]], Noted | None] = append_entries,
        mark: Callable[..., None] = mark_gap,
        prepare: Callable[[LogEntry], LogEntry] | None = None,
        observe: Callable[[Sequence[LogEntry], Noted | None], None] | None = None,
    ) -> None:
        self._database = database
        self._is_required = is_required
        self._append = append
        self._mark = mark
        self._prepare = prepare
        self._observe = observe
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._condition = threading.Condition()
        self._is_urgent = False
        self._is_idle = False
        self._is_stopping = False
        self._give_up_at: float | None = None  # monotonic; set when stopping
        self._batch_since: float | None = None  # monotonic; a batch is being written since then
        self._fault: str | None = None  # why the last attempt failed; None once one succeeded
        self._episode_of: dict[str, str] = {}  # open call -> episode, to mark gaps
        self._gaps: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.num_lost = 0
        """Entries that were given up: an operator must see this."""

    # --- the event loop's side ---

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="lightning-recorder", daemon=True)
        self._thread.start()

    async def stop(self, timeout_sec: float = STOP_TIMEOUT_SEC) -> None:
        """Write what is queued, then end. A database that stays unwritable is given up after the timeout."""
        await asyncio.to_thread(self.close, timeout_sec)

    def close(self, timeout_sec: float = STOP_TIMEOUT_SEC) -> None:
        """`stop` without an event loop: what a forced end of the server owes the log. May be repeated."""
        if self._thread is None or not self._thread.is_alive():
            return
        with self._condition:
            self._is_stopping = True
            self._give_up_at = time.monotonic() + timeout_sec
            self._condition.notify()
        self._thread.join()
        if self.num_lost:
            logger.error("%d log entries could not be written and are lost", self.num_lost)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def fault(self) -> str | None:
        """Why the log can't be written now; None while it can."""
        if self._fault is not None:
            return self._fault
        since = self._batch_since
        if since is not None and time.monotonic() - since > STALLED_AFTER_SEC:
            return STALLED
        if len(self._queue) >= MAX_QUEUED or self._queued_bytes >= MAX_QUEUED_BYTES:
            return FULL
        return None

    @property
    def refusal(self) -> str | None:
        """Why a new call must not be served; None where it may be."""
        return self.fault if self._is_required else None

    def put(self, entry: LogEntry) -> None:
        """Queue an entry that nobody waits for."""
        self._put(entry, None)

    async def committed(self, entry: LogEntry) -> None:
        """Queue an entry and wait until it is in the log.

        Best effort: returns at once while the log can't be written. Raises StoreError for an entry that was
        given up: what it stands for must not be delivered.
        """
        assert self._loop is not None
        done: asyncio.Future[None] = self._loop.create_future()
        self._put(entry, done)
        if self._is_required:
            await done
            return
        while not done.done() and self.fault is None:
            await asyncio.wait([done], timeout=LOOK_FOR_FAULT_SEC)

    async def flush(self) -> None:
        """Wait until everything that was put before is in the log (or given up)."""
        assert self._loop is not None
        done: asyncio.Future[None] = self._loop.create_future()
        with self._condition:
            self._queue.append(_Waiting(None, done, 0))
            self._is_urgent = True
            self._condition.notify()
        await done

    def _put(self, entry: LogEntry, done: asyncio.Future[None] | None) -> None:
        self._remember(entry)
        size = waiting_bytes(entry)
        if not self._is_required and self.fault is not None:
            if done is not None:
                done.set_result(None)
                done = None
            if len(self._queue) >= MAX_QUEUED or self._queued_bytes >= MAX_QUEUED_BYTES:
                self._lose(entry)
                return
        with self._condition:
            self._queue.append(_Waiting(entry, done, size))
            self._queued_bytes += size
            if done is not None:
                self._is_urgent = True
            if done is not None or self._is_idle:
                self._condition.notify()

    def _remember(self, entry: LogEntry) -> None:
        if isinstance(entry, CallIntent) and entry.attribution.episode_id is not None:
            self._episode_of[entry.id] = entry.attribution.episode_id

    def _lose(self, entry: LogEntry) -> None:
        if isinstance(entry, CallDelivered):  # the answer itself is in the log
            return
        self.num_lost += 1
        name = entry.id if isinstance(entry, CallIntent) else entry.call_id
        episode = self._episode_of.get(name)
        if episode is not None:
            self._gaps.add(episode)
        if isinstance(entry, CallEnd):
            self._episode_of.pop(name, None)

    # --- the writer thread's side ---

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if not batch:
                return
            self._batch_since = time.monotonic()
            if self._prepare is not None:
                self._prepare_all(batch, self._prepare)
            self._write(batch)
            self._batch_since = None
            self._forget(batch)
            self._mark_gaps()

    def _prepare_all(self, batch: list[_Waiting], prepare: Callable[[LogEntry], LogEntry]) -> None:
        """Once for each entry, however often it is written. What can't be prepared is not written at all."""
        for item in batch:
            try:
                item.entry = None if item.entry is None else prepare(item.entry)
            except Exception as error:  # as in _write
                logger.error("%s can't be prepared: %r", _shown(item.entry), error, exc_info=error)
                self._give_up([item], f"{type(error).__name__} while preparing a log entry")
                item.entry = None

    def _next_batch(self) -> list[_Waiting]:
        """Wait for work; empty when stopping and nothing is left."""
        with self._condition:
            while not self._is_urgent and not self._is_stopping:
                # Entries that nobody waits for wake nobody up; they are found when the interval is over.
                self._condition.wait_for(self._has_reason, COMMIT_EVERY_SEC)
                if self._queue:
                    break
                self._is_idle = True
                self._condition.wait_for(lambda: bool(self._queue) or self._is_stopping)
                self._is_idle = False
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            self._queued_bytes -= sum(item.size for item in batch)
            self._is_urgent = any(item.done is not None for item in self._queue)
            return batch

    def _has_reason(self) -> bool:
        return self._is_urgent or self._is_stopping

    def _write(self, batch: list[_Waiting]) -> None:
        """Until it is committed, or given up."""
        retry_sec = FIRST_RETRY_SEC
        while True:
            try:
                entries = [item.entry for item in batch if item.entry is not None]
                noted = self._commit(entries)
            except StoreError as error:
                self._failed(batch, str(error))
                if self._give_up_at is not None and time.monotonic() > self._give_up_at:
                    self._give_up(batch, str(error))
                    return
                with self._condition:
                    self._condition.wait(0.1 if self._is_stopping else retry_sec)
                retry_sec = min(2 * retry_sec, LAST_RETRY_SEC)
            except Exception as error:  # noqa: BLE001 - the boundary of this thread: one entry's fault ends no other
                self._write_singly(batch, error)
                return
            else:
                if self._fault is not None:
                    logger.warning("the log can be written again")
                    self._fault = None
                self._batch_since = None  # before anybody is told that it is done
                try:
                    if self._observe is not None:
                        self._observe(entries, noted)
                except Exception:  # it is in the log: whoever counts wrongly must not end the recording
                    logger.exception("what was recorded could not be counted")
                self._resolve(batch, None)
                return

    def _commit(self, entries: list[LogEntry]) -> Noted | None:
        gaps = list(self._gaps)
        noted = None
        if entries:
            with self._database.write() as conn:
                noted = self._append(conn, entries)
        if gaps:
            with self._database.write() as conn:
                for episode in sorted(gaps):
                    self._mark(conn, episode, source="recorder", note="a call was served but not recorded")
            self._gaps.difference_update(gaps)
        return noted

    def _mark_gaps(self) -> None:
        """Of what has just been given up: no other batch may come, and the episode must not be trained."""
        if self._gaps:
            with contextlib.suppress(LightningError):  # then with the next batch
                self._commit([])

    def _failed(self, batch: list[_Waiting], reason: str) -> None:
        if self._fault is None:
            logger.error("the log can't be written, trying again: %s", reason)
        self._fault = reason
        if not self._is_required:
            self._resolve(batch, None)  # served, and still to be written

    def _write_singly(self, batch: list[_Waiting], error: Exception) -> None:
        """A batch that can't be written as it is: find the entry at fault, keep the others."""
        if len(batch) > 1:
            for item in batch:
                self._write([item])
            return
        logger.error("a log entry can't be written: %r: %s", error, _shown(batch[0].entry), exc_info=error)
        self._give_up(batch, f"{type(error).__name__} while writing a log entry")

    def _give_up(self, batch: list[_Waiting], reason: str) -> None:
        for item in batch:
            if item.entry is not None:
                self._lose(item.entry)
        self._resolve(batch, StoreError(reason))

    def _resolve(self, batch: list[_Waiting], error: LightningError | None) -> None:
        waiting = [item.done for item in batch if item.done is not None]
        for item in batch:
            item.done = None
        if waiting:
            assert self._loop is not None
            if not self._loop.is_closed():  # it is after a forced end, and then nobody waits
                self._loop.call_soon_threadsafe(_settle, waiting, error if self._is_required else None)

    def _forget(self, batch: list[_Waiting]) -> None:
        for item in batch:
            if isinstance(item.entry, CallEnd):
                self._episode_of.pop(item.entry.call_id, None)


def _settle(waiting: Sequence[asyncio.Future[None]], error: LightningError | None) -> None:
    for done in waiting:
        if done.done():  # its client left
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _shown(entry: LogEntry | None) -> str:
    if isinstance(entry, CallIntent):
        return f"the intent of call {entry.id}"
    return "nothing" if entry is None else f"{type(entry).__name__} of call {entry.call_id}"
