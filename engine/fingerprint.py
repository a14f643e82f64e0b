"""What identical token ids need to mean the same thing, read off a running engine.

Asks the engine only what it says of itself. Which requests to record, and what a difference means, is for
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..records import Fingerprint
from .client import EngineClient, EngineRefusedError
from .probes import PROBE_MESSAGES, PROBE_TEXT, fingerprint_id, template_probe, tokenizer_probe

RAW = "raw_logprobs"
PROCESSED = "processed_logprobs"
_STEEP, _FLAT = 0.5, 2.0  # vLLM takes none above 2


async def read_fingerprint(client: EngineClient) -> Fingerprint:
    """Ask the engine who it is. Probes that it refuses to answer are None; unreachable is an EngineError."""
    base = await client.base_model()
    fields = {
        "engine": f"vllm {await client.version()}",
        "base_model": base.root,
        "tokenizer_probe": await _tokenizer_probe(client),
        "template_probe": await _template_probe(client),
        "max_model_tokens": base.max_model_tokens,
        "logprobs_mode": await logprobs_mode(client, base.name),
    }
    return Fingerprint(id=fingerprint_id(fields), **fields)  # type: ignore[arg-type]


async def logprobs_mode(client: EngineClient, model: str) -> str | None:
    """Whether logprobs are those that were sampled from (`processed`), or before temperature (`raw`).

    Seen by behaviour: a flat temperature pulls the likeliest token's processed logprob far down and leaves
    the raw one where it was.
    """
    steep, flat = [await likeliest(client, model, {"temperature": t}) for t in (_STEEP, _FLAT)]
    if steep is None or flat is None:
        return None
    return RAW if abs(steep - flat) < 0.05 else PROCESSED


async def likeliest(client: EngineClient, model: str, sampling: Mapping[str, Any]) -> float | None:
    """The likeliest next token's logprob after a fixed text; None where the engine gives none."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 1, "logprobs": 1, **sampling}
    answer = await client.ask("POST", "/v1/completions", body)
    try:
        return float(max(answer.doc["choices"][0]["logprobs"]["top_logprobs"][0].values()))
    except (TypeError, KeyError, IndexError, ValueError):
        return None


async def _tokenizer_probe(client: EngineClient) -> str | None:
    try:
        return tokenizer_probe(await client.tokenize(prompt=PROBE_TEXT))
    except EngineRefusedError:
        return None


async def _template_probe(client: EngineClient) -> str | None:
    try:
        return template_probe(await client.tokenize(messages=PROBE_MESSAGES))
    except EngineRefusedError:
        return None
