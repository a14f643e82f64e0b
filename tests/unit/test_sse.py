"""Framing of server-sent events: whatever the cuts, the same bytes and the same events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.proxy.messages.splice import Edit
from lightning_rl.proxy.messages.sse import Framer, data_of, edit_data

LINES = st.sampled_from(
    [
        b"data: a",
        b"data:b",
        b"data",
        b"data: {\xd0\xb8}",
        b": comment",
        b"event: x",
        b"id: 1",
        b"retry: 5",
        b"",
        b"x",
    ]
)
ENDINGS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream, and the pieces in which it arrives."""
    lines = draw(st.lists(st.tuples(LINES, ENDINGS), max_size=20))
    text = b"".join(line + ending for line, ending in lines) + draw(st.sampled_from([b"", b"data: cut"]))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def events_by_the_book(text: bytes) -> list[bytes]:
    """The HTML standard's algorithm, for complete events' data only."""
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]
    found: list[bytes] = []
    data: list[bytes] = []
    for line in lines:
        if not line:
            if data:
                found.append(b"\n".join(data))
            data = []
        elif line.partition(b":")[0] == b"data":
            value = line.partition(b":")[2]
            data.append(value[1:] if value.startswith(b" ") else value)
    return found


@given(streams())
def test_cuts_change_neither_bytes_nor_events(stream: tuple[bytes, list[bytes]]) -> None:
    text, pieces = stream
    framer = Framer()
    blocks = [block for piece in pieces for block in framer.feed(piece)]
    rest = framer.rest()
    assert b"".join(blocks) + rest == text
    assert [data for block in blocks if (data := data_of(block)) is not None] == events_by_the_book(text)


@given(streams())
def test_an_event_is_given_as_soon_as_it_is_whole(stream: tuple[bytes, list[bytes]]) -> None:
    text, _ = stream
    framer = Framer()
    num_given = 0
    for end in range(1, len(text) + 1):
        num_given += sum(data_of(block) is not None for block in framer.feed(text[end - 1 : end]))
        assert num_given == len(events_by_the_book(text[:end]))


@pytest.mark.parametrize(
    ("block", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\r\n\r\n", b"x"),
        (b"event: e\nid: 7\ndata: one\ndata:two\n\n", b"one\ntwo"),
        (b"data\n\n", b""),
        (b": keep-alive\n\n", None),
        (b"\ndata: x\r\r", b"x"),
        (b"database: x\n\n", None),
        (b"data:  two spaces\n\n", b" two spaces"),
    ],
)
def test_data_of(block: bytes, data: bytes | None) -> None:
    assert data_of(block) == data


def test_edits_leave_framing_alone() -> None:
    block = b': c\r\nevent: e\r\ndata: {"a":\r\ndata:[1,2],"b":3}\r\nid: 1\r\n\r\n'
    data = data_of(block)
    assert data == b'{"a":\n[1,2],"b":3}'
    start = data.index(b"[1,2]")
    edited = edit_data(block, [Edit(start, start + 5, b"null"), Edit(1, 4, b'"A"')])
    assert edited == b': c\r\nevent: e\r\ndata: {"A":\r\ndata:null,"b":3}\r\nid: 1\r\n\r\n'
