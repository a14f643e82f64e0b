"""The command tree. Parse, load settings, call one function, print.

A group's commands live beside what they drive (`proxy/commands.py`, `engine/commands.py`, …) and import heavy
things inside the command, so that `lightning --help` stays quick.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from . import __version__
from .engine.commands import app as engine_app
from .errors import LightningError
from .proxy.commands import app as proxy_app
from .store.commands import calls_app, db_app, doctor, episodes_app, policy_app, reward_app, runs_app
from .trainer.commands import train
from .trainer.credit.commands import credit_app
from .trainer.judging.commands import run_judge


class _OneLineErrors(TyperGroup):
    """Turns every LightningError into one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            answer = super().invoke(ctx)
            sys.stdout.flush()
            return answer
        except LightningError as error:
            typer.echo(f"lightning: {error}", err=True)
            sys.exit(2)
        except OSError as error:
            if not _is_output_lost(error):
                raise
            typer.echo(f"lightning: can't write the output: {error.strerror}", err=True)
            # What is still in the buffer would fail again at exit, with a traceback.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(2)


def _is_output_lost(error: OSError) -> bool:
    """The disk under stdout is full or gone. Errors of files that a command opened have a name."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT)


app = typer.Typer(
    cls=_OneLineErrors,
    name="lightning",
    help="Train LLM agents from their own traffic: record calls, assign rewards, train, publish.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lightning-rl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


app.add_typer(engine_app, name="engine")
app.add_typer(proxy_app, name="proxy")
reward_app.command("run")(run_judge)
app.add_typer(reward_app, name="reward")
app.add_typer(episodes_app, name="episodes")
app.add_typer(calls_app, name="calls")
app.command()(doctor)
app.command()(train)
app.add_typer(runs_app, name="runs")
app.add_typer(credit_app, name="credit")
app.add_typer(policy_app, name="policy")
app.add_typer(db_app, name="db")


if __name__ == "__main__":
    app()
