"""Headers as ASGI gives them, and which of them are ours."""

from __future__ import annotations

Headers = list[tuple[bytes, bytes]]

OUR_HEADERS = b"x-lightning-"
"""Headers with this prefix are ours: read by the proxy, never sent to the engine."""
