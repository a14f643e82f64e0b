"""The next groups to train, from the log: what is ready now, or, watching, as it becomes ready.

The only part of a run that waits for other people's episodes. It decides when a group is ready, not what in
it is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import NothingToTrainError
from ...records import EpisodeStatus, Fingerprint, Group, Purpose, now_ms
from ...store.database import Database
from ...store.fingerprints import load_fingerprints
from ...store.read import load_groups
from ...store.rewards import resolve
from ...store.selection import count_episodes, count_groups, trainable_group_ids

if TYPE_CHECKING:
    import sqlalchemy as sa

GRACE_MS = 30_000
"""Watching, a group waits this long after its last episode's end for what may still come: a reward that is
missing or, where nobody said how many episodes there will be, the next episode."""

_POLL_SEC = 0.25
_POLL_SHARE = 9.0  # waits this many times as long as a look takes: looking has a tenth of the time at most


@dataclass(frozen=True, slots=True)
class GroupSource:
    database: Database
    policy: str
    run_id: str
    groups_per_step: int
    again: bool = False  # also groups that an earlier run trained into a version of the policy
    fewest_episodes: int = 2  # in a group of unknown size, for the credit rule to make anything of it

    def ready(self) -> Iterator[list[Group]]:
        """Everything that is ready now, oldest first, one step's groups at a time; the last may be fewer."""
        with self.database.read() as conn:
            ids = self._ready_ids(conn)
        for start in range(0, len(ids), self.groups_per_step):
            with self.database.read() as conn:
                groups = load_groups(conn, ids[start : start + self.groups_per_step])
            yield groups  # no transaction is open while a step is computed

    def as_they_come(self, on_wait: Callable[[int], None]) -> Iterator[list[Group]]:
        """One step's groups whenever that many are ready, for ever. `on_wait` gets the number of ready
        ones."""
        while True:
            began = time.monotonic()
            with self.database.read() as conn:
                ids = self._ready_ids(conn)
                groups = self._settled(conn, ids) if len(ids) >= self.groups_per_step else []
            if len(groups) == self.groups_per_step:
                yield groups
            else:
                on_wait(len(ids))
                time.sleep(max(_POLL_SEC, _POLL_SHARE * (time.monotonic() - began)))

    def _ready_ids(self, conn: sa.Connection) -> list[str]:
        return trainable_group_ids(conn, policy=self.policy, run_id=self.run_id, again=self.again)

    def _settled(self, conn: sa.Connection, ids: Sequence[str]) -> list[Group]:
        """Up to one step's groups, oldest first, that miss nothing which may still come."""
        found: list[Group] = []
        for start in range(0, len(ids), self.groups_per_step):
            loaded = load_groups(conn, ids[start : start + self.groups_per_step])
            found += [group for group in loaded if is_settled(group, now_ms(), self.fewest_episodes)]
            if len(found) >= self.groups_per_step:
                break
        return found[: self.groups_per_step]

    def fingerprints(self, groups: Sequence[Group]) -> list[Fingerprint]:
        """Of the engines that answered the groups' calls of this policy."""
        ids = {
            call.fingerprint_id
            for group in groups
            for episode in group.episodes
            for call in episode.calls
            if call.fingerprint_id is not None and call.policy == self.policy
        }
        with self.database.read() as conn:
            return list(load_fingerprints(conn, sorted(ids)).values())

    def nothing_ready(self) -> NothingToTrainError:
        """Why there is no group to train, and what to do about it."""
        with self.database.read() as conn:
            episodes = count_episodes(conn)
            groups = count_groups(conn, policy=self.policy, run_id=self.run_id, again=self.again)
        if episodes.total == 0:
            advice = "point an agent at the proxy first"
        elif episodes.ended and episodes.unrewarded == episodes.ended:
            advice = "give rewards: lightning reward EPISODE VALUE"
        elif groups.trained and not groups.running:
            advice = (
                "produce episodes in a new batch (X-Lightning-Batch), or train these once more from the base "
                "model with --from-base"
            )
        elif groups.other_policy:
            advice = f"check --policy {self.policy}"
        elif episodes.running:
            advice = "end episodes by a final reward or the API"
        elif groups.short:
            advice = "produce the missing episodes of each group"
        else:
            advice = "name each episode's task (X-Lightning-Task) and repeat tasks, so that there are groups"
        return NothingToTrainError(
            f"nothing to train in {self.database.shown_url}: {episodes.explain()}; {groups.explain()}; "
            f"{advice}"
        )


def is_settled(group: Group, at_ms: int, fewest_episodes: int = 2) -> bool:
    """Whether a group, none of whose episodes is running, has waited enough for what may still come."""
    ended = [
        episode
        for episode in group.episodes
        if episode.purpose is Purpose.TRAIN and episode.status is EpisodeStatus.ENDED
    ]
    is_sized = group.expected_size is not None
    if not is_sized and len(ended) < fewest_episodes:
        return False  # one episode has nothing to be compared with, unless the rule looks elsewhere
    waiting = [
        episode.ended_at_ms or 0
        for episode in ended
        if not is_sized or resolve(episode.rewards).value is None
    ]
    return not waiting or at_ms - max(waiting) > GRACE_MS
