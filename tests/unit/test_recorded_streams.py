"""What is made of the streams of real APIs, where ../shared/data/sse is there (see its README)."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.cases_recorded import FOLDER

from lightning_rl.proxy.messages.capture import Answer, StreamReader
from lightning_rl.proxy.messages.sse import Framer, data_of

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no recorded streams in {FOLDER}")


def answer_of(name: str) -> Answer:
    (path,) = FOLDER.glob(f"{name}_*.response.sse")
    framer, reader = Framer(), StreamReader(1)
    for block in framer.feed(path.read_bytes()):
        if (data := data_of(block)) is not None:
            reader.add(data)
    return reader.parse()


def message(name: str, choice: int = 0) -> dict[str, Any]:
    return answer_of(name).choices[choice].parts.message()


CALLS = {
    ("01", 0): [("get_country", "{}")],
    ("02", 0): [("get_country", "{}"), ("get_product_name", "{}")],
    ("04", 0): [("get_current_weather", '{"location":"San Francisco, CA"}')],
    ("04", 1): [("get_current_weather", '{"location":"San Francisco, CA","unit":"celsius"}')],
    ("13", 0): [("llm_version", "{}")],
    ("30", 0): [("read_file", '{"path": "a.txt"}')],
    ("40", 0): [("get_country", "{}")],
    ("47", 0): [("read_file", '{"path":"a"}'), ("read_file", '{"path":"b"}')],
}


@pytest.mark.parametrize(("stream", "calls"), CALLS.items(), ids=lambda value: str(value)[:12])
def test_tool_calls(stream: tuple[str, int], calls: list[tuple[str, str]]) -> None:
    found = [call["function"] for call in message(*stream)["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in found] == calls


def test_texts() -> None:
    assert message("05")["content"] == "The product of 17 and 23 is 391."
    assert message("05")["reasoning_content"].startswith('We are asked: "What is 17 * 23?"')
    assert message("06")["reasoning"] == "This is a simple arithmetic question. 2+2 equals 4."
    assert message("09")["content"].endswith("tracing their every move! 😄")
    assert message("15")["content"].startswith("-common.\n\nI'm a python microservice")
    assert message("42")["content"] == "Hi"


def test_how_they_end() -> None:
    assert answer_of("08").error == "Tool choice is required, but model did not call a tool"
    assert answer_of("44").error == "quota exceeded"
    assert answer_of("13").choices[0].finish_reason is None
    assert answer_of("12").reported_tokens() == 8  # cumulative, and again at the end
    assert answer_of("56").choices[0].ids == [28292, 4, 2645]
