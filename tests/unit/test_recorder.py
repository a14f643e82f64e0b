"""The recorder: group commits, promises kept through faults, nothing lost in silence."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fakes.waiting import until

from lightning_rl.errors import StoreError
from lightning_rl.proxy import recorder as recorder_module
from lightning_rl.proxy.recorder import Recorder
from lightning_rl.records import (
    Attribution,
    CallDelivered,
    CallEnd,
    CallIntent,
    CallKind,
    CallStatus,
    LogEntry,
    RecordedChoice,
)
from lightning_rl.store.database import Database


@dataclass
class FakeDatabase:
    """Keeps what was committed, in batches; `fault` and `poison` say what goes wrong."""

    batches: list[list[LogEntry]] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    fault: str | None = None
    poison: Callable[[LogEntry], bool] = lambda entry: False
    num_attempts: int = 0
    may_commit: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_commit.set()

    @contextlib.contextmanager
    def write(self) -> Iterator[list[LogEntry]]:
        self.num_attempts += 1
        if self.fault is not None:
            raise StoreError(self.fault)
        written: list[LogEntry] = []
        yield written
        self.may_commit.wait(60)
        if written:
            self.batches.append(written)

    def append(self, conn: list[LogEntry], entries: Sequence[LogEntry]) -> None:
        for entry in entries:
            if self.poison(entry):
                raise ValueError("a bug of ours")
        conn.extend(entries)

    def mark(self, conn: Any, episode_id: str, *, source: str, note: str) -> None:
        self.gaps.append(episode_id)

    @property
    def entries(self) -> list[LogEntry]:
        return [entry for batch in self.batches for entry in batch]


def intent(name: str, episode: str | None = "e") -> CallIntent:
    return CallIntent(
        id=name,
        attribution=Attribution(episode_id=episode),
        kind=CallKind.POLICY,
        route="/v1/chat/completions",
        dialect="chat",
        streaming=False,
        requested_model=None,
        served_model=None,
        policy="policy",
        policy_version=0,
        engine_url="http://engine",
        fingerprint_id=None,
        sampling={},
        request_body=b"{}",
        request_hash=None,
        state_key=None,
        parent_call_id=None,
        unrecordable=None,
        idempotency_key=None,
        retry_count=0,
        started_at_ms=1,
    )


def end(name: str) -> CallEnd:
    return CallEnd(name, CallStatus.COMPLETE, 200, None, None, (), 0, None, None, 1, 2)


def with_recorder(
    database: FakeDatabase,
    work: Callable[[Recorder], Coroutine[Any, Any, None]],
    *,
    is_required: bool = True,
    stop_timeout_sec: float = 5.0,
) -> Recorder:
    async def run() -> Recorder:
        recorder = Recorder(database, is_required=is_required, append=database.append, mark=database.mark)
        recorder.start()
        try:
            await asyncio.wait_for(work(recorder), 60)
        finally:
            await recorder.stop(stop_timeout_sec)
        return recorder

    return asyncio.run(run())


def test_an_end_is_in_the_log_when_committed_returns() -> None:
    database = FakeDatabase()

    async def work(recorder: Recorder) -> None:
        recorder.put(intent("a"))
        await recorder.committed(end("a"))
        assert [type(entry) for entry in database.entries] == [CallIntent, CallEnd]

    with_recorder(database, work)


def test_an_end_is_not_promised_before_the_commit() -> None:
    database = FakeDatabase()
    database.may_commit.clear()

    async def work(recorder: Recorder) -> None:
        waiting = asyncio.create_task(recorder.committed(end("a")))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert database.batches == []
        database.may_commit.set()
        await waiting

    with_recorder(database, work)


def test_calls_that_end_together_share_a_commit() -> None:
    database = FakeDatabase()
    database.may_commit.clear()

    async def work(recorder: Recorder) -> None:
        waiting = [asyncio.create_task(recorder.committed(end(str(i)))) for i in range(50)]
        await asyncio.sleep(0)  # all are queued, however many the first commit has taken
        database.may_commit.set()
        await asyncio.gather(*waiting)

    with_recorder(database, work)
    assert len(database.entries) == 50
    assert len(database.batches) <= 2


def test_an_intent_alone_is_committed() -> None:
    database = FakeDatabase()

    async def work(recorder: Recorder) -> None:
        await until(lambda: recorder._is_idle)
        recorder.put(intent("a"))
        await until(lambda: database.entries)  # though nobody waits for it, and nothing comes after it

    with_recorder(database, work)


def test_order_is_kept() -> None:
    database = FakeDatabase()

    async def work(recorder: Recorder) -> None:
        for i in range(600):
            recorder.put(intent(str(i)))
        await recorder.flush()

    with_recorder(database, work)
    assert [entry.id for entry in database.entries if isinstance(entry, CallIntent)] == [
        str(i) for i in range(600)
    ]
    assert max(len(batch) for batch in database.batches) <= recorder_module.MAX_BATCH


def test_stop_writes_what_is_queued() -> None:
    database = FakeDatabase()

    async def work(recorder: Recorder) -> None:
        recorder.put(intent("a"))
        recorder.put(CallDelivered("a", True))

    assert with_recorder(database, work).num_lost == 0
    assert len(database.entries) == 2


def test_required_holds_the_end_and_refuses_new_calls_until_the_log_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    database = FakeDatabase(fault="disk full")

    async def work(recorder: Recorder) -> None:
        assert recorder.refusal is None
        waiting = asyncio.create_task(recorder.committed(end("a")))
        await until(lambda: database.num_attempts >= 2)
        assert not waiting.done()
        assert recorder.refusal == "disk full"
        database.fault = None
        await waiting
        assert recorder.refusal is None

    recorder = with_recorder(database, work)
    assert recorder.num_lost == 0
    assert len(database.entries) == 1
    assert database.num_attempts >= 3
    messages = [record.message for record in caplog.records]
    assert sum("trying again" in message for message in messages) == 1  # once, not once an attempt


def test_best_effort_serves_while_the_log_is_away_and_writes_it_later() -> None:
    database = FakeDatabase(fault="locked")

    async def work(recorder: Recorder) -> None:
        recorder.put(intent("a"))
        await recorder.committed(end("a"))
        assert recorder.refusal is None
        assert recorder.fault == "locked"
        await recorder.committed(end("b"))
        assert database.entries == []
        database.fault = None

    recorder = with_recorder(database, work, is_required=False)
    assert recorder.num_lost == 0
    assert len(database.entries) == 3
    assert database.gaps == []


def test_best_effort_counts_what_it_loses_and_marks_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    database = FakeDatabase(fault="locked")
    monkeypatch.setattr(recorder_module, "MAX_QUEUED", 2)

    async def work(recorder: Recorder) -> None:
        await recorder.committed(end("first"))
        for name in ("a", "b", "c"):
            recorder.put(intent(name, episode=f"episode-{name}"))
        recorder.put(CallDelivered("c", True))
        assert recorder.num_lost == 1
        database.fault = None

    recorder = with_recorder(database, work, is_required=False)
    assert recorder.num_lost == 1
    assert database.gaps == ["episode-c"]
    assert len(database.entries) == 3


def test_a_full_queue_refuses_new_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    database = FakeDatabase()
    database.may_commit.clear()
    monkeypatch.setattr(recorder_module, "MAX_QUEUED_BYTES", 10)

    async def work(recorder: Recorder) -> None:
        for i in range(20):
            recorder.put(intent(str(i)))
        await until(lambda: recorder._batch_since is not None)  # from now on the thread takes no more
        for i in range(20):
            recorder.put(intent(f"more-{i}"))
        assert recorder.refusal is not None
        database.may_commit.set()
        await recorder.flush()
        assert recorder.refusal is None

    with_recorder(database, work)
    assert len(database.entries) == 40


WHOLE = {"role": "assistant", "content": "x" * 1000}
CALLS = {"tool_calls": [{"function": {"name": "add", "arguments": "y" * 1000}}], "content": None}


@pytest.mark.parametrize("message", [WHOLE, CALLS, {"content": [{"type": "text", "text": "z" * 1000}]}])
def test_the_texts_of_answers_fill_the_queue(
    message: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = FakeDatabase()
    database.may_commit.clear()
    monkeypatch.setattr(recorder_module, "MAX_QUEUED_BYTES", 5000)
    said = RecordedChoice(0, None, None, "stop", None, message, None)

    async def work(recorder: Recorder) -> None:
        recorder.put(intent("first"))
        await until(lambda: recorder._batch_since is not None)  # from now on the thread takes no more
        for i in range(4):
            recorder.put(replace(end(str(i)), choices=(said,)))
        assert recorder.refusal is None
        recorder.put(replace(end("4"), error="z" * 1000))
        assert recorder.refusal == recorder_module.FULL
        database.may_commit.set()
        await recorder.flush()
        assert recorder.refusal is None

    with_recorder(database, work)


def test_a_stalled_commit_counts_as_unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    database = FakeDatabase()
    database.may_commit.clear()
    monkeypatch.setattr(recorder_module, "STALLED_AFTER_SEC", 0.05)

    async def work(recorder: Recorder) -> None:
        waiting = asyncio.create_task(recorder.committed(end("a")))
        await until(lambda: recorder.refusal == recorder_module.STALLED)
        assert not waiting.done()
        database.may_commit.set()
        await waiting
        assert recorder.refusal is None

    with_recorder(database, work)


def test_one_poisoned_entry_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    database = FakeDatabase(poison=lambda entry: isinstance(entry, CallEnd) and entry.call_id == "bad")

    async def work(recorder: Recorder) -> None:
        recorder.put(intent("bad"))
        results = await asyncio.gather(
            *(recorder.committed(end(name)) for name in ("a", "bad", "b")), return_exceptions=True
        )
        assert [type(result) for result in results] == [type(None), StoreError, type(None)]
        await recorder.committed(end("c"))

    recorder = with_recorder(database, work)
    assert recorder.num_lost == 1
    assert {e.call_id for e in database.entries if isinstance(e, CallEnd)} == {"a", "b", "c"}
    assert database.gaps == ["e"]
    assert "a bug of ours" in caplog.text


def test_a_log_that_stays_away_does_not_block_the_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    database = FakeDatabase(fault="no such server")
    started = time.monotonic()

    async def work(recorder: Recorder) -> None:
        recorder.put(intent("a"))
        recorder.put(end("a"))

    recorder = with_recorder(database, work, stop_timeout_sec=0.3)
    assert recorder.num_lost == 2
    assert time.monotonic() - started < 15  # not the 20 s that a stop may take by default
    assert "2 log entries" in caplog.text


def test_a_client_that_left_does_not_stop_its_row() -> None:
    database = FakeDatabase()
    database.may_commit.clear()

    async def work(recorder: Recorder) -> None:
        waiting = asyncio.create_task(recorder.committed(end("a")))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.sleep(0)
        database.may_commit.set()
        await recorder.committed(end("b"))

    with_recorder(database, work)
    assert len(database.entries) == 2


def test_a_locked_sqlite_file_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    other = Database.open(database.url)

    async def run() -> None:
        recorder = Recorder(database)
        recorder.start()
        recorder.put(intent("a"))
        await recorder.committed(end("a"))
        holder = other.write()
        holder.__enter__()
        waiting = asyncio.create_task(recorder.committed(end("b")))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        holder.__exit__(None, None, None)
        await asyncio.wait_for(waiting, 60)
        await recorder.stop()

    try:
        asyncio.run(run())
        with database.read() as conn:
            assert conn.exec_driver_sql("SELECT count(*) FROM calls").scalar() == 2
    finally:
        other.close()
        database.close()


def test_the_gap_of_the_last_entry_of_all_is_marked() -> None:
    database = FakeDatabase(poison=lambda entry: isinstance(entry, CallEnd))

    async def work(recorder: Recorder) -> None:
        recorder.put(intent("a", "torn"))
        recorder.put(end("a"))

    assert with_recorder(database, work).num_lost == 1
    assert database.gaps == ["torn"]


def test_whoever_counts_wrongly_does_not_end_the_recording() -> None:
    database = FakeDatabase()

    def observe(*_: Any) -> None:
        raise ValueError("a bug of the counter's")

    async def run() -> None:
        recorder = Recorder(database, append=database.append, mark=database.mark, observe=observe)
        recorder.start()
        for name in "ab":
            await asyncio.wait_for(recorder.committed(end(name)), 10)
        await recorder.stop()

    asyncio.run(run())
    assert len(database.entries) == 2
