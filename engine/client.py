"""Talking to vLLM's administration and scoring routes, over aiohttp.

Owns URLs, bodies and error texts of the routes below; knows nothing of policies, episodes or the log. The hot
path of the proxy does not come through here. Every failure is an EngineError of one line.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from ..errors import EngineError
from ..records import Logprobs, TokenIds, logprobs, token_ids
from .launch import RELOAD_EXTENSION

# A batch of scoring prompts waits for the engine's running requests: minutes on a busy CPU, not seconds.
ASK_TIMEOUT_SEC = 300.0
QUICK_TIMEOUT_SEC = 10.0
TOP_LOGPROBS = 20  # vLLM's own default limit


class EngineGoneError(EngineError):
    """Nobody listens at the engine's URL, or the connection broke: it is down or starting."""


class EngineRefusedError(EngineError):
    """The engine answered with an error status. `status` is that; 404 is also what a missing route gives."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One entry of /v1/models. `parent` None: the base model; otherwise an adapter of `parent`."""

    name: str
    root: str
    parent: str | None
    max_model_tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of one request; `doc` is the parsed JSON or, where it is none, the text."""

    status: int
    doc: Any


class EngineClient:
    """One engine. Use as an async context manager, or `close()` it."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(
        self, method: str, path: str, body: Any = None, *, timeout_sec: float = ASK_TIMEOUT_SEC
    ) -> Answer:
        """One request, whatever its status. Raises EngineGoneError when no answer arrives."""
        if self._session is None:
            # vLLM closes a connection after an error, and an idle one after 5 s: one that is used again could
            # break under a request, and look like an engine that is gone.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        payload = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=timeout_sec, sock_connect=5)
        try:
            async with self._session.request(
                method, self.url + path, data=payload, headers=headers, timeout=limit
            ) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineGoneError(f"the engine at {self.url} is not reachable: {_short(error)}") from None
        except TimeoutError:
            raise EngineError(f"{self.url}{path} did not answer within {timeout_sec:g} s") from None
        try:
            return Answer(answer.status, orjson.loads(raw))
        except orjson.JSONDecodeError:
            return Answer(answer.status, raw.decode("utf-8", "replace"))

    async def models(self) -> list[EngineModel]:
        """All served models, the base first."""
        doc = await self._get("/v1/models")
        found = [
            EngineModel(m["id"], m.get("root") or m["id"], m.get("parent"), m.get("max_model_len"))
            for m in doc.get("data", [])
        ]
        return sorted(found, key=lambda model: model.parent is not None)

    async def base_model(self) -> EngineModel:
        """The model that adapters are put on. Raises EngineError where the engine serves none."""
        found = await self.models()
        if not found or found[0].parent is not None:
            raise EngineError(f"{self.url}/v1/models lists no base model: is that vLLM?")
        return found[0]

    async def version(self) -> str:
        return str((await self._get("/version"))["version"])

    async def has_route(self, path: str) -> bool:
        """Whether a POST route is there, without calling it: GET is "method not allowed", not "not found"."""
        answer = await self.ask("GET", path, timeout_sec=QUICK_TIMEOUT_SEC)
        return answer.status == 405

    async def tokenize(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = False,
    ) -> TokenIds:
        """The engine's own ids of a text, or of messages through its chat template (generation prompt on)."""
        assert (prompt is None) != (messages is None), "either a prompt or messages"
        body: dict[str, Any] = {"add_special_tokens": add_special_tokens}
        if messages is not None:
            body |= {"messages": [dict(m) for m in messages], "add_generation_prompt": True}
        else:
            body["prompt"] = prompt
        return token_ids((await self._post("/tokenize", body))["tokens"])

    async def load_lora(self, name: str, path: str) -> None:
        """Load an adapter under a name that was never used; raises EngineRefusedError with vLLM's reason."""
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter's name. One that is not there is no error: it is gone."""
        answer = await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status not in (200, 404):
            raise _refused(self.url, "/v1/unload_lora_adapter", answer)

    async def reload_weights(self, path: str) -> None:
        """Replace the base weights by those in the folder; the prefix cache is left as it is.

        Raises EngineRefusedError when vLLM can't load the folder. Its weights are undefined then, and the
        next answer ends it: reload a good folder first.
        """
        if await self.can_reload_all():
            await self._rpc("lightning_reload", weights_path=path)
        elif await self.has_route("/collective_rpc") and await self.is_on_cpu():
            raise EngineError(
                f"the engine at {self.url} would keep its old output weights after a reload: start it "
                f"with `lightning engine serve`, or add --worker-extension-cls {RELOAD_EXTENSION}"
            )
        else:
            await self._rpc("reload_weights", weights_path=path)

    async def can_reload_all(self) -> bool:
        """Whether our own reload is there (engine/worker.py); False as well where there is none at all."""
        try:
            await self._rpc("lightning_can_reload")
        except EngineRefusedError as error:
            if error.status == 404 or "lightning_can_reload" in str(error):
                return False
            raise
        return True

    async def _rpc(self, method: str, **arguments: Any) -> Any:
        return await self._post("/collective_rpc", {"method": method, "kwargs": arguments})

    async def is_on_cpu(self) -> bool:
        """False where the engine does not say."""
        answer = await self.ask("GET", "/server_info?config_format=json", timeout_sec=QUICK_TIMEOUT_SEC)
        try:
            return bool(answer.doc["vllm_config"]["device_config"]["device"] == "cpu")
        except (TypeError, KeyError):
            return False

    async def reset_prefix_cache(self) -> bool:
        """Whether the cache is empty now; False while running requests hold blocks of it."""
        doc = await self._post("/reset_prefix_cache", None)
        return bool(doc.get("success")) if isinstance(doc, dict) else False

    async def weight_label(self) -> str | None:
        """The label that somebody gave the weights, "default" after a start; None without that route."""
        answer = await self.ask("GET", "/weight_info", timeout_sec=QUICK_TIMEOUT_SEC)
        if answer.status != 200:
            return None
        if not isinstance(answer.doc, dict) or "weight_version" not in answer.doc:
            raise EngineError(f"{self.url}/weight_info names no weight_version: is it vLLM?")
        return str(answer.doc["weight_version"])

    async def set_weight_label(self, label: str) -> None:
        """A note in the engine's memory, gone when it restarts; says nothing about the weights themselves."""
        await self._post("/update_weight_version", {"new_version": label})

    async def sleep(self, level: int) -> None:
        """Give the GPU's memory back: the cache and, level 1, the weights, which are kept in main memory."""
        answer = await self.ask("POST", f"/sleep?level={level}")
        if answer.status == 404:
            raise EngineError(
                f"the engine at {self.url} can't sleep: start it with `lightning engine serve --sleep`, or "
                "with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 on loopback"
            )
        if answer.status != 200:
            raise _refused(self.url, "/sleep", answer)

    async def wake(self) -> None:
        """As it was, with an empty cache; harmless on an engine that is awake."""
        answer = await self.ask("POST", "/wake_up")
        if answer.status not in (200, 404):
            raise _refused(self.url, "/wake_up", answer)

    async def is_asleep(self) -> bool:
        answer = await self.ask("GET", "/is_sleeping", timeout_sec=QUICK_TIMEOUT_SEC)
        return answer.status == 200 and isinstance(answer.doc, dict) and bool(answer.doc.get("is_sleeping"))

    async def score(self, model: str, ids: TokenIds, *, cache_salt: str | None = None) -> Logprobs:
        """Logprobs of ids[1:], computed anew: prompt logprobs never come out of the prefix cache."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": ids.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        doc = await self._post("/v1/completions", body)
        rows = doc["choices"][0].get("prompt_logprobs")
        if not rows or len(rows) != len(ids):
            raise EngineError(f"{self.url} gives no prompt logprobs: is that vLLM?")
        pairs = zip(ids[1:], rows[1:], strict=True)
        return logprobs([row[str(token)]["logprob"] for token, row in pairs])

    async def next_logprobs(
        self, model: str, ids: TokenIds, *, cache_salt: str | None = None
    ) -> dict[int, float]:
        """The likeliest next tokens' logprobs; reads and fills the prefix cache (of that salt, if given)."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": ids.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": TOP_LOGPROBS,
            "return_tokens_as_token_ids": True,
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        doc = await self._post("/v1/completions", body)
        top = (doc["choices"][0].get("logprobs") or {}).get("top_logprobs")
        if not top:
            raise EngineError(f"{self.url} gives no logprobs: is that vLLM?")
        return {int(name.removeprefix("token_id:")): value for name, value in top[0].items()}

    async def _get(self, path: str) -> Any:
        answer = await self.ask("GET", path, timeout_sec=QUICK_TIMEOUT_SEC)
        if answer.status != 200 or not isinstance(answer.doc, dict):
            raise _refused(self.url, path, answer)
        return answer.doc

    async def _post(self, path: str, body: Any) -> Any:
        answer = await self.ask("POST", path, body)
        if answer.status != 200:
            raise _refused(self.url, path, answer)
        return answer.doc


def _refused(url: str, path: str, answer: Answer) -> EngineRefusedError:
    doc = answer.doc
    text: Any = doc
    if isinstance(doc, dict):
        inner = doc.get("error", doc)
        text = inner.get("message") if isinstance(inner, dict) else inner
        text = text or doc.get("detail") or doc
    line = " ".join(str(text).split())[:300]
    return EngineRefusedError(f"{url}{path} answered {answer.status}: {line}", answer.status)


def _short(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "no connection within 5 s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return os.strerror(error.errno) if error.errno else str(error.os_error)
    return " ".join(str(error).split())[:200] or type(error).__name__
