"""The translator's process and its start, which belongs to no client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fakes import slow_translator
from fakes.waiting import until

from lightning_rl.proxy.dialects.translator import Translator, TranslatorError

pytestmark = pytest.mark.slow  # starts processes


def with_translator(folder: Path, work: Callable[[Translator], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        translator = Translator(command=(sys.executable, slow_translator.__file__, str(folder)))
        try:
            await asyncio.wait_for(work(translator), 60)
        finally:
            await translator.stop()

    asyncio.run(run())


def started(folder: Path) -> list[int]:
    """The pids of all that were started."""
    path = folder / "started"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def may_start(folder: Path) -> None:
    (folder / "go").touch()


async def status_of(translator: Translator) -> int:
    answer = await translator.send("/messages", {}, b"{}")
    await answer.read()
    return answer.status


def is_there(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_client_that_leaves_during_the_start_does_not_take_it_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(translator: Translator) -> None:
        first = asyncio.create_task(status_of(translator))
        await until(lambda: started(tmp_path))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        others = [asyncio.create_task(status_of(translator)) for _ in range(2)]
        await asyncio.sleep(0)
        may_start(tmp_path)
        assert await asyncio.gather(*others) == [200, 200]
        assert started(tmp_path) == [translator.pid]

    with_translator(tmp_path, work)
    assert caplog.messages == []


def test_the_proxy_s_end_breaks_a_start_off(tmp_path: Path) -> None:
    async def work(translator: Translator) -> None:
        asked = asyncio.create_task(status_of(translator))
        await until(lambda: started(tmp_path))
        await translator.stop()
        with pytest.raises(TranslatorError):
            await asked
        (pid,) = started(tmp_path)
        assert not is_there(pid)
        with pytest.raises(TranslatorError):  # stopped for good
            await status_of(translator)
        assert started(tmp_path) == [pid]

    with_translator(tmp_path, work)


def test_one_that_does_not_get_ready_in_time_is_ended_and_the_next_call_starts_another(
    tmp_path: Path,
) -> None:
    async def work(translator: Translator) -> None:
        translator.start_timeout_sec = 2.0
        with pytest.raises(TranslatorError):
            await status_of(translator)
        assert translator.pid is None
        assert not any(map(is_there, started(tmp_path)))
        translator.start_timeout_sec = 60.0
        may_start(tmp_path)
        assert await status_of(translator) == 200

    with_translator(tmp_path, work)


def test_one_that_died_is_started_again(tmp_path: Path) -> None:
    may_start(tmp_path)

    async def work(translator: Translator) -> None:
        assert await status_of(translator) == 200
        (pid,) = started(tmp_path)
        os.kill(pid, 9)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert await status_of(translator) == 200
        assert len(started(tmp_path)) == 2

    with_translator(tmp_path, work)
