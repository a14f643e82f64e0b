"""`lightning policy list|show|diff`: parse, open the log, call one function, print."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ...settings.layers import DEFAULT_DB
from .options import DbOption
from .policy_ask import JsonOption, PolicyArgument, promote, rollback

if TYPE_CHECKING:
    import sqlalchemy as sa

T = TypeVar("T")

policy_app = typer.Typer(
    no_args_is_help=True, help="Look at policies and their versions, and say which one is to serve."
)
policy_app.command("promote")(promote)
policy_app.command("rollback")(rollback)


@policy_app.command("list")
def list_(*, as_json: JsonOption = False, db: DbOption = DEFAULT_DB) -> None:
    """Policies: what is live, how many versions and calls, the mean reward of their episodes."""
    import json
    from dataclasses import asdict

    from ..policy_view import list_policies
    from .policy_tables import print_policies

    found = _read(db, list_policies)
    if as_json:
        typer.echo(json.dumps({"policies": [asdict(line) for line in found]}))
    elif found:
        print_policies(found)
    else:
        typer.echo("the log holds no policy yet: point an agent at the proxy first", err=True)


@policy_app.command()
def show(
    policy: PolicyArgument,
    version: Annotated[
        int | None, typer.Argument(help="One version, with all that was said of it; left out: all.", min=0)
    ] = None,
    *,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """A policy's versions: status and verdict, what each was trained on, and what it did while it served."""
    import json

    from ..policy_view import load_policy, load_version_view
    from .policy_tables import print_policy, print_version

    if version is None:
        view = _read(db, lambda conn: load_policy(conn, policy))
        typer.echo(json.dumps(view.document())) if as_json else print_policy(view)
    else:
        one = _read(db, lambda conn: load_version_view(conn, policy, version))
        typer.echo(json.dumps(one.document())) if as_json else print_version(one)


@policy_app.command()
def diff(
    policy: PolicyArgument,
    a: Annotated[int, typer.Argument(help="The version to compare with; 0 is the base model.", min=0)],
    b: Annotated[int, typer.Argument(help="The version that is compared.", min=0)],
    *,
    by_tag: Annotated[
        str | None, typer.Option(help="Compare rewards by the values of this tag, not by task.")
    ] = None,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Two versions side by side: rewards, lengths and turns while they served, and how each was trained."""
    import json

    from ..policy_view import compare
    from .policy_tables import print_comparison

    found = _read(db, lambda conn: compare(conn, policy, a, b, by_tag=by_tag))
    if as_json:
        typer.echo(json.dumps(found.document()))
    else:
        print_comparison(found)


def _read(db: str, read: Callable[[sa.Connection], T]) -> T:
    """A long log takes a while: something moves meanwhile."""
    from rich.console import Console

    from ..database import Database

    database = Database.open(db, must_exist=True)
    try:
        with Console(stderr=True).status("reading the log"), database.read() as conn:
            return read(conn)
    finally:
        database.close()
