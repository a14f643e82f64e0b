"""Second thoughts about what is in the log: an episode back in, its tags, a call's episode or kind, idleness.

Every change adds an event that holds the new value and the old one; the columns that queries read are copies
of it. Nothing that a trained step was made from is rewritten: a manifest keeps its own numbers, and a trained
episode takes no further calls. Runs in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from ..errors import UnknownCallError, UserError
from ..records import CallKind, CallStatus, EpisodeStatus, now_ms
from .episodes import end_episode, locked
from .events import add_event
from .names import require_name, require_tag_keys
from .placement import insert_episodes, write_rows
from .schema import calls, choices, episodes, manifest_episodes
from .statements import chunks, optional_text, storable_json, storable_text

ASSIGNED = "assigned"
"""Attribution rule of a call that somebody gave an episode afterwards."""

OPEN_CALL_HOLDS_MS = 3_600_000
"""A call without an answer keeps its episode from being idle this long; after that its proxy has died."""


def include_episode(conn: sa.Connection, episode_id: str, *, by: str, note: str | None = None) -> None:
    """A failed or excluded episode counts as ended again. Saying it of an ended one changes nothing."""
    row = locked(conn, episode_id)
    if row.status == EpisodeStatus.ENDED.value:
        return
    if row.status == EpisodeStatus.RUNNING.value:
        raise UserError(f"episode {row.id!r} is running: there is nothing to take back")
    _set(conn, row.id, {"status": EpisodeStatus.ENDED.value})
    add_event(conn, "episode", row.id, EpisodeStatus.ENDED.value, {"was": row.status}, by, note)


def tag_episode(
    conn: sa.Connection, episode_id: str, tags: Mapping[str, str], *, by: str, note: str | None = None
) -> None:
    """Set tags, whatever value they had."""
    require_tag_keys(tags)
    row = locked(conn, episode_id)
    new = {key: value for key, value in storable_json(tags).items() if row.tags.get(key) != value}
    if not new:
        return
    was = {key: row.tags[key] for key in new if key in row.tags}
    _set(conn, row.id, {"tags": row.tags | new})
    add_event(conn, "episode", row.id, "tagged", {"tags": new, "was": was}, by, note)


def untag_episode(
    conn: sa.Connection, episode_id: str, keys: Iterable[str], *, by: str, note: str | None = None
) -> list[str]:
    """Take tags off; which of them were there.

    A later call of the episode that carries one puts it back on.
    """
    row = locked(conn, episode_id)
    was = {key: row.tags[key] for key in map(storable_text, keys) if key in row.tags}
    if not was:
        return []
    _set(conn, row.id, {"tags": {key: value for key, value in row.tags.items() if key not in was}})
    add_event(conn, "episode", row.id, "untagged", {"was": was}, by, note)
    return list(was)


def assign_calls(
    conn: sa.Connection,
    episode_id: str,
    call_ids: Sequence[str],
    *,
    agent: str | None = None,
    create: bool = False,
    by: str,
    note: str | None = None,
) -> list[int]:
    """Give calls of the unattributed bin an episode, after its other calls, in the order of their time.

    The ordinals, in that order. UserError, and nothing is written, where a call is not in the bin, or the
    episode has been in a step's manifest: what was trained stays what it was.
    """
    wanted = list(dict.fromkeys(map(storable_text, call_ids)))
    if agent is not None:
        require_name("the agent's name", agent)
    if not wanted:
        raise UserError("no call was named; `lightning episodes list --unattributed` shows them")
    if create:
        require_name("the episode's name", episode_id)
        insert_episodes(conn, {storable_text(episode_id): now_ms()})
    row = locked(conn, episode_id)
    step = conn.execute(
        sa.select(manifest_episodes.c.run_id).where(manifest_episodes.c.episode_id == row.id).limit(1)
    ).scalar()
    if step is not None:
        raise UserError(
            f"episode {row.id!r} was trained by run {step}: its calls are fixed; assign to another episode"
        )
    found = _lock_calls(conn, wanted)
    _require_unattributed(wanted, found)
    ordinals = []
    for call in sorted(found.values(), key=lambda call: (call.started_at_ms, call.id)):
        values = {"episode_id": row.id, "ordinal": row.num_calls, "attribution_rule": ASSIGNED}
        if agent is not None:
            values["agent"] = optional_text(agent)
        conn.execute(calls.update().where(calls.c.id == call.id).values(values))
        event = {"episode": row.id, "ordinal": row.num_calls, "rule_was": call.attribution_rule}
        if agent is not None:
            event |= {"agent": values["agent"], "agent_was": call.agent}
        add_event(conn, "call", call.id, ASSIGNED, event, by, note)
        ordinals.append(row.num_calls)
        row.num_calls += 1
        row.last_call_at_ms = max(row.last_call_at_ms or 0, call.ended_at_ms or call.started_at_ms)
        if row.policy is None and call.policy is not None:
            row.policy, row.policy_version = call.policy, call.policy_version
    write_rows(conn, [row])
    return ordinals


def set_call_kind(
    conn: sa.Connection, call_ids: Sequence[str], kind: CallKind, *, by: str, note: str | None = None
) -> int:
    """Say what the calls are; how many of them changed. Only `policy` calls are trained."""
    wanted = list(dict.fromkeys(map(storable_text, call_ids)))
    found = _lock_calls(conn, wanted)
    for name in wanted:
        if name not in found:
            raise UnknownCallError(f"no call {name!r} in the log; check its id and the database")
    changed = [name for name in wanted if found[name].kind != kind.value]
    for name in changed:
        conn.execute(calls.update().where(calls.c.id == name).values(kind=kind.value))
        add_event(conn, "call", name, "kind", {"kind": kind.value, "was": found[name].kind}, by, note)
    return len(changed)


def set_choice_used(
    conn: sa.Connection, call_id: str, index: int, used: bool, *, by: str, note: str | None = None
) -> None:
    """Say whether the episode went on with this one of a call's answers."""
    name = storable_text(call_id)
    at = (choices.c.call_id == name, choices.c.index == index)
    row = conn.execute(sa.select(choices.c.used).where(*at).with_for_update()).first()
    if row is None:
        raise UnknownCallError(f"no choice {index} of a call {call_id!r} in the log")
    if row.used is used:
        return
    conn.execute(choices.update().where(*at).values(used=used))
    add_event(conn, "choice", f"{name}/{index}", "used", {"used": used, "was": row.used}, by, note)


def calls_of_agent(conn: sa.Connection, episode_id: str, agent: str | None) -> list[str]:
    """Ids of the episode's calls, or of one agent's in it, in order. UserError where there are none."""
    query = sa.select(calls.c.id).where(calls.c.episode_id == storable_text(episode_id))
    of_episode = query
    if agent is not None:
        query = query.where(calls.c.agent == storable_text(agent))
    found = list(conn.execute(query.order_by(calls.c.ordinal)).scalars())
    if not found:
        locked(conn, episode_id)
        agents = conn.execute(of_episode.with_only_columns(calls.c.agent).distinct()).scalars().all()
        named = ", ".join(sorted(repr(name) for name in agents if name is not None)) or "none with a name"
        whose = "" if agent is None else f" of agent {agent!r} (its agents: {named})"
        raise UserError(f"episode {episode_id!r} has no call{whose}; nothing was changed")
    return found


def idle_episodes(conn: sa.Connection, *, idle_ms: int, at_ms: int) -> list[str]:
    """Running episodes without a call or an answer for so long, none of whose calls is under way.

    An episode that was announced and has had no call yet is not idle: it has not begun.
    """
    since = at_ms - max(idle_ms, OPEN_CALL_HOLDS_MS)
    # In literals, so that the index of unfinished calls is the one that is read.
    under_way = sa.select(calls.c.episode_id).where(
        calls.c.status == sa.literal_column(f"'{CallStatus.OPEN.value}'"),
        calls.c.started_at_ms >= since,
        calls.c.episode_id.is_not(None),
    )
    query = sa.select(episodes.c.id).where(
        episodes.c.status == EpisodeStatus.RUNNING.value,
        episodes.c.last_call_at_ms < at_ms - idle_ms,
        episodes.c.id.not_in(under_way),
    )
    return sorted(conn.execute(query).scalars())


def end_if_idle(conn: sa.Connection, episode_id: str, *, idle_ms: int, at_ms: int) -> bool:
    """End it unless a call has come since somebody looked; of several proxies one ends it."""
    row = locked(conn, episode_id)
    is_running = row.status == EpisodeStatus.RUNNING.value
    if not is_running or row.last_call_at_ms is None or row.last_call_at_ms >= at_ms - idle_ms:
        return False
    end_episode(conn, row.id, by="idle", note=f"no call for {idle_ms / 1000:g} s")
    return True


def _set(conn: sa.Connection, episode_id: str, values: Mapping[str, object]) -> None:
    conn.execute(episodes.update().where(episodes.c.id == episode_id).values(values))


def _lock_calls(conn: sa.Connection, ids: Sequence[str]) -> dict[str, sa.Row[tuple[object, ...]]]:
    columns = (
        "id",
        "episode_id",
        "agent",
        "kind",
        "attribution_rule",
        "policy",
        "policy_version",
        "started_at_ms",
        "ended_at_ms",
    )
    return {
        row.id: row
        for chunk in chunks(sorted(ids))
        for row in conn.execute(
            sa.select(*(calls.c[name] for name in columns))
            .where(calls.c.id.in_(chunk))
            .order_by(calls.c.id)
            .with_for_update(key_share=True)
        )
    }


def _require_unattributed(wanted: Sequence[str], found: Mapping[str, sa.Row[tuple[object, ...]]]) -> None:
    for name in wanted:
        if name not in found:
            raise UnknownCallError(
                f"no call {name!r} in the log; `lightning episodes list --unattributed` shows them"
            )
        if found[name].episode_id is not None:
            raise UserError(
                f"call {name!r} is in episode {found[name].episode_id!r} already, and stays there"
            )
