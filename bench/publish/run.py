"""`make bench-publish`: new weights go live while traffic flows, on the real engine; ends with one JSON line.

Parts: swaps, rollback, reload, sabotage, killed, loop, two_engines. Exit code 1 if a bar is missed: a failed
or mislabelled call, a sabotage that was not caught (or does no harm where checks are off), a call admitted
on an older version after a newer one, an answer that the log lacks, a choice trained twice or left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from . import killed, reload, rollback, sabotage, swaps, tables, two_engines
from .processes import Engine
from .stage import stage
from .weights import TorchTrainer, tiny_llama

_MAIN = ("swaps", "rollback", "reload")
_TINY = ("sabotage", "killed", "loop")
PARTS = (*_MAIN, *_TINY, "two_engines")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="whose tokenizer the tiny models have")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, separated by commas")
    parser.add_argument("--versions", type=int, default=20, help="that go live under load (swaps)")
    parser.add_argument("--kills", type=int, default=20, help="of one of two engines (two_engines)")
    parser.add_argument("--proxy-kills", type=int, default=6, help="in the middle of a swap (killed)")
    parser.add_argument("--loop-kills", type=int, default=10, help="of the training loop (loop)")
    parser.add_argument(
        "--whole-model",
        action="store_true",
        help="swaps, rollback, reload with --model itself",
    )
    parser.add_argument("--keep", type=Path, help="folder for logs, versions and vLLM's output; else deleted")
    return parser.parse_args()


@dataclass
class Bench:
    """`on_step` is told what has been done, for the progress bar."""

    options: argparse.Namespace
    folder: Path
    on_step: Callable[[str], None]
    parts: tuple[str, ...]
    doc: dict[str, Any] = field(default_factory=dict)
    is_met: bool = True
    shown: list[Any] = field(default_factory=list)

    def note(self, part: str, is_met: bool, table: Any, **keys: Any) -> None:
        self.doc |= keys
        self.is_met = self.is_met and is_met
        self.shown.append(table)
        self.on_step(f"{part}: {'met' if is_met else 'MISSED'}")

    def wants(self, *parts: str) -> bool:
        return any(part in self.parts for part in parts)

    async def run(self) -> None:
        tiny = tiny_llama(self.folder / "tiny", self.options.model)
        main = self.options.model if self.options.whole_model else tiny
        both = [(main, self._main_parts, _MAIN), (tiny, self._tiny_parts, _TINY)]
        for model in dict.fromkeys((main, tiny)):
            its = [play for of, play, names in both if of == model and self.wants(*names)]
            if its:
                await self._with_engine(model, its)
        if self.wants("two_engines"):
            await self._two_engines(tiny)

    async def _with_engine(self, model: Path, parts: Sequence[Callable[[Engine, Path], Any]]) -> None:
        engine = self._engine(model, "engine")
        engine.start()
        try:
            took = await engine.ready()
            self.on_step(f"engine on {model.name}: ready after {took:.0f} s")
            for play in parts:
                await play(engine, model)
        finally:
            engine.end()

    def _engine(self, model: Path, name: str) -> Engine:
        return Engine(model, self.folder / f"{name}.log")

    def _trainer(self, model: Path, name: str) -> TorchTrainer:
        return TorchTrainer(model, self.folder / f"versions-{name}")

    async def _main_parts(self, engine: Engine, model: Path) -> None:
        trainer = self._trainer(model, "main")
        if self.wants("swaps"):
            done = await swaps.play(self.folder, trainer, engine.url, self.options.versions)
            keys = {
                "versions": done.versions,
                "failed_calls": len(done.failed),
                "version_mismatches": len(done.rescored.mismatches),
                "swap_p50_ms": round(done.p50_ms),
                "swap_model": model.name,
            }
            self.note("swaps", done.is_met, tables.swaps(done), **keys)
        if self.wants("rollback"):
            back = await rollback.play(self.folder, trainer, engine.url)
            doc = {"to": back.version, "sec": round(back.took_sec, 1), "failed_calls": len(back.failed)}
            doc |= {"probe": back.verdict.get("result"), "mismatches": len(back.rescored.mismatches)}
            self.note("rollback", back.is_met, tables.rollback(back), rollback=doc)
        if self.wants("reload"):
            made = await reload.play(
                self.folder, trainer, engine.url, lambda folder: self._engine(folder, "cold")
            )
            doc = {"failed_calls": len(made.failed), "held_ms": made.held_ms, "prompts": made.num_prompts}
            doc |= {"equal": made.num_equal, "mismatches": len(made.rescored.mismatches)}
            self.note("reload", made.is_met, tables.reload(made), reload=doc)

    async def _tiny_parts(self, engine: Engine, model: Path) -> None:
        if self.wants("sabotage"):
            trainer = self._trainer(model, "sabotage")
            other = tiny_llama(self.folder / "tiny-other", self.options.model, seed=7)
            foreign = self._trainer(other, "foreign")
            done = await sabotage.play(self.folder, trainer, foreign, engine.url, on_each=self.on_step)
            keys = {
                "sabotage_caught": done.num_caught,
                "sabotage_tried": len(done.outcomes),
                "sabotage_failed_calls": len(done.failed),
            }
            self.note("sabotage", done.is_met, tables.sabotage(done), **keys)
        if self.wants("killed"):
            trainer = self._trainer(model, "killed")
            ended = await killed.play(
                self.folder, trainer, engine.url, kills=self.options.proxy_kills, on_each=self.on_step
            )
            doc = {"kills": ended.kills, "not_live": len(ended.not_live)}
            doc |= {"mismatches": len(ended.mislabelled)}
            self.note("killed", ended.is_met, tables.killed(ended), proxy_kills=doc)

        if self.wants("loop"):
            from .loop_kills import loop_kills

            trainer = self._trainer(model, "loop")
            async with stage(self.folder, trainer, [engine.url]) as scene:
                play = partial(loop_kills, proxy_url=scene.url, on_each=self.on_step)
                found = await asyncio.to_thread(play, scene.db, model, self.options.loop_kills, 0)
            keys = {"loop_kills": found.kills, "duplicates": found.duplicates, "gaps": found.gaps}
            self.note("loop", found.is_met, tables.loop(found), **keys)

    async def _two_engines(self, model: Path) -> None:
        engines = [self._engine(model, f"engine-{name}") for name in ("a", "b")]
        for engine in engines:
            engine.start()
        try:
            for engine in engines:
                await engine.ready()
            trainer = self._trainer(model, "two")
            done = await two_engines.play(
                self.folder, trainer, engines, kills=self.options.kills, on_each=self.on_step
            )
        finally:
            for engine in engines:
                engine.end()
        doc = {"kills": done.kills, "calls": done.calls, "backwards": len(done.backwards)}
        doc |= {"lost": len(done.lost), "refused": len(done.refused), "broken": done.broken}
        doc |= {"mismatches": len(done.mislabelled)}
        # An engine that is restarted in the middle of an update is the tenth sabotage.
        keys = {
            "sabotage_caught": self.doc.get("sabotage_caught", 0) + done.is_met,
            "sabotage_tried": self.doc.get("sabotage_tried", 0) + 1,
        }
        self.note("two_engines", done.is_met, tables.two_engines(done), two_engines=doc, **keys)


def main() -> int:
    options = arguments()
    parts = tuple(part.strip() for part in options.parts.split(","))
    if unknown := set(parts) - set(PARTS):
        print(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="lightning-publish-") as temporary,
        Progress(console=Console(stderr=True), transient=True) as bar,
    ):
        task = bar.add_task("starting", total=None)

        def on_step(what: str) -> None:
            bar.update(task, description=what)
            bar.console.print(f"[{time.monotonic() - began:5.0f} s] {what}", highlight=False)

        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, folder, on_step, parts)
        asyncio.run(bench.run())
    console = Console(width=150)
    for table in bench.shown:
        console.print(table)
    console.print(f"{time.monotonic() - began:.0f} s in all; bars {'met' if bench.is_met else 'MISSED'}")
    print(json.dumps(bench.doc))
    return 0 if bench.is_met else 1


if __name__ == "__main__":
    sys.exit(main())
