"""Calls and choices: what a row claims against what it refers to and against its own columns."""

from __future__ import annotations

import math
import zlib
from typing import Any

import sqlalchemy as sa

from ...records import HIGHEST_LOGPROB, MISSING_LOGPROB, CallKind, CallStatus, Quarantine
from ..blocks import unpack_floats, unpack_ids
from ..bodies import join_body, load_parts, part_name, part_names, unpack_json
from ..schema import body_parts, calls, choices, episodes, token_blocks
from ..statements import chunks, existing
from ..stubs import NO_INTENT
from .report import REPORT, RESTORE, Findings

MAX_REMEMBERED_PARTS = 1_000_000
"""Names of body parts held in memory (some 100 bytes each), to tell which ones nothing refers to."""

BODIES_AT_ONCE = 50
"""Whose parts are held in memory together, to derive the hashes of whole bodies."""

_STATUSES = frozenset(status.value for status in CallStatus)
_KINDS = frozenset(kind.value for kind in CallKind)
_QUARANTINES = frozenset(reason.value for reason in Quarantine)
_UNFINISHED = (None, "abort", "error")


def check_calls(conn: sa.Connection, findings: Findings) -> set[bytes] | None:
    """The body parts that calls refer to; None where there were too many to remember."""
    answers = (
        sa.select(sa.func.count())
        .select_from(choices)
        .where(choices.c.call_id == calls.c.id)
        .scalar_subquery()
    )
    query = (
        sa.select(
            calls,
            answers.label("num_choices"),
            token_blocks.c.num_tokens.label("block_tokens"),
            episodes.c.has_gap,
        )
        .outerjoin(token_blocks, token_blocks.c.hash == calls.c.prompt_block)
        .outerjoin(episodes, episodes.c.id == calls.c.episode_id)
    )
    referenced: set[bytes] | None = set()
    for page in findings.pages(conn, "calls", query):
        for row in page:
            _check_call(row, findings)
        names = _check_bodies(conn, page, findings)
        if referenced is not None:
            referenced |= names
            if len(referenced) > MAX_REMEMBERED_PARTS:
                referenced = None
    return referenced


def _check_call(row: sa.Row[Any], findings: Findings) -> None:
    def wrong(what: str, todo: str = REPORT) -> None:
        findings.fault("calls", row.id, what, todo)

    if row.status not in _STATUSES:
        wrong(f"its status is {row.status!r}", RESTORE)
    if row.kind not in _KINDS:
        wrong(f"its kind is {row.kind!r}", RESTORE)
    if row.status == CallStatus.OPEN.value:
        findings.notes["open_calls"] += 1
        if row.ended_at_ms is not None or row.num_choices:
            wrong("it is open, and yet its end is there")
        # A loss that is marked (best effort) or that stands out already (no intent) is explained.
        if row.delivered and row.has_gap is False and row.attribution_rule != NO_INTENT:
            wrong(
                "a client has seen its end, which the log does not hold",
                "it was written with durability = write-behind and a crash took its end; "
                "exclude its episode from training",
            )
    elif row.ended_at_ms is None:
        wrong(f"it is {row.status}, and has no end")
    if (row.episode_id is None) != (row.ordinal is None):
        wrong("it has an episode without a place in it, or a place without an episode")
    if row.prompt_block is None:
        if row.num_prompt_tokens:
            wrong(f"it says that its prompt has {row.num_prompt_tokens} tokens, and holds none")
    elif row.block_tokens is None:
        wrong(f"token block {row.prompt_block.hex()} of its prompt is missing", RESTORE)
    elif row.block_tokens != row.num_prompt_tokens:
        wrong(f"its prompt has {row.block_tokens} tokens, and it says {row.num_prompt_tokens}")


def _check_bodies(conn: sa.Connection, page: Any, findings: Findings) -> set[bytes]:
    """Whether each body can be put together again; the names of its parts."""
    parts_of: dict[str, set[bytes]] = {}
    for row in page:
        if row.request_body is None:
            continue
        try:
            parts_of[row.id] = set(part_names(row.request_body))
        except (zlib.error, ValueError):
            findings.fault("calls", row.id, "its request body can't be unpacked", RESTORE)
    names = set().union(*parts_of.values())
    missing = names - existing(conn, body_parts.c.hash, names)
    for call, its in parts_of.items() if missing else ():
        for name in sorted(its & missing):
            findings.fault("calls", call, f"part {name.hex()} of its request body is missing", RESTORE)
    whole = {call for call, its in parts_of.items() if not its & missing}
    hashed = [row for row in page if row.request_hash is not None and row.id in whole]
    for some in chunks(hashed, BODIES_AT_ONCE):
        _check_hashes(conn, some, findings)
    return names


def _check_hashes(conn: sa.Connection, rows: list[sa.Row[Any]], findings: Findings) -> None:
    """What stands between the parts has no hash of its own: the whole body's covers it."""
    try:
        parts = load_parts(conn, [row.request_body for row in rows])
    except (zlib.error, ValueError):
        return  # a part is damaged: check_parts says which
    for row in rows:
        if part_name(join_body(row.request_body, parts)) != row.request_hash:
            findings.fault("calls", row.id, "its request body is not the one of its hash", RESTORE)


def check_choices(conn: sa.Connection, findings: Findings) -> None:
    query = sa.select(choices, calls.c.id.label("call"), calls.c.status, calls.c.prompt_block).outerjoin(
        calls, calls.c.id == choices.c.call_id
    )
    for page in findings.pages(conn, "choices", query):
        for row in page:
            _check_choice(row, findings)


def _check_choice(row: sa.Row[Any], findings: Findings) -> None:
    def wrong(what: str, todo: str = REPORT) -> None:
        findings.fault("choices", (row.call_id, row._mapping["index"]), what, todo)

    if row.call is None:
        wrong("its call is missing", RESTORE)
    try:
        ids = None if row.completion_ids is None else unpack_ids(row.completion_ids)
        values = None if row.behavior_logprobs is None else unpack_floats(row.behavior_logprobs)
        if row.message is not None:
            unpack_json(row.message)
    except (zlib.error, ValueError):
        wrong("its ids, logprobs or message can't be unpacked", RESTORE)
        return
    if row.num_tokens != len(ids or ()):
        wrong(f"it says that it has {row.num_tokens} tokens, and has {len(ids or ())}")
    if row.quarantine is not None:
        if row.quarantine not in _QUARANTINES:
            wrong(f"its quarantine is {row.quarantine!r}", RESTORE)
        return
    if row.status == CallStatus.COMPLETE.value and row.finish_reason in _UNFINISHED:
        wrong(f"its call is complete, its finish reason is {row.finish_reason!r}")
    if not ids or values is None or len(values) != len(ids):
        wrong("it is not quarantined, and yet has not as many logprobs as ids")
    # NaN fails every comparison, but hides in min and max: only the sum can't miss it.
    elif not (
        min(values) > MISSING_LOGPROB and max(values) <= HIGHEST_LOGPROB and math.isfinite(sum(values))
    ):
        wrong("it is not quarantined, and yet a logprob is missing, not finite or positive")
    if row.prompt_block is None:
        wrong("it is not quarantined, and yet its call has no prompt")
