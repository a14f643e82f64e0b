"""What the fake engine says, in vLLM 0.32's shapes, made ahead of time.

Each call's tokens are a pure function of its number, so that the log can be checked to the last bit.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

MODEL = "bench-model"
NUM_PROMPT_TOKENS = 512
NUM_TOKENS = 100
NUM_VARIANTS = 64  # of completions; prompts differ from call to call
HUGE_TOKENS = 55_000  # with logprobs, as JSON: 6 MB

_VOCABULARY = 151_000
_WORDS = "a quick brown fox jumps over the lazy dog while seven wise owls count stars".split()  # noqa: SIM905
_TAIL = [(1 + j * 7919) % _VOCABULARY for j in range(NUM_PROMPT_TOKENS - 2)]
_TAIL_TEXT = ",".join(map(str, _TAIL)).encode()


def prompt_ids(call: int) -> list[int]:
    return [1000 + call // 1000, call % 1000, *_TAIL]


def call_of(ids: Sequence[int]) -> int:
    """The number of the call that has this prompt."""
    return (ids[0] - 1000) * 1000 + ids[1]


def _variant(call: int, num_tokens: int) -> int:
    return call % NUM_VARIANTS if num_tokens == NUM_TOKENS else 0  # huge answers are all alike


def completion_ids(call: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    variant = _variant(call, num_tokens)
    return [(variant * 977 + i * 613) % _VOCABULARY for i in range(num_tokens)]


def logprobs(call: int, num_tokens: int = NUM_TOKENS) -> array[float]:
    """As the engine has them: 32-bit floats."""
    variant = _variant(call, num_tokens)
    return array("f", [-((variant * 31 + i * 17) % 1000 + 1) / 997 for i in range(num_tokens)])


def _word(token: int) -> str:
    return " " + _WORDS[token % len(_WORDS)]


def _entry(token: int, logprob: float) -> dict[str, Any]:
    word = _word(token)
    return {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}


def _dumps(doc: Any) -> bytes:
    return json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode()


def _usage(num_tokens: int) -> dict[str, Any]:
    total = NUM_PROMPT_TOKENS + num_tokens
    return {"prompt_tokens": NUM_PROMPT_TOKENS, "total_tokens": total, "completion_tokens": num_tokens}


@cache
def _whole(variant: int, asked: bool, num_tokens: int) -> tuple[bytes, bytes]:
    """The answer before and after the ids of the prompt that differ."""
    ids = completion_ids(variant, num_tokens)
    message = {
        "role": "assistant",
        "content": "".join(map(_word, ids)),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    entries = [_entry(token, value) for token, value in zip(ids, logprobs(variant, num_tokens), strict=True)]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": entries} if asked else None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids if asked else None,
        "routed_experts": None,
    }
    doc = {
        "id": f"chatcmpl-{variant:032x}",
        "object": "chat.completion",
        "created": 1764500000,
        "model": MODEL,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0",
        "usage": _usage(num_tokens) | {"prompt_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": "HERE" if asked else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
    before, _, after = _dumps(doc).partition(b'"HERE"')
    return before, after


def whole_answer(call: int, *, asked: bool, num_tokens: int = NUM_TOKENS) -> bytes:
    before, after = _whole(_variant(call, num_tokens), asked, num_tokens)
    return before + _prompt_text(call) + after if asked else before


def _prompt_text(call: int) -> bytes:
    return b"[%d,%d,%b]" % (1000 + call // 1000, call % 1000, _TAIL_TEXT)


@cache
def _events(variant: int, asked: bool) -> tuple[bytes, bytes, tuple[bytes, ...]]:
    """The role chunk before and after the prompt's ids, and the content chunks."""
    head = {
        "id": f"chatcmpl-{variant:032x}",
        "object": "chat.completion.chunk",
        "created": 1764500000,
        "model": MODEL,
    }
    first = {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    role = {**head, "choices": [first], "prompt_token_ids": "HERE" if asked else None, "prompt_text": None}
    chunks = []
    for i, (token, value) in enumerate(zip(completion_ids(variant), logprobs(variant), strict=True)):
        is_last = i == NUM_TOKENS - 1
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"content": _word(token)},
            "logprobs": {"content": [_entry(token, value)]} if asked else None,
            "finish_reason": "length" if is_last else None,
        }
        if is_last:
            choice["stop_reason"] = None
        choice["token_ids"] = [token] if asked else None
        more = {"system_fingerprint": "vllm-0.32.0"} if is_last else {}
        chunks.append(_event({**head, "choices": [choice], **more}))
    before, _, after = _event(role).partition(b'"HERE"')
    return before, after, (*chunks, b"data: [DONE]\n\n")


def _event(doc: Any) -> bytes:
    return b"data: " + _dumps(doc) + b"\n\n"


def streamed_answer(call: int, *, asked: bool) -> tuple[bytes, ...]:
    """102 events: the role, 100 tokens, [DONE]."""
    before, after, rest = _events(call % NUM_VARIANTS, asked)
    return (before + _prompt_text(call) + after if asked else before, *rest)


_SYSTEM = (
    "You are a careful assistant that answers questions about warehouses, trains and calendars. Think step "
    "by step, name the numbers that you use, and end with one line that holds the answer and nothing else."
)
_FILLER = " ".join(
    f"On day {d} the train of {d * 7 % 24} o'clock took {d * 37 % 91} crates from hall {d % 9} to the port."
    for d in range(22)
)


def request_body(call: int, *, streams: bool, asks: bool, kind: str = "") -> bytes:
    """About 2 KB, as 512 tokens are; the number in it is how the engine knows the call.

    `asks`: for ids and logprobs. `kind` follows the number, see engine.py.
    """
    messages = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"#{call:08d}{kind} {_FILLER} How many crates went in week {call}?"},
    ]
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "temperature": 1.0,
        "max_tokens": NUM_TOKENS,
    }
    if streams:
        body["stream"] = True
    if asks:
        body |= {"logprobs": True, "return_token_ids": True}
    return _dumps(body)
