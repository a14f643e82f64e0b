"""`lightning reward run`: parse, find the function, judge, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...settings.layers import DEFAULT_DB
from ...store.commands.options import DbOption

if TYPE_CHECKING:
    from .judge import JudgingReport

_SHOWN_FAILURES = 20
_DRY_RUN_EPISODES = 5


def run_judge(
    judge: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="What judges one episode.")],
    *,
    source: Annotated[str | None, typer.Option(help="Name of the source; by default the function's.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=512, help="Episodes judged at a time.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Judge at most so many episodes.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also those that have a reward of this source; the newest counts.")
    ] = False,
    proxy_url: Annotated[
        str | None,
        typer.Option(
            envvar="LIGHTNING_JUDGE_PROXY_URL", help="Proxy through which the judge's own calls go."
        ),
    ] = None,
    proxy_token: Annotated[
        str | None, typer.Option(envvar="LIGHTNING_JUDGE_PROXY_TOKEN", help="The proxy's token, if any.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Judge a few (5, or --limit), print what it says, write nothing."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Let a function judge every ended episode that its source has not judged; resumes where it stopped."""
    import json

    from rich.console import Console
    from rich.progress import Progress

    from ...store.database import Database
    from ...store.names import require_name
    from ...store.reward_rows import unjudged_episodes
    from .judge import find_judge, judge_access, judge_all

    function = find_judge(judge)
    named = require_name("--source", judge.partition(":")[2] if source is None else source)
    access = None if proxy_url is None else judge_access(proxy_url, proxy_token)
    database = Database.open(db, must_exist=True)
    try:
        with database.read() as conn:
            ids = unjudged_episodes(conn, named, again=again)
        chosen = ids[: limit or (_DRY_RUN_EPISODES if dry_run else len(ids))]
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"judging ({named})", total=len(chosen))
            report = judge_all(
                database,
                function,
                chosen,
                named,
                concurrency=concurrency,
                access=access,
                write=not dry_run,
                on_judged=lambda _: bar.advance(task),
            )
    finally:
        database.close()
    if as_json:
        doc = report.as_json() | {"source": named, "written": not dry_run, "waiting": len(ids) - len(chosen)}
        typer.echo(json.dumps(doc))
    else:
        _print(report, named, dry_run=dry_run, waiting=len(ids) - len(chosen))
    if report.stopped:
        raise typer.Exit(130)
    if report.failures:
        raise typer.Exit(1)


def _print(report: JudgingReport, source: str, *, dry_run: bool, waiting: int) -> None:
    from ...store.commands.tables import count_words, print_table
    from ...store.rewards import part_of

    if dry_run:
        rows = [
            (one.episode_id, part_of(reward).describe(), f"{reward.value:g}", reward.note or "")
            for one in report.judged
            for reward in one.rewards
        ]
        print_table(("episode", "about", "value", "note"), rows)
    doc = report.as_json()
    typer.echo(
        f"{source}: {count_words(doc['episodes'], 'episode')} judged, {doc['rewarded']} rewarded "
        f"({count_words(doc['rewards'], 'row')}), "
        f"{doc['no_opinion']} without an opinion, {doc['failed']} failed"
        + (f", {waiting} not asked" if waiting else "")
        + ("; nothing was written" if dry_run else "")
        + ("; stopped: run it again to go on" if report.stopped else "")
    )
    for one in report.failures[:_SHOWN_FAILURES]:
        typer.echo(f"  {one.episode_id}: {one.failure}", err=True)
    if len(report.failures) > _SHOWN_FAILURES:
        typer.echo(f"  and {len(report.failures) - _SHOWN_FAILURES} more; --json lists all", err=True)
