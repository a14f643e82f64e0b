"""`lightning doctor`: what of the log can be trained, and what is in the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ...settings.layers import DEFAULT_DB
from .options import DbOption

if TYPE_CHECKING:
    from ..doctor import Checkup, GroupFindings
    from ..drift_sample import DriftSummary


def doctor(
    *,
    sample: Annotated[
        int,
        typer.Option(
            min=0, max=100_000, help="Newest episodes whose turns are compared for prefix drift; 0: none."
        ),
    ] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Look at the log before training: what is attributed, exact and trainable, and why the rest is not.

    What is found is no error: the exit code is 0 whatever it says.
    """
    import json

    from ..database import Database
    from ..doctor import check_up

    database = Database.open(db, must_exist=True)
    try:
        with database.read() as conn:
            found = check_up(conn, max_episodes=sample)
    finally:
        database.close()
    if as_json:
        typer.echo(json.dumps(found.document()))
    else:
        _print(found)


def _print(found: Checkup) -> None:
    from ..doctor import share
    from .tables import count_words, print_table

    counts = found.counts
    for line in (
        f"{count_words(counts.calls, 'call')}: "
        f"{_percent(share(counts.attributed, counts.calls))} in an episode, "
        f"{_percent(share(counts.complete, counts.calls))} answered to the end",
        f"{count_words(counts.answers, 'answer')}: {_percent(share(counts.exact, counts.answers))} exact, "
        f"{'about ' if counts.is_estimate else ''}"
        f"{_percent(share(counts.trainable, counts.answers))} trainable, "
        f"{_percent(share(found.temperature_zero, counts.answers))} at temperature 0",
        found.episodes.explain(),
        *_groups(found.groups),
        *([] if found.drift is None else _drift(found.drift)),
    ):
        typer.echo(line)
    rows = [
        (
            count_words(exclusion.count, exclusion.what.removesuffix("s")),
            exclusion.reason,
            exclusion.example or "-",
            exclusion.advice,
        )
        for exclusion in found.exclusions
    ]
    if found.drift is not None:
        rows += [
            (count_words(cause.count, "turn"), f"drift: {cause.cause}", cause.example.call_id, cause.advice)
            for cause in found.drift.causes
        ]
    if rows:
        print_table(("count", "reason", "example", "what to do"), rows)


def _groups(groups: GroupFindings) -> Iterator[str]:
    if not groups.examined:
        return
    parts = [f"{groups.with_variance} with variance"]
    if groups.no_variance:
        values = ", ".join(f"{count} all {value:g}" for value, count in groups.no_variance_values)
        parts.append(f"{groups.no_variance} without ({values}; task {groups.no_variance_example})")
    if groups.lone:
        parts.append(f"{groups.lone} of one rewarded episode")
    if groups.unrewarded:
        parts.append(f"{groups.unrewarded} unrewarded")
    yield f"the newest {groups.examined} of {groups.in_log} groups: " + ", ".join(parts)


def _drift(drift: DriftSummary) -> Iterator[str]:
    if not drift.pairs:
        yield "prefix drift: no turns to compare"
        return
    line = (
        f"the newest {drift.episodes} of {drift.episodes_in_log} conversations: {drift.extending} of "
        f"{drift.pairs} "
        "prompts go on where the call before ended"
    )
    if drift.recomputed_tokens:
        part = drift.recomputed_tokens / drift.prompt_tokens
        line += f"; {drift.recomputed_tokens} prompt tokens ({_percent(part)}) are computed twice"
    yield line


def _percent(part: float | None) -> str:
    if part is None:
        return "none"
    if 0 < part < 0.001 or 0.999 < part < 1:
        return f"{part:.3%}"
    return f"{part:.1%}"
