"""`lightning reward …`: parse, open the log, call one function, print."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...settings import DEFAULT_DB
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
    from ...records import Reward, RewardTarget, new_id, now_ms
    from ..append import add_reward
    from ..database import Database

    if agent is not None and call is not None:
        raise UserError("--agent and --call exclude each other: a reward is about one thing")
    target = RewardTarget.AGENT if agent is not None else RewardTarget.CALL if call is not None else None
    is_final = target is None if final is None else final
    row = Reward(
        id=new_id(),
        episode_id=episode,
        target=target or RewardTarget.EPISODE,
        value=value,
        source=source,
        created_at_ms=now_ms(),
        agent=agent,
        call_id=call,
        final=is_final,
        note=note,
    )
    database = Database.open(db, must_exist=True)
    try:
        with database.write() as conn:
            add_reward(conn, row)
    finally:
        database.close()
    about = f" about agent {agent}" if agent else f" about call {call}" if call else ""
    typer.echo(f"{episode}: {value:g} from {source}{about}{', final' if is_final else ''} ({row.id})")
