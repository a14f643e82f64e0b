"""The fake engine, a process of its own: as little work per call as can be, the proxy is what is to be seen.

`python engine.py PORT`. A stream's events are written one by one, as an engine does: at once, or (a request
whose number is followed by `~`) one every 10 ms. After the number, `!` asks for an answer of 6 MB.
"""

from __future__ import annotations

import asyncio
import re
import sys

import answers
import httptools

PACE_SEC = 0.010

_NUMBER = re.compile(rb"#(\d{8})([~!]?)")
_ASKED = re.compile(rb'"return_token_ids"\s*:\s*true')
_STREAMS = re.compile(rb'"stream"\s*:\s*true')
_JSON_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n"
)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_NOT_FOUND = (
    b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 22\r\n\r\n"
    b'{"detail":"Not Found"}'
)
_ABOUT = {
    b"/v1/models": b'{"object":"list","data":[{"id":"%b","object":"model","owned_by":"vllm",'
    b'"root":"/models/bench","parent":null,"max_model_len":32768}]}' % answers.MODEL.encode(),
    b"/version": b'{"version":"0.32.0"}',
}


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=64 * 1024 * 1024)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = b""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._transport is None:
            return
        number = _NUMBER.search(self._body) if self._url.startswith(b"/v1/chat/completions") else None
        if number is None:
            body = _ABOUT.get(self._url)
            self._transport.write(_NOT_FOUND if body is None else _JSON_HEAD % len(body) + body)
            return
        call, kind = int(number.group(1)), number.group(2)
        asked = _ASKED.search(self._body) is not None
        if _STREAMS.search(self._body) is None:
            size = answers.HUGE_TOKENS if kind == b"!" else answers.NUM_TOKENS
            body = answers.whole_answer(call, asked=asked, num_tokens=size)
            self._transport.write(_JSON_HEAD % len(body) + body)
            return
        events = answers.streamed_answer(call, asked=asked)
        if kind == b"~":
            self._write_paced(events, 0)
            return
        write = self._transport.write
        write(_STREAM_HEAD)
        for event in events:  # each is a write of its own: who reads slower finds several at once
            write(b"%x\r\n%b\r\n" % (len(event), event))
        write(b"0\r\n\r\n")

    def _write_paced(self, events: tuple[bytes, ...], at: int) -> None:
        if self._transport is None:
            return
        if at == 0:
            self._transport.write(_STREAM_HEAD)
        event = events[at]
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        if at + 1 < len(events):
            asyncio.get_running_loop().call_later(PACE_SEC, self._write_paced, events, at + 1)
        else:
            self._transport.write(b"0\r\n\r\n")


async def serve(port: int) -> None:
    for call in range(answers.NUM_VARIANTS):  # made before anybody waits for them
        for asked in (False, True):
            answers.whole_answer(call, asked=asked)
            answers.streamed_answer(call, asked=asked)
    answers.whole_answer(0, asked=True, num_tokens=answers.HUGE_TOKENS)
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=2048)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
