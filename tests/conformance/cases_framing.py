"""Event streams as they also occur: other line ends, comments, fields, errors, breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_rl.tests.conformance.case import ADDS_CHAT, SSE, Case, Tokens, body_of, fixed, tokens_of
from lightning_rl.tests.conformance.cases_chat import ONE_TOOL, PLAIN, THREE, TOOL, UNICODE
from lightning_rl.tests.conformance.replay import Asked, Reply
from lightning_rl.tests.conformance.vllm_forms import Script, Step, Wants, chat_chunks, events, words
from lightning_rl.tests.conformance.wire import Question

ERROR = b'data: {"error":{"message":"engine died","type":"InternalServerError","param":null,"code":500}}\n\n'
DONE = b"data: [DONE]\n\n"

Reshape = Callable[[tuple[bytes, ...]], tuple[bytes, ...]]


def framing_cases() -> list[Case]:
    return _other_framings() + _errors_and_breaks() + _streams_that_are_not()


def _reshaped(
    name: str,
    reshape: Reshape,
    script: Script = ONE_TOOL,
    steps: int | None = None,
    *,
    tokens: Tokens | None = None,
    status: str | None = None,
    **reply: Any,
) -> Case:
    """vLLM's stream, or its first steps, in the form asked for, told in another way."""
    told = script if steps is None else replace(script, steps=script.steps[:steps])

    def answer(asked: Asked) -> Reply:
        blocks = reshape(events(chat_chunks(told, Wants.of(asked.body))))
        return Reply(headers=SSE, blocks=blocks, framing="chunked", **reply)

    members: dict[str, Any] = {"stream": True, "n": script.num_choices}
    if script is ONE_TOOL:
        members["tools"] = [TOOL]
    return Case(
        name, (Question(pieces=(body_of(**members),)),), answer, tokens=tokens, adds=ADDS_CHAT, status=status
    )


def _other_framings() -> list[Case]:
    def each(change: Callable[[bytes], bytes]) -> Reshape:
        return lambda blocks: tuple(change(block) for block in blocks)

    def between(extra: bytes) -> Reshape:
        """Before each event that both forms have: what comes between events is nobody's."""
        return lambda blocks: tuple(
            b if b'"delta":{},' in b and b'"finish_reason":null' in b else extra + b for b in blocks
        )

    def two_lines(block: bytes) -> bytes:
        """The data over two lines: cut where a line end is only a space of JSON."""
        if not block.startswith(b"data: {"):
            return block
        at = block.index(b',"choices"') + 1
        return block[:at] + b"\ndata: " + block[at:]

    def two_lines_in_a_value(block: bytes) -> bytes:
        at = block.find(b'"token_ids":[')
        return block if at < 0 else block[: at + 13] + b"\ndata:" + block[at + 13 :]

    shapes: dict[str, Reshape] = {
        "crlf": each(lambda b: b.replace(b"\n", b"\r\n")),
        "cr": each(lambda b: b.replace(b"\n", b"\r")),
        "mixed-ends": each(lambda b: b[:-1] + b"\r\n"),
        "comments": between(b": keep-alive\n\n"),
        "comment-in-event": each(lambda b: b": why\n" + b),
        "fields": each(lambda b: b"event: chunk\nid: 7\nretry: 1000\nx-other: y\n" + b),
        "fields-behind": each(lambda b: b[:-1] + b"id: 7\nevent\n\n"),
        "no-space": each(lambda b: b.replace(b"data: ", b"data:")),
        "two-spaces": each(lambda b: b.replace(b"data: ", b"data:  ")),
        "multi-line": each(two_lines),
        "multi-line-crlf": each(lambda b: two_lines(b).replace(b"\n", b"\r\n")),
        "multi-line-value": each(two_lines_in_a_value),
        "empty-data": between(b"data:\n\ndata\n\n\n\n"),
        "keep-alive-as-data": between(b"data: : keep-alive\n\n"),
        "done-with-spaces": lambda blocks: (*blocks[:-1], b"data:   [DONE] \n\n"),
        "behind-done": lambda blocks: (*blocks, b": bye\n\nevent: end\ndata: {}\n\nrest"),
        "no-done": lambda blocks: blocks[:-1],
        "one-piece": lambda blocks: (b"".join(blocks),),
    }
    cases = [_reshaped(f"sse-{name}", shape, tokens=tokens_of(ONE_TOOL)) for name, shape in shapes.items()]
    utf8 = _reshaped("sse-utf8", lambda blocks: blocks, UNICODE, tokens=tokens_of(UNICODE))
    close = _reshaped("sse-until-close", lambda blocks: blocks, PLAIN, tokens=tokens_of(PLAIN))
    bom = _reshaped("sse-bom", lambda blocks: (b"\xef\xbb\xbf" + blocks[0], *blocks[1:]), THREE)

    def closing(asked: Asked) -> Reply:
        return replace(close.answer(asked), framing="close")

    return [*cases, utf8, replace(close, answer=closing), replace(bom, tokens=tokens_of(THREE))]


def _errors_and_breaks() -> list[Case]:
    def ends_with(*more: bytes) -> Reshape:
        return lambda blocks: (*blocks[:-1], *more)

    def first(num: int, *more: bytes) -> Reshape:
        return lambda blocks: (*blocks[:num], *more)

    def cut_at(mark: bytes) -> Reshape:
        """In the last event, behind `mark`: what both forms have in common."""
        return lambda blocks: (*blocks[:-2], blocks[-2][: blocks[-2].index(mark) + len(mark)])

    def cut_in_tokens(blocks: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Inside of what only those get who asked; for others, where that would begin."""
        at = blocks[-2].index(b'"logprobs":') + 11
        is_asked = blocks[-2][at:].startswith(b"{")
        return (*blocks[:-2], blocks[-2][: at + 15 * is_asked])

    def without_end(blocks: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return (*blocks[:-2], blocks[-2].rstrip(b"\n"))

    aborted = Script(tuple(words("I was", finish=None)))
    nothing = Script((Step((), {}, "stop"),))
    ended = tokens_of(ONE_TOOL)
    return [
        _reshaped("stream-error", ends_with(ERROR, DONE), steps=4, status="error"),
        _reshaped("stream-error-no-done", ends_with(ERROR), steps=3, status="error"),
        _reshaped("stream-error-named", ends_with(b"event: error\n" + ERROR, DONE), steps=4, status="error"),
        _reshaped("stream-only-error", first(0, ERROR, DONE), status="error"),
        _reshaped("stream-cut-inside", cut_at(b'{"argum'), steps=4, breaks=True, status="error"),
        _reshaped("stream-cut-in-tokens", cut_in_tokens, steps=4, breaks=True, status="error"),
        _reshaped("stream-cut-behind-data", without_end, steps=4, breaks=True, status="error"),
        _reshaped("stream-cut-between", ends_with(), steps=4, breaks=True, status="error"),
        _reshaped("stream-cut-at-once", first(0), breaks=True, status="error"),
        _reshaped("stream-cut-role", first(1), breaks=True, status="error"),
        _reshaped("stream-cut-before-done", ends_with(), breaks=True, tokens=ended, status="complete"),
        _reshaped("stream-cut-in-done", ends_with(DONE[:7]), breaks=True, tokens=ended),
        _reshaped("stream-ends-inside", cut_at(b'{"argum'), steps=4, status="aborted"),
        _reshaped("stream-ends-behind-data", without_end, steps=4, status="aborted"),
        _reshaped("stream-no-finish", lambda b: b, steps=6, status="aborted"),
        _reshaped("stream-no-finish-no-done", ends_with(), steps=6, status="aborted"),
        _reshaped("stream-role-and-done", first(1, DONE), status="aborted"),
        _reshaped("stream-one-unfinished", ends_with(DONE), THREE, len(THREE.steps) - 1, status="aborted"),
        _reshaped("stream-nothing", first(0), status="aborted"),
        _reshaped("stream-only-done", first(0, DONE), status="aborted"),
        _reshaped("stream-truncated", lambda b: b, aborted, status="aborted"),
        _reshaped("stream-not-json", ends_with(b"data: {oops}}\n\n", DONE), steps=4, status="aborted"),
        _reshaped("stream-not-chunks", ends_with(*ODD_EVENTS, DONE), steps=4, status="aborted"),
        _reshaped("stream-no-tokens", lambda b: b, nothing, status="complete"),
    ]


ODD_EVENTS = tuple(
    b"data: " + data + b"\n\n"
    for data in (
        b'{"choices":5}',
        b'{"choices":["x"]}',
        b'{"choices":{"a":1}}',
        b'{"choices":[{"index":"x","delta":7}]}',
        b"[1]",
        b'"text"',
        b"null",
        b'{"usage":7}',
        b'{"choices":[{"index":0,"delta":{"tool_calls":"x"},"logprobs":null,"finish_reason":null}]}',
    )
)


def _streams_that_are_not() -> list[Case]:
    """`stream: true` answered with something else."""
    question = (Question(pieces=(body_of(stream=True),)),)
    error = b'{"error":{"message":"too long","type":"BadRequestError","param":"input_tokens","code":400}}'
    empty = b'data: {"choices":[],"prompt_filter_results":[{"prompt_index":0}],"id":"","model":""}\n\n'
    return [
        Case(
            "stream-400",
            question,
            fixed(Reply(b"HTTP/1.1 400 Bad Request", blocks=(error,))),
            adds=ADDS_CHAT,
            status="error",
        ),
        Case(
            "stream-answered-with-json",
            question,
            fixed(Reply(blocks=(b'{"choices": [], "object": "odd"}',))),
            adds=ADDS_CHAT,
            status="aborted",
        ),
        Case(
            "stream-429-as-events",
            question,
            fixed(Reply(b"HTTP/1.1 429 Too Many Requests", SSE, (ERROR, DONE), "chunked")),
            adds=ADDS_CHAT,
            status="error",
        ),
        Case(
            "stream-with-length",
            (Question(pieces=(body_of(stream=True, echo=True),)),),
            fixed(Reply(headers=SSE, blocks=(empty, b": x\n\n", DONE))),
            declared="echo",
        ),
    ]
