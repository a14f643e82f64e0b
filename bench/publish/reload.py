"""Part reload: full weights are replaced under load; answers afterwards are those of a cold start on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_rl.engine.client import EngineClient

from .processes import Engine
from .rescoring import Rescored
from .stage import stage
from .weights import BASE, Trainer

NUM_STREAMS = 32
NUM_PROMPTS = 20
ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Reloaded:
    calls: int
    failed: list[str]
    swap_ms: list[int]
    held_ms: int
    rescored: Rescored
    num_prompts: int
    num_equal: int
    num_changed: int
    """Prompts that the base answers otherwise: equal answers of weights that change nothing prove nothing."""

    @property
    def is_met(self) -> bool:
        is_equal = self.num_equal == self.num_prompts and self.num_changed > self.num_prompts // 2
        return not self.failed and not self.rescored.mismatches and is_equal


async def answers(url: str, model: str) -> list[tuple[int, ...]]:
    """Greedy answers to fixed prompts, in token ids, all asked at once."""
    async with EngineClient(url) as client:

        async def ask(number: int) -> tuple[int, ...]:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": f"What do you know about the number {number}?"}],
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
                "return_token_ids": True,
            }
            answer = await client.ask("POST", "/v1/chat/completions", body)
            assert answer.status == 200, answer.doc
            return tuple(answer.doc["choices"][0]["token_ids"])

        return [await ask(number) for number in range(NUM_PROMPTS)]


async def play(folder: Path, trainer: Trainer, engine_url: str, cold: Callable[[Path], Engine]) -> Reloaded:
    async with stage(folder, trainer, [engine_url]) as scene:
        base = await answers(engine_url, "base")
        clients = scene.clients(num_streams=NUM_STREAMS)
        times: list[int] = []
        before, held = BASE, 0
        made = [await asyncio.to_thread(trainer.full, f"reload-{number}") for number in (1, 2)]
        async with clients.calling():
            await clients.more(NUM_STREAMS)
            for weights in made:
                version = await scene.go_live(weights, before=before)
                times.append(scene.swap_ms(version))
                held = max(held, int((scene.row(version).verdict or {}).get("held_ms", 0)))
                before = weights.name
                await clients.more(NUM_STREAMS)
        warm = await answers(scene.url, "policy")
        found = await scene.rescored(clients.call_ids, 100)
    engine = cold(made[-1].path)
    engine.start()
    try:
        await engine.ready()
        fresh = await answers(engine.url, "base")
    finally:
        engine.end()
    return Reloaded(
        calls=len(clients.heard),
        failed=[f"{one.episode}: {one.error}" for one in clients.failed],
        swap_ms=times,
        held_ms=held,
        rescored=found,
        num_prompts=len(fresh),
        num_equal=sum(a == b for a, b in zip(warm, fresh, strict=True)),
        num_changed=sum(a != b for a, b in zip(warm, base, strict=True)),
    )
