"""Bodies are cut and put together byte for byte, whatever an agent writes."""

import base64
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.errors import StoreError
from lightning_rl.store.bodies import (
    join_body,
    pack_json,
    pack_part,
    part_names,
    split_body,
    unpack_json,
    unpack_part,
)

LONG = "word " * 40

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(LONG),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["messages", "tools", "input", "role", "content"]) | st.text(), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(json_values, st.sampled_from([None, 1, "\t"]), st.booleans(), st.sampled_from(["", " ", "\r\n"]))
def test_any_json_comes_back(value: object, indent: str | int | None, ascii_only: bool, edge: str) -> None:
    text = edge + json.dumps(value, indent=indent, ensure_ascii=ascii_only) + edge
    body = text.encode("utf-8", "surrogatepass")
    skeleton, parts = split_body(body)
    assert join_body(skeleton, parts) == body


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",: messages\\', max_size=80).map(str.encode))
def test_any_bytes_come_back(body: bytes) -> None:
    skeleton, parts = split_body(body)
    assert join_body(skeleton, parts) == body


def test_a_conversation_shares_its_messages_and_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": LONG}}]
    messages = [{"role": "system", "content": f"{LONG}é"}, {"role": "user", "content": f"{LONG}1"}]
    first = json.dumps({"tools": tools, "messages": messages}, ensure_ascii=False).encode()
    messages.append({"role": "assistant", "content": f"{LONG}2"})
    second = json.dumps({"model": "m", "messages": messages, "tools": tools}, ensure_ascii=False).encode()
    (_, parts), (skeleton, more) = split_body(first), split_body(second)
    assert len(parts) == 3
    assert len(more) == 4
    assert parts.items() < more.items()
    assert set(part_names(skeleton)) == set(more)
    with pytest.raises(StoreError, match="damaged"):
        join_body(skeleton, parts)


def test_what_is_nested_too_deep_is_kept_whole() -> None:
    body = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    skeleton, parts = split_body(body)
    assert parts == {}
    assert join_body(skeleton, parts) == body


@given(json_values.filter(lambda value: "nan" not in repr(value)))
def test_packed_json_comes_back(value: object) -> None:
    assert unpack_json(pack_json(value)) == value


@pytest.mark.parametrize("form", ["data:image/png;base64,{}", "{}"])
def test_an_image_is_one_part_whatever_is_said_around_it(form: str) -> None:
    image = form.format(base64.b64encode(random.Random(3).randbytes(30_000)).decode())
    other = form.format(base64.b64encode(random.Random(4).randbytes(30_000)).decode())
    stored: dict[bytes, bytes] = {}
    for turn in range(20):
        content = [
            {"type": "image_url", "image_url": {"url": image}},
            {"type": "text", "text": f"ü Where is the cat in turn {turn}? " * 9},
            {"type": "image_url", "image_url": {"url": other}},
        ]
        body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
        skeleton, parts = split_body(body)
        assert join_body(skeleton, parts) == body
        assert len(skeleton) < 1000
        stored.update(parts)
    assert sorted(len(part) for part in stored.values())[-2:] == sorted([len(image), len(other)])
    assert sum(len(part) for part in stored.values()) < len(image) + len(other) + 20 * 1000
    assert all(unpack_part(pack_part(part)) == part for part in stored.values())
