"""`lightning train`: parse, load settings, run, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from ..settings.train import TrainSettings


def _require_extra() -> None:
    from importlib.util import find_spec

    from ..errors import UserError

    for name in ("numpy", "torch", "transformers", "trl", "peft"):
        if find_spec(name) is None:
            raise UserError(f"training needs {name}: pip install 'lightning-rl[train]'")


def train(
    model: Annotated[
        Path | None, typer.Option(help="Folder of the base model, the one the engine serves.")
    ] = None,
    *,
    db: Annotated[str | None, typer.Option(help="Database URL of the log.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; flags win over it.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for runs.")] = None,
    policy: Annotated[str | None, typer.Option(help="Name of the policy to train.")] = None,
    weights: Annotated[str | None, typer.Option(help="lora or full.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of the adapter.")] = None,
    lora_alpha: Annotated[
        float | None, typer.Option(help="Scale of the adapter; by default twice its rank.")
    ] = None,
    lora_targets: Annotated[
        list[str] | None,
        typer.Option("--lora-target", help="Give this module an adapter (q_proj, …); may be given again."),
    ] = None,
    from_base: Annotated[
        bool | None,
        typer.Option("--from-base/--from-live", help="Start from the base model or the live version."),
    ] = None,
    credit: Annotated[
        str | None,
        typer.Option(
            help="Credit rule, with options behind its name: 'gigpo omega=0.5' (lightning credit list)."
        ),
    ] = None,
    train_agents: Annotated[
        list[str] | None,
        typer.Option("--train-agent", help="Train this agent's calls only; may be given again."),
    ] = None,
    weighting: Annotated[str | None, typer.Option(help="episode, token or constant.")] = None,
    constant_tokens: Annotated[
        int | None, typer.Option(help="What the constant weighting divides by.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Adam's step size.")] = None,
    lr_schedule: Annotated[
        str | None, typer.Option(help="constant, linear or cosine; the latter two end at --max-steps.")
    ] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(help="Optimizer steps over which the learning rate rises.")
    ] = None,
    groups_per_step: Annotated[int | None, typer.Option(help="Groups in one optimizer step.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many optimizer steps.")] = None,
    max_staleness: Annotated[
        int | None, typer.Option(help="Leave out calls of a version older by more than this.")
    ] = None,
    max_sequence_tokens: Annotated[
        int | None,
        typer.Option(help="Leave out calls of more tokens; default: the model's context length."),
    ] = None,
    too_long: Annotated[
        str | None, typer.Option(help="call or episode: what a call that is too long takes along.")
    ] = None,
    unrewarded: Annotated[
        str | None, typer.Option(help="skip, error or fill=NUMBER: ended episodes without a reward.")
    ] = None,
    failed: Annotated[
        str | None, typer.Option(help="skip, as_rewarded or fill=NUMBER: failed episodes.")
    ] = None,
    unequal_sources: Annotated[
        str | None, typer.Option(help="set_aside or common: siblings judged by different sources.")
    ] = None,
    watch: Annotated[
        bool | None, typer.Option("--watch/--once", help="Wait for new groups and go on.")
    ] = None,
    publish: Annotated[
        bool | None,
        typer.Option("--publish/--no-publish", help="Hand each version to the proxy that serves it."),
    ] = None,
    share_gpu: Annotated[
        bool | None,
        typer.Option("--share-gpu/--no-share-gpu", help="Have the engines sleep while a step is computed."),
    ] = None,
    publish_timeout_sec: Annotated[
        float | None, typer.Option(help="How long a version may take to go live.")
    ] = None,
    micro_batch_tokens: Annotated[int | None, typer.Option(help="Tokens in one forward pass.")] = None,
    gradient_checkpointing: Annotated[
        str | None, typer.Option(help="auto, on or off: less memory, a third more time.")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="auto, flex, chunked or rows: how shared prefixes are computed.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes to train with, one a GPU (started through accelerate).")
    ] = None,
    accelerate: Annotated[
        Path | None, typer.Option(help="accelerate's configuration file: DDP, FSDP2 (configs/accelerate/).")
    ] = None,
    rank_timeout_sec: Annotated[
        float | None, typer.Option(help="How long processes wait for each other in a step.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of adapter initialisation.")] = None,
    manifests: Annotated[
        Path | None,
        typer.Option(help="Folder of a dry run: written with --dry-run, trained as it is without."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|latest",
            help="Go on exactly with a run that was interrupted or stopped, by its own settings. latest: the "
            "policy's newest; with --watch, a new one where there is none to go on with.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Give up a run of this policy that was interrupted, and begin anew."),
    ] = False,
    plan_only: Annotated[
        bool,
        typer.Option("--dry-run", help="Plan every step and write the manifests: no torch, no GPU."),
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="EPISODE|CALL", help="With --dry-run: why each choice is trained or not."),
    ] = None,
    report_to: Annotated[
        list[str] | None,
        typer.Option(help="Log figures to tensorboard, wandb, trackio …; may be given again."),
    ] = None,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="Show a progress bar.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON line per step, and one at the end.")
    ] = False,
) -> None:
    """Train from the log: ended and rewarded episodes become new versions of the policy."""
    import os

    from ..errors import SettingsError
    from ..settings.train import DryRunSettings, ResumeSettings, TrainSettings

    flags = {name: value for name, value in locals().items() if name in TrainSettings.model_fields}
    if resume is not None and (fresh or plan_only):
        raise SettingsError("--resume goes on with a run; it excludes --fresh and --dry-run")
    if plan_only:
        _dry_run(DryRunSettings.load(config, **flags), explain, as_json)
        return
    if explain is not None:
        raise SettingsError("--explain needs --dry-run")
    # Read by OpenMP when torch is loaded. By default its threads spin for milliseconds while they wait, which
    # on a CPU shared with the engine keeps away the very thread that they wait for (measured: 3x slower).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    _require_extra()
    settings = (TrainSettings if resume is None else ResumeSettings).load(config, **flags)
    if _in_other_processes(settings, resume):
        return
    from ..store.commands.tables import count_words
    from .loop import train as run
    from .process import INTERRUPTED

    summary = run(settings, resume=resume, fresh=fresh, as_json=as_json)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "run": summary.run_id,
                    "status": summary.status,
                    "steps_trained": summary.steps_trained,
                    "version": summary.version,
                    "folder": str(summary.folder),
                }
            )
        )
    else:
        trained = count_words(summary.steps_trained, "step")
        typer.echo(f"{summary.status}: {trained}, version {summary.version}, {summary.folder}")
    if summary.status == "stopped":
        raise typer.Exit(INTERRUPTED)


def _in_other_processes(settings: TrainSettings, resume: str | None) -> bool:
    """True when the run was in processes that this one has started."""
    import sys

    from . import launch

    if not launch.is_launched():
        code = launch.launch(_of_the_run(settings, resume), sys.argv[1:])
        if code:
            raise typer.Exit(code)
        return code is not None
    if launch.is_follower():
        _follow(settings)
    return False


def _follow(settings: TrainSettings) -> NoReturn:
    """All that a rank does which is not the first."""
    import os
    import sys

    from ..errors import RankLostError, UserError
    from .launch import LOST
    from .steps.making import follow

    try:
        follow(settings)
    except RankLostError:  # said by the one that was lost, or by the leader
        raise typer.Exit(LOST) from None
    except UserError as error:
        raise UserError(f"rank {os.environ['RANK']}: {error}") from None
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to hand over; see Ranks.leave


def _of_the_run(settings: TrainSettings, resume: str | None) -> TrainSettings:
    """A run that goes on does so in as many processes as it had."""
    if resume is None:
        return settings
    from ..store.database import Database
    from .resume import find, settings_of

    database = Database.open(settings.db, must_exist=not settings.watch)
    try:
        run = find(database, resume, settings)
        return settings if run is None else settings_of(run, settings)
    finally:
        database.close()


def _dry_run(settings: TrainSettings, explain: str | None, as_json: bool) -> None:
    from rich.console import Console

    from ..store.commands.tables import count_words, print_table
    from .planning.dry_run import EXPLAINED_TITLES, TITLES, dry_run, explained_rows, reasons_of, table_rows
    from .reasons import in_words

    with Console(stderr=True).status("planning") as status:
        found = dry_run(
            settings, explain=explain, on_step=lambda done: status.update(f"planning: {done} steps")
        )
    for notice in found.notices:
        typer.echo(notice, err=True)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
        return
    print_table(TITLES, list(table_rows(found.plan)))
    if reasons := reasons_of(found.plan):
        typer.echo()
        rows = [(str(count), reason, in_words(reason)) for reason, count in reasons.most_common()]
        print_table(("choices not trained", "reason", "why"), rows)
    if explain is not None:
        typer.echo(f"\n{explain}: reward {found.reward_path}")
        print_table(EXPLAINED_TITLES, list(explained_rows(found)))
    of_steps = count_words(len(found.plan.steps), "step")
    typer.echo(f"\nmanifests of {of_steps} in {found.plan.folder}")
    if any(step.trains for step in found.plan.steps):
        typer.echo(f"train exactly these:\n  {found.command()}")
    else:
        agents = ", ".join(map(repr, settings.train_agents))
        named = f" (calls of agent {agents} only)" if agents else ""
        typer.echo(f"\nnothing would be trained{named}; the table above says why", err=True)
    if found.files == "jsonl":
        typer.echo("written as JSON lines; for Parquet: pip install 'lightning-rl[parquet]'", err=True)
