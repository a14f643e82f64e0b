"""What a run tells people: one line per step, a progress bar, and the same as JSON lines in the run folder.

Knows no torch and no database: it is given finished numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .planning.plan import StepCounts

STEP_LOG = "steps.jsonl"


@dataclass(frozen=True, slots=True)
class StepLine:
    """One step, as printed, logged and stored. None where nothing was trained."""

    step: int  # 0-based number of the manifest within the run
    from_version: int
    to_version: int | None
    reward_mean: float | None  # over judged episodes, those of groups without variance included
    groups: int
    groups_trained: int
    episodes: int
    episodes_trained: int
    episodes_excluded: Mapping[str, int]  # by reason
    choices: int
    choices_trained: int
    choices_excluded: Mapping[str, int]
    trained_tokens: int
    gap_mean: float | None = (
        None  # |policy_logprobs - behavior_logprobs| before the update, over trained tokens
    )
    gap_max: float | None = None
    clip_fraction: float | None = None
    entropy_mean: float | None = None
    loss: float | None = None
    grad_norm: float | None = None  # before clipping
    lr: float | None = None  # learning rate; of the first epoch, as the figures above
    rounded_away: float | None = (
        None  # share of the weights with a gradient that it left as they were in bfloat16; None: not watched
    )
    kl_mean: float | None = None  # to the reference model, over trained tokens
    critic_loss: float | None = None
    explained_variance: float | None = None  # of the returns, by the values before the critic's step
    value_mean: float | None = None
    call_tokens_per_sec: float | None = None  # prompts and completions, as the agent's calls had them
    unique_tokens_per_sec: float | None = None  # what was computed once the shared prefixes are counted once
    micro_batches: int = 0
    train_sec: float = 0.0
    save_sec: float = 0.0
    publish_sec: float = 0.0
    seconds: float = 0.0  # from the groups' selection to the version's verdict

    @classmethod
    def counted(cls, counts: StepCounts, *, step: int, from_version: int) -> Self:
        """The line of a step of which only the plan is known yet."""
        shared = {name: getattr(counts, name) for name in _FROM_COUNTS}
        return cls(step=step, from_version=from_version, to_version=None, **shared)

    def as_json(self) -> dict[str, Any]:
        return {name: _rounded(value) for name, value in asdict(self).items()}


_FROM_COUNTS = (
    "reward_mean",
    "groups",
    "groups_trained",
    "episodes",
    "episodes_trained",
    "episodes_excluded",
    "choices",
    "choices_trained",
    "choices_excluded",
    "trained_tokens",
)


_TRACKED = {
    "to_version": "policy/version",
    "reward_mean": "reward/mean",
    "groups": "groups/all",
    "groups_trained": "groups/trained",
    "episodes": "episodes/all",
    "episodes_trained": "episodes/trained",
    "episodes_excluded": "episodes/excluded",
    "choices": "choices/all",
    "choices_trained": "choices/trained",
    "choices_excluded": "choices/excluded",
    "trained_tokens": "tokens/trained",
    "call_tokens_per_sec": "tokens/per_sec",
    "unique_tokens_per_sec": "tokens/unique_per_sec",
    "gap_mean": "gap/mean",
    "gap_max": "gap/max",
    "clip_fraction": "policy/clip_fraction",
    "entropy_mean": "policy/entropy",
    "kl_mean": "policy/kl",
    "critic_loss": "critic/loss",
    "explained_variance": "critic/explained_variance",
    "value_mean": "critic/value_mean",
    "train_sec": "time/train_sec",
    "save_sec": "time/save_sec",
    "publish_sec": "time/publish_sec",
    "seconds": "time/step_sec",
}
"""What TensorBoard and the like call a figure; others keep their name, below `step/`."""

_TRACKED_ELSEWHERE = frozenset({"step", "from_version", "loss", "grad_norm", "lr"})
"""The number of the manifest, and what transformers logs by itself at each optimizer step."""


def figures(line: StepLine) -> dict[str, float]:
    """The line's numbers for a tracker of experiments; a count by reason is a figure for each reason."""
    found: dict[str, float] = {}
    for name, value in line.as_json().items():
        shown = _TRACKED.get(name, f"step/{name}")
        if isinstance(value, Mapping):
            found |= {f"{shown}/{reason}": float(count) for reason, count in value.items()}
        elif value is not None and name not in _TRACKED_ELSEWHERE:
            found[shown] = float(value)
    return found


def human(line: StepLine) -> str:
    """One line for a terminal."""
    parts = [f"step {line.step}", f"reward {_number(line.reward_mean, '.3f')}"]
    parts.append(f"episodes {_of(line.episodes_trained, line.episodes, line.episodes_excluded)}")
    parts.append(f"choices {_of(line.choices_trained, line.choices, line.choices_excluded)}")
    if line.choices_trained:
        parts.append(f"gap {_number(line.gap_mean, '.4f')} max {_number(line.gap_max, '.3f')}")
        parts.append(f"clipped {_number(line.clip_fraction, '.1%')}")
        parts.append(f"grad {_number(line.grad_norm, '.3g')}")
        parts.append(f"lr {_number(line.lr, '.3g')}")
        parts.append(
            f"{_number(line.call_tokens_per_sec, '.0f')} tokens/s "
            f"({_number(line.unique_tokens_per_sec, '.0f')} unique)"
        )
    if line.rounded_away is not None:
        parts.append(f"rounded away {line.rounded_away:.0%}")
    if line.critic_loss is not None:
        explained = _number(line.explained_variance, ".2f")
        parts.append(f"critic {_number(line.critic_loss, '.3g')}, explains {explained}")
    parts.append(f"{line.seconds:.1f} s")
    parts.append("no new version" if line.to_version is None else f"version {line.to_version}")
    return " | ".join(parts)


class RunReport:
    """Prints to stderr (bar and messages) and stdout (step lines), and appends to `<run
    folder>/steps.jsonl`."""

    def __init__(self, folder: Path, *, as_json: bool, progress: bool) -> None:
        self._as_json = as_json
        self._stdout = Console(soft_wrap=True, highlight=False)
        self._stderr = Console(stderr=True, soft_wrap=True, highlight=False)
        self._file = folder / STEP_LOG
        self._log: TextIO
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._stderr,
            transient=True,
            disable=not (progress and self._stderr.is_terminal),
        )
        self._task = self._bar.add_task("starting", total=None)
        self.on_step: Callable[[StepLine], None] = lambda line: None

    def __enter__(self) -> Self:
        self._log = self._file.open("a", encoding="utf-8")
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._log.close()

    def doing(self, what: str, done: int = 0, total: int | None = None) -> None:
        """What the bar says; `total` None: nobody knows how long."""
        self._bar.update(self._task, description=escape(what), completed=done, total=total)

    def message(self, text: str) -> None:
        """One line for people, beside the steps."""
        self._stderr.print(text, markup=False)

    def step(self, line: StepLine) -> None:
        packed = json.dumps(line.as_json())
        self._log.write(packed + "\n")
        self._log.flush()
        self._stdout.print(packed if self._as_json else human(line), markup=False)
        self._stdout.file.flush()
        self.on_step(line)


def mend_log(folder: Path, finished: Sequence[Mapping[str, Any]]) -> None:
    """The file holds one line for each finished step, where a crash left half a line, or none."""
    file = folder / STEP_LOG
    whole: dict[int, str] = {}
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with suppress(ValueError):
            whole[json.loads(text)["step"]] = text
    partial = file.with_name(f".{STEP_LOG}")
    partial.write_text("".join(whole.get(line["step"], json.dumps(line)) + "\n" for line in finished))
    partial.replace(file)


def _of(trained: int, total: int, excluded: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in excluded.items())
    return f"{trained}/{total}" + (f" ({reasons})" if reasons else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _rounded(value: Any) -> Any:
    """To 6 digits behind the point, or as many that count: a learning rate is small."""
    if not isinstance(value, float):
        return value
    return round(value, 6) if abs(value) >= 1.0 else float(f"{value:.6g}")
