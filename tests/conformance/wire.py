"""HTTP as bytes: a client that sees everything and interprets nothing but where a message ends."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Pairs = tuple[tuple[bytes, bytes], ...]

TIMEOUT_SEC = 20.0


@dataclass(frozen=True)
class Question:
    """A request. `pieces` is the body as it is written, chunked where `chunked`."""

    method: str = "POST"
    target: str = "/v1/chat/completions"
    headers: Pairs = ((b"Content-Type", b"application/json"),)
    pieces: tuple[bytes, ...] = ()
    chunked: bool = False
    trailers: Pairs = ()
    expects: bool = False  # Expect: 100-continue, and the body only after it has come
    version: bytes = b"HTTP/1.1"

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def head(self, prefix: str = "", more: Pairs = ()) -> bytes:
        lines = [f"{self.method} {prefix}{self.target} ".encode() + self.version, b"Host: engine.internal"]
        lines += [name + b": " + value for name, value in (*self.headers, *more)]
        if self.expects:
            lines.append(b"Expect: 100-continue")
        if self.chunked:
            lines.append(b"Transfer-Encoding: chunked")
            if self.trailers:
                lines.append(b"Trailer: " + b", ".join(name for name, _ in self.trailers))
        elif self.pieces or self.method in ("POST", "PUT", "PATCH"):
            lines.append(b"Content-Length: %d" % len(self.body))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def body_pieces(self) -> Iterator[bytes]:
        """The body as it is on the wire."""
        if not self.chunked:
            yield from self.pieces
            return
        for piece in self.pieces:
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
        yield b"0\r\n" + b"".join(name + b": " + value + b"\r\n" for name, value in self.trailers) + b"\r\n"


@dataclass
class RawAnswer:
    """What came back. `is_broken`: the connection ended before the message said that it would."""

    status_line: bytes = b""
    headers: Pairs = ()
    body: bytes = b""
    framing: str = "none"  # none, length, chunked, close
    is_broken: bool = False
    interim: list[bytes] = field(default_factory=list)  # status lines of 1xx answers
    closes: bool = False  # nothing more can be asked on this connection

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


class Connection:
    """One client connection, as plain as it gets."""

    def __init__(self, address: tuple[str, int], timeout_sec: float = TIMEOUT_SEC) -> None:
        self._socket = socket.create_connection(address, timeout=timeout_sec)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._ended = False

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def ask(self, question: Question, prefix: str = "", more: Pairs = ()) -> RawAnswer:
        answer = RawAnswer()
        self.send(question.head(prefix, more))
        if question.expects:
            answer.interim.append(self._read_head()[0])
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an early answer: it is read below
            for piece in question.body_pieces():
                self.send(piece)
        self._read_answer(answer, question.method)
        return answer

    def _read_answer(self, answer: RawAnswer, method: str) -> None:
        answer.status_line, answer.headers = self._read_head()
        while answer.status_line.split(b" ")[1:2] == [b"100"]:
            answer.interim.append(answer.status_line)
            answer.status_line, answer.headers = self._read_head()
        if not answer.status_line:
            answer.is_broken = answer.closes = True
            return
        status = int(answer.status_line.split(b" ")[1])
        lengths = answer.values(b"content-length")
        if method == "HEAD" or status in (204, 304):
            answer.framing = "none"
        elif b"chunked" in b"".join(answer.values(b"transfer-encoding")).lower():
            answer.framing = "chunked"
            answer.body, answer.is_broken = self._read_chunked()
        elif lengths:
            answer.framing = "length"
            self._fill(int(lengths[0]))
            answer.body = self._take(int(lengths[0]))
            answer.is_broken = len(answer.body) < int(lengths[0])
        else:
            answer.framing = "close"
            while self._more():
                pass
            answer.body = self._take(len(self._received))
        says_close = b"close" in b"".join(answer.values(b"connection")).lower()
        answer.closes = says_close or answer.framing == "close" or answer.is_broken

    def _read_head(self) -> tuple[bytes, Pairs]:
        while b"\r\n\r\n" not in self._received:
            if not self._more():
                return b"", ()
        head, self._received = self._received.split(b"\r\n\r\n", 1)
        status_line, *lines = head.split(b"\r\n")
        pairs = []
        for line in lines:
            name, _, value = line.partition(b":")
            pairs.append((name, value.strip(b" \t")))
        return status_line, tuple(pairs)

    def _read_chunked(self) -> tuple[bytes, bool]:
        body = b""
        while True:
            while b"\r\n" not in self._received:
                if not self._more():
                    return body, True
            size, self._received = self._received.split(b"\r\n", 1)
            num_bytes = int(size, 16)
            self._fill(num_bytes + 2)
            body += self._take(num_bytes)
            if self._take(2) != b"\r\n":
                return body, True
            if num_bytes == 0:
                return body, False

    def _fill(self, num_bytes: int) -> None:
        while len(self._received) < num_bytes and self._more():
            pass

    def _take(self, num_bytes: int) -> bytes:
        taken, self._received = self._received[:num_bytes], self._received[num_bytes:]
        return taken

    def _more(self) -> bool:
        if self._ended:
            return False
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        self._ended = not data
        self._received += data
        return bool(data)

    @property
    def has_ended(self) -> bool:
        """Whether the other side has closed, by now."""
        self._socket.settimeout(0.03)
        try:
            return not self._more()
        except TimeoutError:
            return False
        finally:
            self._socket.settimeout(TIMEOUT_SEC)


def ask_all(
    address: tuple[str, int], questions: Sequence[Question], prefix: str = "", more: Pairs = ()
) -> list[RawAnswer]:
    """Ask one after the other, on one connection for as long as it lasts."""
    answers = []
    connection = Connection(address)
    try:
        for question in questions:
            answers.append(connection.ask(question, prefix, more))
            if answers[-1].closes or (len(answers) < len(questions) and connection.has_ended):
                connection.close()
                connection = Connection(address)
    finally:
        connection.close()
    return answers
