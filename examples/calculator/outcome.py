"""What the demo shows at its end: exactness by the agent's own account, a table, a plot."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import Reply
from transformers import AutoTokenizer

from lightning_rl.engine.client import EngineClient
from lightning_rl.records import Call, CallStatus
from lightning_rl.store.database import Database
from lightning_rl.store.read import calls_by_upstream_ids


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out set, each task once at temperature 1."""

    success: float
    num_episodes: int

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.success * (1 - self.success) / self.num_episodes)


def count_exact(db: str, model: Path, replies: Sequence[Reply]) -> int:
    """How many of the replies that the agent received stand exactly in the log.

    Exact: the call of that answer id is there and complete, its prompt ids are there, its choice has aligned
    ids and logprobs and no quarantine, and the ids decode to the very text that the agent received.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)

    def is_exact(call: Call | None, reply: Reply) -> bool:
        return (
            call is not None
            and call.status is CallStatus.COMPLETE
            and len(call.prompt_ids) > 0
            and len(call.choices) == 1
            and call.choices[0].quarantine is None
            and len(call.choices[0].completion_ids) == len(call.choices[0].behavior_logprobs) > 0
            and visible_text(call.choices[0].completion_ids) == reply.text
        )

    def visible_text(ids: Sequence[int]) -> str:
        # An answer that max_tokens ends inside a character shows nothing of its last tokens.
        text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
        return visible_text(ids[:-1]) if text.endswith("\N{REPLACEMENT CHARACTER}") else text

    calls = _calls_of(db, replies)
    return sum(is_exact(calls.get(reply.id), reply) for reply in replies)


def worst_rescored_gap(db: str, engine_url: str, replies: Sequence[Reply]) -> float:
    """Largest |logprob of the recorded ids, scored anew by the engine - recorded logprob|.

    The calls must be of the version that the engine serves now.
    """

    async def score() -> float:
        gaps = [0.0]
        async with EngineClient(engine_url) as engine:
            model = (await engine.base_model()).name
            for call in _calls_of(db, replies).values():
                (choice,) = call.choices
                scored = await engine.score(model, call.prompt_ids + choice.completion_ids)
                pairs = zip(choice.behavior_logprobs, scored[len(call.prompt_ids) - 1 :], strict=True)
                gaps += (abs(recorded - again) for recorded, again in pairs)
        # max() alone would pass over a NaN.
        return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)

    return asyncio.run(score())


def _calls_of(db: str, replies: Sequence[Reply]) -> dict[str, Call]:
    database = Database.open(db, migrate=False)
    try:
        with database.read() as connection:
            return calls_by_upstream_ids(connection, [reply.id for reply in replies])
    finally:
        database.close()


def table(steps: Sequence[dict[str, Any]], before: Evaluation, after: Evaluation) -> str:
    """Success per policy version, one line each."""
    titles = ("step", "version", "training success", "gap mean", "gap max", "grad norm")
    lines = ["  ".join(f"{title:>{width}}" for title, width in zip(titles, (4, 7, 16, 8, 8, 9), strict=True))]
    for step in steps:
        success = f"{step['reward_mean']:16.3f}" if step["reward_mean"] is not None else f"{'-':>16}"
        gaps = [
            f"{step[key]:8.4f}" if step[key] is not None else f"{'-':>8}" for key in ("gap_mean", "gap_max")
        ]
        norm = f"{step['grad_norm']:9.3f}" if step["grad_norm"] is not None else f"{'-':>9}"
        version = step["to_version"] if step["to_version"] is not None else "-"
        lines.append(f"{step['step']:>4}  {version:>7}  {success}  {gaps[0]}  {gaps[1]}  {norm}")
    lines.append(
        f"held out, temperature 1, {after.num_episodes} sums: "
        f"{before.success:.3f} ± {before.standard_error:.3f} before, "
        f"{after.success:.3f} ± {after.standard_error:.3f} after"
    )
    return "\n".join(lines)


def plot(path: Path, steps: Sequence[dict[str, Any]], before: Evaluation, after: Evaluation) -> None:
    """Success by policy version: training episodes as a line, the held-out set before and after as points."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        [step["from_version"] for step in steps],
        [step["reward_mean"] for step in steps],
        marker="o",
        label="training episodes, by the version that played them",
    )
    last = max((step["to_version"] or step["from_version"] for step in steps), default=0)
    axes.errorbar(
        [0, last],
        [before.success, after.success],
        yerr=[2 * before.standard_error, 2 * after.standard_error],
        fmt="s",
        capsize=4,
        color="black",
        label=f"{after.num_episodes} held-out sums (± 2 standard errors)",
    )
    axes.set(
        xlabel="policy version", ylabel="success at temperature 1", ylim=(0, 1.03), title="Calculator agent"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
