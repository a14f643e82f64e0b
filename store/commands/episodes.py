"""`lightning episodes list|show`: parse, open the log, call one function, print."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ...settings.layers import DEFAULT_DB
from .options import DbOption

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..listing import CallLine, EpisodeLine, Page

E = TypeVar("E", bound=StrEnum)

episodes_app = typer.Typer(no_args_is_help=True, help="Look at episodes, and say what is to become of them.")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@episodes_app.command("list")
def list_(
    *,
    task: Annotated[str | None, typer.Option(help="Of this task.")] = None,
    batch: Annotated[str | None, typer.Option(help="Of this batch.")] = None,
    status: Annotated[str | None, typer.Option(help="running, ended, failed or excluded.")] = None,
    purpose: Annotated[str | None, typer.Option(help="train or eval.")] = None,
    policy: Annotated[str | None, typer.Option(help="That began with this policy.")] = None,
    agent: Annotated[str | None, typer.Option(help="With a call of this agent.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="KEY=VALUE; repeat for several.")] = None,
    since: Annotated[str | None, typer.Option(help="Begun since: 30m, 12h, 7d or 2026-11-30.")] = None,
    until: Annotated[str | None, typer.Option(help="Begun before.")] = None,
    unrewarded: Annotated[bool, typer.Option("--unrewarded", help="That nobody has rewarded.")] = False,
    gaps: Annotated[
        bool, typer.Option("--gaps", help="With a call that was served but not recorded.")
    ] = False,
    late_calls: Annotated[bool, typer.Option("--late-calls", help="With a call after the end.")] = False,
    unattributed: Annotated[
        bool, typer.Option("--unattributed", help="The calls that no mark gave an episode, instead.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Rows of one page.")] = 50,
    after: Annotated[str | None, typer.Option(help="The last id of the page before.")] = None,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """One page of episodes, the newest first. All filters must hold."""
    from ...records import EpisodeStatus, Purpose
    from ..database import Database
    from ..listing import EpisodeFilter, list_episodes, list_unattributed
    from .times import moment_ms

    wanted = EpisodeFilter(
        task=task,
        batch=batch,
        status=None if status is None else one_of(EpisodeStatus, "--status", status),
        purpose=None if purpose is None else one_of(Purpose, "--purpose", purpose),
        policy=policy,
        agent=agent,
        tags=read_tags(tag or []),
        since_ms=None if since is None else moment_ms(since),
        until_ms=None if until is None else moment_ms(until),
        unrewarded=unrewarded,
        with_gap=gaps,
        late_calls=late_calls,
    )
    _refuse_mixture(unattributed, wanted != EpisodeFilter())
    database = Database.open(db, must_exist=True)
    try:
        with database.read() as conn:
            if unattributed:
                _print_calls(list_unattributed(conn, limit=limit, after=after), as_json)
            else:
                _print_episodes(list_episodes(conn, wanted, limit=limit, after=after), as_json)
    finally:
        database.close()


@episodes_app.command()
def show(
    episode: Annotated[str, typer.Argument(help="The episode, as the agent's side named it.")],
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """One episode: the tree of its calls, its rewards and what they come to, what was said about it."""
    import json

    from ..database import Database
    from ..episode_view import load_view

    database = Database.open(db, must_exist=True)
    try:
        with database.read() as conn:
            view = load_view(conn, episode)
    finally:
        database.close()
    if as_json:
        typer.echo(json.dumps(view.document()))
    else:
        from .episode_tree import print_view

        print_view(view)


def read_tags(pairs: Sequence[str]) -> Mapping[str, str]:
    """`KEY=VALUE` as a person types it. UserError names the first that is none."""
    from ...errors import UserError
    from ..names import tag_key_fault

    found = {}
    for pair in pairs:
        key, is_pair, value = pair.partition("=")
        if not is_pair or tag_key_fault(key) is not None:
            raise UserError(f"{pair!r} is no tag: write KEY=VALUE")
        found[key] = value
    return found


def one_of(kinds: type[E], option: str, text: str) -> E:
    """UserError lists the choices."""
    from ...errors import UserError

    try:
        return kinds(text)
    except ValueError:
        raise UserError(f"{option} {text!r}: choose one of {', '.join(kinds)}") from None


def _refuse_mixture(unattributed: bool, has_filters: bool) -> None:
    from ...errors import UserError

    if unattributed and has_filters:
        raise UserError("--unattributed lists calls, which have no episode yet: leave the other filters out")


def _print_episodes(page: Page[EpisodeLine], as_json: bool) -> None:
    import json
    from dataclasses import asdict

    if as_json:
        typer.echo(json.dumps({"episodes": [asdict(row) for row in page.rows], "next": page.next}))
        return
    from .tables import print_table
    from .times import shown

    rows = [
        (
            row.id,
            row.task_id or "-",
            row.status + (" (gap)" if row.has_gap else ""),
            "-" if row.policy is None else f"{row.policy}/{row.policy_version}",
            str(row.num_calls),
            "-" if row.reward is None else f"{row.reward:g}",
            " ".join(f"{key}={value}" for key, value in row.tags.items()) or "-",
            shown(row.created_at_ms),
        )
        for row in page.rows
    ]
    print_table(("episode", "task", "status", "policy", "calls", "reward", "tags", "begun"), rows)
    _print_more(page.next)


def _print_calls(page: Page[CallLine], as_json: bool) -> None:
    import json
    from dataclasses import asdict

    if as_json:
        typer.echo(json.dumps({"calls": [asdict(row) for row in page.rows], "next": page.next}))
        return
    from .tables import print_table
    from .times import shown

    rows = [
        (
            row.id,
            row.kind,
            row.agent or "-",
            row.requested_model or "-",
            row.status,
            "-" if row.num_prompt_tokens is None else str(row.num_prompt_tokens),
            shown(row.started_at_ms),
        )
        for row in page.rows
    ]
    print_table(("call", "kind", "agent", "model", "status", "prompt tokens", "begun"), rows)
    _print_more(page.next)


def _print_more(after: str | None) -> None:
    if after is not None:
        typer.echo(f"more: --after {after}", err=True)
