"""The official SDK, unmodified, retries through the proxy: one logical call, trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.fake_vllm import FakeVllm
from fakes.running_proxy import ask, running_proxy

openai = pytest.importorskip("openai")


class FlakyVllm(FakeVllm):
    """Its first answers are 500."""

    num_failures = 2

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        if self.num_failures and scope["method"] == "POST":
            self.num_failures -= 1
            self.raw_answer = 500, [(b"content-length", b"2"), (b"retry-after-ms", b"1")], b"{}"
        else:
            self.raw_answer = None
        await super()._answer(scope, body, send)


@pytest.mark.parametrize("is_stream", [False, True])
def test_attempts_of_the_sdk_are_one_call(tmp_path: Path, is_stream: bool) -> None:
    with running_proxy(tmp_path, FlakyVllm()) as running:
        client = openai.OpenAI(base_url=f"{running.url}/episodes/e/v1", api_key="any", max_retries=2)
        request = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
        answer = client.chat.completions.create(**request, stream=is_stream)
        if is_stream:
            list(answer)
        client.chat.completions.create(**request, stream=is_stream)  # on purpose, once more
        client.close()
        ask(running.url, "/lightning/api/status")  # sees every call before it
        rows = sorted(running.rows("calls"), key=lambda row: row["ordinal"])
    first = rows[0]["id"]
    assert [(row["retry_of"], row["kind"], row["retry_count"]) for row in rows] == [
        (None, "retry_orphan", 0),
        (first, "retry_orphan", 1),
        (first, "policy", 2),
        (None, "policy", 0),
    ]
