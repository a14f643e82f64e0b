"""The append side: what the recorder, the API and the command line write.

`append_entries` is the hot path: a batch of calls in a handful of statements. Each function runs in the
caller's transaction; call `append_entries` once per transaction, because the order in which it takes its
locks (the lock of store/sharing.py, groups, episodes, body parts, calls, token blocks, each by key) is what
keeps many Postgres writers from waiting in a circle.

A batch that is written twice (a commit whose answer was lost with the connection) leaves one set of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from ..records import (
    CallEnd,
    CallIntent,
    CallKind,
    CallMoved,
    CallStatus,
    Fingerprint,
    LogEntry,
    RecordedChoice,
    now_ms,
)
from .blocks import PromptBlocks, pack_floats, pack_ids
from .bodies import pack_json, split_body, store_parts
from .episodes import add_reward, create_episode, end_episode, mark_gap
from .events import add_event
from .placement import Placed, place_calls
from .retries import is_marked, link_retries
from .schema import calls, choices, fingerprints
from .sharing import refer
from .statements import (
    existing,
    indexed_text,
    insert_missing,
    names_in,
    optional_text,
    rows_in,
    storable_json,
    storable_text,
    update_each,
    update_in,
)
from .stubs import NO_INTENT, add_stubs, complete_stub

__all__ = [
    "add_event",
    "add_fingerprint",
    "add_reward",
    "append_entries",
    "create_episode",
    "end_episode",
    "mark_gap",
]


@dataclass(frozen=True, slots=True)
class Noted:
    """What only the log could tell of a batch."""

    num_late_calls: int  # on episodes that had ended
    num_retries: int  # calls found to repeat an earlier attempt


def append_entries(conn: sa.Connection, entries: Sequence[LogEntry]) -> Noted:
    """Write a batch. Of two intents or ends of one call the first stands; the order of the entries is the
    calls'.

    An episode that is named for the first time is created. A call on an episode that has ended is recorded
    all the same: the episode stays ended, an event `late_call` says so, and whoever reads the episode sees
    the call. An end without an intent makes a row of its own in the unattributed bin, untrainable, with an
    event; an intent that comes after all completes it.
    """
    intents: dict[str, CallIntent] = {}
    ends: dict[str, CallEnd] = {}
    delivered: dict[str, bool] = {}
    moved: dict[str, CallMoved] = {}
    for entry in entries:
        if isinstance(entry, CallIntent):
            intents.setdefault(entry.id, entry)
        elif isinstance(entry, CallEnd):
            ends.setdefault(entry.call_id, entry)
        elif isinstance(entry, CallMoved):
            moved[entry.call_id] = entry
        else:
            delivered[entry.call_id] = entry.delivered
    refer(conn)
    known = _known_calls(conn, [*intents, *ends, *delivered])
    ends = {name: end for name, end in ends.items() if name not in known or known[name].open}
    prompts = PromptBlocks()
    answers = {name: _answer_columns(end, prompts) for name, end in ends.items()}
    placed = place_calls(conn, list(intents.values()), _last_ends(ends, known, intents))
    if intents:
        _append_intents(conn, placed, known, list(intents.values()), answers)
    else:
        placed.write(conn)
    add_stubs(conn, ends, sorted({*ends, *delivered} - intents.keys() - known.keys()))
    if moved:
        _append_moves(conn, moved)
    if answers:  # of the calls whose intent is older than this batch
        update_each(
            conn, _SET_END, [{f"b_{k}": v for k, v in answers[name].items()} for name in sorted(answers)]
        )
    if ends:
        prompts.store(conn)
        insert_missing(
            conn,
            choices,
            [_choice_row(end.call_id, choice) for end in ends.values() for choice in end.choices],
        )
    for was in (True, False):
        update_in(conn, _SET_DELIVERED[was], [name for name in delivered if delivered[name] is was])
    marked = [intent for intent in intents.values() if is_marked(intent)]
    repeated = {call.root for call in known.values() if call.root is not None}
    num_retries = link_retries(conn, marked, repeated) if marked or repeated else 0
    return Noted(placed.num_late, num_retries)


def add_fingerprint(conn: sa.Connection, fingerprint: Fingerprint) -> None:
    """Idempotent: the id hashes the rest."""
    insert_missing(conn, fingerprints, [{**asdict(fingerprint), "created_at_ms": now_ms()}])


_KNOWN_CALLS = sa.select(
    calls.c.id, calls.c.episode_id, calls.c.status, calls.c.attribution_rule, calls.c.kind, calls.c.retry_of
).where(names_in(calls.c.id))

_SET_DELIVERED = {
    was: calls.update().where(names_in(calls.c.id)).values(delivered=sa.literal_column(str(was)))
    for was in (True, False)
}

_ANSWER_COLUMNS = (
    "status",
    "http_status",
    "upstream_id",
    "prompt_block",
    "num_prompt_tokens",
    "policy_version_end",
    "reported_completion_tokens",
    "usage_estimated",
    "error",
    "first_byte_at_ms",
    "ended_at_ms",
)

# status = open: an end that is written again, or a second end, changes nothing.
_SET_END = (
    calls.update()
    .where(calls.c.id == sa.bindparam("b_id"), calls.c.status == sa.literal_column("'open'"))
    .values({name: sa.bindparam(f"b_{name}", type_=calls.c[name].type) for name in _ANSWER_COLUMNS})
)


@dataclass(frozen=True, slots=True)
class _KnownCall:
    episode_id: str | None
    open: bool  # no end is in the log yet
    rule: str
    root: str | None  # the first attempt, where it is one of several


def _known_calls(conn: sa.Connection, ids: Iterable[str]) -> dict[str, _KnownCall]:
    found: dict[str, _KnownCall] = {}
    for name, episode_id, status, rule, kind, retry_of in rows_in(conn, _KNOWN_CALLS, ids):
        root = name if retry_of is None and kind == CallKind.RETRY_ORPHAN.value else retry_of
        found[name] = _KnownCall(episode_id, status == CallStatus.OPEN.value, rule, root)
    return found


def _last_ends(
    ends: Mapping[str, CallEnd], known: Mapping[str, _KnownCall], intents: Mapping[str, CallIntent]
) -> dict[str, int]:
    """Episode id -> time of the last of these ends: an idle time-out counts from answers too."""
    latest: dict[str, int] = {}
    for name, end in ends.items():
        if name in known:
            episode_id = known[name].episode_id
        elif name in intents:
            episode_id = optional_text(intents[name].attribution.episode_id)
        else:
            continue
        if episode_id is not None:
            latest[episode_id] = max(latest.get(episode_id, 0), end.ended_at_ms)
    return latest


def _append_intents(
    conn: sa.Connection,
    placed: Placed,
    known: Mapping[str, _KnownCall],
    intents: list[CallIntent],
    answers: dict[str, dict[str, Any]],
) -> None:
    """Insert the calls. Those that this batch answers get their answer at once: it leaves `answers`."""
    if conn.dialect.name != "sqlite":
        # Only now are the episodes locked: an earlier attempt at this batch has either committed or gone.
        known = _known_calls(conn, [intent.id for intent in intents])
    new = [intent for intent in intents if intent.id not in known or known[intent.id].rule == NO_INTENT]
    known_fingerprints = existing(
        conn, fingerprints.c.id, {intent.fingerprint_id for intent in new if intent.fingerprint_id}
    )
    parts: dict[bytes, bytes] = {}
    rows: list[dict[str, Any]] = []
    for intent in new:
        placement = placed.place(conn, intent)
        skeleton, found = split_body(intent.request_body)
        parts.update(found)
        row = _intent_row(intent)
        row["episode_id"] = placement.episode_id
        row["ordinal"] = placement.ordinal
        row["attribution_conflict"] = placement.conflict
        row["request_body"] = skeleton
        if intent.fingerprint_id is not None and intent.fingerprint_id not in known_fingerprints:
            row["fingerprint_id"] = None
            add_event(conn, "call", intent.id, "unknown_fingerprint", intent.fingerprint_id, "recorder")
        rows.append(row)
    placed.write(conn)
    store_parts(conn, parts)
    insert_missing(
        conn,
        calls,
        [row | (answers.pop(row["id"], None) or _NO_ANSWER) for row in rows if row["id"] not in known],
    )
    for row in rows:
        if row["id"] in known:
            complete_stub(conn, row)


_NO_ANSWER = dict.fromkeys(_ANSWER_COLUMNS, None) | {"status": CallStatus.OPEN.value}


def _intent_row(intent: CallIntent) -> dict[str, Any]:
    return {
        "id": intent.id,
        "agent": optional_text(intent.attribution.agent),
        "kind": intent.kind.value,
        "attribution_rule": intent.attribution.rule,
        "parent_call_id": intent.parent_call_id,
        "state_key": optional_text(intent.state_key),
        "route": storable_text(intent.route),
        "dialect": intent.dialect,
        "streaming": intent.streaming,
        "requested_model": optional_text(intent.requested_model),
        "served_model": optional_text(intent.served_model),
        "policy": intent.policy,
        "policy_version": intent.policy_version,
        "engine_url": intent.engine_url,
        "sampling": storable_json(intent.sampling),
        "request_hash": intent.request_hash,
        "idempotency_key": indexed_text(intent.idempotency_key),
        "retry_count": min(max(intent.retry_count, 0), 2**31 - 1),  # from a header: anything may stand there
        "unrecordable": intent.unrecordable,
        "fingerprint_id": intent.fingerprint_id,
        "tags": storable_json(intent.attribution.tags),
        "started_at_ms": intent.started_at_ms,
    }


def _answer_columns(end: CallEnd, prompts: PromptBlocks) -> dict[str, Any]:
    return {
        "id": end.call_id,
        "status": end.status.value,
        "http_status": end.http_status,
        "upstream_id": indexed_text(end.upstream_id),
        "prompt_block": None if end.prompt_ids is None else prompts.add(end.prompt_ids),
        "num_prompt_tokens": end.reported_prompt_tokens if end.prompt_ids is None else len(end.prompt_ids),
        "policy_version_end": end.policy_version_end,
        "reported_completion_tokens": end.reported_completion_tokens,
        "usage_estimated": end.usage_estimated,
        "error": optional_text(end.error),
        "first_byte_at_ms": end.first_byte_at_ms,
        "ended_at_ms": end.ended_at_ms,
    }


def _append_moves(conn: sa.Connection, moved: Mapping[str, CallMoved]) -> None:
    """The engine that was asked in the end. The intent is in the log by now, or earlier in this batch."""
    known = existing(
        conn, fingerprints.c.id, {move.fingerprint_id for move in moved.values() if move.fingerprint_id}
    )
    for name in sorted(moved):
        move = moved[name]
        fingerprint = move.fingerprint_id if move.fingerprint_id in known else None
        values = {"engine_url": move.engine_url, "fingerprint_id": fingerprint}
        conn.execute(calls.update().where(calls.c.id == name).values(values))


def _choice_row(call_id: str, choice: RecordedChoice) -> dict[str, Any]:
    ids, logprobs = choice.completion_ids, choice.behavior_logprobs
    return {
        "call_id": call_id,
        "index": choice.index,
        "completion_ids": None if ids is None else pack_ids(ids),
        "behavior_logprobs": None if logprobs is None else pack_floats(logprobs),
        "num_tokens": 0 if ids is None else len(ids),
        "finish_reason": optional_text(choice.finish_reason),
        "stop_reason": storable_json(choice.stop_reason),
        "message": None if choice.message is None else pack_json(choice.message),
        "quarantine": choice.quarantine and choice.quarantine.value,
        "used": None,
    }
