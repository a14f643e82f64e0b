"""What docs/recording.md says is different behind the proxy, as code: nothing else may be.

Works on what was seen straight, and gives what must be seen through. Header names arrive in lower case and
hop-by-hop headers end at each hop; a reason phrase is the standard one of its status; the engine gets the
members that the proxy adds. What is taken back in answers needs no substitution: the engine itself answers
"straight" in the form that it gives to those who did not ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from lightning_rl.tests.conformance.case import Case
from lightning_rl.tests.conformance.replay import Asked
from lightning_rl.tests.conformance.wire import Pairs, RawAnswer

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
KEYS = (b"authorization", b"x-api-key", b"api-key")
OF_THE_HOP = (b"host", b"content-length", b"expect")
MARK = b"x-conformance-case"


@dataclass(frozen=True)
class Seen:
    """An answer, as far as it has to be the same."""

    status: bytes
    reason: bytes
    headers: Pairs
    body: bytes
    is_broken: bool


@dataclass(frozen=True)
class Sent:
    """A request as the engine gets it, as far as it has to be the same."""

    method: str
    target: str
    headers: Pairs
    body: bytes


def straight_answer(answer: RawAnswer, case: Case) -> Seen:
    """What the client must see through the proxy, given what it saw straight."""
    status = answer.status_line.split(b" ")[1]
    headers, body = _end_to_end(answer.headers), answer.body
    if case.answer_adds is not None:  # the list of models has an entry more for each policy
        added, before = case.answer_adds
        at = body.rindex(before)
        body = body[:at] + added + body[at:]
        length = str(len(body)).encode()
        headers = tuple((n, length if n == b"content-length" else v) for n, v in headers)
    return Seen(status, _phrase(status), headers, body, answer.is_broken)


def proxied_answer(answer: RawAnswer) -> Seen:
    """Of this side only the server's own hop is left out."""
    parts = answer.status_line.split(b" ", 2)
    headers = tuple(
        (name, value) for name, value in answer.headers if name not in (b"transfer-encoding", b"connection")
    )
    return Seen(parts[1], parts[2], headers, answer.body, answer.is_broken)


def straight_request(asked: Asked, case: Case) -> Sent:
    """What the engine must get through the proxy, given what it got straight."""
    headers = [
        (name, value)
        for name, value in _end_to_end(asked.headers)
        if name not in KEYS and name not in OF_THE_HOP and not name.startswith(b"x-lightning-")
    ]
    if case.adds or case.engine_body is not None:  # where the answer has to be read
        headers = [(n, b"identity" if n == b"accept-encoding" else v) for n, v in headers]
    body = asked.body
    if case.engine_body is not None:
        body = case.engine_body
    elif case.adds:
        close = body.rindex(b"}")
        added = b"".join(f',"{name}":{value}'.encode() for name, value in case.adds)
        body = body[:close] + added + body[close:]
    target = asked.target.removesuffix("?")  # an empty query is none
    return Sent(asked.method, target, tuple(headers), body)


def proxied_request(asked: Asked) -> Sent:
    headers = tuple(
        (name.lower(), value)
        for name, value in asked.headers
        if name.lower() not in OF_THE_HOP and name.lower() not in (b"transfer-encoding", b"connection")
    )
    return Sent(asked.method, asked.target, headers, asked.body)


def _end_to_end(headers: Pairs) -> Pairs:
    named = {
        token.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for token in value.split(b",")
    }
    return tuple(
        (name.lower(), value)
        for name, value in headers
        if name.lower() not in HOP_BY_HOP and name.lower() not in named
    )


def _phrase(status: bytes) -> bytes:
    try:
        return HTTPStatus(int(status)).phrase.encode()
    except ValueError:
        return b""
