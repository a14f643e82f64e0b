"""What a request asks for: its model, how many answers, how they are sampled, what that means for training.

Pure reading of a body; nothing is changed here (inject.py) and no answer is known yet (capture.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ...records import Quarantine

_SAMPLING = (
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "frequency_penalty",
    "ignore_eos",
    "length_penalty",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "min_p",
    "min_tokens",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "reasoning_effort",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "temperature",
    "thinking_token_budget",
    "tool_choice",
    "top_k",
    "top_logprobs",
    "top_p",
    "truncate_prompt_tokens",
    "use_beam_search",
)
_GREEDY_BELOW = 0.01
"""vLLM samples greedily below 1e-5 and raises what is between to 0.01: not the temperature that was sent."""

_PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb"\\(?:" + _PAIR + rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)

_TEXT_PARTS = ("text", "refusal", "thinking")
_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}


@dataclass(frozen=True, slots=True)
class Request:
    """A body as the agent sent it, read once."""

    body: bytes
    dialect: str
    doc: dict[str, Any] | None  # None: not a JSON object
    model: str | None
    streaming: bool
    num_choices: int  # answers that a complete answer has
    sampling: Mapping[str, Any]  # as sent, defaults not filled in
    unrecordable: str | None  # why asking the engine for tokens would change the answer
    quarantine: Quarantine | None  # why its choices can't be trained, whatever the answer


def read_request(dialect: str, body: bytes, content_type: str = "application/json") -> Request:
    doc = _object(body)
    if doc is None:
        return Request(body, dialect, None, None, False, 1, {}, "the body is not a JSON object", None)
    model = doc.get("model")
    n = doc.get("n")
    return Request(
        body=body,
        dialect=dialect,
        doc=doc,
        model=model if isinstance(model, str) else None,
        streaming=doc.get("stream") is True,
        num_choices=n if isinstance(n, int) and n > 0 else 1,
        sampling={name: doc[name] for name in _SAMPLING if name in doc},
        unrecordable=_unrecordable(dialect, doc, content_type),
        quarantine=_quarantine(doc),
    )


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        doc = orjson.loads(body)
    except orjson.JSONDecodeError:
        doc = _with_half_characters(body)
    return doc if isinstance(doc, dict) else None


def _with_half_characters(body: bytes) -> Any:
    """As the engine reads it, which takes `"\\ud800"` alone; here it is U+FFFD, which can be written down."""
    mended = _ESCAPE.sub(_whole, body)
    if mended == body:
        return None
    try:
        doc = orjson.loads(mended)
    except orjson.JSONDecodeError:
        return None
    # A name is sent on and written: half of one is nobody's.
    return None if isinstance(doc, dict) and "\ufffd" in str(doc.get("model")) else doc


def _whole(escape: re.Match[bytes]) -> bytes:
    return escape.group() if escape.group(1) is None else b"\\ufffd"


def _unrecordable(dialect: str, doc: Mapping[str, Any], content_type: str) -> str | None:
    """Why nothing may be injected. docs/recording.md lists these cases; anything else is recorded."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return "content type is not application/json"
    if dialect not in _OF_DIALECT:
        return f"the {dialect} API gives no exact tokens"
    if doc.get("echo"):
        return "echo"  # return_token_ids blanks the echoed prompt
    if doc.get("use_beam_search"):
        return "use_beam_search"
    if doc.get("return_token_ids") not in (None, False, True):
        return "return_token_ids is neither true nor false"  # the engine's 400 must stay
    return _OF_DIALECT[dialect](doc)


def _unrecordable_chat(doc: Mapping[str, Any]) -> str | None:
    wanted = doc.get("logprobs")
    if wanted not in (None, False, True):
        return "logprobs is neither true nor false"
    if _says_no(doc.get("include_reasoning")):
        return "include_reasoning=false"  # the engine withholds ids and logprobs, rightly
    if not wanted and doc.get("top_logprobs") not in (None, 0):
        return "top_logprobs without logprobs"  # a 400 that logprobs would hide
    if not wanted and doc.get("logprob_token_ids"):
        return "logprob_token_ids without logprobs"  # likewise
    if doc.get("stream") and doc.get("tools") and _says_no(doc.get("parallel_tool_calls")):
        # The engine empties the deltas of further calls: not to be told from those that injection causes.
        return "parallel_tool_calls=false in a stream"
    return None


def _unrecordable_completion(doc: Mapping[str, Any]) -> str | None:
    wanted = doc.get("logprobs")
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int)):
        return "logprobs is not an integer"
    if wanted is None and doc.get("logprob_token_ids"):
        return "logprob_token_ids without logprobs"
    prompt = doc.get("prompt")
    if doc.get("prompt_embeds") is not None:
        return "prompt_embeds"
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "several prompts in one request"
    return None


_OF_DIALECT = {"chat": _unrecordable_chat, "completions": _unrecordable_completion}


def _quarantine(doc: Mapping[str, Any]) -> Quarantine | None:
    """The first reason in the request itself: what is not reproducible is not trainable."""
    temperature = doc.get("temperature")
    reasons = {
        Quarantine.TEMPERATURE_ZERO: temperature is not None and _number(temperature) < _GREEDY_BELOW,
        Quarantine.TRUNCATED_SUPPORT: _has_truncated_support(doc),
        Quarantine.PENALTIES: any(doc.get(name) not in (None, value) for name, value in _NEUTRAL.items()),
        Quarantine.LOGIT_BIAS: bool(doc.get("logit_bias")),
        Quarantine.CONSTRAINED: _is_constrained(doc),
        Quarantine.IMAGES: _has_other_media(doc.get("messages")),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _has_truncated_support(doc: Mapping[str, Any]) -> bool:
    top_p, top_k, min_p, min_tokens = (doc.get(name) for name in ("top_p", "top_k", "min_p", "min_tokens"))
    return bool(
        (top_p is not None and top_p != 1)
        or (top_k is not None and top_k not in (0, -1))
        or min_p
        or min_tokens  # the stop tokens are masked until then
        or doc.get("allowed_token_ids")
        or doc.get("bad_words")
    )


def _is_constrained(doc: Mapping[str, Any]) -> bool:
    response_format = doc.get("response_format")
    if response_format is not None and not (
        isinstance(response_format, dict) and response_format.get("type") == "text"
    ):
        return True
    choice = doc.get("tool_choice")
    if choice == "required" or isinstance(choice, dict) or _has_constrained_tools(doc):
        return True
    if doc.get("structured_outputs") is not None or doc.get("thinking_token_budget") is not None:
        return True
    return any(name.startswith("guided_") and value is not None for name, value in doc.items())


def _has_constrained_tools(doc: Mapping[str, Any]) -> bool:
    """vLLM puts a grammar on calls of tools that are `strict`, and where only one call is allowed."""
    tools = doc.get("tools")
    if not isinstance(tools, list) or not tools or doc.get("tool_choice") == "none":
        return False
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    is_strict = any(isinstance(function, dict) and function.get("strict") for function in functions)
    return is_strict or _says_no(doc.get("parallel_tool_calls"))


def _has_other_media(messages: Any) -> bool:
    """Content parts that are not text: the log's token ids do not hold what the model saw."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(
            isinstance(part, dict) and part.get("type") not in _TEXT_PARTS for part in content
        ):
            return True
    return False


def _says_no(value: Any) -> bool:
    """Whether the engine reads it as false: it takes words and numbers for truth values, too."""
    if isinstance(value, str):
        return value.lower() in ("false", "f", "no", "n", "off", "0")
    return value is not None and value == 0


def _number(value: Any) -> float:
    """As the engine reads it; a text that is none is refused there, and counts as 1 here."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 1.0
