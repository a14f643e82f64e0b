"""Per-token multipliers: what weighs the same in the loss.

The objective of one step, for trained episodes E, calls k of episode e, tokens t, and Z_e = trained tokens of
e:

    L = - sum_e sum_{k in e} sum_t  m_e * min(r A, clip(r) A)

    episode    m_e = 1 / (|E| Z_e)    every episode weighs 1/|E|. Bias: a token of a long episode weighs less.
    token      m_e = 1 / sum_e Z_e    every token weighs the same (DAPO). Bias: long episodes dominate.
    constant   m_e = 1 / (|E| C)      an unbiased gradient of the summed objective (Dr. GRPO); C: a setting.
                                      Bias: none per token, but the step's size grows with the answers'
                                      length.

For m >= 0, m*min(rA, clip(r)A) = min(r(mA), clip(r)(mA)): a multiplier of the advantage is a multiplier of
the loss term, so TRL's loss stays untouched and its own normaliser is cancelled (trl_bridge). |E| counts
episodes with at least one trained token: groups without variance are left out, as in DAPO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

from ..credit.base import ChoiceKey

Weighting = Literal["episode", "token", "constant"]

CONSTANT_TOKENS = 1024
"""C of the constant weighting, unless it is set. Adam divides it out again; it says where `max_grad_norm`
bites."""


@dataclass(frozen=True, slots=True)
class TrainedChoice:
    """A choice that will be trained: whose it is, and its number of trained tokens (> 0)."""

    episode_id: str
    num_tokens: int


def multipliers(
    trained: Mapping[ChoiceKey, TrainedChoice], weighting: Weighting, constant_tokens: int = CONSTANT_TOKENS
) -> dict[ChoiceKey, float]:
    """The multiplier of every token of each trained choice of ONE optimizer step."""
    tokens_of: Counter[str] = Counter()
    for choice in trained.values():
        assert choice.num_tokens > 0, "a choice without tokens has no loss"
        tokens_of[choice.episode_id] += choice.num_tokens
    num_episodes, num_tokens = len(tokens_of), tokens_of.total()

    def of(choice: TrainedChoice) -> float:
        match weighting:
            case "episode":
                return 1.0 / (num_episodes * tokens_of[choice.episode_id])
            case "token":
                return 1.0 / num_tokens
            case "constant":
                return 1.0 / (num_episodes * constant_tokens)
            case _:
                assert_never(weighting)

    return {key: of(choice) for key, choice in trained.items()}
