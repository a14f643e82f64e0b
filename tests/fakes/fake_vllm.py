"""An ASGI fake of vLLM 0.32: same routes, same bytes (field order, null fields), sizes and speed at will.

Token `i` of choice `c` is a pure function of both, so that a test can say beforehand what must be recorded.
A stream's empty deltas (a tool parser holding tokens back) are sent only to those who ask for tokens, as the
real engine does. What was received is kept in `received`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fakes.asgi import body_of

PROMPT_IDS = [151644, 872, 198, 13048, 151645]
CREATED = 1764500000


def token_id(choice: int, position: int) -> int:
    return 1000 * (choice + 1) + position


def logprob(choice: int, position: int) -> float:
    return -0.125 * (position + 1) - 0.0625 * choice


def word(choice: int, position: int) -> str:
    return (" a", ' "b"', " \\c{", " ü€", "]}")[(choice + position) % 5]


@dataclass
class FakeVllm:
    """Behaviour switches; change them between requests."""

    num_tokens: int = 6
    finish_reason: str = "stop"
    models: list[str] = field(default_factory=lambda: ["base"])
    chunk_delay_sec: float = 0.0
    answer_delay_sec: float = 0.0
    break_after_chunks: int | None = None  # the connection dies there
    error_after_chunks: int | None = None  # an error inside the stream
    raw_answer: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None  # status, headers, body
    raw_pieces: list[bytes] | None = None  # a stream, written in these pieces
    omits_tokens: bool = False
    renders: list[int] | None = field(default_factory=lambda: [5, 6, 7, 8])  # None: no --enable-scale-out
    render_grammar: dict[str, Any] | None = None
    takes_handed_ids: bool = True
    generation_error: tuple[int, str, str] | None = None  # status, type, message of a refused chat request
    repeats_itself: bool = False
    stop_reason: str | None = None
    received: list[dict[str, Any]] = field(default_factory=list)
    num_open: int = 0
    num_aborted: int = 0
    tokens_sent: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await body_of(receive)
        self.received.append(
            {
                "method": scope["method"],
                "path": scope["raw_path"].decode(),
                "query": scope["query_string"].decode(),
                "headers": [(n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"]],
                "body": body,
            }
        )
        self.num_open += 1
        answering = asyncio.create_task(self._answer(scope, body, send))
        leaving = asyncio.create_task(self._left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.num_aborted += 1
        finally:
            self.num_open -= 1
            for task in (answering, leaving):
                if not task.done():
                    task.cancel()
            results = await asyncio.gather(answering, leaving, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _left(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        await asyncio.sleep(self.answer_delay_sec)
        path = scope["path"]
        if self.raw_answer is not None:
            await _respond(send, *self.raw_answer)
        elif self.raw_pieces is not None:
            await self._stream_raw(send)
        elif (scope["method"], path) == ("GET", "/v1/models"):
            cards = [
                {"id": name, "object": "model", "owned_by": "vllm", "root": "/models/x", "parent": None}
                for name in self.models
            ]
            await _json(send, 200, {"object": "list", "data": cards})
        elif path == "/v1/models":
            await _json(send, 405, {"detail": "Method Not Allowed"})
        elif path in ("/v1/chat/completions", "/v1/completions"):
            await self._generate(path, body, send)
        elif path == "/tokenize":
            await _json(send, 200, {"count": 5, "max_model_len": 2048, "tokens": PROMPT_IDS})
        elif path in ("/v1/messages/render", "/v1/responses/render"):
            await self._render(body, send)
        elif path == "/version":
            await _json(send, 200, {"version": "0.32.0"})
        elif path == "/health":
            await _respond(send, 200, [(b"content-length", b"0")], b"")
        else:
            await _json(send, 404, {"detail": "Not Found"})

    def _prompt(self, request: dict[str, Any]) -> Any:
        """Ids that were handed over are taken as they are, as vLLM does."""
        handed = (request.get("kv_transfer_params") or {}).get("prompt_token_ids")
        return handed if handed and self.takes_handed_ids else PROMPT_IDS

    async def _render(self, body: bytes, send: Any) -> None:
        model = json.loads(body).get("model") or self.models[0]
        if self.renders is None:
            await _json(send, 403, {"error": "PermissionDenied"})
        elif model not in self.models:
            message = f"The model `{model}` does not exist."
            error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
            await _json(send, 404, {"error": error})
        else:
            sampling = {"temperature": 1.0, "structured_outputs": self.render_grammar}
            await _json(send, 200, {"token_ids": self.renders, "sampling_params": sampling})

    async def _generate(self, path: str, body: bytes, send: Any) -> None:
        try:
            request = json.loads(body)
            is_valid = isinstance(request, dict) and ("messages" in request or "prompt" in request)
        except ValueError:
            is_valid = False
        if not is_valid:
            error = {"message": "bad body", "type": "BadRequestError", "param": None, "code": 400}
            await _json(send, 400, {"error": error})
            return
        model = request.get("model") or self.models[0]
        if model not in self.models:
            message = f"The model `{model}` does not exist."
            error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
            await _json(send, 404, {"error": error})
        elif self.generation_error is not None:
            code, kind, message = self.generation_error
            await _json(
                send, code, {"error": {"message": message, "type": kind, "param": None, "code": code}}
            )
        elif path == "/v1/completions":
            await self._completion(request, model, send)
        elif request.get("stream"):
            await self._chat_stream(request, model, send)
        else:
            await self._chat(request, model, send)

    def _logprobs(self, choice: int, positions: range) -> dict[str, Any]:
        entries = [
            {
                "token": word(choice, i),
                "logprob": logprob(choice, i),
                "bytes": list(word(choice, i).encode()),
                "top_logprobs": [],
            }
            for i in positions
        ]
        return {"content": entries}

    async def _chat(self, request: dict[str, Any], model: str, send: Any) -> None:
        gives_ids = bool(request.get("return_token_ids")) and not self.omits_tokens
        choices = []
        n = request.get("n") or 1
        for c in range(n):
            message: dict[str, Any] = {"role": "assistant", "content": self._text(c), "refusal": None}
            message |= {"annotations": None, "audio": None, "function_call": None}
            if request.get("tools"):
                call = {"name": "add", "arguments": '{"a": 1, "logprobs": {"x": [1]}}'}
                message |= {"tool_calls": [{"id": "call_1", "type": "function", "function": call}]}
            message |= {"reasoning": None}
            logprobs = self._logprobs(c, range(self.num_tokens)) if request.get("logprobs") else None
            choices.append(
                {
                    "index": c,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": self._finish(request),
                    "stop_reason": self.stop_reason,
                    "token_ids": [token_id(c, i) for i in range(self.num_tokens)] if gives_ids else None,
                    "routed_experts": None,
                }
            )
        doc = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": CREATED,
            "model": model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": "vllm-0.32.0",
            "usage": self._usage(n * self.num_tokens) | {"prompt_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt(request) if gives_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        self.tokens_sent += n * self.num_tokens
        await _json(send, 200, doc)

    def _text(self, choice: int) -> str:
        return "".join(word(choice, i) for i in range(self.num_tokens))

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = len(PROMPT_IDS)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    async def _chat_stream(self, request: dict[str, Any], model: str, send: Any) -> None:
        await self._write_stream(send, self._chat_chunks(request, model))

    def _chat_chunks(self, request: dict[str, Any], model: str) -> Iterator[dict[str, Any]]:
        asks_ids = bool(request.get("return_token_ids"))
        asks_logprobs = bool(request.get("logprobs"))
        options = request.get("stream_options") or {}
        n = request.get("n") or 1
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": CREATED, "model": model}

        def chunk(choice: dict[str, Any], done: int, **more: Any) -> dict[str, Any]:
            usage = {"usage": self._usage(done)} if options.get("continuous_usage_stats") else {}
            return {**head, "choices": [choice], **usage, **more}

        for c in range(n):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": c, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = self._prompt(request) if asks_ids and not self.omits_tokens else None
            yield chunk(choice, 0, prompt_token_ids=ids, prompt_text=None)
        for i in range(self.num_tokens):
            for c in range(n):
                is_last = i == self.num_tokens - 1
                delta = self._delta(request, c, i)
                if not delta and not is_last and not asks_ids and not asks_logprobs:
                    continue  # the parser holds it back, and nobody wants its tokens
                choice = {
                    "index": c,
                    "delta": delta,
                    "logprobs": self._logprobs(c, range(i, i + 1)) if asks_logprobs else None,
                    "finish_reason": self._finish(request) if is_last else None,
                }
                if is_last:
                    choice["stop_reason"] = self.stop_reason
                choice["token_ids"] = [token_id(c, i)] if asks_ids and not self.omits_tokens else None
                self.tokens_sent += 1
                ends = is_last and not options.get("include_usage")
                yield chunk(choice, i + 1, **({"system_fingerprint": "vllm-0.32.0"} if ends else {}))
        if options.get("include_usage"):
            usage = self._usage(n * self.num_tokens)
            yield {**head, "choices": [], "usage": usage, "system_fingerprint": "vllm-0.32.0"}

    def _finish(self, request: dict[str, Any]) -> str:
        return "tool_calls" if request.get("tools") and self.finish_reason == "stop" else self.finish_reason

    def _delta(self, request: dict[str, Any], choice: int, position: int) -> dict[str, Any]:
        if not request.get("tools"):
            return {"content": " a" if self.repeats_itself else word(choice, position)}
        if position == 1:
            function = {"name": "add", "arguments": ""}
            return {"tool_calls": [{"id": "call_1", "type": "function", "index": 0, "function": function}]}
        if position == 3:
            return {"tool_calls": [{"index": 0, "function": {"arguments": '{"delta":{},"a": 1}'}}]}
        return {}

    async def _completion(self, request: dict[str, Any], model: str, send: Any) -> None:
        gives_ids = bool(request.get("return_token_ids"))
        head = {"id": "cmpl-1", "object": "text_completion", "created": CREATED, "model": model}

        def legacy(positions: range) -> dict[str, Any] | None:
            if request.get("logprobs") is None:
                return None
            return {
                "text_offset": [2 * i for i in positions],
                "token_logprobs": [logprob(0, i) for i in positions],
                "tokens": [word(0, i) for i in positions],
                "top_logprobs": [{word(0, i): logprob(0, i)} for i in positions],
            }

        def chunks() -> Iterator[dict[str, Any]]:
            for i in range(self.num_tokens):
                is_last = i == self.num_tokens - 1
                choice = {
                    "index": 0,
                    "text": word(0, i),
                    "logprobs": legacy(range(i, i + 1)),
                    "finish_reason": self.finish_reason if is_last else None,
                    "stop_reason": None,
                    "prompt_token_ids": PROMPT_IDS if gives_ids and i == 0 else None,
                    "token_ids": [token_id(0, i)] if gives_ids else None,
                }
                yield {**head, "choices": [choice]}

        if request.get("stream"):
            await self._write_stream(send, chunks())
            return
        choice = {
            "index": 0,
            "text": self._text(0),
            "logprobs": legacy(range(self.num_tokens)),
            "finish_reason": self.finish_reason,
            "stop_reason": None,
            "token_ids": [token_id(0, i) for i in range(self.num_tokens)] if gives_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": PROMPT_IDS if gives_ids else None,
            "routed_experts": None,
        }
        tail = {
            "service_tier": None,
            "system_fingerprint": "vllm-0.32.0",
            "usage": self._usage(self.num_tokens),
        }
        await _json(send, 200, {**head, "choices": [choice], **tail, "kv_transfer_params": None})

    async def _write_stream(self, send: Any, chunks: Iterator[dict[str, Any]]) -> None:
        await _start_stream(send)
        for number, chunk in enumerate(chunks):
            if number == self.break_after_chunks:
                return  # without an end: uvicorn closes the connection
            if number == self.error_after_chunks:
                error = {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}
                await _write(send, b"data: " + _dumps({"error": error}) + b"\n\n")
                break
            if number and self.chunk_delay_sec:
                await asyncio.sleep(self.chunk_delay_sec)
            await _write(send, b"data: " + _dumps(chunk) + b"\n\n")
        await _write(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream_raw(self, send: Any) -> None:
        await _start_stream(send)
        for piece in self.raw_pieces or ():
            await _write(send, piece)
            await asyncio.sleep(self.chunk_delay_sec)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _dumps(doc: Any) -> bytes:
    return json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode()


async def _json(send: Any, status: int, doc: Any) -> None:
    body = _dumps(doc)
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await _respond(send, status, headers, body)


async def _respond(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _start_stream(send: Any) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _write(send: Any, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


@contextlib.contextmanager
def serving(app: Any, **config: Any) -> Iterator[str]:
    """Run an ASGI application with uvicorn in a thread; gives its root URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    options = {"log_level": "critical", "lifespan": "off", "ws": "none", "access_log": False} | config
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            threading.Event().wait(0.002)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"
