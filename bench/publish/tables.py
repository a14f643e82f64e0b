"""What the bench prints for people: one table per part, and the first few of what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

if TYPE_CHECKING:
    from .killed import Killed
    from .loop_kills import LoopKills
    from .reload import Reloaded
    from .rollback import RolledBack
    from .sabotage import Sabotaged
    from .swaps import Swaps
    from .two_engines import TwoEngines


def _pairs(title: str, rows: Sequence[tuple[str, object]], wrong: Sequence[str] = ()) -> RenderableType:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, str(value))
    return Group(table, *(f"  wrong: {line}" for line in wrong[:5]))


def swaps(done: Swaps) -> RenderableType:
    rows = [
        ("versions", done.versions),
        ("calls while they went live", done.calls),
        ("failed calls", len(done.failed)),
        ("candidate row to live, ms", f"p50 {done.p50_ms:.0f}, {min(done.swap_ms)} to {max(done.swap_ms)}"),
        ("re-scored outside the engine", done.rescored.say()),
        ("episodes that went on to another version", done.num_moved_episodes),
    ]
    return _pairs("LoRA versions under 32 streams", rows, [*done.failed, *done.rescored.mismatches])


def rollback(back: RolledBack) -> RenderableType:
    rows = [
        ("lightning policy rollback said", back.said),
        ("new calls are of version", f"{back.version} (wanted {back.wanted}), after {back.took_sec:.1f} s"),
        ("the probe", f"{back.verdict.get('result')}: {back.verdict.get('reason')}"),
        ("failed calls", len(back.failed)),
        ("re-scored outside the engine", back.rescored.say()),
    ]
    return _pairs("Rollback under load", rows, [*back.failed, *back.rescored.mismatches])


def reload(made: Reloaded) -> RenderableType:
    rows = [
        ("calls meanwhile", made.calls),
        ("failed calls", len(made.failed)),
        ("candidate row to live, ms", ", ".join(map(str, made.swap_ms))),
        ("calls were held for at most, ms", made.held_ms),
        (
            "greedy answers equal to a cold start's",
            f"{made.num_equal} of {made.num_prompts} ({made.num_changed} differ from the base's)",
        ),
        ("re-scored outside the engine", made.rescored.say()),
    ]
    return _pairs("Full weights under 32 streams", rows, [*made.failed, *made.rescored.mismatches])


def sabotage(done: Sabotaged) -> RenderableType:
    table = Table("sabotage", "caught", "because", "with checks off", "failed calls", title="Sabotage")
    for one in done.outcomes:
        off = f"{'harm' if one.is_let_through else 'NO HARM'}: {one.without}"
        caught = "yes" if one.is_caught else "NO"
        table.add_row(one.name, caught, one.reason[:110], off[:70], str(len(one.failed)))
    wrong = [*done.failed, *done.mislabelled]
    beside = [f"beside it, {rescored.say()}" for rescored in done.beside]
    return Group(table, *beside, *(f"  wrong: {line}" for line in wrong[:5]))


def killed(ended: Killed) -> RenderableType:
    rows = [
        ("kills", ended.kills),
        ("the version was then", _counted(ended.killed_at)),
        ("calls cut off", ended.cut),
        ("from the kill to the version being live, s", f"p50 {median(ended.back_sec):.1f}"),
        *(("re-scored outside the engine", one.say()) for one in ended.rescored),
    ]
    return _pairs("Proxy killed in the middle of a swap", rows, [*ended.not_live, *ended.mislabelled])


def two_engines(done: TwoEngines) -> RenderableType:
    rows = [
        ("kills", done.kills),
        ("the version was then", _counted(done.killed_at)),
        ("calls", done.calls),
        ("that the killed engine was answering: broke off", done.broken),
        ("refused though the other engine served", len(done.refused)),
        ("not in the log as the client saw them", len(done.lost)),
        ("admitted on N after another on N + 1", len(done.backwards)),
        ("versions that did not go live", len(done.not_live)),
        ("with checks off, calls harmed by a restart", f"{done.num_harmed} of 16"),
        ("restart of vLLM, s", f"p50 {median(done.start_sec):.0f}"),
        ("then in rotation after, s", f"p50 {median(done.join_sec):.1f}"),
        *(("re-scored outside the engine", one.say()) for one in done.rescored),
    ]
    wrong = [*done.refused, *done.lost, *done.backwards, *done.not_live, *done.mislabelled]
    return _pairs("Two engines, one killed at a random point of an update", rows, wrong)


def loop(found: LoopKills) -> RenderableType:
    rows = [
        ("kills of lightning train --watch", f"{found.kills} ({_counted(found.killed_in)})"),
        ("versions that went live", found.versions),
        ("choices to train", found.choices),
        ("trained twice, left out, strays", f"{found.duplicates}, {found.gaps}, {found.strays}"),
        ("runs (1: every process went on with the first)", found.runs),
    ]
    return _pairs("The loop, killed at random moments", rows)


def _counted(counter: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counter.items()))
