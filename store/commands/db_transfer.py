"""`lightning db export` and `lightning db import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...settings.layers import DEFAULT_DB
from .options import DbOption
from .tables import count_words, say, tell_unknown_policy


def export(
    target: Annotated[
        Path, typer.Argument(help="File (jsonl; packed if it ends in .gz) or folder (parquet).")
    ],
    *,
    form: Annotated[str, typer.Option("--format", help="jsonl or parquet.")] = "jsonl",
    episode: Annotated[list[str] | None, typer.Option(help="Only this episode; repeat for several.")] = None,
    policy: Annotated[str | None, typer.Option(help="Only what began with this policy.")] = None,
    since: Annotated[str | None, typer.Option(help="Only since: 12h, 7d or 2026-11-30.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Write the log, or a part of it, as files: exact, and readable by anything.

    With every episode go its group, calls, choices, rewards and events; unless episodes are named, the
    unattributed calls, policy versions, runs and step manifests too. Episode keys stay where they are.
    """
    from ...errors import UserError
    from ..database import Database
    from ..transfer import FORMATS, Part, count_selected, export_log
    from .times import moment_ms

    if str(target) == "-":
        raise UserError("an export is a file or a folder, not standard output; name a file")
    if form not in FORMATS:
        raise UserError(f"--format {form!r}: write {' or '.join(FORMATS)}")
    part = Part(
        episode_ids=tuple(dict.fromkeys(episode or ())),
        policy=policy,
        since_ms=None if since is None else moment_ms(since),
    )
    database = Database.open(db, migrate=False, must_exist=True)
    try:
        if policy is not None:
            tell_unknown_policy(database, policy)
        with _progress() as bar:
            task = bar.add_task("episodes", total=count_selected(database, part))
            counts = export_log(
                database,
                target,
                part,
                as_parquet=form == "parquet",
                on_progress=lambda count: bar.advance(task, count),
            )
    finally:
        database.close()
    say({"file": str(target), "rows": dict(counts)}, f"{target}: {_listed(counts)}", as_json=as_json)


def import_(
    source: Annotated[Path, typer.Argument(help="What `lightning db export` wrote.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Add exported rows to a log, on either database. Importing twice changes nothing.

    The input is read as a whole before the first row is written: if it is damaged, or disagrees with what
    the log holds, nothing is imported.
    """
    from ..database import Database
    from ..transfer import import_log

    database = Database.open(db)
    try:
        with _progress() as bar:
            task = bar.add_task("rows", total=None)
            read, added = import_log(database, source, lambda count: bar.advance(task, count))
    finally:
        database.close()
    document = {"db": database.shown_url, "rows_read": dict(read), "rows_added": dict(added)}
    say(document, f"{database.shown_url}: added {_listed(added)} of {_listed(read)}", as_json=as_json)


def _progress() -> Any:
    import sys

    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _listed(counts: Any) -> str:
    told = {name: counts.get(name, 0) for name in ("episodes", "calls", "choices", "rewards")}
    others = sum(counts.values()) - sum(told.values())
    listed = {**told, "other rows": others}.items()
    return ", ".join(count_words(count, name.removesuffix("s")) for name, count in listed)
