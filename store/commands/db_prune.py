"""`lightning db prune`: say what would go, or delete it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...settings.layers import DEFAULT_DB
from .options import DbOption

if TYPE_CHECKING:
    from ..database import Database
    from ..prune import Selection


def prune(
    *,
    older_than: Annotated[
        str | None,
        typer.Option(
            help="Days, or 12h, 7d, 2026-11-30: episodes that ended before, unused since; running ones stay."
        ),
    ] = None,
    episode: Annotated[list[str] | None, typer.Option(help="This episode; repeat for several.")] = None,
    policy: Annotated[str | None, typer.Option(help="Episodes that began with this policy.")] = None,
    before_version: Annotated[int | None, typer.Option(help="…with a version of it below this one.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes/--dry-run", help="Delete; otherwise only say what would go.")
    ] = False,
    vacuum: Annotated[
        bool | None,
        typer.Option(
            "--vacuum/--no-vacuum",
            help="Rewrite what is left, so that no trace of deleted rows stays on disk; writers wait for it. "
            "Default: a SQLite file up to 128 MiB.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Delete episodes for good: calls, answers, rewards, events, keys, and what only they referred to.

    All that is said must hold; calls of the unattributed bin go by the same rules. Without any, only what
    nothing refers to is collected. Safe beside live writers. Policy versions, runs and their step manifests
    stay: they hold ids and numbers.
    """
    import json

    from ...errors import UserError
    from ..database import Database
    from ..prune import Selection, plan
    from .tables import tell_unknown_policy
    from .times import moment_ms

    if before_version is not None and policy is None:
        raise UserError("--before-version needs --policy: versions are numbered per policy")
    days = older_than is not None and older_than.strip().isdecimal()
    selection = Selection(
        before_ms=None if older_than is None else moment_ms(f"{older_than}d" if days else older_than),
        episode_ids=tuple(dict.fromkeys(episode or ())),
        policy=policy,
        before_version=before_version,
    )
    database = Database.open(db, must_exist=True)
    try:
        if policy is not None:
            tell_unknown_policy(database, policy)
        if yes:
            document = _delete(database, selection, vacuum)
        else:
            planned = plan(database, selection)
            document = {"deleted": False, "rows": dict(planned.rows), "left_out": dict(planned.left_out)}
            document |= _unreferenced(database) if selection.is_empty else {}
    finally:
        database.close()
    document = {"db": database.shown_url, **document}
    if as_json:
        typer.echo(json.dumps(document))
    else:
        _print(document)


def _unreferenced(database: Database) -> dict[str, Any]:
    from ..collect import unreferenced_parts

    return {"unreferenced_parts": unreferenced_parts(database)}


def _delete(database: Database, selection: Selection, vacuum: bool | None) -> dict[str, Any]:
    import sys
    from dataclasses import asdict

    from rich.console import Console
    from rich.progress import Progress

    from ..collect import collect_blocks, collect_parts
    from ..prune import only_one, plan
    from ..prune import prune as run
    from ..space import give_back

    console = Console(stderr=True)
    with (
        only_one(database),
        Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar,
    ):
        task = bar.add_task("episodes", total=plan(database, selection).rows["episodes"])
        done = run(database, selection, lambda count: bar.advance(task, count))
        task = bar.add_task("calls looked through", total=None)
        done.rows["token_blocks"] += collect_blocks(database)
        done.rows["body_parts"] += collect_parts(database, lambda count: bar.advance(task, count))
        bar.add_task("space", total=None)
        space = give_back(database, rewrite=vacuum)
    return {"deleted": True, "rows": dict(done.rows), "left_out": dict(done.left_out), "space": asdict(space)}


def _print(document: dict[str, Any]) -> None:
    from .tables import count_words

    rows = {name.replace("_", " "): count for name, count in document["rows"].items() if count}
    listed = (
        ", ".join(count_words(count, name.removesuffix("s")) for name, count in rows.items()) or "nothing"
    )
    typer.echo(f"{document['db']}: {'deleted' if document['deleted'] else 'would delete'} {listed}")
    for reason, count in document["left_out"].items():
        if count:
            typer.echo(f"left out: {count_words(count, 'episode')}: {reason}")
    if document.get("unreferenced_parts"):
        typer.echo(f"would collect {document['unreferenced_parts']} body parts that nothing refers to")
    space = document.get("space")
    if space is None:
        typer.echo("nothing was changed; add --yes to delete")
        return
    typer.echo(f"{_mib(space['before_bytes'])} on disk before, {_mib(space['after_bytes'])} now")
    if space["advice"]:
        typer.echo(space["advice"])


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
