"""Server-sent events as bytes: where one ends, and what data it carries.

Cuts a stream, however it was split in transport, into blocks whose concatenation is the stream itself; LF,
CRLF and CR, comments and fields of any name pass unchanged. Knows nothing of what the data means.
"""

from __future__ import annotations

import re

from .splice import Edit, apply

# Atomic groups: a CRLF is one line ending and must not be read as CR and LF.
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_BOM = b"\xef\xbb\xbf"
"""A stream may begin with one; it is no part of the first field's name, so it is a block of its own."""
_LINE = re.compile(rb"([^\r\n]*+)(\r\n|\n|\r|\Z)")


class Framer:
    """Cuts a byte stream into blocks, each up to and including the blank line that ends an event."""

    __slots__ = ("_has_begun", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._has_begun = False

    def feed(self, data: bytes) -> list[bytes]:
        """Take what came and give the blocks that are now whole.

        A CR at the very end ends its block at once (waiting for a LF that may never come would delay the
        event); that LF then opens the next block, where readers skip it.
        """
        text = self._rest + data if self._rest else data
        if not self._has_begun:
            if _BOM.startswith(text):  # perhaps the beginning of one
                self._rest = text
                return []
            self._has_begun = True
            if text.startswith(_BOM):
                self._rest = b""
                return [_BOM, *self.feed(text[len(_BOM) :])]
        if b"\r" not in text:
            return self._feed_lf(text)
        blocks: list[bytes] = []
        position = 0
        for match in _EVENT_END.finditer(text):
            blocks.append(text[position : match.end()])
            position = match.end()
        self._rest = text[position:]
        return blocks

    def _feed_lf(self, text: bytes) -> list[bytes]:
        if text.find(b"\n\n") == len(text) - 2 >= 0:  # by far the most common
            self._rest = b""
            return [text]
        parts = text.split(b"\n\n")
        self._rest = parts.pop()
        return [part + b"\n\n" for part in parts]

    def rest(self) -> bytes:
        """The bytes after the last whole block: what a stream that broke or ended early leaves."""
        rest, self._rest = self._rest, b""
        return rest


def data_of(block: bytes) -> bytes | None:
    """The event's data, its lines joined by LF; None where the block has no data field."""
    if (
        block.startswith(b"data: ")
        and block.endswith(b"\n\n")
        and block.count(b"\n") == 2
        and b"\r" not in block
    ):
        return block[6:-2]
    lines = [content for _, content in _data_lines(block)]
    return b"\n".join(lines) if lines else None


def edit_data(block: bytes, edits: list[Edit]) -> bytes:
    """Carry out edits, given in positions of `data_of(block)`, on the block itself."""
    starts: list[tuple[int, int]] = []  # (position in the data, position in the block) of each data line
    position = 0
    for start, content in _data_lines(block):
        starts.append((position, start))
        position += len(content) + 1

    def in_block(offset: int) -> int:
        line, start = next(pair for pair in reversed(starts) if pair[0] <= offset)
        return start + offset - line

    return apply(block, [Edit(in_block(edit.start), in_block(edit.end), edit.new) for edit in edits])


def _data_lines(block: bytes) -> list[tuple[int, bytes]]:
    """Position and content of each `data` line, without the field's name and the one optional space."""
    found: list[tuple[int, bytes]] = []
    for match in _LINE.finditer(block):
        line = match.group(1)
        if line.startswith(b"data:"):
            skip = 6 if line.startswith(b"data: ") else 5
            found.append((match.start() + skip, line[skip:]))
        elif line == b"data":
            found.append((match.start() + 4, b""))
    return found
