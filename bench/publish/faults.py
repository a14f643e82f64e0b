"""An engine that lies: a reverse proxy in front of the real one, which does some things otherwise than asked.

Everything else passes as it comes, streams included. Each fault is armed by setting it, and is spent when it
has struck once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
from fakes.asgi import body_of

_NOT_FORWARDED = (b"host", b"connection", b"transfer-encoding", b"content-length")


class LyingEngine:
    """ASGI application. `backend` is the real engine's root URL."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.load_instead: Path | None = None
        """The next adapter is loaded from this folder."""
        self.hides_path = False
        """Whether the list of models names the folder that was asked for all the same."""
        self.skips_reset = False
        self.skips_reload = False
        self.asked: list[str] = []
        """Folders that the engine was asked to load."""
        self._shown: dict[str, str] = {}  # adapter -> folder in the list of models
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            return
        body = await body_of(receive)
        path = scope["path"]
        if path == "/v1/load_lora_adapter":
            body = self._loads(json.loads(body))
        elif path == "/reset_prefix_cache" and self.skips_reset:
            self.skips_reset = False
            await _answer(send, 200, [], b'{"success":true}')
            return
        elif path == "/collective_rpc" and self._skips(json.loads(body)):
            await _answer(send, 200, [], b'{"results":[1]}')
            return
        await self._forward(scope, body, send)

    def _loads(self, request: dict[str, Any]) -> bytes:
        self.asked.append(request["lora_path"])
        self._shown.pop(request["lora_name"], None)
        if self.load_instead is not None:
            if self.hides_path:
                self._shown[request["lora_name"]] = request["lora_path"]
            request["lora_path"] = str(self.load_instead)
            self.load_instead = None
        return json.dumps(request).encode()

    def _skips(self, request: dict[str, Any]) -> bool:
        if "weights_path" not in request.get("kwargs", {}):
            return False
        self.asked.append(request["kwargs"]["weights_path"])
        skips, self.skips_reload = self.skips_reload, False
        return skips

    async def _forward(self, scope: Any, body: bytes, send: Any) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), auto_decompress=False
            )
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        headers = [(n.decode(), v.decode()) for n, v in scope["headers"] if n not in _NOT_FORWARDED]
        async with self._session.request(
            scope["method"],
            self.backend + scope["raw_path"].decode() + query,
            data=body or None,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            given = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower() not in _NOT_FORWARDED
            ]
            if scope["path"] == "/v1/models":
                await _answer(send, answer.status, given, self._shows(await answer.read()))
                return
            await send({"type": "http.response.start", "status": answer.status, "headers": given})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _shows(self, raw: bytes) -> bytes:
        doc = json.loads(raw)
        for model in doc["data"]:
            model["root"] = self._shown.get(model["id"], model.get("root"))
        return json.dumps(doc).encode()

    async def _live(self, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self._session is not None:
                await self._session.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


async def _answer(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    kept = [(n, v) for n, v in headers if n != b"content-length"]
    if not any(name == b"content-type" for name, _ in kept):
        kept.append((b"content-type", b"application/json"))
    sized = [*kept, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": sized})
    await send({"type": "http.response.body", "body": body, "more_body": False})
