"""What is measured while a step is computed: sums over micro-batches, means when asked for. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepMetrics:
    """Of one optimizer step, over trained tokens, with the weights before the update."""

    num_tokens: int = 0
    unique_tokens: int = 0
    call_tokens: int = 0
    gap_sum: float = 0.0  # of |policy_logprobs - behavior_logprobs|
    gap_max: float = 0.0
    num_clipped: int = 0
    entropy_sum: float = 0.0
    kl_sum: float = 0.0  # to the reference; 0 where there is none
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    num_pulled: int = 0  # weights of the sample (rounding.py) that had a gradient; 0: nothing is watched
    num_unmoved: int = 0  # of these, those whose bfloat16 value the update left as it was

    @property
    def gap_mean(self) -> float:
        return self.gap_sum / max(1, self.num_tokens)

    @property
    def clip_fraction(self) -> float:
        return self.num_clipped / max(1, self.num_tokens)

    @property
    def kl_mean(self) -> float:
        return self.kl_sum / max(1, self.num_tokens)

    @property
    def rounded_away(self) -> float | None:
        return self.num_unmoved / self.num_pulled if self.num_pulled else None

    @property
    def entropy_mean(self) -> float:
        return self.entropy_sum / max(1, self.num_tokens)
