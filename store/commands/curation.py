"""`lightning episodes end|fail|exclude|include|tag|untag|assign` and `lightning calls kind|used`.

Every one of them leaves an event that `lightning episodes show` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...settings.layers import DEFAULT_DB
from .episodes import episodes_app, one_of, read_tags
from .options import DbOption
from .tables import count_words, in_words, say

if TYPE_CHECKING:
    import sqlalchemy as sa

calls_app = typer.Typer(no_args_is_help=True, help="Say what single calls and answers are.")

BY = "cli"

Episodes = Annotated[list[str], typer.Argument(help="Episodes, as the agent's side named them.")]
Episode = Annotated[str, typer.Argument(help="The episode.")]
NoteOption = Annotated[str | None, typer.Option(help="Why; kept with the event.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@episodes_app.command()
def end(
    episodes: Episodes, note: NoteOption = None, as_json: JsonOption = False, db: DbOption = DEFAULT_DB
) -> None:
    """They are over: with a reward they can be trained."""
    _end(episodes, "ended", note, as_json, db)


@episodes_app.command()
def fail(
    episodes: Episodes, note: NoteOption = None, as_json: JsonOption = False, db: DbOption = DEFAULT_DB
) -> None:
    """They broke down, and are not trained by default."""
    _end(episodes, "failed", note, as_json, db)


@episodes_app.command()
def exclude(
    episodes: Episodes, note: NoteOption = None, as_json: JsonOption = False, db: DbOption = DEFAULT_DB
) -> None:
    """They are never trained, whatever they were worth."""
    _end(episodes, "excluded", note, as_json, db)


@episodes_app.command()
def include(
    episodes: Episodes, note: NoteOption = None, as_json: JsonOption = False, db: DbOption = DEFAULT_DB
) -> None:
    """Failed or excluded ones count as ended again."""
    from ..curation import include_episode

    _each(
        episodes,
        lambda conn, name: include_episode(conn, name, by=BY, note=note),
        {"status": "ended"},
        as_json,
        db,
    )


@episodes_app.command()
def tag(
    episode: Episode,
    tags: Annotated[list[str], typer.Argument(help="KEY=VALUE, one or more.")],
    note: NoteOption = None,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Set tags, whatever value they had."""
    from ..curation import tag_episode

    found = read_tags(tags)
    _each(
        [episode],
        lambda conn, name: tag_episode(conn, name, found, by=BY, note=note),
        {"tags": found},
        as_json,
        db,
    )


@episodes_app.command()
def untag(
    episode: Episode,
    keys: Annotated[list[str], typer.Argument(help="Keys of the tags to take off.")],
    note: NoteOption = None,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Take tags off."""
    from ..curation import untag_episode

    with _writing(db) as conn:
        removed = untag_episode(conn, episode, keys, by=BY, note=note)
    missing = [key for key in dict.fromkeys(keys) if key not in removed]
    words = [f"removed {', '.join(removed)}"] if removed else []
    words += [f"had no {', '.join(missing)}"] if missing else []
    document = {"episodes": [episode], "removed": removed, "missing": missing}
    say(document, f"{episode}: {'; '.join(words)}", as_json=as_json)


@episodes_app.command()
def assign(
    episode: Episode,
    calls: Annotated[list[str], typer.Argument(help="Ids of calls of the unattributed bin.")],
    *,
    agent: Annotated[str | None, typer.Option(help="The agent that made them.")] = None,
    create: Annotated[bool, typer.Option("--create", help="Make the episode if it is not there.")] = False,
    note: NoteOption = None,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Give unattributed calls an episode: they come after its other calls, by their time."""
    from ..curation import assign_calls

    with _writing(db) as conn:
        ordinals = assign_calls(conn, episode, calls, agent=agent, create=create, by=BY, note=note)
    say(
        {"episode": episode, "ordinals": ordinals},
        f"{episode}: {count_words(len(ordinals), 'call')} assigned",
        as_json=as_json,
    )


@calls_app.command()
def kind(
    kind: Annotated[str, typer.Argument(help="policy, side, judge or retry_orphan; only policy is trained.")],
    calls: Annotated[list[str] | None, typer.Argument(help="Ids of calls.")] = None,
    *,
    episode: Annotated[str | None, typer.Option(help="All calls of this episode instead.")] = None,
    agent: Annotated[str | None, typer.Option(help="With --episode: only this agent's.")] = None,
    note: NoteOption = None,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Say what calls are: the agent's own steps, or beside them."""
    from ...errors import UserError
    from ...records import CallKind
    from ..curation import calls_of_agent, set_call_kind

    chosen = one_of(CallKind, "KIND", kind)
    if bool(calls) == (episode is not None) or (agent is not None and episode is None):
        raise UserError("name calls by their ids, or an --episode (and an --agent in it)")
    with _writing(db) as conn:
        ids = calls or calls_of_agent(conn, str(episode), agent)
        changed = set_call_kind(conn, ids, chosen, by=BY, note=note)
    document = {"kind": chosen.value, "calls": len(ids), "changed": changed}
    say(document, f"{changed} of {count_words(len(ids), 'call')} changed to {chosen}", as_json=as_json)


@calls_app.command()
def used(
    call: Annotated[str, typer.Argument(help="Id of the call.")],
    index: Annotated[int, typer.Argument(help="Number of its answer, from 0.")],
    *,
    is_used: Annotated[
        bool, typer.Option("--used/--unused", help="Whether the episode went on with this answer.")
    ] = True,
    note: NoteOption = None,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Of a call with several answers: which one the agent took. The others then get no advantage."""
    from ..curation import set_choice_used

    with _writing(db) as conn:
        set_choice_used(conn, call, index, is_used, by=BY, note=note)
    document = {"call": call, "choice": index, "used": is_used}
    say(document, f"{call}: answer {index} is {'used' if is_used else 'unused'}", as_json=as_json)


@contextmanager
def _writing(db: str) -> Iterator[sa.Connection]:
    from ..database import Database

    database = Database.open(db, must_exist=True)
    try:
        with database.write() as conn:
            yield conn
    finally:
        database.close()


def _end(episodes: list[str], status: str, note: str | None, as_json: bool, db: str) -> None:
    from ...records import EpisodeStatus
    from ..append import end_episode

    chosen = EpisodeStatus(status)
    _each(
        episodes,
        lambda conn, name: end_episode(conn, name, status=chosen, by=BY, note=note),
        {"status": status},
        as_json,
        db,
    )


def _each(
    episodes: list[str],
    change: Callable[[sa.Connection, str], None],
    said: dict[str, Any],
    as_json: bool,
    db: str,
) -> None:
    """All of them or, at the first mistake, none."""
    with _writing(db) as conn:
        for name in sorted(set(episodes)):
            change(conn, name)
    words = ", ".join(f"{key} {in_words(value)}" for key, value in said.items())
    say({"episodes": episodes, **said}, f"{', '.join(episodes)}: {words}", as_json=as_json)
