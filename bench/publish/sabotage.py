"""Part sabotage: what is wrong with a version is caught before it serves, and the old one keeps serving.

Each sabotage is played twice under load: against the product, and against a proxy whose checks are switched
off (unchecked.py), where it must do its harm. One that is harmless there proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fakes.fake_vllm import serving

from lightning_rl.records import PolicyVersion, TokenIds, VersionStatus, WeightsKind

from .clients import Clients
from .faults import LyingEngine
from .rescoring import Rescored
from .stage import Stage, stage
from .weights import BASE, Trainer, Weights, copied

NUM_STREAMS = 8
NUM_ASKED = 8  # calls whose weights are looked at afterwards
FLIP_TIMEOUT_SEC = 30.0
FOREIGN = "foreign"


class TwoTrainers:
    """The bench's own, and that of another base model: names that begin with FOREIGN are its."""

    def __init__(self, own: Trainer, foreign: Trainer) -> None:
        self._own, self._foreign = own, foreign
        self.sequences = own.sequences

    def adapter(self, name: str) -> Weights:
        return self._of(name).adapter(name)

    def full(self, name: str) -> Weights:
        return self._of(name).full(name)

    def score(self, name: str, ids: TokenIds, num_last: int | None = None) -> list[float]:
        return self._of(name).score(BASE if name == FOREIGN else name, ids, num_last)

    def _of(self, name: str) -> Trainer:
        return self._foreign if name.startswith(FOREIGN) else self._own


@dataclass
class Scene:
    """`old`: what serves before the sabotage."""

    stage: Stage
    engine: LyingEngine
    clients: Clients
    old: Weights
    label: str

    async def make(self, what: str, kind: WeightsKind) -> Weights:
        trainer = self.stage.trainer
        make = trainer.adapter if kind is WeightsKind.LORA else trainer.full
        return await asyncio.to_thread(make, f"{what}-{self.label}")


Play = Callable[[Scene], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Sabotage:
    """`harm`: how it shows where nothing is checked. "serves": the version goes live and its calls' ids do
    not fit what it claims. "live": it goes live. "heard": the engine was asked to load it."""

    name: str
    kind: WeightsKind
    play: Play
    harm: str
    is_harmless: bool = False  # nothing is wrong with it: it must go live, and be called indistinguishable


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    is_caught: bool
    is_let_through: bool
    """With the checks switched off."""
    reason: str
    without: str
    failed: list[str] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        return self.is_caught and self.is_let_through and not self.failed


# --- what is done ---


async def wrong_adapter(scene: Scene) -> int:
    meant = await scene.make("meant", WeightsKind.LORA)
    scene.engine.load_instead = (await scene.make("wrong", WeightsKind.LORA)).path
    scene.engine.hides_path = True
    return await scene.stage.hand_in(meant, before=scene.old.name)


async def older_path(scene: Scene) -> int:
    scene.engine.load_instead = scene.old.path
    scene.engine.hides_path = False
    meant = await scene.make("newer", WeightsKind.LORA)
    return await scene.stage.hand_in(meant, before=scene.old.name)


async def another_base(scene: Scene) -> int:
    foreign = await scene.make(FOREIGN, WeightsKind.LORA)
    return await scene.stage.hand_in(foreign, before=FOREIGN)


async def cut_file(scene: Scene) -> int:
    weights = copied(await scene.make("whole", WeightsKind.LORA), f"cut-{scene.label}")
    (file,) = weights.path.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    return await scene.stage.hand_in(weights, before=scene.old.name, promised=f"whole-{scene.label}")


async def half_written(scene: Scene) -> int:
    """As long as it should be, and zeros where the disk was full."""
    weights = copied(await scene.make("complete", WeightsKind.LORA), f"half-{scene.label}")
    (file,) = weights.path.glob("*.safetensors")
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size // 2)
        opened.truncate(size)
    return await scene.stage.hand_in(weights, before=scene.old.name, promised=f"complete-{scene.label}")


async def flipped_early(scene: Scene) -> int:
    """Somebody marks a version as live that no engine has loaded, and that is not what its probe says."""
    meant = await scene.make("claimed", WeightsKind.LORA)
    other = await scene.make("flipped", WeightsKind.LORA)
    return await scene.stage.hand_in(
        other, before=scene.old.name, promised=meant.name, status=VersionStatus.LIVE
    )


async def nothing_differs(scene: Scene) -> int:
    same = copied(scene.old, f"same-{scene.label}")
    return await scene.stage.hand_in(same, before=scene.old.name, promised=scene.old.name)


async def cache_stays(scene: Scene) -> int:
    weights = await scene.make("cached", WeightsKind.FULL)
    scene.engine.skips_reset = True
    return await scene.stage.hand_in(weights, before=scene.old.name)


async def reload_skipped(scene: Scene) -> int:
    weights = await scene.make("skipped", WeightsKind.FULL)
    scene.engine.skips_reload = True
    return await scene.stage.hand_in(weights, before=scene.old.name)


LORA, FULL = WeightsKind.LORA, WeightsKind.FULL
SABOTAGES = (
    Sabotage("wrong adapter under the right name", LORA, wrong_adapter, "serves"),
    Sabotage("adapter loaded from an older path", LORA, older_path, "serves"),
    Sabotage("adapter of another base model", LORA, another_base, "serves"),
    Sabotage("truncated file", LORA, cut_file, "heard"),
    Sabotage("half-written file of the right size", LORA, half_written, "serves"),
    Sabotage("row says live before anything was loaded", LORA, flipped_early, "serves"),
    Sabotage("weights that differ by nothing", LORA, nothing_differs, "live", is_harmless=True),
    Sabotage("prefix cache not reset", FULL, cache_stays, "serves"),
    Sabotage("reload answered 200 and not done", FULL, reload_skipped, "serves"),
)


# --- what came of it ---


@dataclass(frozen=True, slots=True)
class Seen:
    """`num_calls`: answered afterwards. `num_wrong`: those of them that do not fit what their rows claim."""

    row: PolicyVersion
    was_heard: bool  # the engine was asked to load that folder
    serves: bool  # new calls are the version's
    num_wrong: int
    num_calls: int
    failed: list[str]

    @property
    def result(self) -> str:
        return str((self.row.verdict or {}).get("result"))

    @property
    def reason(self) -> str:
        return str((self.row.verdict or {}).get("reason", f"it is {self.row.status}"))


def is_caught(sabotage: Sabotage, seen: Seen) -> bool:
    if seen.num_wrong:
        return False
    if sabotage.is_harmless:
        return seen.serves and seen.result == "indistinguishable"
    is_kept_out = seen.row.status is VersionStatus.REJECTED and not seen.serves
    return is_kept_out and not (sabotage.harm == "heard" and seen.was_heard)


def did_harm(sabotage: Sabotage, seen: Seen) -> bool:
    if sabotage.harm == "heard":
        return seen.was_heard
    if sabotage.harm == "live":
        return seen.serves and seen.result != "indistinguishable"
    return seen.num_wrong > 0


async def _look(scene: Scene, sabotage: Sabotage) -> Seen:
    asked, failed = len(scene.engine.asked), len(scene.clients.failed)
    version = await sabotage.play(scene)
    row = await _decided(scene.stage, version, was_flipped=sabotage.play is flipped_early)
    ids = await scene.clients.ask_some(NUM_ASKED)
    found = await scene.stage.rescored(ids)
    served = {call.policy_version for call in scene.stage.calls(ids).values()}
    return Seen(
        row,
        was_heard=str(row.path) in scene.engine.asked[asked:],
        serves=version in served,
        num_wrong=len(found.mismatches),
        num_calls=found.num_calls,
        failed=[f"{one.episode}: {one.error}" for one in scene.clients.failed[failed:]],
    )


async def _decided(scene: Stage, version: int, *, was_flipped: bool) -> PolicyVersion:
    row = await scene.verdict(version)
    if was_flipped:  # a row that says live is decided when somebody has looked at it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLIP_TIMEOUT_SEC):
                while row.status is VersionStatus.LIVE and row.verdict is None:
                    await asyncio.sleep(0.1)
                    row = await scene.verdict(version)
    return row


@dataclass
class Acts:
    """What is the same for all of them."""

    folder: Path
    trainer: Trainer
    url: str  # of the engine that lies
    engine: LyingEngine
    on_each: Callable[[str], None]
    num_streams: int

    async def play(
        self, sabotages: Sequence[Sabotage], switched_off: str
    ) -> tuple[list[Seen], list[Rescored]]:
        """One after the other, under load, on a log for each kind of weights; and what the load's calls were.

        With the checks off the load proves nothing, and is not re-scored.
        """
        seen: list[Seen] = []
        beside: list[Rescored] = []
        for kind, group in itertools.groupby(sabotages, key=lambda sabotage: sabotage.kind):
            async with stage(self.folder, self.trainer, [self.url], switched_off) as scene:
                clients = scene.clients(num_streams=self.num_streams, max_tokens=16)
                async with clients.calling():
                    seen += await self._group(scene, clients, list(group), kind)
                if not switched_off:
                    beside.append(await scene.rescored(clients.call_ids))
        return seen, beside

    async def _group(
        self, scene: Stage, clients: Clients, sabotages: Sequence[Sabotage], kind: WeightsKind
    ) -> list[Seen]:
        """A good version serves before each: where nothing is checked, the last sabotage has harmed it."""
        label = "off" if scene.switched_off else "on"
        make = self.trainer.adapter if kind is WeightsKind.LORA else self.trainer.full
        seen: list[Seen] = []
        old: Weights | None = None
        for number, sabotage in enumerate(sabotages):
            if old is None or scene.switched_off:
                old = await asyncio.to_thread(make, f"good-{kind.value}-{number}-{label}")
                await scene.go_live(old, before=scene.live_name())
            seen.append(await _look(Scene(scene, self.engine, clients, old, label), sabotage))
            old = None if sabotage.is_harmless else old
            self.on_each(f"{sabotage.name}, checks {label}")
        return seen


@dataclass(frozen=True, slots=True)
class Sabotaged:
    """`beside`: the calls that went on beside the sabotages, by kind of weights."""

    outcomes: list[Outcome]
    beside: list[Rescored]

    @property
    def num_caught(self) -> int:
        return sum(outcome.is_met for outcome in self.outcomes)

    @property
    def failed(self) -> list[str]:
        return [call for outcome in self.outcomes for call in outcome.failed]

    @property
    def mislabelled(self) -> list[str]:
        return [call for rescored in self.beside for call in rescored.mismatches]

    @property
    def is_met(self) -> bool:
        return self.num_caught == len(self.outcomes) and not self.mislabelled


async def play(
    folder: Path,
    trainer: Trainer,
    foreign: Trainer,
    engine_url: str,
    *,
    on_each: Callable[[str], None],
    sabotages: Sequence[Sabotage] = SABOTAGES,
    num_streams: int = NUM_STREAMS,
) -> Sabotaged:
    engine = LyingEngine(engine_url)
    with serving(engine, lifespan="on") as url:
        acts = Acts(folder, TwoTrainers(trainer, foreign), url, engine, on_each, num_streams)
        on, beside = await acts.play(sabotages, "")
        off, _ = await acts.play(sabotages, "judging")
    return Sabotaged([_outcome(*each) for each in zip(sabotages, on, off, strict=True)], beside)


def _outcome(sabotage: Sabotage, checked: Seen, unchecked: Seen) -> Outcome:
    misfits = f"{unchecked.num_wrong} of {unchecked.num_calls} calls do not fit"
    return Outcome(
        name=sabotage.name,
        is_caught=is_caught(sabotage, checked),
        is_let_through=did_harm(sabotage, unchecked),
        reason=checked.reason,
        without=misfits if unchecked.num_wrong else unchecked.reason,
        failed=checked.failed,
    )
