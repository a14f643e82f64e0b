"""`lightning db verify`: is the log what it claims to be?

Derives every hash anew and checks every row against what it refers to, in one snapshot, a page at a time, so
that a log of any size is checked in bounded memory beside live writers. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from ..database import Database
from ..schema import metadata
from .calls import check_calls, check_choices
from .episodes import check_episodes, check_events, check_groups, check_rewards
from .report import Fault, Findings
from .shared import check_blocks, check_parts
from .training import check_manifests, check_versions

__all__ = ["Fault", "Findings", "count_rows", "verify"]

_COUNTED = (
    "groups",
    "episodes",
    "token_blocks",
    "body_parts",
    "calls",
    "choices",
    "rewards",
    "events",
    "policy_versions",
    "runs",
    "manifest_episodes",
    "manifest_choices",
)


def count_rows(database: Database) -> int:
    """How many rows `verify` will look at: what its progress is measured against."""
    with database.read() as conn:
        counts = (sa.select(sa.func.count()).select_from(metadata.tables[name]) for name in _COUNTED)
        return sum(conn.execute(count).scalar_one() for count in counts)


def verify(database: Database, on_progress: Callable[[int], None] = lambda rows: None) -> Findings:
    """Check everything; `on_progress` is told how many more rows are done."""
    findings = Findings(on_progress)
    with database.read() as conn:
        if conn.dialect.name == "sqlite":
            _check_file(conn, findings)
        _check_foreign_keys(conn, findings)
        check_groups(conn, findings)
        check_episodes(conn, findings)
        check_blocks(conn, findings)
        check_parts(conn, findings, check_calls(conn, findings))
        check_choices(conn, findings)
        check_rewards(conn, findings)
        check_events(conn, findings)
        check_versions(conn, findings)
        check_manifests(conn, findings)
    return findings


def _check_file(conn: sa.Connection, findings: Findings) -> None:
    for (said,) in conn.exec_driver_sql("PRAGMA quick_check(20)").all():
        if said != "ok":
            todo = "restore a copy, or salvage it with `sqlite3 FILE .recover`"
            findings.fault("file", conn.engine.url.database, said, todo)


def _check_foreign_keys(conn: sa.Connection, findings: Findings) -> None:
    """Of all tables. On SQLite other programs may have written with the checks switched off."""
    for table in metadata.sorted_tables:
        for constraint in table.foreign_key_constraints:
            target = constraint.referred_table.alias("target")
            pairs = [(element.parent, target.c[element.column.name]) for element in constraint.elements]
            query = sa.select(*table.primary_key.columns).where(
                *(column.is_not(None) for column, _ in pairs),
                ~sa.exists().where(*(column == other for column, other in pairs)),
            )
            for row in conn.execute(query.limit(100)):
                named = ", ".join(column.name for column, _ in pairs)
                what = f"what its {named} names is not in {constraint.referred_table.name}"
                todo = "restore a copy; another program has deleted or changed rows"
                findings.fault(table.name, tuple(row), what, todo)
