"""What a conformance case is: one question (or a few on one connection), what the engine answers to each form
of it, and what the log must hold afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_rl.tests.conformance.replay import Asked, Reply
from lightning_rl.tests.conformance.vllm_forms import (
    Dumps,
    Script,
    Wants,
    chat_chunks,
    chat_json,
    compact,
    completion_chunks,
    completion_json,
    events,
)
from lightning_rl.tests.conformance.wire import Pairs, Question

JSON: Pairs = ((b"content-type", b"application/json"),)
SSE: Pairs = ((b"content-type", b"text/event-stream; charset=utf-8"),)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Tokens:
    """What the log must hold of the call: per choice, in the order of their indexes."""

    prompt_ids: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Case:
    """`tokens` and `declared` exclude each other: a call is recorded exactly, or listed as unrecordable.
    Both None: the route has no row, or the engine gave no tokens (an error, an answer that is not vLLM's)."""

    name: str
    questions: tuple[Question, ...]
    answer: Callable[[Asked], Reply]
    tokens: Tokens | None = None
    declared: str | None = None  # the reason in docs/recording.md
    adds: tuple[tuple[str, str], ...] = ()  # members that the proxy is documented to set, with their values
    engine_body: bytes | None = None  # what the engine must get, where `adds` at the end does not say it
    status: str | None = None  # of the row, where the case is about it
    answer_adds: tuple[bytes, bytes] | None = (
        None  # documented: what is added to the body, before which bytes
    )


ADDS_CHAT = (("return_token_ids", "true"), ("logprobs", "true"))
ADDS_COMPLETION = (("return_token_ids", "true"), ("logprobs", "0"))


def body_of(**members: Any) -> bytes:
    """A request body; None leaves a default out, and `ellipsis` is None itself."""
    doc = {"model": "base", "messages": [{"role": "user", "content": "hi"}], **members}
    return json.dumps({k: None if v is ... else v for k, v in doc.items() if v is not None}).encode()


def prompt_of(**members: Any) -> bytes:
    return json.dumps({"model": "base", "prompt": "hi", **members}).encode()


def tokens_of(script: Script) -> Tokens:
    choices = range(script.num_choices)
    return Tokens(
        script.prompt_ids,
        tuple(tuple(script.ids(c)) for c in choices),
        tuple(tuple(script.logprobs(c)) for c in choices),
    )


def replies_with(script: Script, *, target: str = CHAT, dumps: Dumps = compact, **reply: Any) -> Any:
    """The engine's answer in the form that the request asked for."""
    is_chat = target.startswith(CHAT)

    def answer(asked: Asked) -> Reply:
        wants = Wants.of(asked.body)
        if json.loads(asked.body).get("stream"):
            chunks = (chat_chunks if is_chat else completion_chunks)(script, wants)
            return Reply(headers=SSE, blocks=events(chunks, dumps), framing="chunked", **reply)
        write = chat_json if is_chat else completion_json
        return Reply(headers=JSON, blocks=(write(script, wants, dumps),), **reply)

    return answer


def recorded(name: str, script: Script, *, dumps: Dumps = compact, adds: Any = None, **members: Any) -> Case:
    """A chat call that must be recorded exactly. `adds` None: the client asked for no tokens itself."""
    return Case(
        name,
        (Question(pieces=(body_of(**members),)),),
        replies_with(script, dumps=dumps),
        tokens=tokens_of(script),
        adds=ADDS_CHAT if adds is None else adds,
    )


def completed(name: str, script: Script, *, adds: Any = None, **members: Any) -> Case:
    """Likewise of the completions API."""
    return Case(
        name,
        (Question(target=COMPLETIONS, pieces=(prompt_of(**members),)),),
        replies_with(script, target=COMPLETIONS),
        tokens=tokens_of(script),
        adds=ADDS_COMPLETION if adds is None else adds,
    )


def fixed(reply: Reply) -> Callable[[Asked], Reply]:
    """The same answer, whatever was asked."""
    return lambda asked: reply
