"""Other vendors' models through the real LiteLLM, before a fake vendor: recorded as text, never trainable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fakes.fake_vendor import KEY, WORDS, FakeVendor
from fakes.fake_vllm import serving
from fakes.running_proxy import Answer, Running, ask, running_proxy

from lightning_rl.errors import SettingsError
from lightning_rl.proxy.dialects.translator import is_installed
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.store.bodies import unpack_json

pytestmark = pytest.mark.slow  # starts processes that take seconds

if not is_installed():
    pytest.skip("needs the extra [providers]", allow_module_level=True)

TEXT = "".join(WORDS)
QUESTION = "How good is 1 + 1 = 2?"
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
    "messages": ("messages", {"max_tokens": 50, "messages": [{"role": "user", "content": QUESTION}]}),
    "responses": ("responses", {"input": QUESTION}),
}
ALL = pytest.mark.parametrize("dialect", list(BODIES))
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])


@dataclass
class Judged:
    running: Running
    vendor: FakeVendor

    def ask(self, dialect: str, model: str = "judge", **more: Any) -> Answer:
        path, body = BODIES[dialect]
        sent = json.dumps(body | {"model": model} | more).encode()
        return ask(self.running.url, f"/episodes/e/v1/{path}", sent)

    def last(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        ask(self.running.url, "/lightning/api/status")
        row = max(self.running.rows("calls"), key=lambda row: row["id"])
        return row, [choice for choice in self.running.rows("choices") if choice["call_id"] == row["id"]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    vendor = FakeVendor()
    with serving(vendor) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VENDOR_KEY", KEY)
        patch.setenv("WRONG_KEY", "sk-wrong")
        base = {"model": "openai/judge-2026", "api_base": f"{url}/v1"}
        providers = {
            "judge": base | {"api_key_env": "VENDOR_KEY"},
            "teacher": base | {"api_key_env": "WRONG_KEY", "kind": "side"},
            "keyless": base | {"api_key_env": "NOT_SET"},
            "unknown": {"model": "nobody-sells/this"},
        }
        folder = tmp_path_factory.mktemp("providers")
        with running_proxy(folder, providers=providers) as running:
            yield Judged(running, vendor)


@pytest.fixture
def judged(shared: Judged) -> Judged:
    for name, value in vars(FakeVendor()).items():
        setattr(shared.vendor, name, value)
    return shared


def text_of(dialect: str, answer: Answer, streaming: bool) -> str:
    if not streaming:
        doc = json.loads(answer.body)
        found: str = {
            "chat": lambda: doc["choices"][0]["message"]["content"],
            "messages": lambda: doc["content"][0]["text"],
            "responses": lambda: doc["output"][0]["content"][0]["text"],
        }[dialect]()
        return found
    docs = [json.loads(line[6:]) for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    if dialect == "chat":
        return "".join(d["choices"][0]["delta"].get("content") or "" for d in docs if d["choices"])
    if dialect == "messages":
        return "".join(d["delta"]["text"] for d in docs if d["type"] == "content_block_delta")
    return "".join(d["delta"] for d in docs if d["type"] == "response.output_text.delta")


@ALL
@STREAMING
def test_a_vendor_s_answer_is_recorded_as_text(judged: Judged, dialect: str, streaming: bool) -> None:
    answer = judged.ask(dialect, stream=streaming)
    assert (answer.status, answer.is_broken) == (200, False), answer.body
    assert text_of(dialect, answer, streaming) == TEXT
    assert b"lightning" not in answer.body
    assert "lightning" not in str(answer.headers)
    row, (choice,) = judged.last()
    assert (row["kind"], row["dialect"], row["policy"], row["episode_id"]) == ("judge", dialect, None, "e")
    assert (row["requested_model"], row["served_model"]) == ("judge", "openai/judge-2026")
    assert (row["status"], row["delivered"], choice["quarantine"]) == ("complete", 1, "not_policy")
    assert choice["completion_ids"] is None
    assert TEXT in json.dumps(unpack_json(choice["message"]))
    assert row["num_prompt_tokens"] > 0
    assert row["reported_completion_tokens"] > 0
    assert judged.running.engine.received == []
    (received,) = judged.vendor.received
    assert received["path"] == "/v1/chat/completions"


@ALL
def test_a_vendor_s_own_counts_are_taken(judged: Judged, dialect: str) -> None:
    judged.ask(dialect)
    row, _ = judged.last()
    counts = (row["num_prompt_tokens"], row["reported_completion_tokens"], row["usage_estimated"])
    assert counts == (11, 4, 0)


@ALL
@STREAMING
def test_counts_that_a_vendor_omits_are_estimated_and_marked(
    judged: Judged, dialect: str, streaming: bool
) -> None:
    judged.vendor.gives_usage = False
    answer = judged.ask(dialect, stream=streaming)
    assert answer.status == 200, answer.body
    row, _ = judged.last()
    assert row["usage_estimated"] == 1
    assert 5 < row["num_prompt_tokens"] < 40
    assert 4 <= row["reported_completion_tokens"] <= 12


def test_the_first_estimate_needs_no_download() -> None:
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = "from lightning_rl.proxy.dialects.vendors import _count; print(_count(['one two three']))"
    environment = {**os.environ, **nowhere, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment.pop("TIKTOKEN_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr[-500:]


def test_counts_in_a_stream_that_asked_for_them(judged: Judged) -> None:
    judged.ask("chat", stream=True, stream_options={"include_usage": True})
    row, _ = judged.last()
    counts = (row["num_prompt_tokens"], row["reported_completion_tokens"], row["usage_estimated"])
    assert counts == (11, 4, 0)


@ALL
def test_a_vendor_s_error_keeps_its_status(judged: Judged, dialect: str) -> None:
    judged.vendor.error = (429, "slow down")
    answer = judged.ask(dialect)
    assert answer.status == 429
    assert "slow down" in json.loads(answer.body)["error"]["message"]
    row, _ = judged.last()
    assert (row["status"], row["http_status"], row["delivered"]) == ("error", 429, 1)
    assert len(judged.vendor.received) == 1  # nothing is tried again unasked


def test_keys_are_neither_told_nor_stored(judged: Judged) -> None:
    answer = judged.ask("chat", "teacher")
    assert answer.status == 401
    judged.ask("chat")
    judged.last()
    for secret in ("sk-wrong", KEY):
        assert secret.encode() not in answer.body
        assert secret not in str(judged.running.rows("calls"))
    assert judged.ask("chat", "keyless").status == 501
    assert "no variable NOT_SET" in judged.ask("chat", "keyless").body.decode()


@ALL
@STREAMING
def test_an_agent_gives_litellm_no_orders(judged: Judged, dialect: str, streaming: bool) -> None:
    thief = FakeVendor()
    with serving(thief) as url:
        orders = {
            "base_url": f"{url}/v1",
            "api_base": f"{url}/v1",
            "extra_headers": {"x-order": "1"},
            "timeout": 0.0001,
        }
        answer = judged.ask(dialect, stream=streaming, **orders)
    assert answer.status == 200, answer.body
    assert thief.received == []
    (received,) = judged.vendor.received
    assert "x-order" not in received["headers"]


@ALL
@STREAMING
def test_a_vendor_that_litellm_does_not_know_is_an_error_of_its_own_calls(
    judged: Judged, dialect: str, streaming: bool
) -> None:
    answer = judged.ask(dialect, "unknown", stream=streaming)
    assert 400 <= answer.status < 600
    assert "unknown" in answer.body.decode() or "nobody-sells" in answer.body.decode()
    row, _ = judged.last()
    assert (row["status"], row["http_status"], row["delivered"]) == ("error", answer.status, 1)


def test_a_vendor_s_broken_stream_is_broken(judged: Judged) -> None:
    judged.vendor.breaks = True
    answer = judged.ask("chat", stream=True)
    assert b"[DONE]" not in answer.body
    row, _ = judged.last()
    assert row["status"] == "error"


def test_other_models_go_to_the_engine(judged: Judged) -> None:
    assert judged.ask("chat", "gpt-4o").status == 200
    row, (choice,) = judged.last()
    assert (row["policy"], choice["quarantine"]) == ("policy", None)
    assert judged.vendor.received == []
    judged.running.engine.received.clear()


def test_settings_of_a_provider_are_checked() -> None:
    for wrong in ({"model": "gpt-4o"}, {"model": "openai/x", "api_key": "sk-1"}):
        with pytest.raises(SettingsError, match="providers"):
            ProxySettings.load(providers={"judge": wrong})
