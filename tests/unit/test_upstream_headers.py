"""Which of the client's headers the engine is sent."""

from __future__ import annotations

from lightning_rl.proxy.upstream import request_headers


def test_what_is_for_one_hop_ends_there() -> None:
    sent = [
        (b"connection", b"keep-alive, X-Private"),
        (b"x-private", b"1"),
        (b"te", b"trailers"),
        (b"trailer", b"X-Sum, X-Other"),
        (b"x-kept", b"1"),
        (b"x-sum", b"a trailer, which the server files as a header"),
    ]
    assert request_headers(sent) == [("x-kept", "1")]


def test_values_arrive_as_utf8() -> None:
    assert request_headers([(b"x-a", b"na\xc3\xafve"), (b"x-b", b"na\xefve")]) == [
        ("x-a", "naïve"),
        ("x-b", "naïve"),
    ]
