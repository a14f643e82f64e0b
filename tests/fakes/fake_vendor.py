"""An ASGI fake of another vendor's chat API: not vLLM, no token ids, usage only where it feels like it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

KEY = "sk-vendor-secret"
WORDS = ("Good", " answer", ": 7", " of 10.")


@dataclass
class FakeVendor:
    """`gives_usage`: in whole answers always, in streams where asked for."""

    gives_usage: bool = True
    error: tuple[int, str] | None = None
    breaks: bool = False
    received: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        request = json.loads(body)
        self.received.append({"path": scope["path"], "headers": headers, "body": request})
        if headers.get("authorization") != f"Bearer {KEY}":
            self.error = (401, f"Incorrect API key provided: {headers.get('authorization')}")
        if self.error is not None:
            status, text = self.error
            await _whole(send, status, {"error": {"message": text, "type": "vendor_error", "code": status}})
        elif request.get("stream"):
            await self._stream(request, send)
        else:
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": "".join(WORDS)},
                "finish_reason": "stop",
            }
            doc = {"id": "v-1", "object": "chat.completion", "created": 1, "model": "judge-2026"}
            await _whole(send, 200, doc | {"choices": [choice]} | self._usage())

    def _usage(self) -> dict[str, Any]:
        usage = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15}
        return {"usage": usage} if self.gives_usage else {}

    async def _stream(self, request: dict[str, Any], send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        head = {"id": "v-1", "object": "chat.completion.chunk", "created": 1, "model": "judge-2026"}
        docs: list[dict[str, Any]] = [
            head | {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
            for word in WORDS
        ]
        docs.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if (request.get("stream_options") or {}).get("include_usage") and self.gives_usage:
            docs.append(head | {"choices": []} | self._usage())
        for number, doc in enumerate(docs):
            if self.breaks and number == 2:
                return
            data = b"data: " + json.dumps(doc).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _whole(send: Any, status: int, doc: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(doc).encode()})
