"""`make bench-credit`: rules against formulas, against each other, and PPO beside GRPO on a real engine.

1. Every rule's advantages on random episode sets against an independent computation (independent.py, written
   by somebody who had only docs/credit.md).
2. Steps to a target on ten rooms (world.py), medians and spread over seeds.
3. The calculator agent on the real engine, once with GRPO and once with PPO (`--skip-calculator` leaves this
   half hour out).

The last line is one JSON object; parts that were left out are null.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before torch is imported: two runs at a time, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from against_formulas import largest_difference
from compare import MAX_STEPS, RULES, SEEDS, Compared, Outcome, compare
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EPISODE_SETS = 1000


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def said(outcome: Outcome) -> None:
    run = outcome.run
    steps = f"{outcome.steps} steps" if outcome.reached else f"not within {MAX_STEPS} steps"
    say(f"{run.rule}, learning rate {run.learning_rate:g}, seed {run.seed}: {steps}")


def steps_table(compared: Sequence[Compared]) -> Table:
    table = Table(title="Optimizer steps until 80 % of the episodes find the treasure")
    for column in (
        "rule",
        "learning rate",
        "median",
        "lowest",
        "highest",
        "seeds that got there",
        "of broadcast",
    ):
        table.add_column(column, justify="left" if column == "rule" else "right")
    base = next((c.median_steps for c in compared if c.rule == "broadcast"), None)
    for row in compared:
        steps = [outcome.steps for outcome in row.outcomes]
        table.add_row(
            row.rule,
            f"{row.learning_rate:g}",
            _steps(row.median_steps),
            _steps(min(steps)),
            _steps(max(steps)),
            f"{sum(o.reached for o in row.outcomes)}/{len(steps)}",
            "-" if base is None else f"{row.median_steps / base:.0%}",
        )
    return table


def _steps(steps: float) -> str:
    return f">{MAX_STEPS}" if steps > MAX_STEPS else f"{steps:g}"


def calculator(name: str, config: str, model: Path, out: Path, flags: Sequence[str]) -> dict[str, Any]:
    say(f"the calculator agent with {name} (about a quarter of an hour)")
    command = [sys.executable, str(ROOT / "examples" / "calculator" / "demo.py"), "--model", str(model)]
    command += ["--out", str(out / name), "--train-config", str(ROOT / "configs" / config), *flags]
    # The engine and the trainer choose their own threads.
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(f"bench-credit: the calculator agent with {name} failed, see above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct (make model)")
    parser.add_argument("--out", type=Path, default=Path("demo-out") / time.strftime("credit-%Y%m%d-%H%M%S"))
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--skip-rooms", action="store_true")
    parser.add_argument("--skip-calculator", action="store_true")
    arguments = parser.parse_args()
    console = Console(width=120)

    difference = largest_difference(EPISODE_SETS)
    say(
        f"{EPISODE_SETS} random episode sets, every rule: largest difference of an advantage {difference:.2e}"
    )
    compared: list[Compared] = []
    if not arguments.skip_rooms:
        seeds = SEEDS[: arguments.seeds]
        compared = compare(arguments.rules, seeds, workers=os.cpu_count() or 1, on_run=said)
        console.print(steps_table(compared))
    grpo = ppo = None
    if not arguments.skip_calculator:
        if arguments.model is None:
            parser.error("--model is needed, or --skip-calculator")
        grpo = calculator("grpo", "train-calculator.toml", arguments.model, arguments.out, ())
        twice = ("--max-steps", str(2 * grpo["policy_versions"]))
        ppo = calculator("ppo", "train-calculator-ppo.toml", arguments.model, arguments.out, twice)
        print(
            f"GRPO: {grpo['success_before']} -> {grpo['success_after']} in {grpo['policy_versions']} steps, "
            f"{grpo['train_minutes']} min; PPO: {ppo['success_before']} -> {ppo['success_after']} in "
            f"{ppo['policy_versions']} steps, {ppo['train_minutes']} min"
        )
    print(
        json.dumps(
            {
                "max_abs_difference": difference,
                "median_steps_to_target": {row.rule: row.median_steps for row in compared} or None,
                "seeds": arguments.seeds,
                "ppo_success_after": ppo and ppo["success_after"],
                "grpo_success_after": grpo and grpo["success_after"],
            }
        )
    )


if __name__ == "__main__":
    main()
