"""How many optimizer steps each credit rule needs until the tiny model finds the treasure.

One run = one rule, one learning rate, one seed: play a batch, plan it with the product's planner, train it
with the product's trainer, until two batches in a row succeed often enough. Every rule gets the same search
over learning rates, on seeds that are not used again.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RULES = {
    "broadcast": "lightning",
    "gigpo": "gigpo call_rewards=false",
    "hgpo": "hgpo call_rewards=false",
    "step_gae": "step_gae call_rewards=false",
    "intermediate": "intermediate call_sources=any",  # an unrewarded call achieved nothing: 0
}
"""What is compared. Only the last one sees the rewards of single calls."""

LEARNING_RATES = (1e-3, 3e-3, 1e-2)
SEARCH_SEEDS = (101, 102)
SEEDS = (0, 1, 2, 3, 4)
TASKS_PER_STEP = 8
TARGET = 0.8  # success over two batches in a row, 128 episodes
MAX_STEPS = 150
CRITIC_LEARNING_RATE = 1e-2


@dataclass(frozen=True, slots=True)
class Run:
    rule: str  # key of RULES
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """`steps`: until the target; MAX_STEPS + 1 where it was not reached."""

    run: Run
    steps: int
    success: float  # of the last batch

    @property
    def reached(self) -> bool:
        return self.steps <= MAX_STEPS


def play_out(run: Run) -> Outcome:
    """In a process of its own: torch with one thread."""
    import torch

    torch.set_num_threads(1)
    return _Learner(run).learn()


class _Learner:
    def __init__(self, run: Run) -> None:
        import torch
        from play import new_model, tokenizer

        from lightning_rl.settings.train import TrainSettings
        from lightning_rl.trainer.planning.planner import plan_settings
        from lightning_rl.trainer.steps.objective import Objective
        from lightning_rl.trainer.steps.shape import shape_of
        from lightning_rl.trainer.steps.trl_bridge import BridgeSettings, RecordedTrainer

        self._run = run
        settings = TrainSettings(model=Path(), credit=RULES[run.rule])
        self._planning = plan_settings(settings)
        model = new_model(run.seed)
        self._shape = shape_of(model)
        self._critic = self._new_critic(model) if "values" in self._planning.credit.reads else None
        bridge = BridgeSettings(
            output=Path(tempfile.mkdtemp(prefix="ten-rooms-")),
            learning_rate=run.learning_rate,
            objective=Objective(),
            max_grad_norm=settings.max_grad_norm,
            seed=run.seed,
            on_gpu=False,
            bfloat16=False,
        )
        self._trainer = RecordedTrainer(model, tokenizer(), bridge)
        self._random = random.Random(run.seed)
        self._generator = torch.Generator().manual_seed(run.seed)
        self._recent: deque[float] = deque(maxlen=2)
        self._steps = 0

    def learn(self) -> Outcome:
        self._trainer.steps = self._batches()
        self._trainer.train()
        return Outcome(self._run, self._steps, self._recent[-1])

    def _batches(self) -> Iterator[Sequence[Any]]:
        from play import play
        from world import Task

        from lightning_rl.trainer.batches.packing import cheapest_batches
        from lightning_rl.trainer.credit.base import CreditContext
        from lightning_rl.trainer.planning.plan import plan_step, transitions
        from lightning_rl.trainer.steps.values import StepValues

        while True:
            tasks = [Task.random(f"s{self._steps}-{i}", self._random) for i in range(TASKS_PER_STEP)]
            groups, success = play(self._trainer.model, tasks, self._generator)
            self._recent.append(success)
            if len(self._recent) == 2 and statistics.fmean(self._recent) >= TARGET:
                return
            self._steps += 1
            if self._steps > MAX_STEPS:
                return
            known = None if self._critic is None else StepValues.of(groups, self._critic)
            plan = plan_step(
                groups,
                self._planning,
                run_id="bench",
                step=self._steps,
                from_version=0,
                context=CreditContext({} if known is None else known.values),
            )
            if plan.trains:
                yield cheapest_batches(transitions(plan.manifest, groups), 8192, self._shape)
            if known is not None:
                known.teach(self._critic, self, groups)

    def value_targets(self, groups: Any, values: Any) -> dict[str, float]:
        from lightning_rl.trainer.planning.selection import judge_group

        judged = [judge_group(group, self._planning.selection) for group in groups]
        return self._planning.credit.value_targets(judged, values)

    def _new_critic(self, model: Any) -> Any:
        import copy

        import torch

        from lightning_rl.trainer.steps.critic import Critic, CriticSettings, OwnBody

        settings = CriticSettings(learning_rate=CRITIC_LEARNING_RATE, epochs=2, micro_batch_tokens=8192)
        return Critic(OwnBody(copy.deepcopy(model.base_model)), settings, self._shape, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Compared:
    rule: str
    learning_rate: float
    outcomes: tuple[Outcome, ...]  # one per seed

    @property
    def median_steps(self) -> float:
        return statistics.median(outcome.steps for outcome in self.outcomes)


def compare(rules: Sequence[str], seeds: Sequence[int], *, workers: int, on_run: Any) -> list[Compared]:
    """Search, then run. `on_run` is called with each finished outcome."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:

        def outcomes(runs: Sequence[Run]) -> list[Outcome]:
            found = []
            for outcome in pool.map(play_out, runs):
                on_run(outcome)
                found.append(outcome)
            return found

        searched = outcomes(
            [Run(rule, rate, seed) for rule in rules for rate in LEARNING_RATES for seed in SEARCH_SEEDS]
        )
        best = {rule: _best_rate(rule, searched) for rule in rules}
        final = outcomes([Run(rule, best[rule], seed) for rule in rules for seed in seeds])
    return [Compared(rule, best[rule], tuple(o for o in final if o.run.rule == rule)) for rule in rules]


def _best_rate(rule: str, searched: Sequence[Outcome]) -> float:
    def mean_steps(rate: float) -> float:
        return statistics.fmean(
            o.steps for o in searched if o.run.rule == rule and o.run.learning_rate == rate
        )

    return min(LEARNING_RATES, key=mean_steps)
