"""Reading fingerprints back: what the engines of a policy's calls said they were."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from ..records import Fingerprint
from .schema import fingerprints
from .statements import chunks


def load_fingerprints(conn: sa.Connection, ids: Iterable[str]) -> dict[str, Fingerprint]:
    """By id; an id that the log does not hold is left out."""
    columns = [column for column in fingerprints.c if column.name != "created_at_ms"]
    return {
        row.id: Fingerprint(**row._mapping)
        for chunk in chunks(list(dict.fromkeys(ids)))
        for row in conn.execute(sa.select(*columns).where(fingerprints.c.id.in_(chunk)))
    }
