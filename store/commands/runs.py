"""`lightning runs list|show`: parse, open the log, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...settings.layers import DEFAULT_DB
from .options import DbOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..run_view import RunView, StepView
    from .run_plots import Figure

runs_app = typer.Typer(no_args_is_help=True, help="Look at training runs, from the log alone.")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@runs_app.command("list")
def list_(
    *,
    policy: Annotated[str | None, typer.Option(help="Of this policy.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 20,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Training runs, the newest first."""
    import json
    from dataclasses import asdict

    from ..database import Database
    from ..run_view import list_runs

    database = Database.open(db, must_exist=True)
    try:
        with database.read() as conn:
            found = list_runs(conn, policy=policy, limit=limit)
    finally:
        database.close()
    if as_json:
        typer.echo(json.dumps({"runs": [asdict(line) for line in found]}))
        return
    from .run_tables import print_runs

    if found:
        print_runs(found)
    else:
        whose = "" if policy is None else f" of policy {policy!r}"
        typer.echo(f"the log holds no run{whose} yet; lightning train makes one", err=True)


@runs_app.command()
def show(
    run: Annotated[
        str | None, typer.Argument(help="Id of the run, or how it begins; left out: the latest.")
    ] = None,
    *,
    step: Annotated[int | None, typer.Option(help="What this step trained, instead.")] = None,
    plot: Annotated[
        list[str] | None,
        typer.Option(
            help="Draw this figure; may be given again. reward, gap, grad, speed, excluded (those five where "
            "none is named), loss, lr, clipped, entropy, kl, critic, seconds, or any number of a step's line."
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw into this file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw into this file.")] = None,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """One run: settings that are not the defaults, environment, its steps, and plots of them.

    Works while the run goes on, and wherever the log can be read. Into a pipe or a file go only the plots
    that --plot names.
    """
    import json

    from ...errors import UserError
    from ..database import Database
    from ..run_view import find_run, load_run, load_step

    if step is not None and (plot or png or svg):
        raise UserError("--step shows one step, which is no curve: leave --plot, --png and --svg out")
    database = Database.open(db, must_exist=True)
    try:
        with database.read() as conn:
            run_id = find_run(conn, run)
            if step is not None:
                _show_step(load_step(conn, run_id, step), as_json)
                return
            found = load_run(conn, run_id)
    finally:
        database.close()
    for file, ending in ((png, ".png"), (svg, ".svg")):
        if file is not None:
            _save(found, plot, file, ending)
    if as_json:
        typer.echo(json.dumps(found.document()))
        return
    from .run_tables import print_run

    figures = _in_terminal(found, plot)
    print_run(found)
    _draw(found, figures)


def _show_step(found: StepView, as_json: bool) -> None:
    import json

    if as_json:
        typer.echo(json.dumps(found.document()))
        return
    from .run_tables import print_step

    print_step(found)


def _in_terminal(found: RunView, names: Sequence[str] | None) -> Sequence[Figure]:
    """What is to be drawn there; a pipe gets what was asked for by name."""
    import sys

    from .run_plots import DEFAULT, chosen

    if not any(step.metrics for step in found.steps) or not (names or sys.stdout.isatty()):
        return ()
    return chosen(names or DEFAULT, found.steps)


def _draw(found: RunView, figures: Sequence[Figure]) -> None:
    from .run_plots import INSTALL, can_draw, drawn
    from .tables import terminal

    if figures and not can_draw():
        typer.echo(f"plots in the terminal need plotille: {INSTALL}", err=True)
        return
    columns = terminal().width
    for figure in figures:
        typer.echo(f"\n{drawn(figure, found.steps, columns)}")


def _save(found: RunView, names: Sequence[str] | None, file: Path, ending: str) -> None:
    from ...errors import UserError
    from .run_plots import DEFAULT, chosen, save

    if file.suffix.lower() != ending:
        raise UserError(f"--{ending[1:]} {file}: give the file a name that ends in {ending}")
    if not any(step.metrics for step in found.steps):
        raise UserError(f"run {found.line.id} has finished no step yet: there is nothing to draw")
    save(chosen(names or DEFAULT, found.steps), found.steps, f"run {found.line.id}", file)
    typer.echo(f"drawn: {file}", err=True)
