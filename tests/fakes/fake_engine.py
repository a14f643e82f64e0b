"""An engine in memory, with weights that are one number, a prefix cache, and ways to be sabotaged."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from pathlib import Path

from lightning_rl.engine.checksum import checksum_of
from lightning_rl.engine.client import EngineGoneError, EngineModel, EngineRefusedError
from lightning_rl.records import (
    Logprobs,
    PolicyVersion,
    ProbeSequence,
    TokenIds,
    VersionStatus,
    WeightsKind,
    logprobs,
    now_ms,
    token_ids,
)

BASE = "base"
PROBED = (token_ids(range(3, 60)), token_ids(range(100, 180)))


def write_folder(folder: Path, weight: float, *, is_adapter: bool = False) -> str:
    """A version's folder whose one tensor is `weight`; gives its checksum."""
    folder.mkdir(parents=True)
    name = "lora_A" if is_adapter else "w"
    header = json.dumps({name: {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    file = folder / ("adapter_model.safetensors" if is_adapter else "model.safetensors")
    file.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<d", weight))
    (folder / ("adapter_config.json" if is_adapter else "config.json")).write_text("{}")
    return checksum_of(folder)


def read_weight(folder: str) -> float:
    if not Path(folder).is_dir():
        raise EngineRefusedError(f"no folder {folder}", 404)
    (file,) = Path(folder).glob("*.safetensors")
    return float(struct.unpack("<d", file.read_bytes()[-8:])[0])


def model_logprobs(weight: float, ids: TokenIds) -> Logprobs:
    """What this "model" thinks of ids[1:]: some tokens move much with the weight, most move little."""
    return logprobs([-2 + weight * 0.1 * math.sin(token + i) ** 9 for i, token in enumerate(ids[1:])])


def trained_version(
    folder: Path, version: int, kind: WeightsKind, before: float | None = None
) -> PolicyVersion:
    """A candidate whose weight is its number, with its folder; `before`: the weight before its step."""
    path, weight = folder / f"v{version}", float(version)
    old = weight - 1 if before is None else before
    return PolicyVersion(
        policy="policy",
        version=version,
        status=VersionStatus.CANDIDATE,
        kind=kind,
        path=str(path),
        checksum=write_folder(path, weight, is_adapter=kind is WeightsKind.LORA),
        probe=tuple(
            ProbeSequence(ids, model_logprobs(old, ids), model_logprobs(weight, ids)) for ids in PROBED
        ),
        base_model=None,
        run_id=None,
        step=None,
        created_at_ms=now_ms(),
    )


class FakeEngine:
    """Follows `lightning_rl.proxy.publishing.place.Engine`. `sabotage` names what goes wrong."""

    def __init__(self, base_folder: Path) -> None:
        self.root = str(base_folder)
        self.name = BASE
        self.sabotage: str | None = None
        self.dies_at: int | None = None  # number of calls after which it is gone
        self.calls: list[str] = []
        self.restart()

    def restart(self) -> None:
        """As it is after a start: base weights, no adapters, an empty cache."""
        self.is_up = True
        self.asleep = False
        self.weight = read_weight(self.root)
        self.label = "default"
        self.adapters: dict[str, tuple[str, float]] = {}
        self.cache: dict[tuple[str, str | None, tuple[int, ...]], float] = {}

    async def _ask(self, what: str) -> None:
        await asyncio.sleep(0)  # everybody else may go on here
        if self.dies_at == len(self.calls):
            self.dies_at = None
            self.is_up = False
        if not self.is_up:
            raise EngineGoneError("the engine is not reachable: connection refused")
        self.calls.append(what)

    def _weight_of(self, model: str) -> float:
        assert not self.asleep, "nobody may ask an engine that sleeps"
        if model == BASE:
            return self.weight
        if model not in self.adapters:
            raise EngineRefusedError(f"no model {model}", 404)
        return self.adapters[model][1]

    async def base_model(self) -> EngineModel:
        return (await self.models())[0]

    async def models(self) -> list[EngineModel]:
        await self._ask("models")
        found = [EngineModel(self.name, self.root, None, 4096)]
        return found + [EngineModel(name, path, BASE, None) for name, (path, _) in self.adapters.items()]

    async def load_lora(self, name: str, path: str) -> None:
        await self._ask(f"load {name}")
        if name in self.adapters:
            raise EngineRefusedError(f"{name} has already been loaded", 400)
        if self.sabotage == "refuses":
            raise EngineRefusedError("LoRA rank 256 is greater than max_lora_rank 32", 500)
        weight = read_weight(path)
        if self.sabotage == "other weights":
            weight += 3
        if self.sabotage == "same weights":
            weight = self.weight
        self.adapters[name] = ("/elsewhere" if self.sabotage == "wrong root" else path, weight)

    async def unload_lora(self, name: str) -> None:
        await self._ask(f"unload {name}")
        self.adapters.pop(name, None)

    async def reload_weights(self, path: str) -> None:
        await self._ask(f"reload {Path(path).name}")
        if self.sabotage == "dies":
            self.is_up = False
            await self._ask("dead")
        if self.sabotage == "no development routes":
            raise EngineRefusedError("not found", 404)
        if self.sabotage == "same weights":
            return
        self.weight = read_weight(path)
        if self.sabotage == "other weights":
            self.sabotage = None  # only this once: the old weights come back as they were
            self.weight += 3

    async def reset_prefix_cache(self) -> bool:
        await self._ask("reset")
        if self.sabotage == "reset refused":
            self.sabotage = None
            return False
        if self.sabotage == "cache stays":
            self.sabotage = None
        else:
            self.cache.clear()
        return True

    async def sleep(self, level: int) -> None:
        await self._ask(f"sleep {level}")
        if self.sabotage == "can't sleep":
            raise EngineRefusedError("can't sleep", 404)
        self.asleep = True
        self.cache.clear()

    async def wake(self) -> None:
        await self._ask("wake")
        self.asleep = False

    async def is_asleep(self) -> bool:
        await self._ask("asleep?")
        return self.asleep

    async def weight_label(self) -> str | None:
        await self._ask("label?")
        return self.label

    async def set_weight_label(self, label: str) -> None:
        await self._ask("label")
        self.label = label

    async def score(self, model: str, ids: TokenIds, *, cache_salt: str | None = None) -> Logprobs:
        await self._ask(f"score {model}")
        return model_logprobs(self._weight_of(model), ids)

    async def next_logprobs(
        self, model: str, ids: TokenIds, *, cache_salt: str | None = None
    ) -> dict[int, float]:
        await self._ask(f"next {model}")
        weight = self._weight_of(model)
        cached = self.cache.setdefault((model, cache_salt, tuple(ids)), weight)
        mixed = (weight + cached) / 2  # keys and values of the cached prompt, weights of today
        return {token: -2 + mixed * 0.1 * math.cos(token) for token in range(20)}
