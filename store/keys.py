"""Keys issued for episodes: an agent that has only an API-key slot says with one whose calls it makes.

The log holds a key's hash, never the key (proxy/attribution/keys.py makes them). Runs in the
caller's transaction.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from ..errors import UserError
from ..records import EpisodeStatus, now_ms
from .episodes import locked
from .schema import episode_keys
from .statements import optional_text


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """What a key stands for. `expires_at_ms` None: never."""

    episode_id: str
    agent: str | None
    expires_at_ms: int | None


def add_episode_key(conn: sa.Connection, key_hash: bytes, key: EpisodeKey) -> None:
    """UnknownEpisodeError for an episode that is not in the log, UserError for one that has ended."""
    row = locked(conn, key.episode_id)
    if row.status != EpisodeStatus.RUNNING.value:
        raise UserError(f"episode {row.id!r} has ended ({row.status}); a key is for calls to come")
    conn.execute(
        episode_keys.insert().values(
            key_hash=key_hash,
            episode_id=row.id,
            agent=optional_text(key.agent),
            created_at_ms=now_ms(),
            expires_at_ms=key.expires_at_ms,
        )
    )


def find_episode_key(conn: sa.Connection, key_hash: bytes) -> EpisodeKey | None:
    """None for a key that nobody issued. Whether it has expired is the caller's to judge."""
    columns = (episode_keys.c.episode_id, episode_keys.c.agent, episode_keys.c.expires_at_ms)
    row = conn.execute(sa.select(*columns).where(episode_keys.c.key_hash == key_hash)).first()
    return None if row is None else EpisodeKey(*row)
