"""Attempts of an SDK at one logical call: which rows belong together, and which of them is the real one.

An SDK that got no answer sends its request again and says so, by a count (`x-stainless-retry-count`) or by
the same idempotency key. A body that is merely the same is a call of its own. `retry_of` names the first
attempt; all but one of the attempts are `retry_orphan`, so that one logical call is trained once. In whatever
order the attempts' ends and the news of their delivery arrive, and through whichever workers: the same rows
come out. Runs in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ..records import CallIntent, CallKind, CallStatus
from .events import add_event
from .schema import calls, events
from .statements import chunks, names_in, storable_text

AFTER_FAILURE_MS = 120_000
"""A retry follows its failed attempt within this: SDKs wait seconds, or as long as `retry-after` says."""
AFTER_START_MS = 15 * 60_000
"""…or, where the attempt has no end in the log yet, its start: SDKs give up after ten minutes."""
IN_THE_BIN_MS = 60_000
"""How far back the unattributed bin is searched: it is one for all agents, and can be long."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call, as far as it matters here."""

    id: str
    episode_id: str | None
    retry_of: str | None  # id of the first attempt
    retry_count: int
    request_hash: bytes | None
    idempotency_key: str | None
    kind: str
    status: str
    delivered: bool | None
    started_at_ms: int
    ended_at_ms: int | None

    @property
    def root(self) -> str:
        return self.retry_of or self.id

    @property
    def is_received(self) -> bool:
        """The client has it, whole: no SDK asks again."""
        return self.delivered is True and self.status == CallStatus.COMPLETE.value


def is_marked(intent: CallIntent) -> bool:
    """Whether it may be an attempt of several."""
    return intent.retry_count > 0 or intent.idempotency_key is not None


def link_retries(conn: sa.Connection, intents: Sequence[CallIntent], touched: Iterable[str] = ()) -> int:
    """Link the marked calls (their rows are written by now), and judge their attempts anew.

    `touched`: first attempts of calls that got an end or were delivered. Returns how many calls were found to
    be retries.
    """
    roots = set(touched)
    num_linked = 0
    for intent in intents:
        new = _by_id(conn, intent.id)
        if new is None or new.retry_of is not None:
            continue
        root = first_attempt(new, _earlier(conn, new))
        if root is not None:
            conn.execute(calls.update().where(calls.c.id == new.id).values(retry_of=root))
            roots.add(root)
            num_linked += 1
    for root in sorted(roots):
        _settle(conn, root)
    return num_linked


def first_attempt(new: Attempt, earlier: Sequence[Attempt]) -> str | None:
    """The id of the logical call's first attempt; None where `new` is one itself."""
    before = [call for call in earlier if call.id != new.id and _is_before(call, new)]
    if new.idempotency_key is not None:
        same_key = [call for call in before if call.idempotency_key == new.idempotency_key]
        if same_key:
            return min(same_key, key=_order).root
    if new.retry_count == 0 or new.request_hash is None:
        return None
    failed = [
        call
        for call in before
        if call.request_hash == new.request_hash
        and call.retry_count < new.retry_count
        and not call.is_received
        and _is_recent(call, new)
        and not _has_successor(call, earlier)
    ]
    # Of many equal calls at once (samples of one prompt), each retry takes a failed attempt of its own.
    return min(failed, key=lambda call: (-call.retry_count, *_order(call))).root if failed else None


def real_attempt(attempts: Sequence[Attempt]) -> str:
    """The one that counts: the first that the client received, else the last."""
    ordered = sorted(attempts, key=_order)
    return next((call for call in ordered if call.is_received), ordered[-1]).id


def _order(call: Attempt) -> tuple[int, int, str]:
    return call.started_at_ms, call.retry_count, call.id


def _is_before(call: Attempt, new: Attempt) -> bool:
    return call.episode_id == new.episode_id and _order(call) < _order(new)


def _is_recent(call: Attempt, new: Attempt) -> bool:
    if call.ended_at_ms is None:
        return new.started_at_ms - call.started_at_ms <= AFTER_START_MS
    return new.started_at_ms - call.ended_at_ms <= AFTER_FAILURE_MS


def _has_successor(call: Attempt, others: Iterable[Attempt]) -> bool:
    return any(other.retry_of == call.root and other.retry_count > call.retry_count for other in others)


_SELECT = sa.select(*(calls.c[name] for name in Attempt.__dataclass_fields__))
_BY_ID = _SELECT.where(calls.c.id == sa.bindparam("name"))
_BY_KEY = _SELECT.where(calls.c.idempotency_key == sa.bindparam("key"))
_OF_ROOT = _SELECT.where(sa.or_(calls.c.id == sa.bindparam("root"), calls.c.retry_of == sa.bindparam("root")))
_SAME_BODY = _SELECT.where(calls.c.request_hash == sa.bindparam("hash"))
_SAME_BODY_OF_EPISODE = _SAME_BODY.where(calls.c.episode_id == sa.bindparam("episode"))
# Ids sort by time. `episode_id IS NULL` would lead SQLite to read the whole bin, from its beginning.
_SAME_BODY_IN_BIN = _SAME_BODY.where(
    calls.c.id >= sa.bindparam("oldest_id"), sa.func.coalesce(calls.c.episode_id, "") == ""
)


def _by_id(conn: sa.Connection, name: str) -> Attempt | None:
    row = conn.execute(_BY_ID, {"name": name}).first()
    return None if row is None else Attempt(*row)


def _earlier(conn: sa.Connection, new: Attempt) -> list[Attempt]:
    """What could be earlier attempts: few rows, whatever the size of the log."""
    found: list[Any] = []
    if new.idempotency_key is not None:
        found += conn.execute(_BY_KEY, {"key": new.idempotency_key})
    if new.retry_count > 0 and new.request_hash is not None:
        if new.episode_id is None:
            oldest = f"{max(new.started_at_ms - IN_THE_BIN_MS, 0):012x}"
            found += conn.execute(_SAME_BODY_IN_BIN, {"hash": new.request_hash, "oldest_id": oldest})
        else:
            found += conn.execute(
                _SAME_BODY_OF_EPISODE, {"hash": new.request_hash, "episode": new.episode_id}
            )
    return list({call.id: call for call in (Attempt(*row) for row in found)}.values())


def _settle(conn: sa.Connection, root: str) -> None:
    """Write down which attempt is the real one, where that has changed."""
    attempts = [Attempt(*row) for row in conn.execute(_OF_ROOT, {"root": root})]
    if len(attempts) < 2:
        return
    real = real_attempt(attempts)
    wrong: dict[str, dict[str, str]] = {}
    for call in attempts:
        kind = (CallKind.POLICY if call.id == real else CallKind.RETRY_ORPHAN).value
        if call.kind != kind and call.kind in (CallKind.POLICY.value, CallKind.RETRY_ORPHAN.value):
            wrong[call.id] = {"kind": kind, "was": call.kind}
    for name in sorted(wrong.keys() - _judged_by_people(conn, wrong)):
        conn.execute(calls.update().where(calls.c.id == name).values(kind=wrong[name]["kind"]))
        add_event(conn, "call", name, "kind", wrong[name], "recorder", f"attempts at one call: {root}")


def _judged_by_people(conn: sa.Connection, names: Iterable[str]) -> set[str]:
    """Calls whose kind somebody has said: that stands."""
    query = sa.select(events.c.subject_id).where(
        events.c.subject == "call",
        names_in(events.c.subject_id),
        events.c.kind == "kind",
        events.c.source != "recorder",
    )
    found: set[str] = set()
    for chunk in chunks(sorted(storable_text(name) for name in names)):
        found.update(conn.execute(query, {"names": chunk}).scalars())
    return found
