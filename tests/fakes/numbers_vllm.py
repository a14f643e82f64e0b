"""vLLM over HTTP whose weights are one number: adapters, reload, a prefix cache, chat with ids and logprobs.

What publishing needs of the real engine, in milliseconds. What it "thinks" of tokens is fake_engine.py's, so
that a test can re-score a recorded call under any weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from fakes.asgi import body_of
from fakes.fake_engine import PROBED, FakeEngine, model_logprobs, write_folder
from fakes.fake_vllm import PROMPT_IDS

from lightning_rl.engine.client import EngineRefusedError
from lightning_rl.records import TokenIds, WeightsKind, token_ids

NUM_SHARED = 150  # tokens at the start of every prompt
NUM_TOKENS = 64
_FIXED = {
    "/version": {"version": "0.32.0"},
    "/tokenize": {"count": 5, "max_model_len": 2048, "tokens": PROMPT_IDS},
}


class NumbersVllm:
    """ASGI application around one FakeEngine."""

    def __init__(self, base_folder: Path) -> None:
        self.engine = FakeEngine(base_folder)
        self._num_calls = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await body_of(receive)
        request = json.loads(body) if body else {}
        try:
            if scope["path"] == "/v1/chat/completions":
                await self._chat(request, send)
                return
            status, doc = await self._answer(scope["method"], scope["path"], request)
        except EngineRefusedError as error:
            status, doc = error.status, {"error": {"message": str(error), "code": error.status}}
        await _whole(send, status, doc)

    async def _answer(self, method: str, path: str, request: dict[str, Any]) -> tuple[int, Any]:
        engine = self.engine
        if (method, path) == ("GET", "/v1/models"):
            cards = [
                {"id": m.name, "root": m.root, "parent": m.parent, "max_model_len": m.max_model_tokens}
                for m in await engine.models()
            ]
            return 200, {"object": "list", "data": cards}
        if path in _FIXED:
            return 200, _FIXED[path]
        if path == "/weight_info":
            return 200, {"weight_version": await engine.weight_label()}
        if method != "POST":
            return 404, {"detail": "Not Found"}
        if path == "/v1/completions":
            return 200, await self._completion(request)
        return await self._change(path, request)

    async def _change(self, path: str, request: dict[str, Any]) -> tuple[int, Any]:
        engine = self.engine
        if path == "/v1/load_lora_adapter":
            _require_whole(Path(request["lora_path"]))
            await engine.load_lora(request["lora_name"], request["lora_path"])
        elif path == "/v1/unload_lora_adapter":
            await engine.unload_lora(request["lora_name"])
        elif path == "/collective_rpc":
            if "weights_path" in request.get("kwargs", {}):
                await engine.reload_weights(request["kwargs"]["weights_path"])
        elif path == "/reset_prefix_cache":
            return 200, {"success": await engine.reset_prefix_cache()}
        elif path == "/update_weight_version":
            await engine.set_weight_label(request["new_version"])
        else:
            return 404, {"detail": "Not Found"}
        return 200, {"results": [True]}

    async def _completion(self, request: dict[str, Any]) -> dict[str, Any]:
        model, ids = request["model"], token_ids(request["prompt"])
        salt = request.get("cache_salt")
        if "prompt_logprobs" in request:
            scored = await self.engine.score(model, ids, cache_salt=salt)
            rows = [{str(t): {"logprob": v}} for t, v in zip(ids[1:], scored, strict=True)]
            return {"choices": [{"prompt_logprobs": [None, *rows]}]}
        found = await self.engine.next_logprobs(model, ids, cache_salt=salt)
        top = {f"token_id:{token}": value for token, value in found.items()}
        return {"choices": [{"logprobs": {"top_logprobs": [top]}}]}

    async def _chat(self, request: dict[str, Any], send: Any) -> None:
        self._num_calls += 1
        model, number = request["model"], self._num_calls
        weight = self.engine._weight_of(model)
        shared = tuple(range(NUM_SHARED))
        cached = self.engine.cache.setdefault((model, None, shared), weight)
        chance = Random(number)
        prompt = [*shared, *(chance.randrange(5000) for _ in range(10))]
        ids = [chance.randrange(5000) for _ in range(NUM_TOKENS)]
        scored = model_logprobs((weight + cached) / 2, token_ids([*prompt, *ids]))[len(prompt) - 1 :]
        head = {"id": f"chatcmpl-{number}-{id(self)}", "object": "chat.completion.chunk", "model": model}
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        await _chunk(send, head | {"choices": [first | {"finish_reason": None}], "prompt_token_ids": prompt})
        for position, (token, value) in enumerate(zip(ids, scored, strict=True)):
            entry = {"token": f"t{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            choice = {
                "index": 0,
                "delta": {"content": f" t{token}"},
                "logprobs": {"content": [entry]},
                "finish_reason": "length" if position == NUM_TOKENS - 1 else None,
                "token_ids": [token],
            }
            await _chunk(send, head | {"choices": [choice]})
        await _piece(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class NumberTrainer:
    """Follows `publish.weights.Trainer`. `base`: the number of the model that its adapters are put on."""

    def __init__(self, folder: Path, *, base: float = 0.0) -> None:
        self.sequences: list[TokenIds] = list(PROBED)
        self._folder = folder
        self._base = base
        self._numbers = {"base": 0.0}

    def adapter(self, name: str) -> Any:
        return self._make(name, WeightsKind.LORA)

    def full(self, name: str) -> Any:
        return self._make(name, WeightsKind.FULL)

    def _make(self, name: str, kind: WeightsKind) -> Any:
        from publish.weights import Weights

        number = 1.0 + 1.7 * (len(self._numbers) % 8)
        self._numbers[name] = number
        path = self._folder / name
        return Weights(name, kind, path, write_folder(path, number, is_adapter=kind is WeightsKind.LORA))

    def score(self, name: str, ids: TokenIds, num_last: int | None = None) -> list[float]:
        found = model_logprobs(self._base + self._numbers[name], ids).tolist()
        return found if num_last is None else found[-num_last:]


def _require_whole(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    raw = file.read_bytes()
    if len(raw) < 8 or len(raw) != 16 + int.from_bytes(raw[:8], "little"):
        raise EngineRefusedError("SafetensorError: incomplete metadata, file not fully covered", 500)


async def _whole(send: Any, status: int, doc: Any) -> None:
    body = json.dumps(doc).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _chunk(send: Any, doc: Any) -> None:
    await _piece(send, b"data: " + json.dumps(doc).encode() + b"\n\n")


async def _piece(send: Any, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
