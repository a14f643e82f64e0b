"""Rewards as JSON: what one object says, and a file of one object per line. Pure: no SQL, no I/O.

What is rewarded follows from what is named: the episode, an agent in it, a call, tokens of a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..errors import UserError, plain_words
from ..records import Reward, RewardTarget, new_id, now_ms
from .names import checked_name
from .statements import storable_text

_INT32 = 2**31 - 1
_YEAR_2000_MS = 946_684_800_000
_DAY_MS = 86_400_000


def _checked_text(text: str) -> str:
    if storable_text(text) != text:
        raise ValueError("has a NUL or half characters (lone surrogates)")
    return text


def _checked_time(at_ms: int) -> int:
    """A row that is dated ahead would stand against every later correction of its source."""
    if at_ms < _YEAR_2000_MS:
        raise ValueError(f"is milliseconds since 1970, and {at_ms} is before the year 2000 (seconds?)")
    if at_ms > now_ms() + _DAY_MS:
        raise ValueError(f"is milliseconds since 1970, and {at_ms} has yet to come (microseconds?)")
    return at_ms


class RewardLine(BaseModel):
    """One reward as JSON. `id`: giving the same row again under it changes nothing."""

    model_config = ConfigDict(extra="forbid")

    episode: str = Field(min_length=1)
    value: float = Field(allow_inf_nan=False, strict=True)
    id: str | None = Field(None, min_length=1, max_length=128, description="Made up if left out.")
    source: Annotated[str, AfterValidator(checked_name)] | None = None
    final: bool | None = Field(
        None, description="Whether it ends the episode; by default a reward about the whole episode does."
    )
    agent: str | None = None
    call: str | None = None
    choice: int | None = Field(None, ge=0, le=_INT32)
    token_start: int | None = Field(None, ge=0, le=_INT32)
    token_end: int | None = Field(None, ge=0, le=_INT32)
    note: Annotated[str, AfterValidator(_checked_text)] | None = None
    supersedes: str | None = None
    created_at_ms: Annotated[int, AfterValidator(_checked_time)] | None = Field(
        None, description="When it was given, in milliseconds since 1970; now, if left out."
    )

    def target(self) -> RewardTarget:
        if self.token_start is not None or self.token_end is not None:
            return RewardTarget.TOKENS
        if self.call is not None:
            return RewardTarget.CALL
        return RewardTarget.EPISODE if self.agent is None else RewardTarget.AGENT

    def reward(self, default_source: str) -> Reward:
        target = self.target()
        return Reward(
            id=self.id or new_id(),
            episode_id=self.episode,
            target=target,
            value=self.value,
            source=self.source or default_source,
            created_at_ms=now_ms() if self.created_at_ms is None else self.created_at_ms,
            agent=self.agent,
            call_id=self.call,
            choice_index=self.choice,
            token_start=self.token_start,
            token_end=self.token_end,
            final=target is RewardTarget.EPISODE if self.final is None else self.final,
            note=self.note,
            supersedes=self.supersedes,
        )


@dataclass(frozen=True, slots=True)
class NumberedReward:
    line: int | None  # 1-based; None: it was given by itself
    reward: Reward

    def said(self, fault: str) -> str:
        """A mistake in it, in the words of whoever gave it."""
        return fault if self.line is None else f"line {self.line}: {fault}; nothing was written"


def read_lines(lines: Iterable[str], default_source: str) -> list[NumberedReward]:
    """A reward per line that is not blank; of two about one thing the later line is the newer.

    UserError with the number of the first line that is none.
    """
    found: list[NumberedReward] = []
    made_up: list[int] = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        line = _parsed(number, text)
        if line.id is None:
            made_up.append(len(found))
        found.append(NumberedReward(number, line.reward(default_source)))
    _in_the_order_of_lines(found, made_up)
    return found


def _parsed(number: int, text: str) -> RewardLine:
    try:
        doc = json.loads(text, object_pairs_hook=_each_key_once)
    except UserError as error:
        raise UserError(f"line {number}: {error}; nothing was written") from None
    except RecursionError:
        raise UserError(f"line {number} is nested too deep for a reward; nothing was written") from None
    except json.JSONDecodeError as error:
        raise UserError(f"line {number} is no JSON: {error}; nothing was written") from None
    except ValueError:  # Python's limit of digits
        raise UserError(f"line {number} has a number of too many digits; nothing was written") from None
    try:
        return RewardLine.model_validate(doc)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        said = f"field {where!r} {plain_words(fault)}" if where else "a line is one JSON object"
        unknown = [str(one["loc"][0]) for one in error.errors() if one["type"] == "extra_forbidden"]
        if unknown:
            said = f"there is no field {unknown[0]!r}; the fields: {', '.join(RewardLine.model_fields)}"
        raise UserError(f"line {number}: {said}; nothing was written") from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    doc = dict(pairs)
    if len(doc) < len(pairs):
        names = [name for name, _ in pairs]
        raise UserError(f"field {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return doc


def _in_the_order_of_lines(found: list[NumberedReward], made_up: Sequence[int]) -> None:
    """Ids of one millisecond sort at random; those that we made up are dealt out in order."""
    ids = sorted(found[index].reward.id for index in made_up)
    for index, name in zip(made_up, ids, strict=True):
        found[index] = replace(found[index], reward=replace(found[index].reward, id=name))
