"""Lines and tables on a terminal; the same words, unwrapped, where the output goes to a file or a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ..database import Database


def count_words(count: int, word: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def tell_unknown_policy(database: Database, policy: str) -> None:
    """On stderr: nothing to do is no error for a script that runs every night, but may be a typo."""
    import typer

    from ..listing import has_policy

    with database.read() as conn:
        if not has_policy(conn, policy):
            typer.echo(f"no episode of the log began with policy {policy!r}", err=True)


def in_words(value: Any) -> str:
    """What an event holds, for people: `key=value, key=value`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={in_words(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(in_words(inner) for inner in value)
    if isinstance(value, str):
        return value if value.isprintable() else json.dumps(value)
    return "-" if value is None else str(value)


def say(document: Mapping[str, Any], words: str, *, as_json: bool) -> None:
    """What a command did: a line for people, or the document."""
    import typer

    typer.echo(json.dumps(document) if as_json else words)


def terminal() -> Console:
    """As wide as the terminal; for a file or a pipe as wide as the longest line."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Text only: whatever a name holds is shown as it is, never read as markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    terminal().print(table)
