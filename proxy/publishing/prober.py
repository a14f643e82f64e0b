"""Fetches the numbers of a probe from the engine: before a version is loaded, and after.

Owns which prompts are asked and how the prefix cache is primed; what the numbers mean is judged in probe.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Protocol

from ...errors import PublishError
from ...records import Logprobs, PolicyVersion, ProbeSequence, TokenIds, new_id, token_ids
from .probe import (
    Judgement,
    PrimedPrompt,
    Result,
    judge_cache,
    judge_weights,
    largest_difference,
    rms_difference,
)

NUM_PRIMED = 2
# The prefix cache holds whole blocks only, of 16 tokens on a GPU and 128 on a CPU: two blocks and a bit.
PRIMED_TOKENS = 300


class Scores(Protocol):
    """The slice of the engine that a probe asks."""

    async def score(self, model: str, ids: TokenIds, *, cache_salt: str | None = None) -> Logprobs: ...

    async def next_logprobs(
        self, model: str, ids: TokenIds, *, cache_salt: str | None = None
    ) -> dict[int, float]: ...


@dataclass(frozen=True, slots=True)
class Before:
    """What the engine said while it still served the old version, under `model`."""

    model: str
    engine_before: list[float]
    noise_rms: float
    primed: list[tuple[TokenIds, dict[int, float]]]  # prompts in its cache, and its answers
    cache_noise: float


@dataclass(frozen=True, slots=True)
class Probed:
    """Both judgements. `cache` None: nothing was primed, because nothing cached can be stale."""

    weights: Judgement
    cache: Result | None
    stale_max: float | None

    @property
    def is_accepted(self) -> bool:
        return self.weights.result.is_accepted and (self.cache is None or self.cache.is_accepted)

    @property
    def reason(self) -> str:
        if self.weights.result.is_accepted and self.cache is Result.STALE:
            return f"the prefix cache still answers for the old weights, by {self.stale_max:.2g}"
        return self.weights.reason

    def numbers(self) -> dict[str, Any]:
        cache = None if self.cache is None else self.cache.value
        more = {"reason": self.reason, "cache": cache, "stale_max": self.stale_max}
        return {**self.weights.numbers(), **more}


class Prober:
    """Asks one engine about one version's probe sequences."""

    def __init__(
        self,
        engine: Scores,
        version: PolicyVersion,
        *,
        max_model_tokens: int | None,
        known_gap_rms: float | None,
    ) -> None:
        limit = max_model_tokens or 1 << 30
        self._engine = engine
        self._limit = limit
        self._known_gap_rms = known_gap_rms
        self._sequences = [sequence for sequence in version.probe if 2 <= len(sequence.ids) < limit]
        if not self._sequences:
            raise PublishError(
                "it carries no probe that fits this engine, so nothing can prove what is served"
            )

    async def before(self, model: str, *, primes: bool) -> Before:
        """Score under the version that serves now; with `primes`, leave long prompts in the shared cache."""
        engine_before = await self._scores(model)
        noise = rms_difference(await self._scores(model), engine_before)
        prompts = _long_prompts(self._sequences, min(PRIMED_TOKENS, self._limit - 1)) if primes else []
        primed, cache_noise = [], 0.0
        for prompt in prompts:
            await self._engine.next_logprobs(model, prompt)
            cached = await self._engine.next_logprobs(model, prompt)
            past = await self._engine.next_logprobs(model, prompt, cache_salt=new_id())
            cache_noise = max(cache_noise, largest_difference(cached, past))
            primed.append((prompt, cached))
        return Before(model, engine_before, noise, primed, cache_noise)

    async def after(self, model: str, before: Before | None) -> Probed:
        """Judge what `model` serves now. `before` None: nobody could ask the old version."""
        weights = judge_weights(
            [value for sequence in self._sequences for value in sequence.logprobs_before],
            [value for sequence in self._sequences for value in sequence.logprobs_after],
            await self._scores(model),
            engine_before=None if before is None else before.engine_before,
            noise_rms=0.0 if before is None else before.noise_rms,
            known_gap_rms=self._known_gap_rms,
        )
        if before is None or not before.primed:
            return Probed(weights, None, None)
        prompts = []
        for prompt, old in before.primed:
            primed = await self._engine.next_logprobs(model, prompt)
            fresh = await self._engine.next_logprobs(model, prompt, cache_salt=new_id())
            prompts.append(PrimedPrompt(old, primed, fresh))
        return Probed(weights, *judge_cache(prompts, noise=before.cache_noise))

    async def _scores(self, model: str) -> list[float]:
        """Over all sequences, one behind the other, each past any cache."""
        scored = await asyncio.gather(
            *(self._engine.score(model, sequence.ids, cache_salt=new_id()) for sequence in self._sequences)
        )
        return [value for values in scored for value in values]


def _long_prompts(sequences: Sequence[ProbeSequence], num_tokens: int) -> list[TokenIds]:
    """Prompts of a given length out of the sequences' own tokens, each beginning at another place."""
    all_ids = list(chain.from_iterable(sequence.ids for sequence in sequences))
    starts = [i * len(all_ids) // NUM_PRIMED for i in range(NUM_PRIMED)]
    return [token_ids(list(islice(cycle(all_ids), start, start + num_tokens))) for start in starts]
