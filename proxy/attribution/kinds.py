"""What a call is for: the agent's own step, or one beside it that must not be trained as if it were.

Two rules: the agent's name, as the settings list them, and the text of requests that ask for the title of a
conversation, which chat programs send on their own between an agent's calls. Pure; what it finds can be
changed (`lightning calls kind`). Retries are recognised elsewhere: one request's text does not show them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ...records import CallKind

_MAX_MESSAGES = 3
_MAX_CHARS = 4000
_ASKS = re.compile(r"\b(?:generat|creat|writ|extract|output|produc|com(?:e|ing) up with|summari[sz])", re.I)
_TITLE = re.compile(r"\btitles?\b", re.I)
_CONVERSATION = re.compile(r"\b(?:conversation|chat|thread|session)s?\b", re.I)


@dataclass(frozen=True, slots=True)
class Kinds:
    """`by_agent`: agent name (a shell pattern) -> kind; the first that matches counts."""

    by_agent: Mapping[str, CallKind] = field(default_factory=dict)

    def of(self, agent: str | None, doc: Mapping[str, Any] | None) -> CallKind:
        if agent is not None:
            for pattern, kind in self.by_agent.items():
                if fnmatchcase(agent, pattern):
                    return kind
            return CallKind.POLICY  # whoever names its agents says what is what
        return CallKind.SIDE if doc is not None and asks_for_title(doc) else CallKind.POLICY


def asks_for_title(doc: Mapping[str, Any]) -> bool:
    """A short request without tools whose instructions ask for the title of a conversation."""
    messages = doc.get("messages")
    if doc.get("tools") or not isinstance(messages, list) or not 1 <= len(messages) <= _MAX_MESSAGES:
        return False
    first = messages[0]
    # The instructions only: what a person asks of an agent that has instructions is a task.
    text = first.get("content") if isinstance(first, dict) else None
    if not isinstance(text, str) or len(text) > _MAX_CHARS:
        return False
    return all(sign.search(text) for sign in (_TITLE, _CONVERSATION, _ASKS))
