"""How retries are recognised, on every database; registered beside the store's other behaviours."""

from __future__ import annotations

import itertools

import sqlalchemy as sa
from fakes.log_rows import end, intent
from fakes.store_behaviours import behaviour, event_kinds, write

from lightning_rl.records import CallDelivered, CallEnd, CallIntent, CallStatus, LogEntry
from lightning_rl.store.append import append_entries
from lightning_rl.store.database import Database
from lightning_rl.store.events import add_event
from lightning_rl.store.schema import calls

START_MS = 1_764_500_000_000


def attempt(
    call: str, count: int, at_sec: float = 0.0, episode: str | None = "ep", **more: object
) -> CallIntent:
    values = {"request_hash": b"same-body", "started_at_ms": START_MS + int(1000 * at_sec)} | more
    return intent(call, episode, retry_count=count, **values)


def failed(call: str, at_sec: float = 1.0, status: CallStatus = CallStatus.ERROR) -> CallEnd:
    return end(call, None, status=status, http_status=500, ended_at_ms=START_MS + int(1000 * at_sec))


def received(call: str) -> tuple[LogEntry, ...]:
    return end(call), CallDelivered(call, True)


def judged(database: Database) -> dict[str, tuple[str | None, str]]:
    with database.read() as conn:
        rows = conn.execute(sa.select(calls.c.id, calls.c.retry_of, calls.c.kind))
        return {name: (retry_of, kind) for name, retry_of, kind in rows}


REPEATED = {"a": (None, "retry_orphan"), "b": ("a", "policy")}


@behaviour
def test_a_retry_supersedes_the_failed_attempt_whatever_batches_they_came_in(database: Database) -> None:
    entries: list[LogEntry] = [
        attempt("a", 0),
        failed("a"),
        CallDelivered("a", True),  # an error was delivered: it is a failure all the same
        attempt("b", 1, at_sec=2),
        *received("b"),
    ]
    for cut in range(len(entries) + 1):
        episode = f"ep{cut}"
        named = [_renamed(entry, str(cut), episode) for entry in entries]
        write(database, *named[:cut])
        write(database, *named[cut:])
    found = judged(database)
    for cut in range(len(entries) + 1):
        assert found[f"a{cut}"] == (None, "retry_orphan")
        assert found[f"b{cut}"] == (f"a{cut}", "policy")
    assert event_kinds(database, "call", "a0") == ["kind"]


def _renamed(entry: LogEntry, suffix: str, episode: str) -> LogEntry:
    if isinstance(entry, CallIntent):
        return attempt(entry.id + suffix, entry.retry_count, (entry.started_at_ms - START_MS) / 1000, episode)
    if isinstance(entry, CallDelivered):
        return CallDelivered(entry.call_id + suffix, entry.delivered)
    return failed(entry.call_id + suffix) if entry.status is CallStatus.ERROR else end(entry.call_id + suffix)


@behaviour
def test_the_attempt_that_was_received_stays_the_real_one(database: Database) -> None:
    """The retry is in the log before the first answer's arrival; the news come in any order."""
    news: list[tuple[LogEntry, ...]] = [(end("a"),), (CallDelivered("a", True),), received("b")]
    for number, order in enumerate(itertools.permutations(news)):
        episode = f"ep{number}"
        write(database, attempt(f"a{number}", 0, 0, episode))
        write(database, attempt(f"b{number}", 1, 1, episode))
        assert judged(database)[f"a{number}"][1] == "retry_orphan"
        for entries in order:
            write(database, *(_renamed(entry, str(number), episode) for entry in entries))
        found = judged(database)
        assert found[f"a{number}"] == (None, "policy")
        assert found[f"b{number}"] == (f"a{number}", "retry_orphan")


@behaviour
def test_an_answer_that_never_arrived_is_superseded(database: Database) -> None:
    write(database, attempt("a", 0), end("a"), CallDelivered("a", False))
    write(database, attempt("b", 1, 5), *received("b"))
    assert judged(database) == REPEATED


@behaviour
def test_a_chain_of_retries_names_the_first_attempt(database: Database) -> None:
    write(database, attempt("a", 0), failed("a", 1))
    write(database, attempt("b", 1, 2), failed("b", 3, CallStatus.ABORTED))
    write(database, attempt("c", 2, 4), *received("c"))
    assert judged(database) == {
        "a": (None, "retry_orphan"),
        "b": ("a", "retry_orphan"),
        "c": ("a", "policy"),
    }


@behaviour
def test_equal_calls_at_once_are_retried_one_by_one(database: Database) -> None:
    first = [attempt(f"a{i}", 0, 0.001 * i) for i in range(3)]
    write(database, *first, *(failed(call.id) for call in first[:2]), *received("a2"))
    write(database, *(attempt(f"b{i}", 1, 2 + 0.001 * i) for i in range(3)))
    found = judged(database)
    assert [found[f"b{i}"][0] for i in range(3)] == ["a0", "a1", None]  # a third has nothing to repeat
    assert [found[f"a{i}"][1] for i in range(3)] == ["retry_orphan", "retry_orphan", "policy"]


@behaviour
def test_the_same_body_on_purpose_is_a_call_of_its_own(database: Database) -> None:
    write(database, attempt("failed", 0), failed("failed"))
    write(database, attempt("on-purpose", 0, 2), *received("on-purpose"))
    write(database, attempt("other-body", 1, 3, request_hash=b"another"))
    write(database, attempt("other-episode", 1, 3, "ep2"))
    write(database, attempt("much-later", 1, 1 + 121))
    assert set(judged(database).values()) == {(None, "policy")}


@behaviour
def test_the_same_idempotency_key_is_the_same_call(database: Database) -> None:
    write(database, attempt("a", 0, idempotency_key="k", request_hash=None), *received("a"))
    write(database, attempt("b", 0, 30, idempotency_key="k"), *received("b"))
    write(
        database, attempt("c", 0, 31, idempotency_key="k2"), attempt("d", 0, 31, "ep2", idempotency_key="k")
    )
    assert judged(database) == {
        "a": (None, "policy"),  # the client had its answer
        "b": ("a", "retry_orphan"),
        "c": (None, "policy"),
        "d": (None, "policy"),
    }


@behaviour
def test_retries_in_the_unattributed_bin_are_recognised(database: Database) -> None:
    write(database, attempt("a", 0, 0, None), failed("a"))
    write(database, attempt("b", 1, 2, None), *received("b"))
    assert judged(database) == REPEATED


@behaviour
def test_a_kind_that_somebody_has_said_stands(database: Database) -> None:
    write(database, attempt("a", 0), failed("a"))
    with database.write() as conn:
        add_event(conn, "call", "a", "kind", "policy", "me")
    with database.write() as conn:
        noted = append_entries(conn, [attempt("b", 1, 2), *received("b")])
    assert noted.num_retries == 1
    assert judged(database) == {"a": (None, "policy"), "b": ("a", "policy")}
    write(database, attempt("b", 1, 2), *received("b"))  # a batch that is written twice
    assert judged(database) == {"a": (None, "policy"), "b": ("a", "policy")}
