"""What keeps calls and episodes out of training: each reason counted, with an example and what to do.

Counts read the indexes of exceptions (store/schema.py) and per-episode counters: ordinary calls are never
looked at, so a million of them cost what the exceptions among them cost. Conditions stand in literals,
because that is how a query says that it fits such an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from ..records import CallKind, CallStatus, EpisodeStatus, Purpose, Quarantine, RewardTarget
from .schema import calls, choices, episodes, events, rewards

MAX_EXAMINED = 50_000
"""Of more calls of one exception than this, only the newest are looked at for answers of their own."""

_QUARANTINE_ADVICE = {
    Quarantine.INCOMPLETE: "the engine did not finish: raise max_tokens or the client's time-out, look at "
    "aborts",
    Quarantine.NO_PROMPT_IDS: "the engine gave no prompt ids: lightning engine check URL",
    Quarantine.NO_COMPLETION_IDS: "the engine gave no token ids: lightning engine check URL",
    Quarantine.MISALIGNED: "fewer logprobs than tokens: lightning engine check URL",
    Quarantine.BAD_LOGPROB: "the engine gave logprobs that are none: check its version and logprobs mode",
    Quarantine.COUNT_MISMATCH: "the stream lost tokens that the engine counted: lightning engine check URL",
    Quarantine.UNRECORDABLE: "asking for tokens would have changed the answer: docs/recording.md lists the "
    "cases",
    Quarantine.TEMPERATURE_ZERO: "sampled greedily, nothing to learn from: have the agent send temperature 1",
    Quarantine.TRUNCATED_SUPPORT: "top_p, top_k or min_p cut the distribution: leave them out while "
    "producing",
    Quarantine.PENALTIES: "penalties change the distribution: leave them out while producing",
    Quarantine.LOGIT_BIAS: "logit_bias changes the distribution: leave it out while producing",
    Quarantine.CONSTRAINED: "a grammar or a forced tool call chose tokens: let the model choose "
    "(tool_choice auto)",
    Quarantine.IMAGES: "the log does not hold what the model saw: train text calls only, for now",
    Quarantine.NOT_POLICY: "no policy of yours served it: ask for the policy's name or an alias of it",
    Quarantine.VERSION_CHANGED: "weights changed in the middle: nothing to do, the next calls are whole",
    Quarantine.REDACTED: "tokens were redacted: nothing to do",
    Quarantine.PROMPT_PARITY: "a translated prompt is not proven to be the engine's own: start vLLM with "
    "--enable-scale-out (docs/dialects.md)",
}
_STATUS_ADVICE = {
    CallStatus.OPEN: "no answer is in the log: still running, or its proxy was killed",
    CallStatus.ABORTED: "the engine or the proxy gave up: look at the engine's log",
    CallStatus.ERROR: "the engine answered with an error: lightning calls show CALL tells it",
    CallStatus.DISCONNECTED: "the client left before the answer was complete: raise its time-out",
}
_KIND_ADVICE = {
    CallKind.SIDE: "not the agent's own step; if it is: lightning calls kind policy CALL",
    CallKind.JUDGE: "a judge's call; if it is the agent's own step: lightning calls kind policy CALL",
    CallKind.RETRY_ORPHAN: "the SDK asked again and used the other answer: raise its time-out if there are "
    "many",
}
_INEXACT = frozenset(
    {
        Quarantine.INCOMPLETE,
        Quarantine.NO_PROMPT_IDS,
        Quarantine.NO_COMPLETION_IDS,
        Quarantine.MISALIGNED,
        Quarantine.BAD_LOGPROB,
        Quarantine.COUNT_MISMATCH,
        Quarantine.UNRECORDABLE,
        Quarantine.REDACTED,
    }
)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """`example`: the newest call (or episode) that it holds for."""

    reason: str
    what: str  # "calls" | "answers" | "episodes"
    count: int
    example: str | None
    advice: str


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls, and their answers (a call with n=4 has four)."""

    calls: int
    attributed: int
    complete: int  # the engine finished every answer
    answers: int
    exact: int  # answers whose tokens and logprobs are whole and the engine's own
    trainable: int  # exact, sampled as a policy is, by a policy call of an episode
    is_estimate: bool = False  # of `trainable`: there were too many exceptions to look at each


def count_calls(conn: sa.Connection) -> tuple[CallCounts, list[Exclusion]]:
    """The shares, and what is excluded call by call or answer by answer, the most frequent first."""
    found = [*_quarantined(conn), *_of_calls(conn)]
    by_reason = {exclusion.reason: exclusion.count for exclusion in found}
    in_episodes = conn.execute(sa.select(sa.func.coalesce(sa.func.sum(episodes.c.num_calls), 0))).scalar_one()
    answers = conn.execute(sa.select(sa.func.count()).select_from(choices)).scalar_one()
    unfinished = sum(by_reason.get(status.value, 0) for status in CallStatus)
    quarantined = sum(exclusion.count for exclusion in found if exclusion.what == "answers")
    beside, is_estimate = _untrained_beside_quarantine(conn, found)
    total = int(in_episodes) + by_reason.get("unattributed", 0)
    counts = CallCounts(
        calls=total,
        attributed=int(in_episodes),
        complete=total - unfinished,
        answers=answers,
        exact=answers - sum(by_reason.get(reason.value, 0) for reason in _INEXACT),
        trainable=max(0, answers - quarantined - beside),
        is_estimate=is_estimate,
    )
    return counts, sorted(found, key=lambda exclusion: -exclusion.count)


def _quarantined(conn: sa.Connection) -> list[Exclusion]:
    query = (
        sa.select(choices.c.quarantine, sa.func.count(), sa.func.max(choices.c.call_id))
        .where(choices.c.quarantine.is_not(None))
        .group_by(choices.c.quarantine)
    )
    return [
        Exclusion(reason, "answers", count, example, _advice(reason))
        for reason, count, example in conn.execute(query)
    ]


def _advice(reason: str) -> str:
    known = {quarantine.value: advice for quarantine, advice in _QUARANTINE_ADVICE.items()}
    return known.get(reason, "lightning calls show CALL tells more")


def _of_calls(conn: sa.Connection) -> list[Exclusion]:
    found = []
    for column, ordinary, advice in (
        (calls.c.status, CallStatus.COMPLETE, {s.value: words for s, words in _STATUS_ADVICE.items()}),
        (calls.c.kind, CallKind.POLICY, {f"{k.value}": words for k, words in _KIND_ADVICE.items()}),
    ):
        query = (
            sa.select(column, sa.func.count(), sa.func.max(calls.c.id))
            .where(column != sa.literal_column(f"'{ordinary.value}'"))
            .group_by(column)
        )
        for value, count, example in conn.execute(query):
            reason = f"{value}_call" if column is calls.c.kind else value
            found.append(Exclusion(reason, "calls", count, example, advice.get(value, "")))
    for reason, where, words in (
        (
            "unattributed",
            calls.c.episode_id.is_(None),
            "no mark said whose it is: set the base URL or a header (docs/recording.md), or assign it: "
            "lightning episodes assign EPISODE CALL",
        ),
        (
            "attribution_conflict",
            calls.c.attribution_conflict.is_not(None),
            "two marks named different things; the stronger one counts: lightning calls show CALL tells both",
        ),
    ):
        count, example = conn.execute(sa.select(sa.func.count(), sa.func.max(calls.c.id)).where(where)).one()
        if count:
            found.append(Exclusion(reason, "calls", count, example, words))
    return found


def _untrained_beside_quarantine(conn: sa.Connection, found: Sequence[Exclusion]) -> tuple[int, bool]:
    """Answers without a quarantine of their own whose call is no policy call, or in no episode."""
    policy: sa.ColumnElement[str] = sa.literal_column(f"'{CallKind.POLICY.value}'")
    counted = {exclusion.reason: exclusion.count for exclusion in found}
    # Each in the order of the index that picks it.
    of_kinds = sa.select(calls.c.id).where(calls.c.kind != policy)
    of_kinds = of_kinds.order_by(calls.c.kind.desc(), calls.c.id.desc())
    in_bin = sa.select(calls.c.id).where(calls.c.episode_id.is_(None), calls.c.kind == policy)
    in_bin = in_bin.order_by(calls.c.id.desc())
    num_kinds = sum(counted.get(f"{kind.value}_call", 0) for kind in CallKind)
    first, is_estimated = _free_answers(conn, of_kinds, num_kinds)
    second, is_too = _free_answers(conn, in_bin, counted.get("unattributed", 0))
    return first + second, is_estimated or is_too


def _free_answers(conn: sa.Connection, query: sa.Select[str], num_calls: int) -> tuple[int, bool]:
    """How many answers of these (so many) calls have no quarantine, and whether that is an estimate."""
    # With a limit it is a step of its own: joined freely, SQLite would go through all answers instead.
    examined = query.limit(MAX_EXAMINED).subquery()
    free = sa.and_(choices.c.call_id == examined.c.id, choices.c.quarantine.is_(None))
    count = conn.execute(sa.select(sa.func.count()).select_from(examined.join(choices, free))).scalar_one()
    if num_calls <= MAX_EXAMINED:
        return count, False
    return round(count * num_calls / MAX_EXAMINED), True


def episode_exclusions(conn: sa.Connection) -> list[Exclusion]:
    """Why whole episodes are not trained."""
    found = []
    for status, advice in (
        (
            EpisodeStatus.RUNNING,
            "end it (lightning episodes end, a final reward), or set idle_timeout_sec; its group waits for "
            "it",
        ),
        (EpisodeStatus.FAILED, "left out; if it counts: lightning episodes include EPISODE"),
        (EpisodeStatus.EXCLUDED, "left out on purpose; to take it back: lightning episodes include EPISODE"),
    ):
        where = (episodes.c.status == status.value, episodes.c.purpose == Purpose.TRAIN.value)
        found.append(_episodes(conn, status.value, where, advice))
    ended = (episodes.c.status == EpisodeStatus.ENDED.value, episodes.c.purpose == Purpose.TRAIN.value)
    rewarded = sa.exists().where(
        rewards.c.episode_id == episodes.c.id, rewards.c.target == RewardTarget.EPISODE.value
    )
    found += [
        _episodes(conn, "unrewarded", (*ended, ~rewarded), "give one: lightning reward EPISODE VALUE"),
        _episodes(
            conn,
            "no_task",
            (*ended, episodes.c.group_id.is_(None)),
            "without a task there is nothing to compare with: send X-Lightning-Task, and repeat tasks",
        ),
        _episodes(
            conn,
            "gap",
            (sa.literal_column("episodes.has_gap"),),
            "a call was served but not recorded: look at the proxy's log of that time",
        ),
    ]
    late = sa.select(sa.func.count(sa.distinct(events.c.subject_id)), sa.func.max(events.c.subject_id)).where(
        events.c.kind == "late_call"
    )
    count, example = conn.execute(late).one()
    advice = "a call came after the end: end episodes later, or lengthen idle_timeout_sec"
    found.append(Exclusion("late_call", "episodes", count, example, advice))
    return [exclusion for exclusion in found if exclusion.count]


def _episodes(
    conn: sa.Connection, reason: str, where: tuple[sa.ColumnElement[bool], ...], advice: str
) -> Exclusion:
    count = conn.execute(sa.select(sa.func.count()).select_from(episodes).where(*where)).scalar_one()
    example = None
    if count:
        newest = sa.select(episodes.c.id).where(*where)
        newest = newest.order_by(episodes.c.created_at_ms.desc(), episodes.c.id.desc()).limit(1)
        example = conn.execute(newest).scalar()
    return Exclusion(reason, "episodes", count, example, advice)
