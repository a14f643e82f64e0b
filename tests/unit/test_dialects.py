"""Responses and Messages through the real LiteLLM, in its own process, before a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from fakes.fake_vllm import FakeVllm, logprob, token_id
from fakes.running_proxy import Answer, Running, ask, running_proxy
from fakes.waiting import wait_until

from lightning_rl.proxy.dialects import front
from lightning_rl.proxy.dialects.translator import is_installed
from lightning_rl.proxy.dialects.wire import ANSWER_ID, HOP_URL, TOKEN, StartUp
from lightning_rl.proxy.dialects.worker import Worker
from lightning_rl.records import CallEnd, LogEntry
from lightning_rl.store.blocks import unpack_floats, unpack_ids
from lightning_rl.store.bodies import load_bodies
from lightning_rl.store.database import Database

pytestmark = pytest.mark.slow  # starts processes that take seconds

if not is_installed():
    pytest.skip("needs the extra [providers]", allow_module_level=True)

TOOL = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
BODIES: dict[str, dict[str, Any]] = {
    "messages": {
        "model": "claude-x",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
    },
    "responses": {"model": "gpt-4o", "input": "hi"},
}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"name": "add", "description": "adds", "strict": True, "input_schema": TOOL}],
    "responses": [
        {"type": "function", "name": "add", "description": "adds", "strict": True, "parameters": TOOL}
    ],
}
BOTH = pytest.mark.parametrize("dialect", ["messages", "responses"])
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_proxy(tmp_path_factory.mktemp("dialects")) as running:
        yield running


@pytest.fixture
def running(shared: Running) -> Running:
    """The same proxy and translator for all tests (LiteLLM takes seconds to import), the engine as new."""
    for name, value in vars(FakeVllm()).items():
        setattr(shared.engine, name, value)
    return shared


def call(running: Running, dialect: str, episode: str = "e", **more: Any) -> Answer:
    body = json.dumps(BODIES[dialect] | more).encode()
    return ask(running.url, f"/episodes/{episode}/agents/solver/v1/{dialect}", body)


def flushed(running: Running) -> None:
    """Our API answers when everything before it is in the log."""
    ask(running.url, "/lightning/api/status")


def last_call(running: Running) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    flushed(running)
    row = max(running.rows("calls"), key=lambda row: row["id"])
    return row, [choice for choice in running.rows("choices") if choice["call_id"] == row["id"]]


def chat_requests(running: Running) -> list[dict[str, Any]]:
    return [json.loads(r["body"]) for r in running.engine.received if r["path"] == "/v1/chat/completions"]


def read_until_delta(response: http.client.HTTPResponse) -> None:
    """Until the answer has begun; the connection's time-out ends a wait in vain."""
    assert any(b"delta" in line for line in iter(response.readline, b"")), "the stream ended without a delta"


def events(body: bytes) -> list[dict[str, Any]]:
    blocks = [block for block in body.decode().split("\n\n") if block]
    docs = [json.loads(block.split("\ndata: ")[1]) for block in blocks]
    assert [block.split("\n")[0] for block in blocks] == [f"event: {doc['type']}" for doc in docs]
    return docs


@BOTH
@STREAMING
def test_one_row_per_call_with_the_engine_s_own_tokens(
    running: Running, dialect: str, streaming: bool
) -> None:
    answer = call(running, dialect, stream=streaming)
    assert answer.status == 200
    row, (choice,) = last_call(running)
    shown = {name: row[name] for name in ("route", "dialect", "episode_id", "agent", "requested_model")}
    assert shown == {
        "route": f"/v1/{dialect}",
        "dialect": dialect,
        "episode_id": "e",
        "agent": "solver",
        "requested_model": BODIES[dialect]["model"],
    }
    assert (row["status"], row["delivered"], row["streaming"]) == ("complete", 1, streaming)
    assert (row["policy"], row["served_model"], row["unrecordable"]) == ("policy", "base", None)
    assert unpack_ids(choice["completion_ids"]).tolist() == [token_id(0, i) for i in range(6)]
    assert unpack_floats(choice["behavior_logprobs"]).tolist() == [logprob(0, i) for i in range(6)]
    assert choice["quarantine"] is None
    assert row["num_prompt_tokens"] == len(running.engine.renders or ())
    (asked,) = chat_requests(running)
    assert asked["kv_transfer_params"] == {"prompt_token_ids": running.engine.renders}
    said = json.loads(answer.body) if not streaming else events(answer.body)[0]
    first = said.get("message") or said.get("response") or said
    assert (first["id"], first["model"]) == (row["upstream_id"], BODIES[dialect]["model"])


@BOTH
def test_the_log_holds_the_agent_s_own_body_and_no_key(running: Running, dialect: str) -> None:
    body = json.dumps(BODIES[dialect]).encode()
    ask(running.url, f"/v1/{dialect}", body, {"authorization": "Bearer sk-mine", "x-api-key": "sk-mine"})
    row, _ = last_call(running)
    with running.database.read() as conn:
        assert load_bodies(conn, [row["request_body"]]) == [body]
    assert row["attribution_rule"] == "none"
    assert not any("sk-mine" in str(received["headers"]) for received in running.engine.received)


@BOTH
@STREAMING
def test_tools_reach_the_engine_as_the_agent_wrote_them(
    running: Running, dialect: str, streaming: bool
) -> None:
    answer = call(running, dialect, stream=streaming, tools=TOOLS[dialect])
    (asked,) = chat_requests(running)
    function = {"name": "add", "description": "adds", "strict": True, "parameters": TOOL}
    assert asked["tools"] == [{"type": "function", "function": function}]
    _, (choice,) = last_call(running)
    assert choice["quarantine"] == "constrained"  # `strict` is a grammar
    assert choice["num_tokens"] == 6
    text = answer.body.decode()
    assert '"name":"add"' in text
    assert "call_1" in text


@BOTH
def test_parallel_tool_calls_and_sampling_arrive(running: Running, dialect: str) -> None:
    single: dict[str, dict[str, Any]] = {
        "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "top_k": 5},
        "responses": {"parallel_tool_calls": False, "top_k": 5, "max_output_tokens": 9},
    }
    call(running, dialect, stream=True, tools=TOOLS[dialect], temperature=0.5, **single[dialect])
    (asked,) = chat_requests(running)
    assert (asked["parallel_tool_calls"], asked["temperature"], asked["top_k"]) == (False, 0.5, 5)
    assert asked["max_tokens"] == 9
    row, (choice,) = last_call(running)
    assert json.loads(row["sampling"])["temperature"] == 0.5
    assert (row["unrecordable"], choice["num_tokens"]) == (None, 6)


@BOTH
def test_the_engine_s_refusals_keep_status_and_words(running: Running, dialect: str) -> None:
    running.engine.generation_error = (400, "BadRequestError", "too long by 3 tokens")
    answer = call(running, dialect)
    assert answer.status == 400
    doc = json.loads(answer.body)
    assert (doc["error"]["message"], doc["error"]["type"]) == ("too long by 3 tokens", "BadRequestError")
    assert doc.get("type") == ("error" if dialect == "messages" else None)
    row, _ = last_call(running)
    assert (row["status"], row["http_status"], row["error"]) == ("error", 400, "too long by 3 tokens")
    assert row["delivered"] == 1


@BOTH
def test_what_the_engine_will_not_render_it_is_not_asked_for(running: Running, dialect: str) -> None:
    answer = call(running, dialect, model="nope")
    assert answer.status == 404
    assert "`nope` does not exist" in json.loads(answer.body)["error"]["message"]
    row, choices = last_call(running)
    assert (row["status"], row["http_status"], choices) == ("error", 404, [])
    assert chat_requests(running) == []


@BOTH
def test_a_prompt_that_is_not_proven_is_not_trained(running: Running, dialect: str) -> None:
    running.engine.renders = None
    assert call(running, dialect).status == 200
    row, (choice,) = last_call(running)
    assert (choice["quarantine"], choice["num_tokens"]) == ("prompt_parity", 6)
    assert "--enable-scale-out" in row["unrecordable"]
    running.engine.renders = [5, 6]
    running.engine.takes_handed_ids = False
    assert call(running, dialect).status == 200
    _, (choice,) = last_call(running)
    assert (choice["quarantine"], choice["num_tokens"]) == ("prompt_parity", 6)


@pytest.mark.parametrize(
    ("dialect", "more", "reason"),
    [
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id: the engine's own memory"),
        ("responses", {"background": True}, "background: the engine's own memory"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "logprobs in a response"),
        ("responses", {"tools": [{"type": "custom", "name": "patch"}]}, "custom tools"),
        ("responses", {"tools": [{"type": "mcp"}]}, "a tool that the engine may run itself"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "images, audio or files",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "images, audio or files",
        ),
    ],
)
def test_what_is_not_translated_goes_to_the_engine_as_it_is(
    running: Running, dialect: str, more: dict[str, Any], reason: str
) -> None:
    assert call(running, dialect, **more).status == 404  # the fake has no such route
    row, _ = last_call(running)
    assert (row["unrecordable"], row["dialect"]) == (reason, dialect)
    assert json.loads(running.engine.received[-1]["body"]) == BODIES[dialect] | {"model": "base"} | more


@BOTH
def test_what_litellm_does_not_understand_goes_to_the_engine_as_it_is(running: Running, dialect: str) -> None:
    more = {"messages": 5} if dialect == "messages" else {"tools": 5}
    assert call(running, dialect, **more).status == 404  # the fake has no such route
    row, _ = last_call(running)
    assert row["unrecordable"] == "LiteLLM could not translate it"
    assert (row["delivered"], chat_requests(running)) == (1, [])


def test_what_the_agent_asks_beyond_litellm_s_knowledge_arrives(running: Running) -> None:
    schema = {"type": "object", "properties": {}}
    more = {
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
        "context_management": {"edits": []},
        "seed": 5,
        "model": "gpt-4o-ü",
    }
    answer = call(running, "messages", **more)
    assert json.loads(answer.body)["model"] == "gpt-4o-ü"
    (asked,) = chat_requests(running)
    assert asked["response_format"]["json_schema"]["schema"] == schema
    assert asked["seed"] == 5


@BOTH
def test_a_client_that_leaves_ends_the_engine_s_work(running: Running, dialect: str) -> None:
    running.engine.num_tokens, running.engine.chunk_delay_sec = 100_000, 0.01
    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=30)
    body = json.dumps(BODIES[dialect] | {"stream": True}).encode()
    connection.request("POST", f"/episodes/e/v1/{dialect}", body, {"content-type": "application/json"})
    response = connection.getresponse()
    read_until_delta(response)
    response.close()
    connection.close()
    wait_until(lambda: running.engine.num_aborted > 0)
    wait_until(lambda: last_call(running)[0]["delivered"] is not None)
    row, choices = last_call(running)
    assert (row["status"], row["delivered"]) == ("disconnected", 0)
    assert [choice["quarantine"] for choice in choices] == ["incomplete"]
    assert choices[0]["num_tokens"] > 0


@BOTH
def test_a_client_that_leaves_before_its_call_is_translated_is_in_the_log(
    running: Running, dialect: str
) -> None:
    running.engine.answer_delay_sec = 60.0  # of the rendering
    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=30)
    body = json.dumps(BODIES[dialect]).encode()
    connection.request("POST", f"/episodes/early/v1/{dialect}", body, {"content-type": "application/json"})
    wait_until(lambda: running.engine.num_open > 0)
    connection.close()
    wait_until(lambda: running.engine.num_aborted > 0)
    flushed(running)
    (row,) = [
        row for row in running.rows("calls") if (row["episode_id"], row["dialect"]) == ("early", dialect)
    ]
    assert (row["status"], row["error"]) == ("disconnected", "the client left before the answer was complete")
    assert len(running.engine.received) == 1


@BOTH
def test_a_call_that_the_proxy_s_end_cuts_off_is_recorded_as_aborted(tmp_path: Any, dialect: str) -> None:
    engine = FakeVllm(num_tokens=100_000, chunk_delay_sec=0.01)
    with running_proxy(tmp_path, engine, drain_sec=0) as running:
        database = running.database.url
        connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=30)
        body = json.dumps(BODIES[dialect] | {"stream": True}).encode()
        connection.request("POST", f"/episodes/e/v1/{dialect}", body, {"content-type": "application/json"})
        response = connection.getresponse()
        read_until_delta(response)
    connection.close()
    with contextlib.closing(Database.open(database)) as log, log.read() as conn:
        (row,) = conn.exec_driver_sql("SELECT status, error, delivered FROM calls").all()
    assert row == ("aborted", "the proxy was stopped", 0)


@BOTH
def test_an_error_inside_the_stream_arrives_in_the_dialect_s_own_event(
    running: Running, dialect: str
) -> None:
    running.engine.error_after_chunks = 3
    answer = call(running, dialect, stream=True)
    last = events(answer.body)[-1]
    assert (last["type"], answer.is_broken) == ("error", False)
    assert "engine died" in json.dumps(last)
    row, _ = last_call(running)
    assert (row["status"], row["error"]) == ("error", "engine died")


@BOTH
def test_a_broken_stream_is_broken_for_the_agent_too(running: Running, dialect: str) -> None:
    running.engine.break_after_chunks = 3
    answer = call(running, dialect, stream=True)
    assert answer.is_broken
    assert b"message_stop" not in answer.body
    assert b"response.completed" not in answer.body
    row, choices = last_call(running)
    assert (row["status"], [choice["quarantine"] for choice in choices]) == ("error", ["incomplete"])


@BOTH
def test_a_policy_that_repeats_itself_is_heard_to_its_end(running: Running, dialect: str) -> None:
    running.engine.num_tokens, running.engine.repeats_itself = 300, True
    answer = call(running, dialect, stream=True)
    deltas = [doc["delta"] for doc in events(answer.body) if doc["type"].endswith(".delta")] + [
        doc["delta"]["text"] for doc in events(answer.body) if doc["type"] == "content_block_delta"
    ]
    assert "".join(deltas) == " a" * 300
    _, (choice,) = last_call(running)
    assert (choice["num_tokens"], choice["quarantine"]) == (300, None)


@STREAMING
def test_an_answer_cut_at_its_limit_says_so(running: Running, streaming: bool) -> None:
    running.engine.finish_reason = "length"
    said = call(running, "responses", stream=streaming).body
    response = json.loads(said) if not streaming else events(said)[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    if streaming:
        assert events(said)[-1]["type"] == "response.completed"
    assert b'"stop_reason":"max_tokens"' in call(running, "messages", stream=streaming).body


@STREAMING
def test_a_stop_sequence_is_named(running: Running, streaming: bool) -> None:
    running.engine.stop_reason = 'x"y'
    said = call(running, "messages", stream=streaming, stop_sequences=['x"y']).body
    doc = json.loads(said) if not streaming else events(said)[-2]["delta"]
    assert (doc["stop_reason"], doc["stop_sequence"]) == ("stop_sequence", 'x"y')
    assert chat_requests(running)[0]["stop"] == ['x"y']


@BOTH
def test_the_end_waits_for_its_commit(
    running: Running, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    order: list[str] = []
    committed = running.proxy.recorder.committed

    async def slow(entry: LogEntry) -> None:
        assert isinstance(entry, CallEnd)
        await asyncio.sleep(0.2)
        await committed(entry)
        order.append("committed")

    monkeypatch.setattr(running.proxy.recorder, "committed", slow)
    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=30)
    body = json.dumps(BODIES[dialect] | {"stream": True}).encode()
    connection.request("POST", f"/v1/{dialect}", body, {"content-type": "application/json"})
    response = connection.getresponse()
    for line in response:
        if line.startswith((b"event: message_delta", b"event: message_stop", b"event: response.completed")):
            order.append("end")
    connection.close()
    assert order[0] == "committed"
    assert "end" in order


@BOTH
@STREAMING
def test_a_translator_that_dies_is_not_taken_for_the_agent(
    running: Running, dialect: str, streaming: bool
) -> None:
    call(running, dialect)  # so that it is there
    episode = f"dies-{dialect}-{streaming}"
    running.engine.received.clear()
    if streaming:
        running.engine.num_tokens, running.engine.chunk_delay_sec = 100_000, 0.01
    else:
        running.engine.answer_delay_sec = 2.0
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(call, running, dialect, episode, stream=streaming)
        wait_until(lambda: chat_requests(running))
        pid = running.proxy.translator.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        answer = asked.result()
    assert answer.is_broken or answer.status == 502
    flushed(running)
    (row,) = [row for row in running.rows("calls") if row["episode_id"] == episode]
    assert (row["status"], row["error"]) == ("error", "the translator broke off")


def test_litellm_ends_no_answer_that_takes_long() -> None:
    asked: dict[str, Any] = {}

    async def acreate(**given: Any) -> Any:
        asked.update(given)
        raise ValueError("seen")

    async def send_json(*_: Any) -> None:
        pass

    litellm = SimpleNamespace(anthropic=SimpleNamespace(messages=SimpleNamespace(acreate=acreate)))
    client: Any = SimpleNamespace(has_started=False, send_json=send_json)
    headers = {HOP_URL: "http://hop/v1", TOKEN: "t", ANSWER_ID: "msg_1"}
    asyncio.run(Worker(StartUp("", "s"), litellm)._answer("/messages", BODIES["messages"], headers, client))
    assert asked["timeout"] > 24 * 3600  # seconds; its own would be ten minutes


def test_a_translator_that_dies_is_started_again(running: Running) -> None:
    call(running, "messages")
    pid = running.proxy.translator.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert call(running, "messages").status == 200
    assert running.proxy.translator.pid not in (None, pid)


def test_without_the_extra_one_line_says_what_to_install(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "is_installed", lambda: False)
    for dialect in BODIES:
        answer = call(running, dialect)
        assert (answer.status, dict(answer.headers)["x-should-retry"]) == (501, "false")
        message = json.loads(answer.body)["error"]["message"]
        assert "pip install 'lightning-rl[providers]'" in message
        assert "\n" not in message


def test_nobody_else_can_use_the_inner_hop(running: Running) -> None:
    call(running, "messages")
    hop = running.proxy.hop_url
    assert hop is not None
    for headers in ({}, {"authorization": "Bearer " + "0" * 64}):
        answer = ask(hop.removesuffix("/v1"), "/v1/chat/completions", b"{}", headers)
        assert answer.status == 401


def test_the_translator_ends_with_the_proxy_and_starts_with_the_first_call(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the hop is not asked through it
    with running_proxy(tmp_path) as running:
        assert running.proxy.translator.pid is None
        assert call(running, "messages").status == 200
        pid = running.proxy.translator.pid
        assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_pass_leaves_both_dialects_to_the_engine(tmp_path: Any) -> None:
    with running_proxy(tmp_path, dialects="pass") as running:
        assert call(running, "messages").status == 404
        row, _ = last_call(running)
        assert row["unrecordable"] == "the messages API gives no exact tokens"
        assert running.proxy.translator.pid is None
