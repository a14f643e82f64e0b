"""`lightning reward import` and `lightning reward show`: parse, open the log, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...settings.layers import DEFAULT_DB
from .options import DbOption


def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE|-", help="One JSON object per line; - reads stdin.")],
    *,
    source: Annotated[str, typer.Option(help="Source of the lines that name none.")] = "import",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Append many rewards: all of them, or none and the number of the first line that is wrong.

    Fields of a line: episode, value; and, where wanted, id, source, final, agent, call, choice, token_start,
    token_end, note, supersedes, created_at_ms. A line with an id can be imported twice.
    """
    import json
    import sys

    from ...errors import UserError
    from ..database import Database
    from ..names import require_name
    from ..reward_lines import read_lines
    from ..reward_rows import import_rewards
    from .tables import count_words

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"can't read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is no UTF-8 text") from None
    require_name("--source", source)
    numbered = read_lines(text.removeprefix("\ufeff").splitlines(), source)
    database = Database.open(db, must_exist=True)
    try:
        with database.write() as conn:
            found = import_rewards(conn, numbered)
    finally:
        database.close()
    if as_json:
        typer.echo(json.dumps({"added": found.added, "known": found.known}))
        return
    verb = "was" if found.known == 1 else "were"
    known = f", {found.known} {verb} in the log already" if found.known else ""
    typer.echo(f"{count_words(found.added, 'reward')} added{known}")


def show_rewards(
    episode: Annotated[str, typer.Argument(help="The episode, as the agent's side named it.")],
    *,
    config: Annotated[
        Path | None, typer.Option(help="Training settings whose source weights count; else all weigh 1.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """What an episode's rewards come to, and how: which rows count, which do not, and why."""
    import json

    from ...settings.train import DryRunSettings
    from ..database import Database
    from ..reward_rows import rewards_of
    from ..reward_view import view_rewards
    from .tables import print_table
    from .times import shown

    weights = DryRunSettings.load(config).sources
    database = Database.open(db, must_exist=True)
    try:
        with database.read() as conn:
            rows = rewards_of(conn, episode)
    finally:
        database.close()
    view = view_rewards(episode, rows, weights)
    if as_json:
        typer.echo(json.dumps(view.as_json()))
        return
    value = view.resolution.value
    typer.echo(f"{episode}: {'no value' if value is None else format(value, 'g')}   {view.resolution.path}")
    if view.parts:
        parts = [(part.describe(), f"{found.value:g}", found.path) for part, found in view.parts]
        typer.echo()
        print_table(("about", "value", "how"), parts)
    if view.rows:
        typer.echo()
        print_table(
            ("row", "given", "about", "source", "value", "note", "what became of it"),
            [
                (
                    row.reward.id,
                    shown(row.reward.created_at_ms),
                    row.about.describe(),
                    row.reward.source,
                    f"{row.reward.value:g}",
                    row.reward.note or "",
                    row.fate,
                )
                for row in view.rows
            ],
        )
