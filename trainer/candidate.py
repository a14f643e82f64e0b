"""Handing a version to the publisher: its candidate row, the probe that proves it, and the wait for the
verdict.

The trainer only writes the row. Whether the version serves is decided by the publisher in the proxy, which
compares the engine's logprobs over the probe's sequences with the trainer's, before and after the step.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import sqlalchemy as sa

from ..errors import OvertakenError, PublishError
from ..records import (
    Logprobs,
    PolicyVersion,
    ProbeSequence,
    TokenIds,
    Transition,
    VersionStatus,
    WeightsKind,
    now_ms,
)
from ..settings.train import TrainSettings
from ..store.database import Database
from ..store.policies import (
    add_candidate,
    live_version,
    load_version,
    lock_policy,
    next_version,
    versions,
)
from ..store.policy_requests import PolicyRequest, newest_request, waiting_request
from . import version_folders

PROBE_POOL = 8
PROBE_SEQUENCES = 4
PROBE_TOKENS = 512

_SERVED = (VersionStatus.LIVE, VersionStatus.DRAINING, VersionStatus.RETIRED)
_POLL_SEC = 0.1


def probe_pool(transitions: Sequence[Transition]) -> list[TokenIds]:
    """A handful of short sequences of this step, each from another prompt as far as there are enough."""
    by_prompt: dict[bytes, TokenIds] = {}
    rest: list[TokenIds] = []
    for transition in sorted(transitions, key=lambda t: len(t.prompt_ids) + len(t.completion_ids)):
        ids = (transition.prompt_ids + transition.completion_ids)[:PROBE_TOKENS]
        prompt = transition.prompt_ids.tobytes()
        if prompt in by_prompt:
            rest.append(ids)
        else:
            by_prompt[prompt] = ids
    return [*by_prompt.values(), *rest][:PROBE_POOL]


def moved_most(
    pool: Sequence[TokenIds], before: Sequence[Logprobs], after: Sequence[Logprobs]
) -> tuple[ProbeSequence, ...]:
    """The sequences in which some token's logprob changed most."""

    def change(i: int) -> float:
        return max(abs(b - a) for b, a in zip(before[i], after[i], strict=True))

    best = sorted(range(len(pool)), key=change, reverse=True)[:PROBE_SEQUENCES]
    return tuple(ProbeSequence(pool[i], before[i], after[i]) for i in best)


class Scorer(Protocol):
    def sequence_logprobs(self, sequences: Sequence[TokenIds], max_tokens: int) -> list[Logprobs]: ...


@dataclass(frozen=True, slots=True)
class Probe:
    """The pool, scored with the weights before the step."""

    pool: list[TokenIds]
    before: list[Logprobs]
    max_tokens: int

    @classmethod
    def before_step(cls, scorer: Scorer, transitions: Sequence[Transition], max_tokens: int) -> Self:
        pool = probe_pool(transitions)
        return cls(pool, scorer.sequence_logprobs(pool, max_tokens), max_tokens)

    def after_step(self, scorer: Scorer) -> tuple[ProbeSequence, ...]:
        return moved_most(self.pool, self.before, scorer.sequence_logprobs(self.pool, self.max_tokens))


class Handover:
    """One run's way from trained weights to a served version: number, folder, wait, and old folders
    deleted. `serves`: the version that is live as far as the run knows; None: it does not matter yet."""

    def __init__(
        self, database: Database, settings: TrainSettings, run_id: str, folder: Path, *, serves: int | None
    ) -> None:
        self._database, self._settings, self._run_id, self._folder = database, settings, run_id, folder
        self._serves = serves
        self._unpublished: list[Path] = []

    def require_current(self) -> None:
        """OvertakenError where somebody has put another version live, or has asked for one."""
        if self._settings.publish:
            with self._database.read() as conn:
                self._require_current(conn)

    def _require_current(self, conn: sa.Connection) -> None:
        policy = self._settings.policy
        live = live_version(conn, policy)
        now = 0 if live is None else live.version
        asked = waiting_request(conn, policy)
        if self._serves is None:  # it starts from the base model, whatever is live
            self._serves = now
        if now == self._serves and asked is None:
            return
        if asked is None:
            asked = newest_request(conn, policy)
            asked = asked if asked is not None and asked.version == now else None
        raise OvertakenError(_overtaken(policy, self._serves, now, asked, self._run_id))

    def offer(self, conn: sa.Connection, version: PolicyVersion) -> None:
        """Write its row, in the transaction that finishes the step; OvertakenError, and nothing is kept of
        the step, where nobody wants what it went on from."""
        lock_policy(conn, version.policy)
        try:
            self._require_current(conn)
        except OvertakenError:
            shutil.rmtree(str(version.path), ignore_errors=True)
            raise
        add_candidate(conn, version)

    def save(
        self,
        model: Any,
        probe: tuple[ProbeSequence, ...],
        *,
        after: int,
        step: int,
        gathered: dict[str, Any] | None = None,
    ) -> PolicyVersion:
        """Write the next version's folder; its row is the caller's, in one transaction with the step's."""
        with self._database.read() as conn:
            number = max(next_version(conn, self._settings.policy), after + 1)
        saved = version_folders.save_version(
            model,
            self._folder / f"{number:05d}",
            base_model=self._settings.model,
            kind=WeightsKind(self._settings.weights),
            gathered=gathered,
        )
        self._unpublished.append(saved.path)
        return PolicyVersion(
            policy=self._settings.policy,
            version=number,
            status=VersionStatus.CANDIDATE,
            kind=saved.kind,
            path=str(saved.path),
            checksum=saved.checksum,
            probe=probe,
            base_model=str(self._settings.model.resolve()),
            run_id=self._run_id,
            step=step,
            created_at_ms=now_ms(),
        )

    def forget_unfinished(self, made: Collection[int]) -> None:
        """After a crash: delete folders of versions that no finished step of this run has made."""
        known = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        for folder in known:
            if not folder.name.isdigit() or int(folder.name) not in made:
                shutil.rmtree(folder, ignore_errors=True)
        self._unpublished = [folder for folder in known if folder.is_dir()]

    def delete_old(self) -> None:
        keep = self._settings.keep_versions
        if self._settings.publish:
            # Under the lock, so that nobody asks for a version whose folder goes at this moment.
            with self._database.write() as conn:
                lock_policy(conn, self._settings.policy)
                known = versions(conn, self._settings.policy)
                gone = version_folders.set_old_aside(known, keep, inside=self._settings.output)
            for folder in gone:
                shutil.rmtree(folder, ignore_errors=True)
        else:  # these are in no database: only the newest are of use
            version_folders.keep_newest(self._unpublished, keep)
            self._unpublished = self._unpublished[-keep:]

    def await_verdict(self, version: PolicyVersion, on_status: Callable[[VersionStatus], None]) -> None:
        """Wait until the version is live. PublishError when it is rejected, or nobody has decided in time."""
        timeout_sec = self._settings.publish_timeout_sec
        until = time.monotonic() + timeout_sec
        name = f"version {version.version} of policy {version.policy!r}"
        seen: VersionStatus | None = None
        while True:
            with self._database.read() as conn:
                row = load_version(conn, version.policy, version.version)
            if row is None:
                raise PublishError(f"{name} has vanished from {self._database.shown_url} before it went live")
            if row.status is not seen:
                seen = row.status
                on_status(seen)
                gate_sec = _gate_sec(row)
                if gate_sec is not None:
                    timeout_sec = gate_sec + self._settings.publish_timeout_sec
                    until = time.monotonic() + timeout_sec
            if row.status in _SERVED:
                self._serves = version.version
                return
            if row.status is VersionStatus.REJECTED:
                why = (row.verdict or {}).get("reason") or row.verdict or "no reason given"
                raise PublishError(f"{name} was rejected, so it does not serve: {why}; it is in {row.path}")
            if time.monotonic() > until:
                raise PublishError(_too_late(name, row.status, timeout_sec, self._database.shown_url))
            time.sleep(_POLL_SEC)


def _overtaken(policy: str, serves: int, now: int, asked: PolicyRequest | None, run_id: str) -> str:
    wanted = now if asked is None else asked.version
    if asked is None:
        what = f"version {now} is live"
    elif asked.outcome is None:
        what = f"{asked.by} has asked for version {wanted}"
    else:
        what = f"{asked.by} has put version {wanted} live"
    return (
        f"{what} of policy {policy!r}, and this run goes on from version {serves}, so it stops and hands "
        f"over nothing more: lightning train begins a new run from version {wanted}; or make {serves} live "
        f"again (lightning policy promote {policy} {serves}) and go on with --resume {run_id}"
    )


def _gate_sec(row: PolicyVersion) -> float | None:
    """How long an evaluation or a canary may take, by the publisher's own word."""
    said = (row.verdict or {}).get("waits_sec")
    waits = row.status in (VersionStatus.EVALUATING, VersionStatus.CANARY)
    return float(said) if waits and isinstance(said, int | float) else None


def _too_late(name: str, status: VersionStatus, timeout_sec: float, url: str) -> str:
    if status is VersionStatus.CANDIDATE:
        return (
            f"nobody has taken up {name} within {timeout_sec:g} s: start the proxy that publishes it "
            f"(lightning proxy serve --db {url}, with publish on), or train with --no-publish; the version "
            "is saved"
        )
    return f"{name} is still {status} after {timeout_sec:g} s: see the proxy's log; the version is saved"
