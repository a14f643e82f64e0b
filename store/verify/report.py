"""What a check finds: faults with their rows, counts that are no faults, and how far it has come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

MAX_LISTED = 1000
PAGE_ROWS = 500


@dataclass(frozen=True, slots=True)
class Fault:
    """One row that is not what it should be. `key` as people write it: "CALL/INDEX", "EPISODE"."""

    table: str
    key: str
    what: str
    todo: str


@dataclass(slots=True)
class Findings:
    """Of one run over the log. The first `MAX_LISTED` faults are kept, all are counted."""

    on_progress: Callable[[int], None] = lambda rows: None
    faults: list[Fault] = field(default_factory=list)
    num_faults: int = 0
    num_rows: Counter[str] = field(default_factory=Counter)
    """Rows checked, by table."""
    notes: Counter[str] = field(default_factory=Counter)
    """What is worth knowing and no fault, by name."""

    def fault(self, table: str, key: Any, what: str, todo: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_LISTED:
            self.faults.append(Fault(table, shown(key), what, todo))

    def checked(self, table: str, rows: int) -> None:
        self.num_rows[table] += rows
        self.on_progress(rows)

    def pages(
        self, conn: sa.Connection, table: str, query: sa.Select[Any]
    ) -> Iterator[Sequence[sa.Row[Any]]]:
        """The rows in pages, never all at once; counted as checked."""
        result = conn.execute(query, execution_options={"yield_per": PAGE_ROWS})
        for page in result.partitions(PAGE_ROWS):
            yield page
            self.checked(table, len(page))


def shown(key: Any) -> str:
    if isinstance(key, bytes):
        return key.hex()
    if isinstance(key, tuple):
        return "/".join(shown(part) for part in key)
    return str(key)


RESTORE = "the row was damaged after it was written; restore it from a copy or an export"
REPORT = "this is a fault of the program that wrote it; please report it with this line"
DELETE = "delete the rest of it with `lightning db prune --episode ID`"
