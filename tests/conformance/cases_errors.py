"""Errors of every status, and headers that must arrive as they were."""

from __future__ import annotations

from http import HTTPStatus

from lightning_rl.tests.conformance.case import ADDS_CHAT, Case, body_of, fixed
from lightning_rl.tests.conformance.cases_chat import PLAIN
from lightning_rl.tests.conformance.replay import Reply
from lightning_rl.tests.conformance.vllm_forms import Wants, chat_json
from lightning_rl.tests.conformance.wire import Pairs, Question

JSON = (b"content-type", b"application/json")


def error_cases() -> list[Case]:
    bodies = {
        400: b'{"error":{"message":"This model\'s maximum context length is 2048 tokens. However, you requested 4096 '
        b'tokens","type":"BadRequestError","param":"input_tokens","code":400}}',
        401: b'{"error":"Unauthorized"}',
        403: b'{"error":{"message":"no","type":"PermissionDeniedError","param":null,"code":403}}',
        404: b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":"model","code":404}}',
        405: b'{"detail":"Method Not Allowed"}',
        408: b"",
        409: b'{ "error" : {"message": "conflict"} }',
        413: b"<html><body>413</body></html>\r\n",
        415: b'{"detail":[{"type":"x","loc":["body"],"msg":"Unsupported Media Type: Only \'application/json\' is allowed"}]}',
        422: b'{"error":{"message":"[{\'type\': \'missing\'}]","type":"Unprocessable","param":null,"code":422}}',
        429: b'{"error":{"message":"slow down","code":429}}\n',
        500: b'{"error":{"message":"boom \xff","type":"InternalServerError","param":null,"code":500}}',
        501: b'{"error":{"message":"The model does not support this","type":"NotImplementedError","code":501}}',
        502: b"Bad Gateway",
        503: b'{"error":{"message":"paused","token_ids":[1],"logprobs":{"a":1},"choices":[{"token_ids":[1]}]}}',
        504: b"upstream request timeout",
        507: b'{"choices":[{"index":0,"token_ids":[1,2],"logprobs":{"content":[]},"finish_reason":"stop"}]}',
    }
    more: dict[int, Pairs] = {
        401: ((b"WWW-Authenticate", b'Bearer realm="x"'), (b"WWW-Authenticate", b"Basic")),
        405: ((b"Allow", b"POST"),),
        429: ((b"Retry-After", b"7"), (b"retry-after-ms", b"6500"), (b"X-Should-Retry", b"false")),
        503: ((b"Retry-After", b"Wed, 21 Oct 2026 07:28:00 GMT"), (b"x-should-retry", b"true")),
    }
    cases = []
    for status, body in bodies.items():
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()
        reply = Reply(line, (*more.get(status, ()), JSON), (body,))
        question = Question(pieces=(body_of(stream=status % 2 == 0),))
        cases.append(Case(f"error-{status}", (question,), fixed(reply), adds=ADDS_CHAT, status="error"))
    broken = Reply(
        b"HTTP/1.1 500 Internal Server Error", ((b"content-length", b"500"), JSON), (b'{"err',), "none", True
    )
    cases.append(
        Case("error-500-cut", (Question(pieces=(body_of(),)),), fixed(broken), adds=ADDS_CHAT, status="error")
    )
    cases.append(
        Case(
            "unknown-route-of-the-engine",
            (Question("GET", "/v1/responses/resp_1", ()),),
            fixed(Reply(b"HTTP/1.1 404 Not Found", (JSON,), (b'{"detail":"Not Found"}',))),
        )
    )
    return cases


HEADERS: Pairs = (
    (b"Date", b"Mon, 30 Nov 2026 12:00:00 GMT"),
    (b"Server", b"uvicorn"),
    (b"Set-Cookie", b"a=1; Path=/"),
    (b"X-First", b"1"),
    (b"Set-Cookie", b"b=2; HttpOnly"),
    (b"Vary", b"Origin"),
    (b"VARY", b"Accept-Encoding"),
    (b"X-Request-Id", b"abc-123"),
    (b"X-Empty", b""),
    (b"X-Latin", b"na\xefve"),
    (b"X-Utf8", "naïve".encode()),
    (b"x-spaces", b"  inside  and   out  "),
    (b"Content-Type", b"application/json; charset=utf-8"),
    (b"Access-Control-Allow-Origin", b"*"),
    (b"Content-Language", b"en"),
    (b"ETag", b'W/"x"'),
    (b"X-Long", b"l" * 6000),
)


def header_cases() -> list[Case]:
    hop = (
        (b"Connection", b"keep-alive, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Proxy-Authenticate", b"Basic"),
        (b"X-After", b"2"),
    )
    question = Question(pieces=(body_of(),))
    sent: Pairs = (
        (b"User-Agent", b"OpenAI/Python 3.0"),
        (b"Content-Type", b"application/json"),
        (b"Accept", b"application/json"),
        (b"X-Stainless-Retry-Count", b"1"),
        (b"OpenAI-Organization", b"org"),
        (b"Authorization", b"Bearer sk-client"),
        (b"X-Api-Key", b"sk-client"),
        (b"api-key", b"sk-client"),
        (b"Connection", b"keep-alive, X-Private"),
        (b"X-Private", b"hop"),
        (b"TE", b"trailers"),
        (b"Traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        (b"X-Twice", b"1"),
        (b"X-TWICE", b"2"),
        (b"Cookie", b"a=1; b=2"),
        (b"X-Request-Id", b"mine"),
        (b"X-Latin", b"na\xefve"),
        (b"Accept-Encoding", b"gzip, deflate, br, zstd"),
        (b"X-Lightning-Agent", b"planner"),
        (b"X-Vllm-Priority", b"3"),
        (b"X-Empty", b""),
    )
    plain = Question("POST", "/tokenize", sent, (b'{"prompt": "a"}',))
    body = chat_json(PLAIN, Wants(), lambda doc: b'{"choices": []}')
    return [
        Case(
            "headers-of-an-answer", (question,), fixed(Reply(headers=HEADERS, blocks=(body,))), adds=ADDS_CHAT
        ),
        Case(
            "headers-of-a-stream",
            (Question(pieces=(body_of(stream=True),)),),
            fixed(
                Reply(
                    headers=(
                        *HEADERS[:12],
                        (b"content-type", b"text/event-stream"),
                        (b"X-Accel-Buffering", b"no"),
                    ),
                    blocks=(b"data: [DONE]\n\n",),
                    framing="chunked",
                )
            ),
            adds=ADDS_CHAT,
        ),
        Case("headers-of-a-plain-route", (plain,), fixed(Reply(headers=HEADERS, blocks=(b"{}",)))),
        Case("headers-of-one-hop", (plain,), fixed(Reply(headers=(*hop, JSON), blocks=(b"{}",)))),
        Case(
            "headers-of-a-call",
            (Question(headers=sent, pieces=(body_of(),)),),
            fixed(Reply(headers=(*hop, JSON), blocks=(b"{}",))),
            adds=ADDS_CHAT,
        ),
        Case("no-content-type", (question,), fixed(Reply(headers=(), blocks=(b"{}",))), adds=ADDS_CHAT),
        Case(
            "odd-reason",
            (question,),
            fixed(Reply(b"HTTP/1.1 200 Fine, thanks", blocks=(b"{}",))),
            adds=ADDS_CHAT,
        ),
        Case(
            "unnamed-status",
            (question,),
            fixed(Reply(b"HTTP/1.1 529 Overloaded", blocks=(b'{"type":"error"}',))),
            adds=ADDS_CHAT,
            status="error",
        ),
    ]
