"""The whole loop on one machine without a GPU: engine, proxy, episodes, rewards, training, hot reload.

Starts `lightning engine serve`, `lightning proxy serve`, `lightning train --watch`, plays groups of episodes
through the proxy until the policy solves nearly all of them, and evaluates on held-out sums before and after.
Everything it makes lies in one folder; every process it starts ends with it. The last line on standard output
is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcome import Evaluation, count_exact, plot, table, worst_rescored_gap
from processes import Child, Children
from produce import Produced, produce
from tasks import Task, make_tasks

from lightning_rl.errors import LightningError

TASKS_PER_STEP, EPISODES_PER_TASK = 12, 8
RESCORED = 100  # calls of the last evaluation
SOLVED = 0.93  # stop when the training success of two batches in a row reaches this


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Trainer:
    """`lightning train --watch --json`, read one step at a time."""

    def __init__(self, child: Child, steps_file: Path) -> None:
        self._child, self._lines, self._num_read = child, steps_file, 0

    def next_step(self, timeout_sec: float = 900) -> dict[str, Any]:
        until = time.monotonic() + timeout_sec
        while time.monotonic() < until:
            self._child.check()
            lines = [line for line in self._lines.read_text().splitlines() if line.startswith('{"step"')]
            if len(lines) > self._num_read:
                self._num_read += 1
                step: dict[str, Any] = json.loads(lines[self._num_read - 1])
                return step
            time.sleep(0.2)
        raise RuntimeError(f"no training step within {timeout_sec:.0f} s (see {self._lines})")


class Demo:
    def __init__(self, arguments: argparse.Namespace, children: Children) -> None:
        self.arguments, self.children = arguments, children
        self.out: Path = arguments.out
        self.db = f"sqlite:///{self.out / 'demo.db'}"
        self.engine_url = self.proxy_url = ""
        self.batches: list[Produced] = []

    def start_servers(self) -> None:
        self.engine_url, self.proxy_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        say("starting the engine (about a minute)")
        self.children.start(
            "engine",
            *("engine", "serve", str(self.arguments.model), "--port", self.engine_url.split(":")[-1]),
            *("--no-lora", "--dtype", "float32"),  # what a CPU gets by itself: full weights, no rounding
        )
        self.children.wait_ready(f"{self.engine_url}/health", "the engine")
        say("starting the proxy")
        self.children.start(
            "proxy",
            "proxy",
            "serve",
            "--db",
            self.db,
            "--engine-url",
            self.engine_url,
            "--port",
            self.proxy_url.split(":")[-1],
        )
        self.children.wait_ready(f"{self.proxy_url}/healthz", "the proxy")

    def start_trainer(self) -> Trainer:
        arguments = [
            "--db",
            self.db,
            "--model",
            str(self.arguments.model),
            "--output",
            str(self.out / "runs"),
        ]
        child = self.children.start(
            "train", "train", "--config", str(self.arguments.train_config), *arguments, "--watch", "--json"
        )
        return Trainer(child, child.log)

    def play(self, batch: str, tasks: Sequence[Task], **options: Any) -> Produced:
        produced = asyncio.run(
            produce(self.proxy_url, tasks, batch=batch, stream=self.arguments.stream, **options)
        )
        if produced.errors:
            raise RuntimeError(f"{len(produced.errors)} episodes of {batch} failed: {produced.errors[0]}")
        self.batches.append(produced)
        return produced

    def evaluate(self, name: str, tasks: Sequence[Task]) -> Evaluation:
        say(f"evaluating on {len(tasks)} held-out sums ({name})")
        produced = self.play(f"eval-{name}", tasks, purpose="eval")
        say(f"held-out success {name}: {produced.success:.3f} ({produced.seconds:.0f} s)")
        return Evaluation(produced.success, len(tasks))

    def learn(self, trainer: Trainer, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """Batches of groups, one optimizer step each, until two in a row are solved."""
        steps: list[dict[str, Any]] = []
        for number in range(self.arguments.max_steps):
            start = number * TASKS_PER_STEP % len(tasks)
            batch = [tasks[(start + i) % len(tasks)] for i in range(TASKS_PER_STEP)]
            produced = self.play(f"batch-{number:03d}", batch, episodes_per_task=EPISODES_PER_TASK)
            step = trainer.next_step()
            steps.append(step)
            say(
                f"step {step['step']}: success {produced.success:.3f}, episodes {produced.seconds:.0f} s, "
                f"training {step['seconds']:.0f} s, version {step['to_version']}"
            )
            recent = [item.success for item in self.batches[-2:]]
            if number >= 1 and min(recent) >= SOLVED:
                break
        return steps

    def run(self) -> dict[str, Any]:
        train_tasks, held_out = make_tasks()
        held_out = held_out[: self.arguments.held_out]
        self.start_servers()
        trainer = self.start_trainer()
        before = self.evaluate("before", held_out)
        began = time.monotonic()
        steps = self.learn(trainer, train_tasks)
        train_minutes = (time.monotonic() - began) / 60
        after = self.evaluate("after", held_out)
        calls_by_agent = sum(batch.num_calls for batch in self.batches)
        replies = [reply for batch in self.batches for reply in batch.replies]
        exact = count_exact(self.db, self.arguments.model, replies)
        gap = worst_rescored_gap(self.db, self.engine_url, self.batches[-1].replies[:RESCORED])
        print(table(steps, before, after))
        print(f"{RESCORED} recorded calls scored again by the engine: largest difference {gap:.6f}")
        plot(self.out / "success.png", steps, before, after)
        say(f"plot: {self.out / 'success.png'}; log: {self.db}; also try: lightning --help")
        trained = [step for step in steps if step["gap_mean"] is not None]
        return {
            "success_before": round(before.success, 4),
            "success_after": round(after.success, 4),
            "held_out": len(held_out),
            "policy_versions": sum(step["to_version"] is not None for step in steps),
            "episodes": sum(len(batch.episode_ids) for batch in self.batches),
            "calls_by_agent": calls_by_agent,
            "calls_exact": round(exact / calls_by_agent, 6),
            "gap_mean_worst_step": round(max((step["gap_mean"] for step in trained), default=0.0), 6),
            "gap_max": round(max((step["gap_max"] for step in trained), default=0.0), 6),
            "train_minutes": round(train_minutes, 2),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct (make model)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the log, the runs and the plot; default demo-out/<time>"
    )
    parser.add_argument(
        "--train-config",
        type=Path,
        default=Path(__file__).parents[2] / "configs" / "train-calculator.toml",
        help="settings of `lightning train`; default configs/train-calculator.toml",
    )
    parser.add_argument("--stream", action="store_true", help="the agent streams its answers")
    parser.add_argument(
        "--max-steps", type=int, default=24, help="stop after this many optimizer steps at most"
    )
    parser.add_argument("--held-out", type=int, default=400, help="held-out sums to evaluate on")
    arguments = parser.parse_args()
    arguments.out = arguments.out or Path("demo-out") / time.strftime("%Y%m%d-%H%M%S")
    try:
        arguments.out.mkdir(parents=True)
        with Children(arguments.out) as children:
            result = Demo(arguments, children).run()
    except FileExistsError:
        say(f"demo: {arguments.out} exists already; name another folder with --out")
        return 2
    except (RuntimeError, LightningError) as error:
        say(f"demo: {error}")
        return 1
    except KeyboardInterrupt:
        say("demo: stopped; the log so far is a usable database")
        return 130
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
