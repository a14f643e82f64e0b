"""How much of the log is attributed, and what was odd about it: counts for the status page, from indexes."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from ..records import MALFORMED_MARK, CallKind
from .schema import calls, events


@dataclass(frozen=True, slots=True)
class MarkCounts:
    """Calls of the whole log."""

    unattributed: int  # in the bin
    conflicts: int  # marks that disagree or can't be read
    malformed_marks: int  # those of them that can't be read
    late_calls: int  # on episodes that had ended
    retry_orphans: int  # attempts that a later (or an earlier, received) one stands for


def count_marks(conn: sa.Connection) -> MarkCounts:
    num = sa.func.count()
    conflict = calls.c.attribution_conflict
    malformed = conflict.startswith(MALFORMED_MARK, autoescape=True)
    # `kind <> 'policy'` once more in literals: the index of the few other kinds is used only then.
    orphans = sa.and_(sa.text("kind <> 'policy'"), calls.c.kind == CallKind.RETRY_ORPHAN.value)
    queries = (
        sa.select(num).select_from(calls).where(calls.c.episode_id.is_(None)),
        sa.select(num).select_from(calls).where(conflict.is_not(None)),
        sa.select(num).select_from(calls).where(conflict.is_not(None), malformed),
        sa.select(num).select_from(events).where(events.c.kind == "late_call"),
        sa.select(num).select_from(calls).where(orphans),
    )
    return MarkCounts(*(conn.execute(query).scalar_one() for query in queries))
