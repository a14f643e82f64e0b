"""One recorded answer in the two forms in which vLLM 0.32 writes it: to those who asked for tokens, and not.

An answer is a list of steps, one per chunk. Where a parser holds tokens back (`delta` None), vLLM writes a
chunk with an empty delta to those who asked for ids or logprobs, and none to others; ids and logprobs that
were not asked for are there as null. Field order as read in vLLM's source and seen on the running engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CREATED = 1764500000
FINGERPRINT = "vllm-0.32.0"

Dumps = Callable[[Any], bytes]


def compact(doc: Any) -> bytes:
    return json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode()


def spaced(doc: Any) -> bytes:
    return json.dumps(doc, ensure_ascii=False, separators=(", ", ": ")).encode()


def indented(doc: Any) -> bytes:
    return json.dumps(doc, ensure_ascii=False, indent=2).encode()


@dataclass(frozen=True)
class Wants:
    """What a request asked for, as the engine reads it."""

    ids: bool = False
    logprobs: bool = False
    top: int = 0
    usage: bool = False
    continuous: bool = False

    @classmethod
    def of(cls, body: bytes) -> Wants:
        doc = json.loads(body)
        options = doc.get("stream_options") or {}
        logprobs = doc.get("logprobs")
        is_count = isinstance(logprobs, int) and not isinstance(logprobs, bool)
        return cls(
            ids=bool(doc.get("return_token_ids")),
            logprobs=is_count or bool(logprobs),
            top=int(logprobs) if is_count else doc.get("top_logprobs") or 0,
            usage=bool(options.get("include_usage")),
            continuous=bool(options.get("continuous_usage_stats")),
        )


@dataclass(frozen=True)
class Step:
    """Some tokens of one choice. `delta` None: the parser holds them back."""

    tokens: tuple[tuple[int, float, str], ...] = ()  # id, logprob, text
    delta: Mapping[str, Any] | None = None
    finish: str | None = None
    stop: str | int | None = None
    choice: int = 0


@dataclass(frozen=True)
class Script:
    """A whole answer. `message` per choice is what the JSON form holds."""

    steps: tuple[Step, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] = (151644, 872, 198, 13048, 151645)
    model: str = "base"
    extra: Mapping[str, Any] | None = None  # further members of the JSON form

    @property
    def num_choices(self) -> int:
        return 1 + max((step.choice for step in self.steps), default=0)

    def ids(self, choice: int) -> list[int]:
        return [token[0] for step in self.steps if step.choice == choice for token in step.tokens]

    def logprobs(self, choice: int) -> list[float]:
        return [token[1] for step in self.steps if step.choice == choice for token in step.tokens]

    def of(self, choice: int) -> list[Step]:
        return [step for step in self.steps if step.choice == choice]

    def usage(self, completion: int) -> dict[str, int]:
        prompt = len(self.prompt_ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def words(text: str, first_id: int = 1000, choice: int = 0, finish: str | None = "stop") -> list[Step]:
    """A plain answer: a token per word, its end of sequence (an id without text) in the finish chunk."""
    parts = [part if i == 0 else " " + part for i, part in enumerate(text.split(" "))]
    steps = [
        Step(((first_id + i, round(-0.0625 * (i + 1), 4), part),), {"content": part}, choice=choice)
        for i, part in enumerate(parts)
    ]
    if finish is not None:
        end = ((2, -0.001953125, ""),) if finish == "stop" else ()
        steps.append(Step(end, {"content": ""}, finish, choice=choice))
    return steps


def interleaved(*choices: Sequence[Step]) -> tuple[Step, ...]:
    """The choices' steps in turn, as long as each lasts."""
    longest = max(len(steps) for steps in choices)
    return tuple(steps[i] for i in range(longest) for steps in choices if i < len(steps))


def _entries(tokens: Sequence[tuple[int, float, str]], top: int) -> dict[str, Any]:
    def entry(token: tuple[int, float, str]) -> dict[str, Any]:
        return {"token": token[2], "logprob": token[1], "bytes": list(token[2].encode())}

    others = [(7, -3.5, ' "logprobs":{'), (8, -4.25, ',"finish_reason":'), (9, -5.0, "}]}")]
    return {
        "content": [
            {**entry(token), "top_logprobs": [entry(t) for t in (token, *others)[:top]]} for token in tokens
        ]
    }


# --- chat ---


def chat_json(script: Script, wants: Wants, dumps: Dumps = compact) -> bytes:
    choices = []
    for c in range(script.num_choices):
        tokens = [token for step in script.of(c) for token in step.tokens]
        last = script.of(c)[-1]
        shown = script.messages[c] if script.messages else {"content": "".join(t[2] for t in tokens)}
        message = {"role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None}
        message |= {"function_call": None, **shown}
        choices.append(
            {
                "index": c,
                "message": message if "reasoning" in message else {**message, "reasoning": None},
                "logprobs": _entries(tokens, wants.top) if wants.logprobs else None,
                "finish_reason": last.finish,
                "stop_reason": last.stop,
                "token_ids": script.ids(c) if wants.ids else None,
                "routed_experts": None,
            }
        )
    num = sum(len(step.tokens) for step in script.steps)
    doc = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": CREATED,
        "model": script.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": script.usage(num) | {"prompt_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": list(script.prompt_ids) if wants.ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
        **(script.extra or {}),
    }
    return dumps(doc)


def chat_chunks(script: Script, wants: Wants) -> list[dict[str, Any]]:
    head = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": CREATED,
        "model": script.model,
    }
    done = [0] * script.num_choices

    def chunk(choice: dict[str, Any], c: int, **more: Any) -> dict[str, Any]:
        usage = {"usage": script.usage(done[c])} if wants.continuous else {}
        return {**head, "choices": [choice], **more, **usage}

    chunks = []
    for c in range(script.num_choices):
        role = {
            "index": c,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        prompt = list(script.prompt_ids) if wants.ids else None
        chunks.append(chunk(role, c, prompt_token_ids=prompt, prompt_text=None))
    for step in script.steps:
        done[step.choice] += len(step.tokens)
        if step.delta is None and step.finish is None and not wants.ids and not wants.logprobs:
            continue
        choice: dict[str, Any] = {
            "index": step.choice,
            "delta": dict(step.delta or {}),
            "logprobs": _entries(step.tokens, wants.top) if wants.logprobs else None,
            "finish_reason": step.finish,
        }
        if step.finish is not None:
            choice["stop_reason"] = step.stop
        choice["token_ids"] = [token[0] for token in step.tokens] if wants.ids else None
        ends = step.finish is not None and not wants.usage
        chunks.append(chunk(choice, step.choice, **({"system_fingerprint": FINGERPRINT} if ends else {})))
    if wants.usage:
        chunks.append(
            {**head, "choices": [], "usage": script.usage(sum(done)), "system_fingerprint": FINGERPRINT}
        )
    return chunks


# --- completions ---


def _legacy(tokens: Sequence[tuple[int, float, str]], top: int) -> dict[str, Any]:
    return {
        "text_offset": [3 * i for i in range(len(tokens))],
        "token_logprobs": [token[1] for token in tokens],
        "tokens": [token[2] for token in tokens],
        "top_logprobs": [{t[2]: t[1], **({' "x': -9.5} if top else {})} for t in tokens],
    }


def completion_json(script: Script, wants: Wants, dumps: Dumps = compact) -> bytes:
    choices = []
    for c in range(script.num_choices):
        tokens = [token for step in script.of(c) for token in step.tokens]
        last = script.of(c)[-1]
        choices.append(
            {
                "index": c,
                "text": "".join(token[2] for token in tokens),
                "logprobs": _legacy(tokens, wants.top) if wants.logprobs else None,
                "finish_reason": last.finish,
                "stop_reason": last.stop,
                "token_ids": script.ids(c) if wants.ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": list(script.prompt_ids) if wants.ids else None,
                "routed_experts": None,
            }
        )
    num = sum(len(step.tokens) for step in script.steps)
    doc = {"id": "cmpl-1", "object": "text_completion", "created": CREATED, "model": script.model}
    doc |= {"choices": choices, "service_tier": None, "system_fingerprint": FINGERPRINT}
    return dumps(doc | {"usage": script.usage(num), "kv_transfer_params": None})


def completion_chunks(script: Script, wants: Wants) -> list[dict[str, Any]]:
    head = {"id": "cmpl-1", "object": "text_completion", "created": CREATED, "model": script.model}
    chunks = []
    seen: set[int] = set()
    done = [0] * script.num_choices
    for step in script.steps:
        c = step.choice
        done[c] += len(step.tokens)
        chunk: dict[str, Any] = {
            **head,
            "choices": [
                {
                    "index": c,
                    "text": "".join(token[2] for token in step.tokens),
                    "logprobs": _legacy(step.tokens, wants.top) if wants.logprobs else None,
                    "finish_reason": step.finish,
                    "stop_reason": step.stop,
                    "prompt_token_ids": list(script.prompt_ids) if wants.ids and c not in seen else None,
                    "token_ids": [token[0] for token in step.tokens] if wants.ids else None,
                }
            ],
        }
        seen.add(c)
        if wants.continuous:
            chunk["usage"] = script.usage(done[c])
        chunks.append(chunk)
    if wants.usage:
        chunks.append({**head, "choices": [], "usage": script.usage(sum(done))})
    return chunks


# --- streams as bytes ---


def events(chunks: Sequence[Any], dumps: Dumps = compact, *, done: bool = True) -> tuple[bytes, ...]:
    blocks = [b"data: " + dumps(chunk) + b"\n\n" for chunk in chunks]
    return (*blocks, b"data: [DONE]\n\n") if done else tuple(blocks)
