"""`lightning db verify`: run the checks, show what they found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...settings.layers import DEFAULT_DB
from .options import DbOption

if TYPE_CHECKING:
    from ..verify import Findings

MAX_SHOWN = 20


def verify(
    db: DbOption = DEFAULT_DB,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Derive every hash of the log anew and check every row; exit code 1 if something is wrong.

    Reads one snapshot, a page at a time, beside live writers; changes nothing.
    """
    import json
    import sys
    from dataclasses import asdict

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..database import Database
    from ..verify import count_rows
    from ..verify import verify as run

    database = Database.open(db, migrate=False, must_exist=True)
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        shows = progress and sys.stderr.isatty()
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shows) as bar:
            task = bar.add_task("verify", total=count_rows(database) if shows else None)
            found = run(database, lambda rows: bar.advance(task, rows))
    finally:
        database.close()
    if as_json:
        document = {
            "db": database.shown_url,
            "faults": [asdict(fault) for fault in found.faults],
            "num_faults": found.num_faults,
            "rows": dict(found.num_rows),
            "notes": dict(found.notes),
        }
        typer.echo(json.dumps(document))
    else:
        _print(database.shown_url, found)
    if found.num_faults:
        raise typer.Exit(1)


def _print(url: str, found: Findings) -> None:
    from rich.console import Console
    from rich.table import Table

    counts = {name.replace("_", " "): count for name, count in found.num_rows.items() if count}
    checked = ", ".join(f"{count} {name}" for name, count in counts.items())
    typer.echo(f"{url}: checked {checked or 'an empty log'}")
    for name, count in found.notes.items():
        if count:
            typer.echo(f"  {count} {_NOTES.get(name, name)}")
    if not found.num_faults:
        typer.echo("no fault found")
        return
    table = Table("table", "key", "what is wrong", "what to do")
    for fault in found.faults[:MAX_SHOWN]:
        table.add_row(fault.table, fault.key, fault.what, fault.todo)
    Console().print(table)
    more = found.num_faults - MAX_SHOWN
    typer.echo(f"{found.num_faults} faults" + (f"; {more} are not shown, use --json" if more > 0 else ""))


_NOTES = {
    "open_calls": "calls without an end: running now, or cut off by a crash of the proxy",
    "orphaned_blocks": "token blocks that nothing refers to; `lightning db prune` collects them",
    "orphaned_parts": "body parts that nothing refers to; `lightning db prune` collects them",
    "manifest_episodes_deleted_since": "trained episodes that have been deleted since",
}
