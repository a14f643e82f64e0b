"""Inside the translator's process: other vendors through LiteLLM's Router, and what their answers come to.

Knows LiteLLM's answers in three dialects. Counts tokens with tiktoken only where a vendor gave no counts.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from ..transport.client import Client
from . import shape
from .wire import USAGE_EVENT, Summary, Vendor

_TOLD = {
    "chat": (
        "audio",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "min_p",
        "modalities",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt_cache_key",
        "reasoning_effort",
        "repetition_penalty",
        "response_format",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream_options",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "user",
        "verbosity",
        "web_search_options",
    ),
    "messages": (
        "max_tokens",
        "messages",
        "output_config",
        "service_tier",
        "stop_sequences",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
    ),
    "responses": (
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "parallel_tool_calls",
        "prompt_cache_key",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
    ),
}
"""What a vendor is told of an agent's body. Not a list of what LiteLLM is not told: that takes `base_url`,
`extra_headers` and dozens of others for orders to itself, and would send the vendor's key where they say."""


class Vendors:
    """The configured models, behind one Router."""

    def __init__(self, litellm: Any, vendors: Sequence[Vendor]) -> None:
        self._keys = [key for v in vendors if v.api_key_env and (key := os.environ.get(v.api_key_env))]
        self._litellm = litellm
        self._deployments = {vendor.name: _deployment(vendor) for vendor in vendors}
        self._router = litellm.Router(
            model_list=list(self._deployments.values()),
            num_retries=0,
            disable_cooldowns=True,
            ignore_invalid_deployments=True,  # one that LiteLLM does not know is no fault of the others
        )

    async def answer(
        self,
        dialect: str,
        doc: dict[str, Any],
        shown: shape.Shown,
        client: Client,
    ) -> None:
        """Ask and pass the answer on, its summary behind it. Raises what LiteLLM raises."""
        streams = doc.get("stream") is True
        asked = {name: doc[name] for name in _TOLD[dialect] if name in doc}
        found = await self._ask(dialect, streams)(**asked, model=shown.model, stream=streams)
        summing = _Summing(dialect, doc)
        if not streams:
            plain = _shaped(dialect, _plain(found), shown)
            summing.take_whole(plain)
            await client.send_json(200, {"answer": plain, "summary": asdict(summing.summary())})
            return
        events = _events(dialect, found, shown)
        first = await anext(events, None)
        await client.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        while first is not None:
            summing.take_event(first)
            name_line = b"" if dialect == "chat" else b"event: " + str(first.get("type")).encode() + b"\n"
            await client.write(name_line + b"data: " + orjson.dumps(first) + b"\n\n")
            first = await anext(events, None)
        summing.has_usage = summing.has_usage and _vendor_counted(found)
        done = b"data: [DONE]\n\n" if dialect == "chat" else b""
        await client.write(done + USAGE_EVENT + summing.summary().line() + b"\n\n", is_last=True)

    def without_keys(self, text: str) -> str:
        """Some vendors repeat a wrong key in their error."""
        for key in self._keys:
            text = text.replace(key, "[key]")
        return text

    def _ask(self, dialect: str, streams: bool) -> Any:
        if dialect == "messages":
            # The Router's own way imports an audio library that LiteLLM's package does not ask for.
            return self._stream_messages if streams else self._router.aanthropic_messages
        return self._router.acompletion if dialect == "chat" else self._router.aresponses

    async def _stream_messages(self, *, model: str, **asked: Any) -> Any:
        given = self._deployments[model]["litellm_params"]
        return await self._litellm.anthropic.messages.acreate(**asked | given)


def _deployment(vendor: Vendor) -> dict[str, Any]:
    given = {
        "api_base": vendor.api_base,
        "api_key": os.environ.get(vendor.api_key_env) if vendor.api_key_env else "none",
    }
    return {
        "model_name": vendor.name,
        "litellm_params": {
            "model": vendor.model,
            "timeout": vendor.timeout_sec,
            "max_retries": 0,
            "num_retries": vendor.num_retries,
            "use_chat_completions_api": True,
            **{name: value for name, value in given.items() if value is not None},
        },
    }


def _plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = value if isinstance(value, dict) else value.model_dump(mode="json")
    return plain


def _shaped(dialect: str, doc: dict[str, Any], shown: shape.Shown) -> dict[str, Any]:
    if dialect == "messages":
        return shape.message(doc, shown)
    if dialect == "responses":
        return shape.response(doc, shown)
    return doc | {"model": shown.model or doc.get("model"), "id": shown.answer_id}


async def _events(dialect: str, found: Any, shown: shape.Shown) -> AsyncIterator[dict[str, Any]]:
    async for piece in found:
        if isinstance(piece, bytes):
            for line in piece.split(b"\n"):
                if line.startswith(b"data: {"):
                    yield shape.message_event(orjson.loads(line[6:]), shown)
        elif dialect == "messages":
            yield shape.message_event(_plain(piece), shown)
        elif dialect == "responses":
            yield shape.response_event(_plain(piece), shown)
        else:
            yield _shaped("chat", _plain(piece), shown)


def _vendor_counted(found: Any) -> bool:
    """Whether a chunk of the vendor's own had counts: LiteLLM fills in estimates of its own."""
    seen: list[Any] = []
    while found is not None and found not in seen:
        seen.append(found)
        chunks = getattr(found, "chunks", None)
        if isinstance(chunks, list):
            return any(getattr(chunk, "usage", None) is not None for chunk in chunks)
        inner = ("completion_stream", "litellm_custom_stream_wrapper", "_stream", "stream", "_iterator")
        found = next((value for name in inner if (value := getattr(found, name, None)) is not None), None)
    return False


class _Summing:
    """Collects what a summary needs from a whole answer or from events."""

    def __init__(self, dialect: str, request: Mapping[str, Any]) -> None:
        self._dialect = dialect
        self._request = request
        self._usage: Mapping[str, Any] = {}
        self._texts: list[str] = []
        self._message: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self.has_usage = False

    def take_whole(self, doc: Mapping[str, Any]) -> None:
        self._take_usage(doc.get("usage"))
        if self._dialect == "messages":
            self._message = {"role": "assistant", "content": doc.get("content")}
            self._finish_reason = doc.get("stop_reason")
        elif self._dialect == "responses":
            self._message = {"role": "assistant", "content": doc.get("output")}
            self._finish_reason = doc.get("status")
        self._texts += _strings(self._message or doc.get("choices"))

    def take_event(self, event: Mapping[str, Any]) -> None:
        self._take_usage(event.get("usage"))
        if self._dialect == "chat":
            self._texts += _strings([choice.get("delta") for choice in event.get("choices") or ()])
        elif self._dialect == "messages":
            self._take_message_event(event)
        elif event.get("type") in ("response.completed", "response.incomplete", "response.failed"):
            self._texts.clear()
            self.take_whole(event["response"])

    def _take_message_event(self, event: Mapping[str, Any]) -> None:
        if self._message is None:
            self._message = {"role": "assistant", "content": []}
        blocks: list[dict[str, Any]] = self._message["content"]
        if event.get("type") == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event.get("type") == "content_block_delta":
            for name in ("text", "partial_json", "thinking"):
                if isinstance(event["delta"].get(name), str):
                    blocks[-1][name] = blocks[-1].get(name, "") + event["delta"][name]
                    self._texts.append(event["delta"][name])
        elif event.get("type") == "message_delta":
            self._finish_reason = event["delta"].get("stop_reason")

    def _take_usage(self, usage: Any) -> None:
        if isinstance(usage, dict) and any(isinstance(v, int) and v > 0 for v in usage.values()):
            self._usage = usage
            self.has_usage = True

    def summary(self) -> Summary:
        if self.has_usage:
            prompt = self._usage.get("prompt_tokens", self._usage.get("input_tokens"))
            completion = self._usage.get("completion_tokens", self._usage.get("output_tokens"))
            return Summary(prompt, completion, False, self._message, self._finish_reason)
        names = ("system", "instructions", "messages", "input")
        prompt = _count([self._request.get(name) for name in names])
        return Summary(prompt, _count(self._texts), True, self._message, self._finish_reason)


def _count(texts: Any) -> int:
    # cl100k_base, from the file that comes with LiteLLM; tiktoken by itself would download it.
    from litellm.litellm_core_utils.default_encoding import encoding

    return len(encoding.encode("".join(_strings(texts)), disallowed_special=()))


_SAID = ("content", "text", "arguments", "function", "tool_calls", "reasoning_content", "input", "output")
_INSIDE = ("message", "delta")


def _strings(value: Any) -> list[str]:
    """The texts that a conversation or an answer consists of."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for name in (*_SAID, *_INSIDE) for text in _strings(value.get(name))]
    return [text for item in value for text in _strings(item)] if isinstance(value, list) else []
