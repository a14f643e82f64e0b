"""Figures of a run over its steps, drawn in the terminal (plotille) or into a picture (matplotlib).

Both libraries are optional: whoever asks for a drawing without them is told what to install.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError

if TYPE_CHECKING:
    from ..run_view import StepFacts

INSTALL = "pip install 'lightning-rl[plot]'"
_HEIGHT = 8  # lines of one drawing, without its axis
_WIDEST = 72


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    read: Callable[[Mapping[str, Any]], float | None]  # from a step's line

    def points(self, steps: Sequence[StepFacts]) -> list[tuple[int, float]]:
        """(step, value) of the steps that have one."""
        found = ((step.step, self.read(step.metrics)) for step in steps)
        return [(step, value) for step, value in found if value is not None]


def _number(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    def read(metrics: Mapping[str, Any]) -> float | None:
        value = metrics.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    return read


def _left_out(metrics: Mapping[str, Any]) -> float | None:
    made, trained = metrics.get("episodes"), metrics.get("episodes_trained")
    return None if made is None or trained is None else float(made - trained)


FIGURES = {
    "reward": Figure("mean reward", _number("reward_mean")),
    "gap": Figure("gap between engine and trainer, mean per token", _number("gap_mean")),
    "grad": Figure("gradient norm, before it is scaled down", _number("grad_norm")),
    "speed": Figure("agent's tokens per second", _number("call_tokens_per_sec")),
    "excluded": Figure("episodes left out", _left_out),
    "loss": Figure("loss", _number("loss")),
    "lr": Figure("learning rate", _number("lr")),
    "clipped": Figure("share of tokens at the clip", _number("clip_fraction")),
    "entropy": Figure("entropy, mean per token", _number("entropy_mean")),
    "kl": Figure("KL divergence to the base model", _number("kl_mean")),
    "critic": Figure("variance of the returns that the critic explains", _number("explained_variance")),
    "seconds": Figure("seconds from selection to verdict", _number("seconds")),
}
DEFAULT = ("reward", "gap", "grad", "speed", "excluded")


def chosen(names: Sequence[str], steps: Sequence[StepFacts]) -> list[Figure]:
    """By the names above, or any number of the step's line. UserError names what there is."""
    numbers = {key for step in steps for key in step.metrics if _number(key)(step.metrics) is not None}
    unknown = [name for name in names if name not in FIGURES and name not in numbers]
    if unknown:
        others = sorted(numbers - FIGURES.keys())
        raise UserError(f"--plot {unknown[0]!r}: choose one of {', '.join([*FIGURES, *others])}")
    return [FIGURES[name] if name in FIGURES else Figure(name, _number(name)) for name in names]


def can_draw() -> bool:
    return find_spec("plotille") is not None


def drawn(figure: Figure, steps: Sequence[StepFacts], columns: int) -> str:
    """Title, curve and axis, ready to print; one line where there is no curve."""
    import plotille

    points = figure.points(steps)
    if not points:
        return f"{figure.title}: no step has it"
    xs, ys = [step for step, _ in points], [value for _, value in points]
    if min(ys) == max(ys):
        return f"{figure.title}: {ys[0]:.4g} in every step that has it"
    low, high = _range(ys)
    canvas = plotille.Figure()
    canvas.with_colors = canvas.origin = False
    canvas.width, canvas.height = max(20, min(columns, _WIDEST) - 14), _HEIGHT
    # A tick every ten columns: each a whole step.
    steps_per_tick = math.ceil((xs[-1] - xs[0]) * 10 / canvas.width)
    canvas.set_x_limits(xs[0], xs[0] + steps_per_tick * canvas.width / 10)
    canvas.set_y_limits(low, high)
    canvas.x_label, canvas.y_label = "step", ""
    canvas.x_ticks_fkt = lambda value, _: f"{value:.0f}"
    canvas.y_ticks_fkt = lambda value, _: f"{value:.4g}"
    canvas.plot(xs, ys)
    _, _, curve = str(canvas.show()).partition("\n")  # its first line would name the axis again
    return f"{figure.title}: {ys[0]:.4g} -> {ys[-1]:.4g}\n{curve}"


def save(figures: Sequence[Figure], steps: Sequence[StepFacts], title: str, file: Path) -> None:
    """One picture with a panel per figure; what it is by the file's ending. UserError where that can't be."""
    if find_spec("matplotlib") is None:
        raise UserError(f"{file} needs matplotlib: {INSTALL}")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    picture, panels = pyplot.subplots(
        len(figures), 1, figsize=(8, 2.1 * len(figures) + 0.6), squeeze=False, sharex=True
    )
    try:
        for figure, panel in zip(figures, panels[:, 0], strict=True):
            points = figure.points(steps)
            panel.plot([step for step, _ in points], [value for _, value in points], marker=".")
            panel.set_title(figure.title, fontsize="small", loc="left")
            panel.grid(alpha=0.3)
        panels[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[-1, 0].set_xlabel("step")
        picture.suptitle(title, fontsize="medium")
        picture.tight_layout()
        picture.savefig(file)
    except OSError as error:
        raise UserError(f"can't write {file}: {error.strerror}") from None
    except ValueError as error:  # an ending that matplotlib has no format for
        raise UserError(f"can't write {file}: {error}") from None
    finally:
        pyplot.close(picture)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Some room around it; what is never negative is not drawn as if it could be."""
    low, high = min(values), max(values)
    room = (high - low) * 0.05
    return (max(0.0, low - room) if low >= 0 else low - room), high + room
