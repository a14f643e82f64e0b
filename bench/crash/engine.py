"""The engine of the crash test: a process of its own that outlives every kill and keeps its own record.

Looks like vLLM to the proxy (chat, streamed and not). What it answers is drawn from the name of the call, and
the whole answer is in the record file before the first byte of it goes out: what the log is held against.

    python engine.py PORT_FILE RECORD_FILE
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import uvicorn

SHARED_TOKENS = 300  # of every prompt of an episode; 40 more per turn, and 5 of the call's own
MODEL = "base"


class Engine:
    def __init__(self, record: TextIO) -> None:
        self._record = record

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        if path == "/v1/models":
            card = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "parent": None}
            await _json(send, 200, {"object": "list", "data": [card]})
        elif path == "/version":
            await _json(send, 200, {"version": "0.32.0"})
        elif path == "/tokenize":
            await _json(send, 200, {"count": 1, "max_model_len": 4096, "tokens": [1]})
        elif path == "/v1/chat/completions":
            await self._chat(json.loads(body), send)
        else:
            await _json(send, 404, {"detail": "Not Found"})

    async def _chat(self, request: dict[str, Any], send: Any) -> None:
        answer = answer_to(str(request["messages"][-1]["content"]), request.get("n") or 1)
        self._record.write(json.dumps(answer) + "\n")
        self._record.flush()
        pace = random.Random(answer["id"])
        if request.get("stream"):
            await _stream(request, answer, pace.uniform(0.002, 0.015), send)
        else:
            await asyncio.sleep(pace.uniform(0.01, 0.25))
            await _json(send, 200, _whole(request, answer))


def answer_to(call: str, n: int) -> dict[str, Any]:
    """`call`: "EPISODE/TURN"."""
    episode, _, turn = call.rpartition("/")
    shared, own = random.Random(episode), random.Random(call)
    num_shared = SHARED_TOKENS + 40 * int(turn)
    choices = []
    for _ in range(n):
        ids = [own.randrange(150_000) for _ in range(own.randint(2, 30))]
        # Sixteenths survive every way of writing a number, so that equal means equal.
        choices.append({"ids": ids, "logprobs": [-own.randrange(1, 200) / 16 for _ in ids]})
    prompt = [shared.randrange(150_000) for _ in range(num_shared)] + [
        own.randrange(150_000) for _ in range(5)
    ]
    return {"id": f"chatcmpl-{call}", "prompt": prompt, "choices": choices}


def _logprobs(ids: list[int], values: list[float]) -> dict[str, Any]:
    return {
        "content": [
            {"token": f"t{i}", "logprob": v, "bytes": None, "top_logprobs": []}
            for i, v in zip(ids, values, strict=True)
        ]
    }


def _whole(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    gives_ids, gives_logprobs = bool(request.get("return_token_ids")), bool(request.get("logprobs"))
    count = sum(len(choice["ids"]) for choice in answer["choices"])
    return {
        "id": answer["id"],
        "object": "chat.completion",
        "created": 1764500000,
        "model": MODEL,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": " ".join(f"t{i}" for i in choice["ids"])},
                "logprobs": _logprobs(choice["ids"], choice["logprobs"]) if gives_logprobs else None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": choice["ids"] if gives_ids else None,
            }
            for index, choice in enumerate(answer["choices"])
        ],
        "usage": {"prompt_tokens": len(answer["prompt"]), "completion_tokens": count, "total_tokens": 0},
        "prompt_token_ids": answer["prompt"] if gives_ids else None,
    }


def _chunks(request: dict[str, Any], answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    gives_ids, gives_logprobs = bool(request.get("return_token_ids")), bool(request.get("logprobs"))
    head = {"id": answer["id"], "object": "chat.completion.chunk", "created": 1764500000, "model": MODEL}
    for index, _ in enumerate(answer["choices"]):
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        yield head | {
            "choices": [first | {"finish_reason": None}],
            "prompt_token_ids": answer["prompt"] if gives_ids else None,
        }
    for position in range(max(len(choice["ids"]) for choice in answer["choices"])):
        for index, choice in enumerate(answer["choices"]):
            if position >= len(choice["ids"]):
                continue
            one, value = choice["ids"][position : position + 1], choice["logprobs"][position : position + 1]
            chunk = {
                "index": index,
                "delta": {"content": f" t{one[0]}"},
                "logprobs": _logprobs(one, value) if gives_logprobs else None,
                "finish_reason": "stop" if position == len(choice["ids"]) - 1 else None,
                "token_ids": one if gives_ids else None,
            }
            yield head | {"choices": [chunk]}


async def _stream(request: dict[str, Any], answer: dict[str, Any], pause_sec: float, send: Any) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for chunk in _chunks(request, answer):
        await send(_piece(b"data: " + json.dumps(chunk).encode() + b"\n\n"))
        await asyncio.sleep(pause_sec)
    await send(_piece(b"data: [DONE]\n\n"))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _piece(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _json(send: Any, status: int, doc: Any) -> None:
    body = json.dumps(doc).encode()
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def main() -> None:
    port_file, record_file = Path(sys.argv[1]), Path(sys.argv[2])
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    with record_file.open("a") as record:
        config = uvicorn.Config(Engine(record), log_level="warning", lifespan="off", access_log=False)
        port_file.write_text(str(listener.getsockname()[1]))
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
