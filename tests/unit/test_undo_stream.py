"""Taking injection back out of event streams: whatever their framing and wherever they are cut, what the
client gets is what the engine would have sent without."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_rl.proxy.messages.capture import StreamReader
from lightning_rl.proxy.messages.inject import Injection, inject
from lightning_rl.proxy.messages.request import read_request
from lightning_rl.proxy.messages.sse import Framer, data_of

TEXTS = st.one_of(
    st.text(max_size=8).filter(lambda text: text.isprintable()),
    st.sampled_from(
        [
            '"token_ids":[1]',
            ',"finish_reason":',
            '"logprobs":{',
            '{"delta":{}}',
            "\\",
            '"',
            "]}",
            "ü€😀",
            "data: x",
        ]
    ),
)
DELTAS = st.one_of(
    st.just({}),
    st.builds(lambda text: {"content": text}, TEXTS),
    st.builds(lambda text: {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}, TEXTS),
)
SPELLINGS: list[Callable[[Any], bytes]] = [
    lambda doc: json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode(),
    lambda doc: json.dumps(doc, ensure_ascii=True, separators=(", ", ": ")).encode(),
    lambda doc: json.dumps(doc, ensure_ascii=False, separators=(" , ", " : ")).encode(),
]
ODD_LINES = st.sampled_from(
    [
        b": keep-alive",
        b"event: x",
        b"id: 1",
        b"retry: 5",
        b"data",
        b"data: [DONE]",
        b"data:{oops",
        b"data: }}]",
        b"data: 5",
        b'data: {"error":{"message":"x"}}',
        b'data: {"choices":[],"usage":{"completion_tokens":3}}',
        b'data: {"choices":7}',
        b'data: {"choices":[{"index":{}}, 3]}',
        b"x\xff\x00",
    ]
)
LINE_ENDS = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])


class Event(NamedTuple):
    """The bytes that those get who asked for tokens, and those who did not."""

    asked: bytes
    plain: bytes


@st.composite
def chunks(draw: st.DrawFn) -> Event:
    """One chunk as vLLM writes it in either form, framed in any way."""
    dumps = draw(st.sampled_from(SPELLINGS))
    delta, finish = draw(DELTAS), draw(st.sampled_from([None, None, "stop"]))
    head: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "base"}
    tail = {"usage": {"completion_tokens": 1}} if draw(st.booleans()) else {}
    if draw(st.integers(0, 3)) == 0:
        tail |= {"prompt_token_ids": draw(st.lists(st.integers(0, 99), max_size=3))}
    token = {"token": draw(TEXTS), "logprob": -0.5, "bytes": [1], "top_logprobs": []}

    def write(is_asked: bool) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": {"content": [token]} if is_asked else None,
            "finish_reason": finish,
            "token_ids": [7] if is_asked else None,
        }
        nulled = {key: None if key == "prompt_token_ids" and not is_asked else tail[key] for key in tail}
        return dumps({**head, "choices": [choice], **nulled})

    end = draw(LINE_ENDS)
    before = b"".join(line + end for line in draw(st.lists(ODD_LINES.filter(_is_no_data), max_size=2)))
    field = draw(st.sampled_from([b"data: ", b"data:", b"data:  "]))

    def frame(data: bytes) -> bytes:
        return before + field + data + end + end

    is_held = delta == {} and finish is None
    return Event(frame(write(True)), b"" if is_held else frame(write(False)))


def _is_no_data(line: bytes) -> bool:
    return not line.startswith(b"data") and not line.startswith(b"x")


@st.composite
def odd_events(draw: st.DrawFn) -> Event:
    """Anything else: the same in both forms."""
    end = draw(LINE_ENDS)
    lines = draw(st.lists(ODD_LINES, max_size=3))
    text = b"".join(line + end for line in lines) + end
    return Event(text, text)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Event, list[int]]:
    events = draw(st.lists(st.one_of(chunks(), chunks(), odd_events()), max_size=6))
    # A LF behind a CR would belong to it.
    assume(not any(a.asked.endswith(b"\r") and b.asked.startswith(b"\n") for a, b in pairwise(events)))
    bom = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"]))
    rest = draw(st.sampled_from([b"", b"data: cut", b": cut\n", b'data: {"id":"c","choi', b"data: \xe2\x82"]))
    stream = Event(*(bom + b"".join(event[form] for event in events) + rest for form in (0, 1)))
    return stream, draw(st.lists(st.integers(0, len(stream.asked)), max_size=12))


def received(injection: Injection, text: bytes, cuts: list[int]) -> bytes:
    """As exchange.py does it, the row's reader included: it must survive whatever passes."""
    framer, reader = Framer(), StreamReader(1)
    out = b""
    places = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(places):
        for block in framer.feed(text[start:end]):
            if (data := data_of(block)) is not None:
                reader.add(data)
            out += injection.undo_block(block)
    reader.parse()
    return out + injection.undo_rest(framer.rest())


def asking(**members: Any) -> Injection:
    body = json.dumps({"messages": [], "stream": True, **members}).encode()
    return inject(read_request("chat", body), None, None)


@settings(max_examples=400, deadline=None)
@given(streams())
def test_a_client_gets_what_it_would_have_got_without(stream: tuple[Event, list[int]]) -> None:
    event, cuts = stream
    assert received(asking(), event.asked, cuts) == event.plain


@settings(max_examples=200, deadline=None)
@given(streams())
def test_where_nothing_was_injected_nothing_changes(stream: tuple[Event, list[int]]) -> None:
    event, cuts = stream
    for text in event:
        assert received(asking(return_token_ids=True, logprobs=True), text, cuts) == text
        assert received(asking(echo=True), text, cuts) == text


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_bytes_that_are_no_events_pass(text: bytes, cuts: list[int]) -> None:
    assume(b"data" not in text)
    assert received(asking(), text, [min(cut, len(text)) for cut in cuts]) == text


TAIL = b'"finish_reason":null,"token_ids":[7,8]}]}'


@pytest.mark.parametrize(
    ("rest", "visible"),
    [
        (b'data: {"choices":[{"delta":{"content":"a', None),
        (
            b'data: {"choices":[{"delta":{"content":"a"},"logprobs":{"content":[{"tok',
            b'data: {"choices":[{"delta":{"content":"a"},"logprobs":',
        ),
        (
            b'data: {"choices":[{"delta":{"content":"a"},"logprobs":null,"token_ids":[7,8',
            b'data: {"choices":[{"delta":{"content":"a"},"logprobs":',
        ),
        (b'data: {"choices":[{"delta":{"content":"a"},"logprobs":{"content":[]},' + TAIL, b"null"),
    ],
)
def test_a_broken_stream_shows_no_tokens(rest: bytes, visible: bytes | None) -> None:
    shown = asking().undo_rest(rest)
    if visible == b"null":  # whole but for the blank line
        assert json.loads(shown[6:])["choices"][0] == {
            "delta": {"content": "a"},
            "logprobs": None,
            "finish_reason": None,
            "token_ids": None,
        }
    else:
        assert shown == (rest if visible is None else visible)


def test_the_frame_that_others_send_to_everybody_stays() -> None:
    frame = b'{"content":null,"refusal":null}'
    block = b'data: {"choices":[{"delta":{"content":"a"},"index":0,"logprobs":' + frame + b"}]}\n\n"
    assert asking().undo_block(block) == block


def test_an_empty_delta_without_tokens_is_the_engines_own() -> None:
    block = b'data: {"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null}]}\n\n'
    assert asking().undo_block(block) == block
