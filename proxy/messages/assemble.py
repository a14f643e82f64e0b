"""A streamed message put together again, for people and judges who read the log.

Training never uses it (it uses the engine's ids), so oddities of the field are met with tolerance: ids and
names repeated in every delta, tool calls without an index or with a shared one, whole calls in one delta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_JOINED = ("content", "reasoning", "reasoning_content", "refusal")
"""Texts that come in pieces. Of what is not named here or below, lists grow and other values are replaced."""


class MessageParts:
    """The deltas of one choice."""

    __slots__ = ("_calls", "_fields", "_function")

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._calls: list[_CallParts] = []
        self._function: _CallParts | None = None

    def add(self, delta: Mapping[str, Any]) -> None:
        for name, value in delta.items():
            if name == "tool_calls":
                for part in value or ():
                    if isinstance(part, dict):
                        self._call_of(part).add(part)
            elif name == "function_call" and isinstance(value, dict):  # the older API: one call, no id
                self._function = self._function or _CallParts(None)
                self._function.add({"function": value})
            elif value is None:
                self._fields.setdefault(name, None)
            elif name in _JOINED and isinstance(value, str) and isinstance(self._fields.get(name), str):
                self._fields[name] += value
            elif isinstance(value, list) and isinstance(self._fields.get(name), list):
                self._fields[name] = self._fields[name] + value
            elif name != "role" or not self._fields.get("role"):
                self._fields[name] = value

    def message(self) -> dict[str, Any]:
        message = dict(self._fields)
        if self._function is not None:
            message["function_call"] = self._function.as_dict()["function"]
        if self._calls:
            message["tool_calls"] = [call.as_dict() for call in self._calls]
        return message

    def _call_of(self, part: Mapping[str, Any]) -> _CallParts:
        """The call that a delta continues: by index, else by id, else the last one.

        A new id under an index already taken is a call of its own: some engines number all calls 0.
        """
        index, call_id = part.get("index"), part.get("id") or None
        matching = [call for call in self._calls if index is not None and call.index == index]
        if index is None:
            matching = [call for call in self._calls if call_id is None or call.id == call_id]
        if matching and (call_id is None or matching[-1].id in (None, call_id)):
            return matching[-1]
        same_id = [call for call in self._calls if call_id is not None and call.id == call_id]
        if same_id:
            return same_id[-1]
        self._calls.append(_CallParts(index))
        return self._calls[-1]


class _CallParts:
    __slots__ = ("_arguments", "_name", "_type", "id", "index")

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.id: str | None = None
        self._type = "function"
        self._name = ""
        self._arguments: list[str] = []

    def add(self, part: Mapping[str, Any]) -> None:
        self.id = self.id or part.get("id") or None
        self._type = part.get("type") or self._type
        function = part.get("function")
        if not isinstance(function, dict):
            return
        name = function.get("name")
        if name and name != self._name and not self._arguments:  # a repeated name is not a continued one
            self._name += name
        arguments = function.get("arguments")
        if arguments:
            self._arguments.append(arguments if isinstance(arguments, str) else str(arguments))

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self._name, "arguments": "".join(self._arguments)}
        return {"id": self.id, "type": self._type, "function": function}
