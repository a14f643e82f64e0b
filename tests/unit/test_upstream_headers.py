"""Which of the client's headers the engine is sent."""

from __future__ import annotations

import asyncio

from lightning_rl.proxy.transport.upstream import Upstream, request_headers


def test_what_is_for_one_hop_ends_there() -> None:
    sent = [
        (b"connection", b"keep-alive, X-Private"),
        (b"x-private", b"1"),
        (b"te", b"trailers"),
        (b"trailer", b"X-Sum, X-Other"),
        (b"x-kept", b"1"),
        (b"x-sum", b"a trailer, which the server files as a header"),
    ]
    assert request_headers(sent) == [(b"x-kept", b"1")]


def test_websockets_send_values_as_utf8() -> None:
    headers = [(b"x-a", b"na\xc3\xafve"), (b"x-b", b"na\xefve")]

    async def sent() -> list[tuple[str, str]]:
        return Upstream("a-key").request_headers(headers)

    assert asyncio.run(sent()) == [("x-a", "naïve"), ("x-b", "naïve"), ("authorization", "Bearer a-key")]
