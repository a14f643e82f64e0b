"""What proxy and translator say to each other: header names, the line that starts a translator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import orjson

SECRET = "x-lightning-secret"
HOP_URL = "x-lightning-hop"
TOKEN = "x-lightning-token"
ANSWER_ID = "x-lightning-answer"
SHOWN_MODEL = "x-lightning-model"
USAGE_EVENT = b"event: lightning.usage\ndata: "
"""The last block of a vendor's stream: for the proxy, not for the agent."""
KEEP_ALIVE_SEC = 24 * 3600
"""Neither side's server closes an idle connection that the other is about to use."""
FAULT_STATUS = 599
"""No vendor's status: the translator itself could not do it, and the body says why."""


@dataclass(frozen=True, slots=True)
class Vendor:
    """One provider, as LiteLLM's Router is told of it. The key itself travels in the environment."""

    name: str
    model: str
    api_base: str | None
    api_key_env: str | None
    num_retries: int
    timeout_sec: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a vendor's answer comes to, whatever its dialect."""

    prompt_tokens: int | None
    completion_tokens: int | None
    is_estimated: bool
    message: dict[str, Any] | None  # None for chat: the chunks say it
    finish_reason: str | None

    def line(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def read(cls, line: bytes) -> Summary:
        return cls(**orjson.loads(line))


@dataclass(frozen=True, slots=True)
class StartUp:
    """The one line on a translator's stdin; more than that, and the end of stdin is its end."""

    socket_path: str
    secret: str
    vendors: tuple[Vendor, ...] = ()

    def line(self) -> bytes:
        return orjson.dumps(asdict(self)) + b"\n"

    @classmethod
    def read(cls, line: bytes) -> StartUp:
        doc = orjson.loads(line)
        return cls(doc["socket_path"], doc["secret"], tuple(Vendor(**vendor) for vendor in doc["vendors"]))
