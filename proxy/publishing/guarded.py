"""An engine that only the proxy with the lease may change: before each step it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from ...engine.client import EngineModel
from ...records import Logprobs, TokenIds
from .place import Engine


class GuardedEngine:
    """Follows `place.Engine`. `require` raises where this proxy may no longer change what engines hold."""

    def __init__(self, engine: Engine, require: Callable[[], None]) -> None:
        self._engine = engine
        self._require = require

    async def models(self) -> list[EngineModel]:
        return await self._engine.models()

    async def base_model(self) -> EngineModel:
        return await self._engine.base_model()

    async def weight_label(self) -> str | None:
        return await self._engine.weight_label()

    async def score(self, model: str, ids: TokenIds, *, cache_salt: str | None = None) -> Logprobs:
        return await self._engine.score(model, ids, cache_salt=cache_salt)

    async def next_logprobs(
        self, model: str, ids: TokenIds, *, cache_salt: str | None = None
    ) -> dict[int, float]:
        return await self._engine.next_logprobs(model, ids, cache_salt=cache_salt)

    async def load_lora(self, name: str, path: str) -> None:
        self._require()
        await self._engine.load_lora(name, path)

    async def unload_lora(self, name: str) -> None:
        self._require()
        await self._engine.unload_lora(name)

    async def reload_weights(self, path: str) -> None:
        self._require()
        await self._engine.reload_weights(path)

    async def reset_prefix_cache(self) -> bool:
        self._require()
        return await self._engine.reset_prefix_cache()

    async def set_weight_label(self, label: str) -> None:
        self._require()
        await self._engine.set_weight_label(label)

    async def sleep(self, level: int) -> None:
        self._require()
        await self._engine.sleep(level)

    async def wake(self) -> None:
        self._require()
        await self._engine.wake()

    async def is_asleep(self) -> bool:
        return await self._engine.is_asleep()
