"""`lightning reward run`: a function that judges episodes, over all that its source has not judged yet.

The function gets a `store.seen.SeenEpisode` and gives a number, None (no opinion), or a list of `Judgement`s
about parts; it may be async. Each episode's rewards are one transaction, so whatever stops the run leaves
what was judged, and the next run goes on from there. Knows nothing of models: a judge that asks one is told
where (`SeenEpisode.judge`).
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from importlib import import_module
from numbers import Real
from typing import Any

from ...errors import UserError
from ...records import Reward, RewardTarget, new_id, now_ms
from ...settings.layers import root_url
from ...store.database import Database
from ...store.episodes import add_reward
from ...store.seen import JudgeAccess, SeenEpisode, load_seen

JUDGE_AGENT = "judge"
"""The agent in whose name a judge calls the proxy, which takes its calls for a judge's (setting `kinds`)."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A reward about what is named: the episode, else an agent, a call, or a range of a call's tokens."""

    value: float
    agent: str | None = None
    call: str | None = None
    choice: int | None = None
    token_start: int | None = None
    token_end: int | None = None
    note: str | None = None

    def reward(self, episode_id: str, source: str) -> Reward:
        target = RewardTarget.EPISODE if self.agent is None else RewardTarget.AGENT
        if self.call is not None:
            whole = self.token_start is None and self.token_end is None
            target = RewardTarget.CALL if whole else RewardTarget.TOKENS
        return Reward(
            id=new_id(),
            episode_id=episode_id,
            target=target,
            value=self.value,
            source=source,
            created_at_ms=now_ms(),
            agent=self.agent,
            call_id=self.call,
            choice_index=self.choice,
            token_start=self.token_start,
            token_end=self.token_end,
            note=self.note,
        )


Judge = Callable[[SeenEpisode], Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of one episode. `failure`: why the function, or the log, said no."""

    episode_id: str
    rewards: tuple[Reward, ...] = ()
    failure: str | None = None


@dataclass(slots=True)
class JudgingReport:
    judged: list[Judged] = field(default_factory=list)
    stopped: bool = False

    @property
    def rewarded(self) -> list[Judged]:
        return [one for one in self.judged if one.rewards]

    @property
    def failures(self) -> list[Judged]:
        return [one for one in self.judged if one.failure is not None]

    def as_json(self) -> dict[str, Any]:
        return {
            "episodes": len(self.judged),
            "rewarded": len(self.rewarded),
            "rewards": sum(len(one.rewards) for one in self.judged),
            "no_opinion": len(self.judged) - len(self.rewarded) - len(self.failures),
            "failed": len(self.failures),
            "failures": [{"episode": one.episode_id, "why": one.failure} for one in self.failures],
            "stopped": self.stopped,
        }


def judge_access(proxy_url: str, token: str | None) -> JudgeAccess:
    """The proxy's address for a judge's calls."""
    try:
        root = root_url(proxy_url)
    except ValueError as error:
        raise UserError(f"--proxy-url {proxy_url!r}: {error}") from None
    return JudgeAccess(f"{root}/agents/{JUDGE_AGENT}/v1", token or "none")


def find_judge(name: str) -> Judge:
    """`module:function`, looked for in the working directory too. UserError in one line."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise UserError(f"name the function as MODULE:FUNCTION, not {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"no module {error.name!r} for {name!r}; run this where it can be imported") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a person's own module: whatever it raises is one line)
        raise UserError(f"module {module!r} can't be imported: {_one_line(error)}") from None
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UserError(f"module {module!r} has no function {attribute!r}")
    judge: Judge = found
    return judge


def judge_all(
    database: Database,
    judge: Judge,
    ids: Sequence[str],
    source: str,
    *,
    concurrency: int,
    access: JudgeAccess | None = None,
    write: bool = True,
    on_judged: Callable[[Judged], None] = lambda _: None,
) -> JudgingReport:
    """Judge the episodes, `concurrency` at a time; a failure concerns its episode alone. `write` False: look
    only."""
    report = JudgingReport()

    def note(judged: Judged) -> None:
        report.judged.append(judged)
        on_judged(judged)

    async def run() -> None:
        names = iter(ids)
        with ThreadPoolExecutor(concurrency, "judge") as pool:
            judging = _Judging(database, judge, source, access, write, pool)
            await asyncio.gather(*(judging.work(names, note) for _ in range(concurrency)))

    try:
        asyncio.run(run())
    except (KeyboardInterrupt, _StoppedError):
        report.stopped = True
    place = {name: number for number, name in enumerate(ids)}
    report.judged.sort(key=lambda judged: place[judged.episode_id])
    return report


class _StoppedError(Exception):
    """A judge's own KeyboardInterrupt, in a form that asyncio passes on like any other."""


@dataclass(frozen=True, slots=True)
class _Judging:
    """What every worker of one run uses."""

    database: Database
    judge: Judge
    source: str
    access: JudgeAccess | None
    write: bool
    pool: ThreadPoolExecutor

    async def work(self, names: Iterator[str], note: Callable[[Judged], None]) -> None:
        for name in names:
            try:
                judged = await self._judged(name)
            except KeyboardInterrupt:
                raise _StoppedError from None
            note(judged)

    async def _judged(self, name: str) -> Judged:
        try:
            said = await self._said(await self._in_thread(self._load, name))
            rewards = tuple(judgement.reward(name, self.source) for judgement in judgements(said))
            if self.write and rewards:
                await self._in_thread(self._keep, rewards)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a person's own function: it fails for this episode alone)
            return Judged(name, failure=_one_line(error))
        return Judged(name, rewards)

    async def _said(self, seen: SeenEpisode) -> Any:
        if inspect.iscoroutinefunction(self.judge):
            return await self.judge(seen)
        said = await self._in_thread(self.judge, seen)
        return await said if isinstance(said, Awaitable) else said

    async def _in_thread(self, function: Callable[[Any], Any], argument: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, argument)

    def _load(self, name: str) -> SeenEpisode:
        with self.database.read() as conn:
            return load_seen(conn, [name], self.access)[0]

    def _keep(self, rewards: Sequence[Reward]) -> None:
        with self.database.write() as conn:
            for reward in rewards:
                add_reward(conn, reward)


def judgements(said: Any) -> list[Judgement]:
    """What a function gave, as judgements. UserError where it can't be read as any."""
    if said is None:
        return []
    if isinstance(said, list | tuple):
        return [_judgement(item) for item in said]
    return [_judgement(said)]


def _judgement(said: Any) -> Judgement:
    if isinstance(said, Judgement):
        return replace(said, value=_number(said.value, "the value of a reward is a number"))
    if not isinstance(said, Mapping):
        return Judgement(_number(said, "a judge gives a number, None, or a list of rewards"))
    known = [one.name for one in fields(Judgement)]
    for key in said:
        if key not in known:
            raise UserError(f"a reward has no key {key!r}; the keys: {', '.join(known)}")
    if "value" not in said:
        raise UserError(f"a reward has a value; this one has {', '.join(said) or 'nothing'}")
    return _judgement(Judgement(**said))


def _number(said: Any, expected: str) -> float:
    """What is true or false is none, as in a file of rewards: what it is worth is for the judge to say."""
    if isinstance(said, bool) or not isinstance(said, Real | Decimal):
        raise UserError(f"{expected}; this one gave {type(said).__name__}")
    return float(said)


def _one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"[:500]
