"""What proxy and translator say to each other: header names, the line that starts a translator."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson

SECRET = "x-lightning-secret"
HOP_URL = "x-lightning-hop"
TOKEN = "x-lightning-token"
ANSWER_ID = "x-lightning-answer"
SHOWN_MODEL = "x-lightning-model"
FAULT_STATUS = 599
"""No vendor's status: the translator itself could not do it, and the body says why."""


@dataclass(frozen=True, slots=True)
class StartUp:
    """The one line on a translator's stdin; more than that, and the end of stdin is its end."""

    socket_path: str
    secret: str

    def line(self) -> bytes:
        return orjson.dumps(asdict(self)) + b"\n"

    @classmethod
    def read(cls, line: bytes) -> StartUp:
        return cls(**orjson.loads(line))
