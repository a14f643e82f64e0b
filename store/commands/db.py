"""`lightning db …`: the log's database as a whole; parse, open it, call one function, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ...settings.layers import DEFAULT_DB
from .db_prune import prune
from .db_transfer import export, import_
from .db_verify import verify
from .options import DbOption

db_app = typer.Typer(no_args_is_help=True, help="The log's database: upgrade it, check it.")
db_app.command()(verify)
db_app.command()(prune)
db_app.command()(export)
db_app.command("import")(import_)


@db_app.command()
def upgrade(
    db: DbOption = DEFAULT_DB,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Bring the schema up to date, making the database's tables where there are none."""
    import json

    from ..database import Database
    from ..upgrade import HEAD

    database = Database.open(db)
    database.close()
    if as_json:
        typer.echo(json.dumps({"db": database.shown_url, "schema": HEAD, "current": True}))
        return
    typer.echo(f"{database.shown_url}: schema {HEAD} is current")


@db_app.command()
def check(
    db: DbOption = DEFAULT_DB,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether the log can be opened and its schema is current: exit code 0 if so, 2 if not."""
    import json

    from ...errors import StoreError
    from ..database import Database, shown_url
    from ..upgrade import HEAD

    problem = None
    try:
        Database.open(db, migrate=False, must_exist=True).close()
    except StoreError as error:
        if not as_json:
            raise
        problem = str(error)
    if as_json:
        typer.echo(
            json.dumps({"db": shown_url(db), "schema": HEAD, "current": problem is None, "problem": problem})
        )
        raise typer.Exit(0 if problem is None else 2)
    typer.echo(f"{shown_url(db)}: schema {HEAD} is current")
