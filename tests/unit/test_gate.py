"""The gate holds new calls, drains the running ones and never stays closed by accident."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.proxy.live.gate import Gate


async def close(gate: Gate, drain_timeout_sec: float) -> None:
    """As the publisher does it (fleet.py)."""
    gate.hold()
    await gate.drained(drain_timeout_sec)


def test_an_open_gate_lets_calls_pass_and_counts_them() -> None:
    async def run() -> None:
        gate = Gate()
        await gate.enter()
        await gate.enter()
        assert gate.in_flight == 2
        gate.leave()
        assert gate.in_flight == 1

    asyncio.run(run())


def test_close_waits_for_the_running_call_and_holds_the_next_one() -> None:
    async def run() -> None:
        gate = Gate()
        await gate.enter()
        closing = asyncio.create_task(close(gate, 5))
        await asyncio.sleep(0)
        held = asyncio.create_task(gate.enter())
        await asyncio.sleep(0.01)
        assert not closing.done()
        assert gate.waiting == 1
        gate.leave()
        await closing
        await asyncio.sleep(0.01)
        assert not held.done()
        assert gate.in_flight == 0
        gate.open()
        await held
        assert gate.in_flight == 1
        assert gate.waiting == 0

    asyncio.run(run())


def test_a_drain_that_takes_too_long_says_so_and_lets_nobody_in() -> None:
    async def run() -> None:
        gate = Gate()
        await gate.enter()
        with pytest.raises(TimeoutError):
            await close(gate, 0.01)
        assert not gate.is_open
        gate.open()
        await asyncio.wait_for(gate.enter(), 60)

    asyncio.run(run())


def test_a_held_call_whose_client_leaves_is_not_counted() -> None:
    async def run() -> None:
        gate = Gate()
        await close(gate, 1)
        held = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        gate.open()
        assert gate.in_flight == 0
        assert gate.waiting == 0

    asyncio.run(run())


def test_a_gate_closed_again_before_the_waiters_ran_holds_them_still() -> None:
    async def run() -> None:
        gate = Gate()
        await close(gate, 1)
        held = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        gate.open()
        await close(gate, 1)  # nothing in flight: no pause, the waiter has not run
        await asyncio.sleep(0.01)
        assert not held.done()
        gate.open()
        await held

    asyncio.run(run())


@given(st.lists(st.tuples(st.sampled_from(["call", "swap"]), st.integers(0, 3)), max_size=25))
def test_no_call_ever_runs_while_weights_change(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        gate = Gate()
        swapping = False
        violations = 0

        async def call(turns: int) -> None:
            nonlocal violations
            await gate.enter()
            try:
                for _ in range(turns):
                    violations += swapping
                    await asyncio.sleep(0)
                violations += swapping
            finally:
                gate.leave()

        async def swap(turns: int) -> None:
            nonlocal swapping
            await close(gate, 5)
            swapping = True
            for _ in range(turns):
                await asyncio.sleep(0)
            swapping = False
            gate.open()

        async def swaps() -> None:
            for kind, turns in steps:
                if kind == "swap":
                    await swap(turns)
                else:
                    await asyncio.sleep(0)

        calls = [call(turns) for kind, turns in steps if kind == "call"]
        await asyncio.gather(swaps(), *calls)
        assert violations == 0
        assert gate.in_flight == 0
        assert gate.is_open

    asyncio.run(run())
