"""`lightning policy promote|rollback`: write the request, and wait for what the publisher makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...settings.layers import DEFAULT_DB
from .options import DbOption

if TYPE_CHECKING:
    from ..database import Database
    from ..policy_requests import PolicyRequest, Verb

POLL_SEC = 0.1

PolicyArgument = Annotated[str, typer.Argument(help="The policy's name.")]
NoteOption = Annotated[str | None, typer.Option(help="Why: is kept with the version.")]
RejectedOption = Annotated[
    bool, typer.Option("--even-if-rejected", help="Also a version that was rejected: it is probed anew.")
]
WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait for what becomes of it, or only ask for it.")
]
TimeoutOption = Annotated[float, typer.Option(help="How long to wait.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def promote(
    policy: PolicyArgument,
    version: Annotated[int, typer.Argument(help="The version that is to serve; 0 is the base model.", min=0)],
    *,
    even_if_rejected: RejectedOption = False,
    note: NoteOption = None,
    wait: WaitOption = True,
    timeout_sec: TimeoutOption = 300.0,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Have a version serve: the proxy that publishes loads it, probes it, and lets the live one drain."""
    _ask(db, policy, version, "promote", even_if_rejected, note, timeout_sec if wait else None, as_json)


def rollback(
    policy: PolicyArgument,
    *,
    to: Annotated[
        int | None,
        typer.Option(help="The version to go back to; 0 is the base model. Left out: the one before.", min=0),
    ] = None,
    even_if_rejected: RejectedOption = False,
    note: NoteOption = None,
    wait: WaitOption = True,
    timeout_sec: TimeoutOption = 300.0,
    as_json: JsonOption = False,
    db: DbOption = DEFAULT_DB,
) -> None:
    """Go back to the version that was live before, or to another. Episodes stay on what they began with."""
    _ask(db, policy, to, "rollback", even_if_rejected, note, timeout_sec if wait else None, as_json)


def _ask(  # noqa: PLR0917 - the two commands' options, in their order
    db: str,
    policy: str,
    version: int | None,
    verb: Verb,
    even_if_rejected: bool,
    note: str | None,
    timeout_sec: float | None,
    as_json: bool,
) -> None:
    import json

    from ...errors import PublishError
    from ..database import Database
    from ..promotion import ask_for_version
    from ..verdicts import verdict_words

    database = Database.open(db, must_exist=True)
    try:
        with database.write() as conn:
            request = ask_for_version(
                conn, policy, version, verb, source=_who(), note=note, even_if_rejected=even_if_rejected
            )
        if timeout_sec is not None and request.outcome is None:
            request = _await_outcome(database, request, timeout_sec)
    finally:
        database.close()
    if as_json:
        typer.echo(json.dumps({name: getattr(request, name) for name in type(request).__dataclass_fields__}))
        raise typer.Exit(0 if request.outcome in {None, "live"} else 2)
    what = f"version {request.version} of policy {policy!r}"
    if request.outcome is None:
        typer.echo(f"asked for {what}, instead of {request.from_version}")
    elif request.outcome == "live":
        instead = "" if request.from_version == request.version else f", instead of {request.from_version}"
        typer.echo(f"{what} is live{instead}: {verdict_words(request.verdict)}")
    else:
        why = verdict_words(request.verdict)
        raise PublishError(f"{what} is {request.outcome}, {request.from_version} keeps serving: {why}")


def _await_outcome(database: Database, request: PolicyRequest, timeout_sec: float) -> PolicyRequest:
    import time

    from rich.console import Console

    from ...errors import PublishError
    from ..policies import load_version
    from ..policy_requests import load_request

    until = time.monotonic() + timeout_sec
    name = f"version {request.version} of policy {request.policy!r}"
    status = "candidate"
    with Console(stderr=True).status(f"{name} is {status}") as shown:
        while True:
            with database.read() as conn:
                found = load_request(conn, request.id)
                row = load_version(conn, request.policy, request.version)
            assert found is not None, "requests are never deleted"
            if found.outcome is not None:
                return found
            status = "candidate" if row is None else row.status.value
            shown.update(f"{name} is {status}")
            if time.monotonic() > until:
                break
            time.sleep(POLL_SEC)
    back = f"lightning policy promote {request.policy} {request.from_version}"
    if status == "candidate":
        raise PublishError(
            f"nobody has taken up {name} within {timeout_sec:g} s: start the proxy that publishes it "
            f"(lightning proxy serve --db {database.shown_url}); the request stands until then, or until "
            f"you withdraw it ({back})"
        )
    raise PublishError(
        f"{name} is still {status} after {timeout_sec:g} s: see the proxy's log; the request stands"
    )


def _who() -> str:
    """For the log; whoever has no name on this machine is the command line."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return "cli"
