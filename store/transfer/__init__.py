"""A log, or a part of it, as files that anybody can read, and back into a log on either database.

Exact: what is imported plans the same training steps, token for token, as what was exported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from ...errors import UserError
from ...records import now_ms
from ..database import Database
from ..prune import only_one
from ..upgrade import HEAD
from .jsonl import read_jsonl, write_jsonl
from .load import load
from .parquet import read_parquet, write_parquet
from .rows import Part, Rows, count_episodes, part_rows

__all__ = ["Part", "count_selected", "export_log", "import_log"]

FORMATS = ("jsonl", "parquet")


def export_log(
    database: Database,
    target: Path,
    part: Part,
    *,
    as_parquet: bool,
    on_progress: Callable[[int], None] = lambda episodes: None,
) -> Counter[str]:
    """Write the rows to a file (JSONL) or a folder (Parquet) that must not exist yet; rows by table."""
    if target.exists():
        raise UserError(f"{target} exists already; name another")
    if not target.absolute().parent.is_dir():
        raise UserError(f"there is no folder {target.absolute().parent}; create it or name another")
    header = {"schema": HEAD, "exported_at_ms": now_ms(), "selection": part.shown()}

    def counted(rows: Iterator[Rows]) -> Iterator[Rows]:
        for table, page in rows:
            yield table, page
            if table.name == "episodes":
                on_progress(len(page))

    write = write_parquet if as_parquet else write_jsonl
    try:
        with database.read() as conn:
            return write(target, header, counted(part_rows(conn, part)))
    except OSError as error:
        raise UserError(f"{target}: {error.strerror}; nothing was exported") from None


def count_selected(database: Database, part: Part) -> int:
    with database.read() as conn:
        return count_episodes(conn, part)


def import_log(
    database: Database, source: Path, on_progress: Callable[[int], None] = lambda rows: None
) -> tuple[Counter[str], Counter[str]]:
    """(rows read, rows added), by table. Nothing is written unless the whole input can be read."""
    if not source.exists():
        raise UserError(f"there is no {source}")
    read = read_parquet if source.is_dir() else read_jsonl
    # Shared rows are written in transactions before those that refer to them: a prune would collect them.
    with only_one(database):
        return load(database, lambda: read(source), on_progress)
