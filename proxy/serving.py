"""The background of a running proxy: it keeps in touch with the others, and publishes or follows.

Owns which of the two this process does at the moment, and the engines' clients. How it is agreed on is in
fleet.py, what publishing means in publisher.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ..errors import LightningError
from .app import ProxyApp
from .engine_watch import EngineWatch, engine_handles
from .publishing.fleet import Member, Times
from .publishing.guarded import GuardedEngine
from .publishing.place import Handle, Place
from .publishing.publisher import Publisher
from .publishing.version_log import Notices

DRAIN_TIMEOUT_SEC = 120.0
FORGET_ENDED_SEC = 2.0

logger = logging.getLogger("lightning.fleet")


async def serve_policies(app: ProxyApp, *, times: Times | None = None) -> None:
    """The proxy's background task. Calls wait at the gate until it is known what is live."""
    app.gate.hold()
    for engine in app.engines.all:
        app.engines.withdraw(engine, is_up=False)
    settings = app.settings
    member = Member(
        app.database,
        app.live,
        app.engines,
        flush=app.recorder.flush,
        wants_lease=settings.publish,
        is_required=settings.recording == "required",
        times=times,
    )
    app.live.recall = member.recall
    async with engine_handles(app) as handles:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_keep_in_touch(member, settings.publish_poll_sec))
                group.create_task(_work(app, member, handles))
        finally:
            app.live.recall = None
            await member.stop()


async def _keep_in_touch(member: Member, poll_sec: float) -> None:
    loop = asyncio.get_running_loop()
    forgot_at = loop.time()
    while True:
        try:
            await member.turn()
            if loop.time() - forgot_at >= FORGET_ENDED_SEC:
                forgot_at = loop.time()
                await member.forget_ended()
        except LightningError as error:
            logger.warning("%s", error)
        except Exception:  # the boundary of the task: it must go on, or this proxy counts as gone
            logger.exception("keeping in touch with the other proxies failed; going on")
        await asyncio.sleep(member.wait_sec or poll_sec)


async def _work(app: ProxyApp, member: Member, handles: Sequence[Handle]) -> None:
    raw = {handle.state: handle.client for handle in handles}
    guarded = [Handle(GuardedEngine(handle.client, member.require_lease), handle.state) for handle in handles]

    async def seen(handle: Handle) -> str | None:
        return await app.fingerprint_of(raw[handle.state])

    place = Place(guarded, app.engines, app.live, member, DRAIN_TIMEOUT_SEC)
    publisher = Publisher(
        app.database, place, app.settings, on_engine_seen=seen, open_door=app.open_evaluation
    )
    watch = EngineWatch(app, handles)
    term: int | None = None
    notices = Notices()
    while True:
        notices.begin()
        try:
            state = None if member.view is None else member.view.state
            if member.term is not None:
                if term != member.term:
                    await publisher.take_over(was_open=state is not None and state.phase == "open")
                    term = member.term
                await publisher.turn()
            else:
                term = None
                if member.has_publisher:
                    if state is not None and state.engines:
                        await watch.turn(listed=tuple(state.engines))
                        member.looked()
                elif member.view is not None and not app.settings.publish:
                    await watch.turn(listed=None)
            notices.end()
        except LightningError as error:
            notices.say(str(error))
            notices.end()
        except Exception as error:  # noqa: BLE001 - the boundary of the task
            notices.broke(error)
        await asyncio.sleep(app.settings.publish_poll_sec)
