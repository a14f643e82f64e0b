"""What clients put into their API-key slot: the proxy's token, or a key issued for an episode.

Owns how an episode key is made (its form is in store/names.py) and who is let in. A key is shown once, when
it is issued; afterwards only its hash is known, here and in the log. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ...errors import UserError
from ...records import now_ms
from ...store.database import Database
from ...store.keys import EpisodeKey, find_episode_key
from ...store.names import EPISODE_KEY, EPISODE_KEY_PREFIX

_KEY_IN_QUERY = re.compile(
    rb"(?:^|&)(?:(?:api[_-]?key|access_token)=|[^&=]*=" + EPISODE_KEY_PREFIX + rb")", re.IGNORECASE
)
_KEY_IN_URL = "the URL holds a key; send it in the header Authorization or X-Api-Key"
KNOWN_FOR_SEC = 30.0
"""How long a look-up is trusted: a key that the log has lost (its episode was deleted) works no longer."""
MAX_KNOWN = 16_384

REFUSAL = "wrong or missing API key: send the proxy's token, or a key issued for an episode, as the API key"


class RefusedKeyError(UserError):
    """An episode key that nobody issued, or that has expired."""


def new_key() -> str:
    """256 random bits behind a prefix that says whose key it is."""
    return EPISODE_KEY_PREFIX.decode() + secrets.token_urlsafe(32)


def key_hash(key: bytes) -> bytes:
    """Of a key with 256 random bits: nothing slower or salted is needed."""
    return hashlib.sha256(key).digest()


def is_episode_key(text: bytes) -> bool:
    return EPISODE_KEY.fullmatch(text) is not None


def sent_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """What stands in the places where clients put their API key."""
    keys: list[bytes] = []
    for name, value in headers:
        if name in (b"x-api-key", b"api-key"):
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key.strip())
    return keys


def holds_token(keys: Iterable[bytes], token: bytes) -> bool:
    """Constant time for each."""
    matches = [hmac.compare_digest(key, token) for key in keys]
    return any(matches)


def check_query(query: bytes) -> None:
    """The same by what it is called, before anybody is let in or not: so sent, it could let nobody in."""
    if query and _KEY_IN_QUERY.search(query) is not None:
        raise UserError(_KEY_IN_URL)


def check_url(raw_path: bytes, query: bytes, token: bytes | None) -> None:
    """UserError for a key in the URL: it would travel to the engine, and into logs on the way."""
    if query or EPISODE_KEY_PREFIX in raw_path or (token is not None and token in raw_path):
        url = raw_path + b"?" + query
        holds_token = token is not None and (token in query or token in raw_path.split(b"/"))
        if holds_token or EPISODE_KEY.search(url) is not None:
            raise UserError(_KEY_IN_URL)


class EpisodeKeys:
    """Keys that were seen lately, and the log for the others. On the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: OrderedDict[bytes, tuple[EpisodeKey, float]] = OrderedDict()

    async def find(self, keys: Sequence[bytes]) -> EpisodeKey | None:
        """The episode key among them, or None where there is none.

        RefusedKeyError for one that is not valid: its call must not land in the bin. StoreError where the log
        can't be asked.
        """
        for key in keys:
            if is_episode_key(key):
                found = await self._look_up(key_hash(key))
                if found is None:
                    raise RefusedKeyError("nobody issued this episode key; ask for one again")
                if found.expires_at_ms is not None and found.expires_at_ms <= now_ms():
                    raise RefusedKeyError("this episode key has expired; ask for one again")
                return found
        return None

    async def _look_up(self, name: bytes) -> EpisodeKey | None:
        known = self._known.get(name)
        if known is not None and time.monotonic() - known[1] < KNOWN_FOR_SEC:
            return known[0]

        def read() -> EpisodeKey | None:
            with self._database.read() as conn:
                return find_episode_key(conn, name)

        found = await asyncio.to_thread(read)
        self._known.pop(name, None)
        if found is not None:  # what nobody issued is not kept: it may be issued yet
            self._known[name] = (found, time.monotonic())
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return found
