"""`lightning calls show`: parse, open the log, call one function, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ...settings.layers import DEFAULT_DB
from .options import DbOption


def show_call(
    call: Annotated[str, typer.Argument(help="Id of the call.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """One call, of an episode or of the unattributed bin: whose it is and what came of it."""
    import json

    from ..database import Database
    from ..episode_view import load_call

    database = Database.open(db, must_exist=True)
    try:
        with database.read() as conn:
            view = load_call(conn, call)
    finally:
        database.close()
    if as_json:
        typer.echo(json.dumps(view.document()))
    else:
        from .episode_tree import print_call

        print_call(view)
