"""`lightning proxy serve` with every check of a version switched off: what the checks are held against.

    python unchecked.py judging --db … --engine-url …       versions are not looked at
    python unchecked.py judging,bringing --db … …          and engines that come back are not set up either

A sabotage that is harmless here as well would prove nothing. Nothing in the product can be switched off like
this: the checks are taken out of the running process, from outside.
"""

from __future__ import annotations

import sys
from typing import Any

from lightning_rl.engine.client import EngineModel
from lightning_rl.proxy.live.engines import Holding
from lightning_rl.proxy.publishing import arrival, candidates, place, prober, rotation, swap
from lightning_rl.proxy.publishing.arrival import Arrived, Seen, Target
from lightning_rl.proxy.publishing.place import Engine, Handle
from lightning_rl.proxy.publishing.probe import Judgement, Result
from lightning_rl.records import PolicyVersion


class AcceptsAll(prober.Prober):
    async def after(self, model: str, before: prober.Before | None) -> prober.Probed:
        judged = Judgement(Result.FOLLOWS, "not looked at", 1, 0.0, 0.0, 0.0, None, None)
        return prober.Probed(judged, None, None)


async def no_look_at_files(version: PolicyVersion, base: EngineModel) -> None:
    return None


async def load_and_believe(engine: Engine, name: str, path: str) -> None:
    if name not in {model.name for model in await engine.models()}:
        await engine.load_lora(name, path)


async def nothing_is_missing(client: Engine, holding: Holding, lacks: Any) -> None:
    return None


async def bring_nothing(handle: Handle, target: Target, seen: Seen) -> Arrived:
    return Arrived(handle, await handle.client.base_model(), await seen(handle), frozenset())


def switch_off(*, brings: bool) -> None:
    changes: dict[Any, dict[str, Any]] = {
        swap: {
            "Prober": AcceptsAll,
            "ensure_adapter": load_and_believe,
            "what_is_missing": nothing_is_missing,
        },
        arrival: {
            "Prober": AcceptsAll,
            "ensure_adapter": load_and_believe,
            "what_is_missing": nothing_is_missing,
        },
        place: {"what_is_missing": nothing_is_missing},
        candidates: {"check_version_files": no_look_at_files},
        rotation: {} if brings else {"bring": bring_nothing},
    }
    for module, names in changes.items():
        for name, instead in names.items():
            assert hasattr(module, name), f"{module.__name__}.{name} is gone: this file has to follow"
            setattr(module, name, instead)


if __name__ == "__main__":
    from lightning_rl.cli import app

    switch_off(brings="bringing" not in sys.argv[1].split(","))
    app(["proxy", "serve", *sys.argv[2:]])
