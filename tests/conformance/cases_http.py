"""HTTP itself: methods, paths, bodies in every transfer, compression, connections."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import replace
from typing import Any

from lightning_rl.tests.conformance.case import ADDS_CHAT, CHAT, Case, body_of, fixed, replies_with, tokens_of
from lightning_rl.tests.conformance.cases_chat import PARALLEL_TOOLS, PLAIN, THREE, TOOL
from lightning_rl.tests.conformance.replay import Asked, Reply
from lightning_rl.tests.conformance.vllm_forms import Script, compact
from lightning_rl.tests.conformance.wire import Pairs, Question

JSON = (b"content-type", b"application/json")
EMBEDDING = compact({"object": "list", "data": [{"embedding": [0.1, -2.5e-3], "index": 0}], "model": "base"})
ZSTD = b"\x28\xb5\x2f\xfd\x04\x58\x11\x00\x00{}\xab\xcd"  # not real: nobody on the way may look
BROTLI = b"\x0b\x00\x80{}\x03"


def http_cases() -> list[Case]:
    return _methods() + _targets() + _models() + _bodies() + _compression() + _connections()


def _models() -> list[Case]:
    """The list of models, which shows the policy, and calls that name it, or name it otherwise, or nothing."""
    card = b'{"id":"base", "object":"model", "created":1, "max_model_len":2048, "permission":[{"id":"p"}]}'
    policy = b'{"id":"policy","object":"model","created":1,"max_model_len":2048,"permission":[{"id":"p"}]}'
    listed = Reply(blocks=(b'{"object": "list", "data": [' + card + b"] }\n",))
    models = Question("GET", "/v1/models", ())
    cases = [
        Case("models", (models,), fixed(listed), answer_adds=(b"," + policy, b"] }")),
        _plain("version", Question("GET", "/version", ()), Reply(blocks=(b'{"version":"0.32.0"}',))),
    ]
    for model in ("gpt-4o", "policy", 'claude-"\\', "base", "other"):
        for kind, script, more in (
            ("chat", PLAIN, {}),
            ("stream", PARALLEL_TOOLS, {"tools": [TOOL], "stream": True}),
            ("stream-n3", THREE, {"n": 3, "stream": True}),
        ):
            body = body_of(model=model, **more)
            served = b'"other"' if model == "other" else b'"base"'  # what nobody has an alias for stays
            engine_body = body.replace(json.dumps(model).encode(), served, 1)
            added = b',"return_token_ids":true,"logprobs":true}'
            cases.append(
                Case(
                    f"alias-{kind}-{model[:6]}",
                    (Question(pieces=(body,)),),
                    named(script),
                    tokens=tokens_of(script),
                    engine_body=engine_body[:-1] + added,
                )
            )
    nameless = b'{"messages": []}'
    cases.append(
        Case(
            "alias-none",
            (Question(pieces=(nameless,)),),
            replies_with(PLAIN),
            tokens=tokens_of(PLAIN),
            engine_body=b'{"messages": [],"model":"base","return_token_ids":true,"logprobs":true}',
        )
    )
    plain = Question("POST", "/tokenize", (JSON,), (b'{"prompt": "a", "model" : "gpt-4o"}',))
    told = fixed(Reply(blocks=(b'{"count":5}',)))
    cases.append(Case("alias-plain", (plain,), told, engine_body=b'{"prompt": "a", "model" : "base"}'))
    return cases


def named(script: Script) -> Any:
    """The engine calls itself what it was called."""

    def answer(asked: Asked) -> Reply:
        called = json.loads(asked.body)["model"]
        reply: Reply = replies_with(replace(script, model=called))(asked)
        return reply

    return answer


def _plain(name: str, question: Question, reply: Reply) -> Case:
    return Case(name, (question,), fixed(reply))


def _methods() -> list[Case]:
    cors: Pairs = (
        (b"Access-Control-Allow-Origin", b"*"),
        (b"Access-Control-Allow-Methods", b"DELETE, GET"),
        (b"Vary", b"Origin"),
    )
    asks_cors: Pairs = ((b"Origin", b"http://x"), (b"Access-Control-Request-Method", b"POST"))
    length = (b"content-length", b"17")
    return [
        _plain("head", Question("HEAD", "/health", ()), Reply(headers=(length, JSON), framing="none")),
        _plain(
            "head-models",
            Question("HEAD", "/v1/models", ()),
            Reply(b"HTTP/1.1 405 Method Not Allowed", ((b"allow", b"GET"), length, JSON), framing="none"),
        ),
        _plain("options", Question("OPTIONS", CHAT, asks_cors), Reply(headers=cors, blocks=(b"OK",))),
        _plain(
            "get-chat",
            Question("GET", CHAT, ()),
            Reply(
                b"HTTP/1.1 405 Method Not Allowed",
                ((b"allow", b"POST"), JSON),
                (b'{"detail":"Method Not Allowed"}',),
            ),
        ),
        _plain(
            "delete", Question("DELETE", "/v1/responses/resp_1", ()), Reply(blocks=(b'{"deleted":true}',))
        ),
        _plain(
            "put",
            Question("PUT", "/v1/responses/resp_1", (JSON,), (b"{}",)),
            Reply(b"HTTP/1.1 405 Method Not Allowed", (JSON,), (b"{}",)),
        ),
        _plain("health", Question("GET", "/health", ()), Reply(headers=())),
        _plain(
            "204",
            Question("POST", "/detokenize", (JSON,), (b"{}",)),
            Reply(b"HTTP/1.1 204 No Content", (), framing="none"),
        ),
        _plain(
            "304",
            Question("GET", "/openapi.json", ((b"If-None-Match", b'"x"'),)),
            Reply(b"HTTP/1.1 304 Not Modified", ((b"etag", b'"x"'),), framing="none"),
        ),
        _plain(
            "redirect",
            Question("GET", "/docs", ()),
            Reply(b"HTTP/1.1 307 Temporary Redirect", ((b"location", b"/v1/models"),), (b"",)),
        ),
    ]


def _targets() -> list[Case]:
    targets = {
        "query": "/metrics?a=1&a=2&b=%20x%2Fy&c=+&=&%zz",
        "empty-query": "/metrics?",
        "query-of-a-call": f"{CHAT}?api-version=2024-10-21&x=%C3%BC",
        "encoded-path": "/v1/%72esponses/resp_1",
        "encoded-lower-case": "/v1/mess%61ges/count%5ftokens",
    }
    cases = []
    for name, target in targets.items():
        is_call = target.startswith(CHAT)
        method = "POST" if is_call or "count" in target else "GET"
        body = (body_of(),) if is_call else (b"{}",) if method == "POST" else ()
        question = Question(method, target, (JSON,) if body else (), body)
        cases.append(
            Case(
                f"target-{name}",
                (question,),
                fixed(Reply(blocks=(b"{}",))),
                adds=ADDS_CHAT if is_call else (),
            )
        )
    for path in ("/v1/embeddings", "/tokenize", "/v1/score", "/rerank", "/v1/chat/completions/render"):
        question = Question("POST", path, (JSON,), (b'{"model": "base",  "input": ["a"]}',))
        cases.append(_plain("route" + path.replace("/", "-"), question, Reply(blocks=(EMBEDDING,))))
    return cases


def _bodies() -> list[Case]:
    parts = tuple(bytes([65 + i % 26]) * (1 + 997 * i % 5000) for i in range(40))
    form: Pairs = ((b"Content-Type", b"multipart/form-data; boundary=----b"),)
    wav = Question("POST", "/v1/audio/transcriptions", form, parts)
    call = tuple(body_of()[i : i + 9] for i in range(0, len(body_of()), 9))
    large = (b"x" * (1 << 20),) * 12
    told = Reply(blocks=(b'{"text":"hi"}',))
    tokens = tokens_of(PLAIN)
    exact = replies_with(PLAIN)
    cases = [
        _plain("multipart", wav, told),
        _plain("multipart-chunked", replace(wav, chunked=True), told),
        _plain("multipart-large", replace(wav, pieces=large), told),
        _plain("multipart-large-chunked", replace(wav, pieces=large, chunked=True), told),
        _plain("multipart-expect", replace(wav, expects=True), told),
        _plain(
            "post-without-body",
            Question("POST", "/tokenize", ()),
            Reply(b"HTTP/1.1 422 Unprocessable Content", (JSON,), (b"{}",)),
        ),
        Case("call-chunked", (Question(pieces=call, chunked=True),), exact, tokens=tokens, adds=ADDS_CHAT),
        Case(
            "call-chunked-trailers",
            (Question(pieces=call, chunked=True, trailers=((b"X-Sum", b"1"),)),),
            exact,
            tokens=tokens,
            adds=ADDS_CHAT,
        ),
        Case("call-in-pieces", (Question(pieces=call),), exact, tokens=tokens, adds=ADDS_CHAT),
        Case("call-expect", (Question(pieces=call, expects=True),), exact, tokens=tokens, adds=ADDS_CHAT),
        Case(
            "call-large",
            (Question(pieces=(body_of(messages=[{"role": "user", "content": "y" * 6_000_000}]),)),),
            exact,
            tokens=tokens,
            adds=ADDS_CHAT,
        ),
        Case(
            "answer-large",
            (Question("POST", "/v1/embeddings", (JSON,), (b"{}",)),),
            fixed(Reply(blocks=(b'{"data":"' + b"z" * 8_000_000 + b'"}',))),
        ),
        Case(
            "answer-chunked-json",
            (Question(pieces=(body_of(),)),),
            lambda asked: replace(exact(asked), framing="chunked"),
            tokens=tokens,
            adds=ADDS_CHAT,
        ),
        Case(
            "answer-until-close",
            (Question(pieces=(body_of(echo=True),)),),
            lambda asked: replace(exact(asked), framing="close"),
            declared="echo",
        ),
        Case(
            "answer-cut",
            (Question(pieces=(body_of(echo=True),)),),
            fixed(
                Reply(
                    headers=((b"content-length", b"90"), JSON),
                    blocks=(b'{"choices":[',),
                    framing="none",
                    breaks=True,
                )
            ),
            declared="echo",
            status="error",
        ),
        Case(
            "plain-answer-cut",
            (Question("GET", "/metrics", ()),),
            fixed(
                Reply(headers=((b"content-length", b"90"),), blocks=(b"# HELP",), framing="none", breaks=True)
            ),
        ),
        Case(
            "plain-stream-cut",
            (Question("POST", "/v1/audio/translations", form, (b"x",)),),
            fixed(
                Reply(
                    headers=((b"content-type", b"text/event-stream"),),
                    blocks=(b"data: 1\n\n", b"data"),
                    framing="chunked",
                    breaks=True,
                )
            ),
        ),
        Case(
            "early-answer",
            (Question("POST", "/v1/audio/transcriptions", form, (b"x" * 65536,) * 64),),
            fixed(
                Reply(
                    b"HTTP/1.1 413 Request Entity Too Large",
                    (JSON, (b"connection", b"close")),
                    (b'{"error":"too large"}',),
                )
            ),
        ),
    ]
    for name, body in {
        "not-json": b"{",
        "no-body": b"",
        "array": b"[1]",
        "nan": b'{"model":"base","temperature":NaN}',
        "bom": b"\xef\xbb\xbf" + body_of(),
    }.items():
        cases.append(
            Case(
                f"declared-{name}",
                (Question(pieces=(body,)),),
                fixed(Reply(b"HTTP/1.1 400 Bad Request", (JSON,), (b'{"error":{"message":"bad"}}',))),
                declared="the body is not a JSON object",
                status="error",
            )
        )
    cases.append(
        Case(
            "declared-content-type",
            (Question(headers=((b"Content-Type", b"text/plain"),), pieces=(body_of(),)),),
            fixed(Reply(b"HTTP/1.1 415 Unsupported Media Type", (JSON,), (b"{}",))),
            declared="content type is not application/json",
        )
    )
    return cases


def _compression() -> list[Case]:
    zipped = gzip.compress(EMBEDDING)
    asks: Pairs = (JSON, (b"Accept-Encoding", b"gzip, br, zstd"))
    question = Question("POST", "/v1/embeddings", asks, (b'{"model": "base"}',))
    cases = []
    for coding, body in {
        "gzip": zipped,
        "zstd": ZSTD,
        "br": BROTLI,
        "deflate": zlib.compress(EMBEDDING),
    }.items():
        headers = ((b"content-encoding", coding.encode()), (b"vary", b"Accept-Encoding"), JSON)
        cases.append(_plain(f"answer-{coding}", question, Reply(headers=headers, blocks=(body,))))
    headers = ((b"content-encoding", b"gzip"), JSON)
    cases.append(
        _plain("answer-gzip-chunked", question, Reply(headers=headers, blocks=(zipped,), framing="chunked"))
    )
    cases.append(
        Case(
            "answer-gzip-error",
            (Question(pieces=(body_of(),)),),
            fixed(
                Reply(b"HTTP/1.1 400 Bad Request", headers, (gzip.compress(b'{"error":{"message":"x"}}'),))
            ),
            adds=ADDS_CHAT,
            status="error",
        )
    )
    for coding, body in {"gzip": gzip.compress(body_of()), "zstd": ZSTD}.items():
        sent: Pairs = (JSON, (b"Content-Encoding", coding.encode()))
        refusal = Reply(b"HTTP/1.1 400 Bad Request", (JSON,), (b'{"error":{"message":"not JSON"}}',))
        cases.append(
            Case(
                f"request-{coding}",
                (Question(headers=sent, pieces=(body,)),),
                fixed(refusal),
                declared="the body is not a JSON object",
                status="error",
            )
        )
        cases.append(_plain(f"plain-request-{coding}", Question("POST", "/tokenize", sent, (body,)), refusal))
    return cases


def _connections() -> list[Case]:
    exact = replies_with(PLAIN)
    call = Question(pieces=(body_of(),))
    stream = Question(pieces=(body_of(stream=True),))
    health = Question("GET", "/metrics", ())
    tokens = tokens_of(PLAIN)

    def mixed(asked: Asked) -> Reply:
        return exact(asked) if asked.body else Reply(blocks=(b"# metrics",))

    return [
        Case("keep-alive", (call, stream, call), exact, tokens=tokens, adds=ADDS_CHAT),
        Case("keep-alive-plain", (health, health, health), mixed),
        Case(
            "engine-closes-behind-each",
            (call, stream, call, call),
            lambda asked: replace(exact(asked), closes=True),
            tokens=tokens,
            adds=ADDS_CHAT,
        ),
        Case(
            "engine-says-close",
            (health, health),
            fixed(Reply(headers=((b"connection", b"close"),), blocks=(b"x",), closes=True)),
        ),
        Case(
            "http-1-0-client",
            (replace(call, version=b"HTTP/1.0", headers=(JSON,)),),
            exact,
            tokens=tokens,
            adds=ADDS_CHAT,
        ),
        Case(
            "http-1-0-engine",
            (health,),
            fixed(Reply(b"HTTP/1.0 200 OK", ((b"content-type", b"text/plain"),), (b"old",), "close")),
        ),
    ]
