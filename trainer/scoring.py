"""The head, only where a loss needs it: a forward that gives logprobs of chosen tokens instead of logits.

Which tokens, and at which temperature, is the batch's matter; how hidden states become logprobs is a function
that the bridge hands in.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from .batch import HeadRows


class Project(Protocol):
    def __call__(
        self, rows: Any, targets: Any, head: Any, *, temperature: float, softcap: float | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """rows (U, H) -> (U,) logprobs of `targets` (U,) at the temperature, and (U,) entropies."""
        ...


def on_device(values: Any, device: Any) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def add_scoring_head(model: Any, project: Project) -> None:
    """`model(..., scored=HeadRows)` returns (logprobs, entropies) of those rows and never makes other logits.

    A patched forward rather than a function beside it, so that DDP and FSDP wrappers see the whole
    computation.
    """
    original = model.forward
    text = model.config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    scale = _logit_scale(text)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, scored: HeadRows | None = None, **kwargs: Any) -> Any:
        if scored is None:
            return original(*args, **kwargs)
        hidden = self.base_model(*args, **kwargs, use_cache=False).last_hidden_state
        head = self.get_output_embeddings()
        rows = hidden.reshape(-1, hidden.shape[-1])[on_device(scored.position, hidden.device)]
        targets = on_device(scored.target, hidden.device)
        found = []
        for start, end, temperature in _runs(scored.temperature):
            part = project(
                rows[start:end],
                targets[start:end],
                head,
                temperature=temperature,
                softcap=softcap,
                scale=scale,
            )
            found.append(part)
        return torch.cat([logps for logps, _ in found]), torch.cat([entropies for _, entropies in found])

    model.forward = types.MethodType(forward, model)


def _logit_scale(config: Any) -> float:
    """The factor by which some architectures multiply their logits; TRL's own head reads the same fields."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return float(divisor) if config.model_type == "hyperclovax" else 1.0 / float(divisor)


def _runs(values: Any) -> Iterator[tuple[int, int, float]]:
    """(start, end, value) of each stretch of equal values."""
    start = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or values[end] != values[start]:
            yield start, end, float(values[start])
            start = end
