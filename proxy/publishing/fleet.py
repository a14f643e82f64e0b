"""This proxy among others on the same log: heartbeats, the lease of the one that publishes, the shared state.

Whoever holds the lease writes what is live and whether calls may be admitted; the others carry it out and say
so in their own rows. All through rows, so that it works across hosts. A proxy that can't renew its heartbeat
closes its gate (the fence) before the others may take it for gone. Knows no engine and no version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from ...errors import StoreError
from ...records import new_id, now_ms
from ...store import fleet as rows
from ...store.database import Database
from ...store.fleet import FleetView, Phase, ProxyRow, ServingState
from ..live.engines import Engines, Holding
from ..live.policies import LivePolicies
from .place import BusyError, LeaseLostError

HEARTBEAT_SEC = 1.0
FENCE_SEC = 4.0
"""After so long without a heartbeat that arrived, this proxy admits nothing."""
GONE_SEC = 6.0
"""After so long (by the database's clock) the others take it for gone. The lease lasts as long."""
HURRY_SEC = 0.02
"""Between looks while a change is near or calls are held."""
ACK_TIMEOUT_SEC = 10.0
FORGET_SEC = 3600.0

logger = logging.getLogger("lightning.fleet")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Times:
    """How quickly the proxies of a fleet notice each other; tests shorten it."""

    heartbeat_sec: float = HEARTBEAT_SEC
    fence_sec: float = FENCE_SEC
    gone_sec: float = GONE_SEC


class Member:
    """One proxy process. `turn` is one look at the rows; call everything from one event loop."""

    def __init__(
        self,
        database: Database,
        live: LivePolicies,
        engines: Engines,
        *,
        flush: Callable[[], Awaitable[None]],
        wants_lease: bool,
        is_required: bool = True,
        times: Times | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = new_id()
        self._database = database
        self._live = live
        self._engines = engines
        self._flush = flush
        self._wants_lease = wants_lease
        self._is_required = is_required
        self._times = times or Times()
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightning-fleet")
        self._beat_at = float("-inf")
        self._beaten: ProxyRow | None = None  # what the last heartbeat said
        self._valid_until = float("-inf")  # of the lease, by this clock
        self._seq = -1  # the newest state that was read or written
        self._acked = -1
        self._acking: asyncio.Task[None] | None = None
        self._written: tuple[Any, ...] | None = None  # the state that this proxy wrote last
        self._is_changing = False
        self._said: str | None = None
        self._has_looked = False
        self.term: int | None = None
        """While this proxy publishes: its term. None: it follows."""
        self.view: FleetView | None = None

    # --- every proxy ---

    @property
    def is_publisher(self) -> bool:
        return self.term is not None

    @property
    def has_publisher(self) -> bool:
        return self.view is not None and self.view.owner is not None

    @property
    def others(self) -> list[ProxyRow]:
        """Proxies that live, as far as this one knows."""
        if self.view is None:
            return []
        return [row for row in self.view.fresh(round(self._times.gone_sec * 1000)) if row.id != self.id]

    @property
    def wait_sec(self) -> float | None:
        """How soon to look again; None: no hurry."""
        return HURRY_SEC if self._is_changing or self._live.gate.is_held else None

    async def turn(self) -> None:
        """Say that this proxy lives, read what the others say, carry it out. Failures are waited out."""
        started = self._clock()
        try:
            uses = self._live.uses()
            row = ProxyRow(
                self.id,
                socket.gethostname(),
                os.getpid(),
                self._acked,
                tuple(sorted((policy, version, busy) for (policy, version), busy in uses.items())),
            )
            view, term, has_beaten = await self._in_thread(lambda: self._exchange(row))
        except StoreError as error:
            if str(error) != self._said:
                self._said = str(error)
                logger.warning("this proxy is out of touch with the others: %s", error)
            if self._clock() >= self._valid_until:
                self.term = None
            return
        self._said = None
        self.view = view
        self._engines.is_shared = bool(self.others)
        if has_beaten:
            self._take_term(term, view, started)
        if self.term is None and view.state is not None and view.owner is not None:
            self._follow(view.state)
        if has_beaten:
            self._put_off_fence(started)

    def _exchange(self, row: ProxyRow) -> tuple[FleetView, int | None, bool]:
        due = row != self._beaten or self._clock() - self._beat_at >= self._times.heartbeat_sec
        term = None
        if due:
            started = self._clock()
            with self._database.write() as conn:
                if self._wants_lease:
                    term = rows.take_lease(conn, self.id, round(self._times.gone_sec * 1000))
                rows.beat(conn, row)
                if term is not None:
                    rows.forget_gone(conn, round(FORGET_SEC * 1000))
            self._beat_at, self._beaten = started, row
        # After the heartbeat is in: whoever writes a state from now on waits for this proxy.
        with self._database.read() as conn:
            return rows.view(conn), term, due

    def _take_term(self, term: int | None, view: FleetView, started: float) -> None:
        if term is not None:
            self._valid_until = started + self._times.fence_sec
        if term == self.term:
            return
        if term is not None:
            logger.info("this proxy publishes now (term %d)", term)
            self._cancel_acking()
            if view.state is not None:
                self._seq = max(self._seq, view.state.seq)
        elif self.term is not None:
            logger.warning("another proxy publishes now")
        self.term = term
        self._written = None

    def _put_off_fence(self, started: float) -> None:
        gate = self._live.gate
        if not self._is_required and not self.others:
            gate.fence_at(float("inf"))  # alone, and asked to serve even where the log can't be written
            return
        gate.fence_at(started + self._times.fence_sec)

    async def stop(self) -> None:
        """In order: nobody has to wait for this proxy, and another may publish at once."""
        self._cancel_acking()

        def leave() -> None:
            with self._database.write() as conn:
                rows.leave(conn, self.id)

        try:
            await self._in_thread(leave)
        except StoreError as error:
            logger.warning("%s", error)
        self._thread.shutdown(wait=False)

    # --- a proxy that follows ---

    def _follow(self, state: ServingState) -> None:
        if state.seq == self._seq:
            return
        if self._live.gate.is_fenced and self._seq >= 0:
            self._live.num_doubts += 1  # the others may have gone on without this proxy
        self._seq = state.seq
        self._is_changing = state.is_changing
        self._cancel_acking()
        if state.phase == "open":
            self._live.apply(state.live)
            self._apply_engines(state)
            if self._has_looked:
                self._live.gate.open()
            self._acked = state.seq
        else:
            self._live.gate.hold()
            self._acking = asyncio.create_task(self._acknowledge(state))

    def looked(self) -> None:
        """The engines were looked at: calls need not wait for that any more."""
        self._has_looked = True
        state = None if self.view is None else self.view.state
        if self.term is None and state is not None and state.phase == "open" and state.seq == self._seq:
            self._live.gate.open()

    async def _acknowledge(self, state: ServingState) -> None:
        if state.phase == "drain":
            await self._live.gate.drained(None)
        await self._flush()  # the pins of calls that were admitted are in the log
        self._acked = state.seq

    def _cancel_acking(self) -> None:
        if self._acking is not None:
            self._acking.cancel()
            self._acking = None

    def _apply_engines(self, state: ServingState) -> None:
        label, adapters = state.live["label"], state.live["adapters"]
        self._engines.holding = Holding(label, adapters)
        known = state.engines
        for engine in self._engines.all:
            doc = known.get(engine.url)
            if doc is None:
                self._engines.withdraw(engine, is_up=engine.is_up)
                continue
            engine.fingerprint_id, engine.lacks = doc["fingerprint"], frozenset(doc["lacks"])
            if engine.is_up:  # else it is looked at first: it was seen down here
                self._engines.admit_engine(engine, fingerprint_id=doc["fingerprint"], lacks=doc["lacks"])
        if known and not any(engine.url in known for engine in self._engines.all):
            logger.warning(
                "the proxy that publishes serves %s, and none of this proxy's engines: "
                "give all proxies of a log the same engine_url",
                ", ".join(sorted(known)),
            )

    # --- the proxy that publishes: `place.Fleet` ---

    async def hold(self, *, drains: bool, timeout_sec: float) -> None:
        gate = self._live.gate
        gate.hold()
        seq = await self._write("drain" if drains else "hold")
        try:
            if drains:
                await gate.drained(timeout_sec)
            await self._wait_for_acks(seq, timeout_sec if drains else ACK_TIMEOUT_SEC)
        except TimeoutError:
            running = gate.in_flight
            await self.release()
            raise BusyError(
                f"{running} calls here, or some of another proxy, were still running after {timeout_sec:g} s"
            ) from None

    async def release(self) -> None:
        if self._is_news("open"):
            await self._write("open")
        self._live.gate.open()

    async def announce(self) -> None:
        if not self._live.gate.is_held and self._is_news("open"):
            await self._write("open")

    async def prepare(self, *, is_changing: bool) -> None:
        """Ask the others to look often, or no longer: a hold is short then."""
        self._is_changing = is_changing
        if self.others and not self._live.gate.is_held:
            await self._write("open")

    @property
    def is_told(self) -> bool:
        return all(row.acked_seq >= self._seq for row in self.others)

    def is_answering(self, policy: str, version: int) -> bool:
        return self._live.is_answering(policy, version) or (policy, version, True) in self._their_uses()

    def is_in_use(self, policy: str, version: int) -> bool:
        theirs = {(name, number) for name, number, _ in self._their_uses()}
        return self._live.is_in_use(policy, version) or (policy, version) in theirs

    def _their_uses(self) -> set[tuple[str, int, bool]]:
        return {use for row in self.others for use in row.uses}

    def require_lease(self) -> None:
        """Raises LeaseLostError unless this proxy may still change what engines hold."""
        if self.term is None or self._clock() >= self._valid_until:
            raise LeaseLostError("another proxy may publish by now; this one stops")

    def require_lease_in(self, conn: sa.Connection) -> None:
        """The same, by the row, for a transaction that writes what the publisher has decided."""
        if self.term is None or not rows.holds_lease(conn, self.id, self.term):
            raise LeaseLostError("another proxy publishes now; this one stops")

    def _state_now(self) -> tuple[dict[str, Any], dict[str, Any]]:
        holding = self._engines.holding
        live = {**self._live.snapshot(), "label": holding.label, "adapters": dict(holding.adapters)}
        engines = {
            engine.url: {"fingerprint": engine.fingerprint_id, "lacks": sorted(engine.lacks)}
            for engine in self._engines.in_rotation
        }
        return live, engines

    def _is_news(self, phase: Phase) -> bool:
        return self._written != (phase, self._is_changing, *self._state_now())

    async def _write(self, phase: Phase) -> int:
        self.require_lease()
        live, engines = self._state_now()
        term, changing = self.term, self._is_changing
        assert term is not None, "require_lease has looked"

        def write() -> int:
            with self._database.write() as conn:
                self.require_lease_in(conn)
                before = rows.view(conn).state
                seq = max(self._seq, -1 if before is None else before.seq) + 1
                rows.write_state(conn, ServingState(seq, term, phase, changing, live, engines))
                return seq

        seq = await self._in_thread(write)
        self._written = (phase, changing, live, engines)
        self._seq = self._acked = seq
        return seq

    async def _wait_for_acks(self, seq: int, timeout_sec: float) -> None:
        """Until every proxy that lives has carried it out; one that has fallen silent is not waited for."""
        deadline = self._clock() + timeout_sec
        while True:
            view = await self._in_thread(self._look)
            late = [row for row in view.fresh(round(self._times.gone_sec * 1000)) if row.id != self.id]
            if all(row.acked_seq >= seq for row in late):
                return
            if self._clock() >= deadline:
                raise TimeoutError
            self.require_lease()
            await asyncio.sleep(HURRY_SEC / 2)

    def _look(self) -> FleetView:
        with self._database.read() as conn:
            return rows.view(conn)

    # --- pins ---

    async def recall(self, policy: str, episode_id: str) -> tuple[int, float] | None:
        """What other processes have pinned the episode to, with its age in seconds; `LivePolicies.recall`."""

        def find() -> tuple[int, int] | None:
            with self._database.read() as conn:
                return rows.find_pin(conn, policy, episode_id)

        try:
            found = await asyncio.to_thread(find)
        except StoreError as error:
            logger.warning("%s", error)
            return None
        return None if found is None else (found[0], max(0, now_ms() - found[1]) / 1000)

    async def forget_ended(self) -> None:
        """Episodes that somebody has ended, anywhere, need no pin."""
        pinned = sorted({name for names in self._live.pinned_to_older().values() for name in names})
        if not pinned:
            return

        def find() -> set[str]:
            with self._database.read() as conn:
                return rows.still_running(conn, pinned)

        running = await self._in_thread(find)
        for name in pinned:
            if name not in running:
                self._live.end_episode(name)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
