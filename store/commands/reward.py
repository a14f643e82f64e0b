"""`lightning reward …`: parse, open the log, call one function, print."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...settings.layers import DEFAULT_DB
from .options import DbOption


class _GiveByDefault(TyperGroup):
    """`lightning reward EPISODE VALUE` is `lightning reward give EPISODE VALUE`.

    A first argument that names no sub-command goes to `give`, so that sub-commands can be added; an episode
    that is called like one of them is reached with the long form.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["give", *args]
        return super().parse_args(ctx, args)


reward_app = typer.Typer(
    cls=_GiveByDefault,
    no_args_is_help=True,
    help="Say what an episode was worth: lightning reward EPISODE VALUE",
)


# ignore_unknown_options: else a negative VALUE would be taken for an option.
@reward_app.command("give", context_settings={"ignore_unknown_options": True})
def reward(
    episode: Annotated[str, typer.Argument(help="The episode, as the agent's side named it.")],
    value: Annotated[float, typer.Argument(help="A finite number.")],
    *,
    source: Annotated[str, typer.Option(help="Who says so; the newest row of each source counts.")] = "cli",
    note: Annotated[str | None, typer.Option(help="Why; kept with the row.")] = None,
    agent: Annotated[
        str | None, typer.Option(help="Reward this agent's part instead of the episode.")
    ] = None,
    call: Annotated[str | None, typer.Option(help="Reward this call instead of the episode.")] = None,
    choice: Annotated[int | None, typer.Option(min=0, help="With --call: this one of its answers.")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="START:END", help="With --call: these tokens of the answer, END not included."),
    ] = None,
    supersedes: Annotated[
        str | None, typer.Option(help="Id of the row that this one replaces, whoever gave it.")
    ] = None,
    final: Annotated[
        bool | None,
        typer.Option(
            "--final/--not-final",
            help="Whether the episode has ended with this. Default: if it is about the whole episode.",
        ),
    ] = None,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Append one reward. Nothing is overwritten: a newer one of the same source takes its place."""
    from ...errors import UserError
    from ..append import add_reward
    from ..database import Database
    from ..names import require_name
    from ..reward_lines import RewardLine
    from ..reward_rows import rewards_of
    from ..rewards import COUNTS, EPISODE, fate_of_rows, part_of

    if agent is not None and call is not None:
        raise UserError("--agent and --call exclude each other: a reward is about one thing")
    if call is None and (choice is not None or tokens is not None):
        raise UserError("--choice and --tokens are about a call: name it with --call")
    start, end = (None, None) if tokens is None else _range(tokens)
    require_name("--source", source)
    row = RewardLine.model_construct(
        episode=episode,
        value=value,
        final=final,
        agent=agent,
        call=call,
        choice=choice,
        token_start=start,
        token_end=end,
        note=note,
        supersedes=supersedes,
    ).reward(source)
    database = Database.open(db, must_exist=True)
    try:
        with database.write() as conn:
            add_reward(conn, row)
            fate = fate_of_rows(rewards_of(conn, episode))[row.id]
    finally:
        database.close()
    part = part_of(row)
    about = "" if part == EPISODE else f" about {part.describe()}"
    typer.echo(f"{episode}: {value:g} from {source}{about}{', final' if row.final else ''} ({row.id})")
    if fate != COUNTS:
        typer.echo(
            f"lightning: this does not count, being {fate}, which is dated ahead; to have it count, give it "
            "again with --supersedes and that id",
            err=True,
        )


def _range(text: str) -> tuple[int, int]:
    from ...errors import UserError

    start, colon, end = text.partition(":")
    if not (colon and start.isdecimal() and end.isdecimal()):
        raise UserError(f"--tokens is START:END, for example 0:12, not {text!r}")
    return int(start), int(end)
