"""What a database reads to answer: the plans of the statements that are run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from lightning_rl.store.database import Database

_EXPLAINED = ("SELECT", "WITH", "UPDATE", "DELETE")


@contextlib.contextmanager
def explaining(database: Database) -> Iterator[list[str]]:
    """The statement and the plan of every SELECT, UPDATE and DELETE that is run meanwhile."""
    plans: list[str] = []

    def before(conn: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if not statement.lstrip().upper().startswith(_EXPLAINED):
            return
        explain = "EXPLAIN QUERY PLAN " if conn.dialect.name == "sqlite" else "EXPLAIN "
        cursor = conn.connection.cursor()  # the driver's own: it is not heard here
        cursor.execute(explain + statement, parameters)
        plans.append("\n".join([statement, *(str(row[-1]) for row in cursor.fetchall())]))
        cursor.close()

    sa.event.listen(database.engine, "before_cursor_execute", before)
    try:
        yield plans
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", before)


def full_scans(plans: Sequence[str], tables: Sequence[str] = ("calls",)) -> list[str]:
    """Plans that read a whole one of these tables, or a whole index of all its rows.

    The indexes of exceptions (store/schema.py) hold no ordinary call: reading one whole is no such scan.
    """
    return [
        plan for plan in plans if any(_scans(line, table) for line in plan.split("\n") for table in tables)
    ]


_EXCEPTIONS = re.compile(r"ix_calls_(?:unattributed|unfinished|other_kinds|conflicts|retry_of)\b")


def _scans(line: str, table: str) -> bool:
    is_whole = re.search(rf"\b(?:SCAN|Seq Scan on) {table}\b", line) is not None
    return is_whole and _EXCEPTIONS.search(line) is None
