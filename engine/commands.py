"""`lightning engine …`: start a vLLM that fits, and say what another one lacks."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .child import Child
    from .launch import Machine, ServeOptions

app = typer.Typer(
    help="The engine: vLLM, started so that it can be recorded and updated.", no_args_is_help=True
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def serve(  # noqa: PLR0917 - a parameter per flag
    ctx: typer.Context,
    model: Annotated[Path, typer.Argument(help="Folder of the model.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    served_model_name: Annotated[str, typer.Option(help="Name of the base model in the API.")] = "base",
    lora: Annotated[
        bool | None, typer.Option("--lora/--no-lora", help="Allow adapters; default: only on a GPU.")
    ] = None,
    max_loras: Annotated[int, typer.Option(min=2, help="Adapters that can run at the same time.")] = 3,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Largest rank of an adapter.")] = 32,
    dtype: Annotated[str | None, typer.Option(help="Precision. Default: float32 on a CPU.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Longest prompt and answer.")] = None,
    tool_call_parser: Annotated[str, typer.Option(help="Parser of tool calls; '' for none.")] = "hermes",
    sleep: Annotated[
        bool, typer.Option("--sleep", help="May be put to sleep by a trainer that shares the GPU.")
    ] = False,
    log: Annotated[Path | None, typer.Option(help="File for vLLM's log. Default: a temporary one.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show vLLM's log on stderr.")] = False,
) -> None:
    """Start vLLM with what recording and hot reload need; wait until it is ready; end it with Ctrl-C.

    Everything after `--` goes to vLLM as it is: lightning engine serve MODEL -- --gpu-memory-utilization 0.5
    """
    from .launch import ServeOptions
    from .preflight import check as check_first
    from .preflight import look_at_machine

    options = ServeOptions(
        model=model,
        host=host,
        port=port,
        served_model_name=served_model_name,
        lora=lora,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        dtype=dtype,
        max_model_len=max_model_len,
        tool_call_parser=tool_call_parser or None,
        sleep=sleep,
        extra=tuple(ctx.args),
    )
    machine = look_at_machine()
    check_first(options, machine)
    options = replace(options, model=model.resolve())  # the proxy reads this folder too, from elsewhere
    _run(options, machine, log or Path(tempfile.gettempdir()) / f"lightning-engine-{port}.log", verbose)


@app.command()
def check(
    url: Annotated[
        str, typer.Argument(help="Root URL of the engine, without /v1.")
    ] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line instead of a table.")] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="LIGHTNING_PROXY_ENGINE_API_KEY", help="Its API key.")
    ] = None,
) -> None:
    """Say what an engine that somebody else started lacks. Exit code 0 when recording is exact, else 2."""
    import asyncio

    from .check import as_document, examine, render
    from .client import EngineClient

    async def run() -> int:
        async with EngineClient(url.removesuffix("/v1"), api_key=api_key) as client:
            findings = await examine(client)
        if as_json:
            typer.echo(as_document(url, findings))
        else:
            render(url, findings)
        return 0 if all(finding.is_fine for finding in findings if finding.is_needed) else 2

    raise typer.Exit(asyncio.run(run()))


def _run(options: ServeOptions, machine: Machine, log: Path, verbose: bool) -> None:
    from .child import Child
    from .launch import Device, command, environment

    def show(line: str) -> None:
        if verbose:
            typer.echo(line, err=True)

    import os

    with _ended_by_signals():
        child: Child | None = None
        try:
            child = Child.start(
                command(options, machine), environment(options, machine, os.environ), log.resolve()
            )
            with _progress(options.model.name, is_quiet=verbose) as on_phase:
                child.wait_ready(options.url, on_phase, show)
            if (
                machine.device is Device.CPU
                and options.has_lora(Device.CPU)
                and options.has_reload(Device.CPU)
            ):
                child.mend(options.url)
            typer.echo(_ready_line(options, machine, child))
            child.wait(show)
        except KeyboardInterrupt:
            typer.echo("ending vLLM", err=True)
        finally:
            if child is not None:
                child.end()


def _ready_line(options: ServeOptions, machine: Machine, child: Child) -> str:
    ways = ["LoRA versions"] if options.has_lora(machine.device) else []
    ways += ["full-weight reload"] if options.has_reload(machine.device) else []
    return (
        f"ready: {options.url} serves {options.model.name} as {options.served_model_name!r} "
        f"({', '.join(ways) or 'no hot reload'}; log {child.log})"
    )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end us as Ctrl-C does: in order, the child first."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(model: str, *, is_quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner with phase and seconds on a terminal; a line per phase elsewhere."""
    if is_quiet or not sys.stderr.isatty():
        seen: list[str] = []

        def note(phase: str) -> None:
            if phase not in seen and not is_quiet:
                typer.echo(f"engine: {phase}", err=True)
            seen.append(phase)

        yield note
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{model}: starting", total=None)
        yield lambda phase: progress.update(task, description=f"{model}: {phase}")
