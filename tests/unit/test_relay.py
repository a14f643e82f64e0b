"""The proxy end to end: real server, connections and SQLite, a fake engine that writes vLLM's bytes."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fakes.fake_vllm import PROMPT_IDS, FakeVllm, logprob, token_id
from fakes.running_proxy import Answer, Running, ask, running_proxy
from fakes.waiting import wait_until

from lightning_rl.records import WeightsKind
from lightning_rl.store.read import load_episodes

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_proxy(tmp_path_factory.mktemp("proxy")) as running:
        yield running


@pytest.fixture
def running(shared: Running) -> Iterator[Running]:
    """The shared proxy, its engine as new."""
    for name, value in vars(FakeVllm()).items():
        setattr(shared.engine, name, value)
    yield shared
    wait_until(lambda: shared.proxy.gate.in_flight == 0)


def chat(**more: Any) -> bytes:
    doc = {"model": "base", "messages": [{"role": "user", "content": "hi"}], **more}
    return json.dumps(doc, indent=1).encode()


def more_of(raw: socket.socket) -> bytes:
    received = raw.recv(65536)
    assert received, "the connection was closed"
    return received


def same(direct: Answer, proxied: Answer) -> None:
    """Everything but the clock."""
    assert proxied.body == direct.body
    assert proxied.status == direct.status
    assert proxied.is_broken == direct.is_broken
    for answer in (direct, proxied):
        answer.headers = [pair for pair in answer.headers if pair[0] != "date"]
    assert proxied.headers == direct.headers


def call_of(running: Running, episode: str) -> dict[str, Any]:
    wait_until(lambda: any(row["delivered"] is not None for row in calls_of(running, episode)))
    (row,) = calls_of(running, episode)
    return row


def calls_of(running: Running, episode: str) -> list[dict[str, Any]]:
    return [row for row in running.rows("calls") if row["episode_id"] == episode]


def choices_of(running: Running, episode: str) -> list[dict[str, Any]]:
    call_ids = {row["id"] for row in calls_of(running, episode)}
    return [row for row in running.rows("choices") if row["call_id"] in call_ids]


# --- the same bytes, and the tokens in the log ---

SHAPES: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"tools": [{"type": "function", "function": {"name": "add"}}]},
    {"n": 3, "tools": [{}]},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "tools": [{}]},
    {"return_token_ids": True},
    {"return_token_ids": True, "tools": [{}]},
    {"logprobs": True, "return_token_ids": True, "tools": [{}]},
    {"logprobs": False, "return_token_ids": None},
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(shape) or "plain")
def test_chat_bytes_are_the_engines_own_and_tokens_are_recorded(
    running: Running, shape: dict[str, Any], is_stream: bool, request: pytest.FixtureRequest
) -> None:
    body = chat(stream=is_stream, **shape)
    same(ask(running.engine_url, CHAT, body), ask(running.url, f"/episodes/{request.node.name}{CHAT}", body))
    with running.database.read() as conn:
        (episode,) = load_episodes(conn, [request.node.name])
    (call,) = episode.calls
    assert call.prompt_ids.tolist() == PROMPT_IDS
    assert len(call.choices) == shape.get("n", 1)
    for choice in call.choices:
        assert choice.completion_ids.tolist() == [token_id(choice.index, i) for i in range(6)]
        assert choice.behavior_logprobs.tolist() == [logprob(choice.index, i) for i in range(6)]
        assert choice.quarantine is None


@pytest.mark.parametrize(
    "more", [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_usage_chunks(running: Running, more: dict[str, Any]) -> None:
    episode = "usage" + str(len(more))
    body = chat(stream=True, stream_options=more, tools=[{}], n=2)
    same(ask(running.engine_url, CHAT, body), ask(running.url, f"/episodes/{episode}{CHAT}", body))
    assert call_of(running, episode)["reported_completion_tokens"] == 12


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"logprobs": 1}, {"stream": True, "logprobs": 1}])
def test_completions(running: Running, more: dict[str, Any], request: pytest.FixtureRequest) -> None:
    body = json.dumps({"model": "base", "prompt": "hi", **more}).encode()
    same(
        ask(running.engine_url, "/v1/completions", body),
        ask(running.url, "/v1/completions", body, {"X-Lightning-Episode": request.node.name}),
    )
    with running.database.read() as conn:
        (episode,) = load_episodes(conn, [request.node.name])
    (choice,) = episode.calls[0].choices
    assert choice.completion_ids.tolist() == [token_id(0, i) for i in range(6)]
    assert choice.behavior_logprobs.tolist() == [logprob(0, i) for i in range(6)]
    assert choice.quarantine is None


def test_what_can_not_be_injected_passes_untouched(running: Running) -> None:
    body = chat(echo=True, temperature=0.5)
    same(ask(running.engine_url, CHAT, body), ask(running.url, f"/episodes/echo{CHAT}", body))
    assert running.engine.received[-1]["body"] == body
    row = call_of(running, "echo")
    assert (row["unrecordable"], row["status"], row["dialect"]) == ("echo", "complete", "chat")
    assert [choice["quarantine"] for choice in choices_of(running, "echo")] == ["unrecordable"]


def test_half_a_character_keeps_its_alias_and_its_tokens(running: Running) -> None:
    half = b'{"model": "gpt-4o", "a\\udfff": 1, "messages": [{"role": "user", "content": '
    half += b'"\\\\ud800 \\ud83d\\ude00 \\ud800"}]}'
    answer = ask(running.url, f"/episodes/half{CHAT}", half)
    assert (answer.status, json.loads(answer.body)["model"]) == (200, "gpt-4o")
    sent = running.engine.received[-1]["body"]
    assert sent.startswith(half.replace(b"gpt-4o", b"base")[:-1])
    row = call_of(running, "half")
    assert (row["unrecordable"], row["requested_model"], row["served_model"]) == (None, "gpt-4o", "base")
    nameless = half.replace(b"gpt-4o", b"\\ud800")
    ask(running.url, CHAT, nameless)
    assert running.engine.received[-1]["body"] == nameless


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'{"model":"base"}', chat(model="missing-model")])
def test_error_bodies(running: Running, body: bytes) -> None:
    same(ask(running.engine_url, CHAT, body), ask(running.url, CHAT, body))


def test_errors_are_in_the_log(running: Running) -> None:
    ask(running.url, f"/episodes/err{CHAT}", chat(model="missing-model"))
    row = call_of(running, "err")
    assert (row["status"], row["http_status"]) == ("error", 404)
    assert row["error"] == "The model `missing-model` does not exist."


def test_odd_answers_pass(running: Running) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"x-twice", b"1"),
        (b"x-twice", b"2"),
        (b"retry-after", b"7"),
        (b"content-length", b"8"),
    ]
    running.engine.raw_answer = (429, headers, b"{oops\xff \x00")
    same(ask(running.engine_url, CHAT, chat()), ask(running.url, CHAT, chat()))
    running.engine.raw_answer = (500, [(b"content-length", b"100")], b"cut")
    same(ask(running.engine_url, CHAT, chat()), ask(running.url, CHAT, chat()))
    zipped = gzip.compress(b'{"choices":[]}')
    headers = [(b"content-encoding", b"gzip"), (b"content-length", str(len(zipped)).encode())]
    running.engine.raw_answer = (200, [*headers, (b"content-type", b"application/json")], zipped)
    body = chat(echo=True)
    same(ask(running.engine_url, CHAT, body), ask(running.url, CHAT, body))


def test_an_engine_that_compresses_all_the_same(running: Running) -> None:
    doc = {"id": "z", "choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop"}]}
    zipped = gzip.compress(json.dumps(doc).encode())
    headers = [(b"content-encoding", b"gzip"), (b"content-type", b"application/json")]
    running.engine.raw_answer = (200, headers, zipped)
    answer = ask(running.url, f"/episodes/zip{CHAT}", chat(), {"accept-encoding": "gzip"})
    assert json.loads(answer.body)["choices"][0]["token_ids"] is None
    assert "content-encoding" not in dict(answer.headers)
    assert ("accept-encoding", "identity") in running.engine.received[-1]["headers"]
    assert call_of(running, "zip")["upstream_id"] == "z"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_odd_framing_passes(running: Running, newline: bytes) -> None:
    text = (
        b': hi\n\nevent: e\nid: 1\nretry: 5\ndata: {"choices":\ndata: []}\n\ndata: \xc3\xbc\n\n\n\ndata: cut'
    )
    text = text.replace(b"\n", newline)
    running.engine.raw_pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    for body in (chat(stream=True), chat(stream=True, echo=True)):
        same(ask(running.engine_url, CHAT, body), ask(running.url, CHAT, body))


# --- who is asked, and as whom ---


def test_aliases_are_served_by_the_policy_and_see_their_own_name(running: Running) -> None:
    for more in ({}, {"stream": True}, {"stream": True, "tools": [{}], "n": 2}):
        direct = ask(running.engine_url, CHAT, chat(**more))
        proxied = ask(running.url, f"/episodes/alias{CHAT}", chat(model="gpt-4o", **more))
        assert json.loads(running.engine.received[-1]["body"])["model"] == "base"
        assert proxied.body == direct.body.replace(b'"model":"base"', b'"model":"gpt-4o"')
        assert b'"model":"base"' not in proxied.body
    wait_until(lambda: len(choices_of(running, "alias")) == 4)
    row = calls_of(running, "alias")[0]
    assert (row["requested_model"], row["served_model"], row["policy"]) == ("gpt-4o", "base", "policy")


def test_an_adapter_serves_those_who_name_no_model(tmp_path: Path) -> None:
    engine = FakeVllm(models=["base", "policy@1"])
    with running_proxy(tmp_path, engine) as running:
        running.proxy.live.set_live("policy", 1, WeightsKind.LORA, "policy@1")
        body = b'{"messages":[]}'
        proxied = ask(running.url, f"/episodes/e{CHAT}", body)
        assert json.loads(engine.received[-1]["body"])["model"] == "policy@1"
        assert proxied.body == ask(running.engine_url, CHAT, body).body
        row = call_of(running, "e")
        assert (row["policy_version"], row["policy_version_end"]) == (1, 1)


def test_other_peoples_models_are_recorded_but_not_trainable(tmp_path: Path) -> None:
    with running_proxy(tmp_path, FakeVllm(models=["base", "other"])) as running:
        ask(running.url, f"/episodes/o{CHAT}", chat(model="other"))
        assert call_of(running, "o")["policy"] is None
        assert choices_of(running, "o")[0]["quarantine"] == "not_policy"


def test_models_shows_the_policy_behind_the_engines_own(running: Running) -> None:
    direct, proxied = ask(running.engine_url, "/v1/models"), ask(running.url, "/v1/models")
    assert proxied.body.startswith(direct.body[:-2])
    assert [card["id"] for card in json.loads(proxied.body)["data"]] == ["base", "policy"]


def test_headers_travel_except_ours_and_keys(tmp_path: Path) -> None:
    with running_proxy(tmp_path, engine_api_key="engine-key") as running:
        sent = {
            "Authorization": "Bearer client-key",
            "X-Api-Key": "client-key",
            "X-Lightning-Episode": "h",
            "X-Request-Id": "r-1",
            "User-Agent": "agent/1",
            "Connection": "close, X-Hop",
            "X-Hop": "1",
            "Idempotency-Key": "idem",
            "X-Stainless-Retry-Count": "2",
            "X-Name": "ü".encode().decode("latin-1"),
        }
        ask(running.url, f"{CHAT}?a=%20b&a=2", chat(), sent)
        received = running.engine.received[-1]
        headers = dict(received["headers"])
        assert headers["authorization"] == "Bearer engine-key"
        assert (headers["x-request-id"], headers["user-agent"]) == ("r-1", "agent/1")
        assert headers["x-name"].encode("latin-1").decode() == "ü"
        assert headers["content-length"] == str(len(received["body"]))
        names = [name for name, _ in received["headers"]]
        assert not {"x-hop", "x-lightning-episode", "x-api-key", "accept"} & set(names)
        assert len(names) == len(set(names))
        assert received["query"] == "a=%20b&a=2"
        row = call_of(running, "h")
        assert (row["idempotency_key"], row["retry_count"]) == ("idem", 2)
        log = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert b"client-key" not in log
        assert b"engine-key" not in log


def test_attribution_order_and_parents(running: Running) -> None:
    first = [{"role": "user", "content": "a"}]
    second = [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    ask(running.url, f"/episodes/line/tasks/t/agents/w{CHAT}", chat(messages=first), {"X-Session-Id": "s"})
    ask(running.url, f"/episodes/line{CHAT}", chat(messages=second))
    ask(running.url, f"/episodes/line{CHAT}", chat(messages=[{"role": "user", "content": "new"}]))
    wait_until(lambda: len(calls_of(running, "line")) == 3)
    one, two, three = sorted(calls_of(running, "line"), key=lambda row: row["ordinal"])
    assert (one["agent"], one["attribution_rule"]) == ("w", "path")
    assert one["attribution_conflict"] == "alias:X-Session-Id says 's'"
    assert (one["parent_call_id"], two["parent_call_id"], three["parent_call_id"]) == (None, one["id"], None)
    assert len({one["state_key"], two["state_key"], three["state_key"]}) == 3
    (episode,) = [row for row in running.rows("episodes") if row["id"] == "line"]
    assert episode["task_id"] == "t"


def test_calls_without_a_mark_are_in_the_unattributed_bin(running: Running) -> None:
    before = sum(row["episode_id"] is None for row in running.rows("calls"))
    ask(running.url, CHAT, chat())
    wait_until(lambda: sum(row["episode_id"] is None for row in running.rows("calls")) == before + 1)


# --- routes ---


def test_admin_routes_and_unknown_ones_look_alike(running: Running) -> None:
    num_received = len(running.engine.received)
    for path in ("/pause", "/v1/load_lora_adapter", "/%70ause", "//pause", "/v1/../pause", "/nope"):
        answer = ask(running.url, path, b"{}")
        assert (answer.status, answer.body) == (404, b'{"detail":"Not Found"}'), path
    assert len(running.engine.received) == num_received


def test_addresses_that_were_meant_for_us_are_told_their_form(running: Running) -> None:
    num_rows = len(running.rows("calls"))
    for path, status in (
        ("/episode/a/v1/chat/completions", 404),
        ("/episodes/a/task/b/v1/chat/completions", 404),
        ("/episodes/a/chat/completions", 404),
        ("/tasks/t/v1/chat/completions", 400),
    ):
        answer = ask(running.url, path, json.dumps({"model": "base", "messages": []}).encode())
        assert answer.status == status, path
        assert "/episodes/EPISODE/v1" in json.loads(answer.body)["error"]["message"]
    assert len(running.rows("calls")) == num_rows
    doc = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps({**doc, "metadata": {"episode_id": "of-the-body"}}).encode()
    assert ask(running.url, "/tasks/t/v1/chat/completions", body).status == 200


def test_plain_routes_pass_without_a_row(running: Running) -> None:
    num_calls = len(running.rows("calls"))
    for method, path, body in (
        ("HEAD", "/v1/models", None),
        ("OPTIONS", CHAT, None),
        ("GET", CHAT, None),
        ("GET", "/health", None),
        ("POST", "/tokenize", b'{"prompt": "a"}'),
        ("POST", "/v1/audio/transcriptions", b"x" * 300_000),
    ):
        headers = {"content-type": "multipart/form-data; boundary=x"} if body and body[:1] == b"x" else {}
        same(
            ask(running.engine_url, path, body, headers, method),
            ask(running.url, path, body, headers, method),
        )
        direct, proxied = running.engine.received[-2:]
        assert proxied["body"] == direct["body"]
        assert proxied["method"] == direct["method"]
    assert len(running.rows("calls")) == num_calls


def test_aliases_are_resolved_on_plain_routes_too(running: Running) -> None:
    ask(running.url, "/tokenize", b'{"model": "gpt-4o", "prompt": "a"}')
    assert running.engine.received[-1]["body"] == b'{"model": "base", "prompt": "a"}'


def test_a_chunked_request_body_arrives_whole(running: Running) -> None:
    body = chat()
    address = urlsplit(running.url)
    with socket.create_connection((address.hostname, address.port)) as raw:
        head = f"POST /episodes/chunked{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        raw.sendall(head.encode() + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for i in range(0, len(body), 7):
            raw.sendall(b"%x\r\n%b\r\n" % (len(body[i : i + 7]), body[i : i + 7]))
        raw.sendall(b"0\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.endswith(ask(running.engine_url, CHAT, body).body)
    assert call_of(running, "chunked")["status"] == "complete"


def test_large_answers_and_bodies(running: Running) -> None:
    running.engine.num_tokens = 20_000
    body = chat(messages=[{"role": "user", "content": "x" * 1_000_000}])
    same(ask(running.engine_url, CHAT, body), ask(running.url, f"/episodes/large{CHAT}", body))
    call_of(running, "large")
    assert choices_of(running, "large")[0]["num_tokens"] == 20_000


def test_a_long_stream_is_read_while_it_comes(running: Running) -> None:
    running.engine.num_tokens = 5_000
    body = chat(stream=True)
    same(ask(running.engine_url, CHAT, body), ask(running.url, f"/episodes/long{CHAT}", body))
    call_of(running, "long")
    (choice,) = choices_of(running, "long")
    assert choice["num_tokens"] == 5_000
    assert choice["quarantine"] is None


def test_a_body_of_megabytes_is_sent_without_a_warning(running: Running) -> None:
    body = chat(messages=[{"role": "user", "content": "x" * 3_000_000}])
    same(ask(running.engine_url, CHAT, body), ask(running.url, f"/episodes/megabytes{CHAT}", body))
    assert choices_of(running, "megabytes")[0]["quarantine"] is None


def test_bodies_above_the_limit_are_refused(tmp_path: Path) -> None:
    with running_proxy(tmp_path, max_body_mb=1) as running:
        ours = ("/lightning/api/episodes", "/lightning/api/rewards/import")
        for path, headers in (
            (CHAT, {}),
            ("/v1/audio/transcriptions", {"content-type": "audio/wav"}),
            *((path, {}) for path in ours),
        ):
            answer = ask(running.url, path, b" " * (2 * 1024 * 1024), headers)
            assert answer.status == 413
            assert "max_body_mb" in json.loads(answer.body)["error"]["message"]


def test_the_token(tmp_path: Path) -> None:
    with running_proxy(tmp_path, token="secret") as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for path in (CHAT, "/lightning/api/rewards"):
                assert ask(running.url, path, chat(), headers).status == 401
        for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert ask(running.url, CHAT, chat(), headers).status == 200
        assert ask(running.url, "/healthz").status == 200
        assert "secret" not in str(running.engine.received)


# --- when things break ---


def test_a_broken_stream_stays_broken(running: Running) -> None:
    running.engine.break_after_chunks = 4
    body = chat(stream=True)
    direct = ask(running.engine_url, CHAT, body)
    proxied = ask(running.url, f"/episodes/broken{CHAT}", body)
    same(direct, proxied)
    assert proxied.is_broken
    row = call_of(running, "broken")
    assert (row["status"], row["delivered"]) == ("error", 0)
    (choice,) = choices_of(running, "broken")
    assert (choice["num_tokens"], choice["quarantine"]) == (3, "incomplete")


def test_a_stream_that_breaks_behind_its_end_is_complete(running: Running) -> None:
    running.engine.break_after_chunks = 7
    running.engine.num_tokens = 6
    body = chat(stream=True, stream_options={"include_usage": True})
    direct = ask(running.engine_url, CHAT, body)
    same(direct, ask(running.url, f"/episodes/late{CHAT}", body))
    assert call_of(running, "late")["status"] == "complete"
    assert choices_of(running, "late")[0]["quarantine"] is None


def test_an_error_inside_a_stream(running: Running) -> None:
    running.engine.error_after_chunks = 3
    body = chat(stream=True)
    same(ask(running.engine_url, CHAT, body), ask(running.url, f"/episodes/inside{CHAT}", body))
    row = call_of(running, "inside")
    assert (row["status"], row["error"], row["http_status"]) == ("error", "engine died", 200)


def test_a_whole_answer_cut_short_stays_short(running: Running) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
    running.engine.raw_answer = (200, headers, b'{"choices":[')
    body = chat(echo=True)
    direct = ask(running.engine_url, CHAT, body)
    assert direct.is_broken
    same(direct, ask(running.url, f"/episodes/short{CHAT}", body))
    assert call_of(running, "short")["status"] == "error"


def test_a_list_of_models_cut_short_is_a_fault_of_the_engine_s(running: Running) -> None:
    length = (b"content-length", b"99")
    running.engine.raw_answer = (200, [(b"content-type", b"application/json"), length], b'{"data":')
    answer = ask(running.url, "/v1/models")
    assert answer.status == 502
    assert "broke off" in json.loads(answer.body)["error"]["message"]


def test_an_aborted_answer_is_told_apart(running: Running) -> None:
    running.engine.finish_reason = "abort"
    for more in ({}, {"stream": True}):
        episode = f"abort-{len(more)}"
        same(
            ask(running.engine_url, CHAT, chat(**more)),
            ask(running.url, f"/episodes/{episode}{CHAT}", chat(**more)),
        )
        assert call_of(running, episode)["status"] == "aborted"
        assert choices_of(running, episode)[0]["quarantine"] == "incomplete"


def test_an_engine_that_gives_no_tokens(running: Running) -> None:
    running.engine.omits_tokens = True
    same(ask(running.engine_url, CHAT, chat()), ask(running.url, f"/episodes/old{CHAT}", chat()))
    call_of(running, "old")
    assert choices_of(running, "old")[0]["quarantine"] == "no_prompt_ids"


@pytest.mark.parametrize("count", ["9" * 5000, "99999999999", "-1", "1.5", "\u00b2"])
def test_what_can_not_be_a_count_of_retries_is_none(running: Running, count: str) -> None:
    episode = f"retries-{count[:9].encode().hex()}-{len(count)}"
    answer = ask(running.url, f"/episodes/{episode}{CHAT}", chat(), {"x-stainless-retry-count": count})
    assert answer.status == 200
    assert call_of(running, episode)["retry_count"] == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_request_nested_deeper_than_it_can_be_hashed_is_recorded(running: Running, path: str) -> None:
    nested: Any = "hi"
    for _ in range(300):
        nested = [nested]
    episode = f"deep-{len(path)}"
    body = chat(messages=[{"role": "user", "content": nested}], prompt=nested)
    assert ask(running.url, f"/episodes/{episode}{path}", body).status == 200
    row = call_of(running, episode)
    assert (row["status"], row["state_key"]) == ("complete", None)


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as running:
        running.proxy.engines.all[0].url = "http://127.0.0.1:9"
        answer = ask(running.url, f"/episodes/none{CHAT}", chat())
        assert answer.status == 502
        assert "127.0.0.1:9" in json.loads(answer.body)["error"]["message"]
        assert ask(running.url, "/v1/models").status == 502
        assert call_of(running, "none")["status"] == "error"


def test_a_policy_that_is_not_live_yet(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as running:
        running.proxy.live.forget_engine()
        answer = ask(running.url, CHAT, chat(model="policy"))
        assert answer.status == 503
        assert dict(answer.headers)["retry-after"] == "1"
        assert ask(running.url, "/healthz").status == 503


@contextlib.contextmanager
def asking(url: str, path: str, body: bytes) -> Iterator[socket.socket]:
    """A client that can leave when it likes."""
    host, port = urlsplit(url).netloc.split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield raw


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_is_noticed_by_the_engine_at_once(running: Running, is_stream: bool) -> None:
    running.engine.chunk_delay_sec, running.engine.num_tokens = 0.02, 25_000
    running.engine.answer_delay_sec = 0.0 if is_stream else 500.0
    episode = f"left-{is_stream}"
    with asking(running.url, f"/episodes/{episode}{CHAT}", chat(stream=is_stream)) as raw:
        if is_stream:
            received = b""
            while received.count(b"data:") < 4:
                received += more_of(raw)
        wait_until(lambda: running.engine.num_open == 1)
    wait_until(lambda: running.engine.num_open == 0, timeout_sec=5)  # the answer takes a hundred times that
    row = call_of(running, episode)
    assert (row["status"], row["delivered"]) == ("disconnected", 0)
    if is_stream:
        (choice,) = choices_of(running, episode)
        assert 3 <= choice["num_tokens"] < 5000
        assert choice["quarantine"] == "incomplete"


def test_a_client_that_leaves_at_the_gate(running: Running) -> None:
    num_received = len(running.engine.received)
    running.proxy.gate._opened.clear()
    with asking(running.url, f"/episodes/gate{CHAT}", chat()):
        wait_until(lambda: running.proxy.gate.waiting == 1)
    wait_until(lambda: running.proxy.gate.waiting == 0)
    running.proxy.gate._opened.set()
    assert len(running.engine.received) == num_received


def test_many_clients_that_leave_at_any_time_leave_no_orphans(running: Running) -> None:
    running.engine.chunk_delay_sec, running.engine.num_tokens = 0.001, 30
    for i in range(60):
        with asking(running.url, f"/episodes/leavers{CHAT}", chat(stream=bool(i % 3))):
            time.sleep(0.0007 * i)
    wait_until(lambda: running.engine.num_open == 0 and running.proxy.gate.in_flight == 0)
    wait_until(lambda: all(row["status"] != "open" for row in calls_of(running, "leavers")))
    rows = calls_of(running, "leavers")
    assert {row["status"] for row in rows} <= {"disconnected", "complete"}
    wait_until(lambda: all(row["delivered"] is not None for row in calls_of(running, "leavers")))


def test_the_next_request_on_a_connection_is_served(running: Running) -> None:
    import http.client

    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=10)
    direct = ask(running.engine_url, CHAT, chat()).body
    for _ in range(3):
        connection.request("POST", CHAT, chat(), {"content-type": "application/json"})
        assert connection.getresponse().read() == direct
    connection.close()


# --- nothing delivered is lost ---


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_end_is_held_until_it_is_committed(running: Running, is_stream: bool) -> None:
    episode = f"held-{is_stream}"
    direct = ask(running.engine_url, CHAT, chat(stream=is_stream)).body
    with contextlib.ExitStack() as locks:
        locks.enter_context(running.database.write())
        with asking(running.url, f"/episodes/{episode}{CHAT}", chat(stream=is_stream)) as raw:
            raw.settimeout(0.4)
            received = b""
            with contextlib.suppress(TimeoutError):
                while True:
                    received += more_of(raw)
            assert (b"data:" in received) == is_stream  # what is not the end has come
            assert b'"finish_reason":"stop"' not in received
            locks.close()
            raw.settimeout(5)
            while direct[-20:].strip() not in received:
                received += more_of(raw)
            assert calls_of(running, episode)[0]["status"] == "complete"


def test_write_behind_does_not_wait(tmp_path: Path) -> None:
    with running_proxy(tmp_path, durability="write-behind") as running:
        with running.database.write():
            for more in ({}, {"stream": True}):
                answer = ask(running.url, f"/episodes/wb{CHAT}", chat(**more))
                assert answer.body == ask(running.engine_url, CHAT, chat(**more)).body
        wait_until(lambda: [row["status"] for row in calls_of(running, "wb")] == ["complete"] * 2)


def test_an_unwritable_log_refuses_calls_or_counts_them(tmp_path: Path) -> None:
    for mode, status in (("required", 503), ("best-effort", 200)):
        folder = tmp_path / mode
        folder.mkdir()
        with running_proxy(folder, recording=mode) as running:
            running.proxy.recorder._fault = "disk full"
            answer = ask(running.url, CHAT, chat())
            assert answer.status == status
            if status == 503:
                assert dict(answer.headers)["retry-after"] == "1"
                assert "disk full" in json.loads(answer.body)["error"]["message"]
                running.proxy.recorder._fault = None


def test_shutdown_writes_everything(tmp_path: Path) -> None:
    with running_proxy(tmp_path, durability="write-behind") as running:
        for _ in range(20):
            ask(running.url, f"/episodes/e{CHAT}", chat())
    from lightning_rl.store.database import Database

    database = Database.open(running.database.url)
    with database.read() as conn:
        assert conn.exec_driver_sql("SELECT count(*) FROM calls WHERE delivered").scalar() == 20
    database.close()


# --- our own API ---


def post(running: Running, path: str, doc: Any = None) -> tuple[int, Any]:
    answer = ask(running.url, f"/lightning/api{path}", b"" if doc is None else json.dumps(doc).encode())
    return answer.status, json.loads(answer.body)


def test_an_episode_from_announcement_to_reward(running: Running) -> None:
    status, new = post(
        running, "/episodes", {"task": "t1", "batch": "b", "expected_size": 4, "tags": {"k": "v"}}
    )
    assert status == 200
    assert new["base_url"] == f"{running.url}/episodes/{new['episode']}/v1"
    ask(new["base_url"], urlsplit(new["base_url"]).path + "/chat/completions", chat())
    status, rewarded = post(running, "/rewards", {"episode": new["episode"], "value": 0.5})
    assert (status, rewarded["final"], rewarded["target"]) == (200, True, "episode")
    shown = json.loads(ask(running.url, f"/lightning/api/episodes/{new['episode']}").body)
    assert (shown["status"], shown["reward"], shown["task"]) == ("ended", 0.5, "t1")
    assert shown["calls"][0]["choices"][0]["num_tokens"] == 6
    assert shown["tags"] == {"k": "v"}


def test_a_reward_about_a_call_does_not_end_the_episode(running: Running) -> None:
    ask(running.url, f"/episodes/r2{CHAT}", chat())
    (row,) = calls_of(running, "r2")
    status, rewarded = post(
        running, "/rewards", {"episode": "r2", "value": 1, "call": row["id"], "source": "judge"}
    )
    assert (status, rewarded["final"], rewarded["target"]) == (200, False, "call")
    assert json.loads(ask(running.url, "/lightning/api/episodes/r2").body)["status"] == "running"
    status, ended = post(running, "/episodes/r2/end", {"status": "failed", "note": "tool crashed"})
    assert (status, ended["status"]) == (200, "failed")
    assert json.loads(ask(running.url, "/lightning/api/episodes/r2").body)["status"] == "failed"


@pytest.mark.parametrize(
    ("path", "doc", "status", "words"),
    [
        ("/rewards", {"episode": "never-seen", "value": 1}, 404, "never-seen"),
        ("/rewards", {"episode": "x"}, 422, "value"),
        ("/rewards", {"episode": "x", "value": "much"}, 422, "value"),
        ("/rewards", {"episode": "x", "value": 1, "extra": 1}, 422, "extra"),
        ("/episodes/never-seen/end", {}, 404, "never-seen"),
        ("/episodes", {"expected_size": 0}, 422, "expected_size"),
        ("/episodes", {"batch": "b"}, 400, "task"),
        ("/nope", {}, 404, "Not Found"),
    ],
)
def test_mistakes_get_one_line(running: Running, path: str, doc: Any, status: int, words: str) -> None:
    got, answer = post(running, path, doc)
    assert got == status
    message = answer["error"]["message"]
    assert words in message
    assert "\n" not in message


def test_status_and_policies(running: Running) -> None:
    status = json.loads(ask(running.url, "/lightning/api/status").body)
    assert status["engine"]["base_model"] == "base"
    assert status["recording"]["entries_lost"] == 0
    policies = json.loads(ask(running.url, "/lightning/api/policies").body)["policies"]
    assert (policies[0]["policy"], policies[0]["live_version"]) == ("policy", 0)
    health = json.loads(ask(running.url, "/healthz").body)
    assert health == {"status": "ok", "recording": "ok", "engine": "ok"}
