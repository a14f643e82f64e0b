"""The head, only where a loss needs it: a forward that gives logprobs of chosen tokens instead of logits.

Which tokens, and at which temperature, is the batch's matter; how hidden states become logprobs is a function
that the bridge hands in.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from ..batches.tree import HeadRows


class Project(Protocol):
    def __call__(
        self, rows: Any, targets: Any, head: Any, *, temperature: float, softcap: float | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """rows (U, H) -> (U,) logprobs of `targets` (U,) at the temperature, and (U,) entropies."""
        ...


HELD_LOGITS = 2**27
"""Up to this many logits are held in memory at once on a CPU: a third quicker than computing them twice."""


class HeldHead(torch.autograd.Function):  # type: ignore[misc]
    """Logprobs and entropies of a few hundred rows, with their probabilities kept for the backward pass.

    For float32 on a CPU, where a pass over (U, vocabulary) costs more than memory does. Three products
    instead of the four of a head that recomputes its logits. The entropies are for reading only: no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = rows @ weight.T
        if factor != 1.0:
            logits.mul_(factor)
        all_logps = torch.log_softmax(logits, -1)
        probabilities = torch.exp(all_logps, out=logits)
        entropies = -torch.einsum("uv,uv->u", probabilities, all_logps)
        ctx.save_for_backward(rows, weight, targets, probabilities)
        ctx.factor = factor
        ctx.mark_non_differentiable(entropies)
        return all_logps.gather(1, targets[:, None])[:, 0], entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_logps: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        rows, weight, targets, probabilities = ctx.saved_tensors
        grad = (grad_logps * ctx.factor)[:, None]
        grad_logits = probabilities.mul_(-grad).scatter_add_(1, targets[:, None], grad)  # in place: used once
        return (
            grad_logits @ weight if ctx.needs_input_grad[0] else None,
            grad_logits.T @ rows if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


def on_device(values: Any, device: Any) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def add_scoring_head(model: Any, project: Project, *, holds_logits: bool = True) -> None:
    """`model(..., scored=HeadRows)` returns (logprobs, entropies) of those rows and never makes other logits.

    `holds_logits` False: `project` always computes them, and entropies have a gradient, too.

    A patched forward rather than a function beside it, so that DDP and FSDP wrappers see the whole
    computation; and the head computes inside its own forward, where FSDP has put its weights together.
    """
    original = model.forward
    text = model.config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    scale = _logit_scale(text)
    head = model.get_output_embeddings()
    _compute_inside(head)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, scored: HeadRows | None = None, **kwargs: Any) -> Any:
        if scored is None:
            return original(*args, **kwargs)
        hidden = self.base_model(*args, **kwargs, use_cache=False).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1])[on_device(scored.position, hidden.device)]
        targets = on_device(scored.target, hidden.device)

        def scores(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = []
            for start, end, temperature in _runs(scored.temperature):
                part = (rows[start:end], targets[start:end])
                if holds_logits and _can_hold(part[0], head, softcap):
                    found.append(HeldHead.apply(part[0], head.weight, part[1], scale / temperature))
                else:
                    found.append(project(*part, head, temperature=temperature, softcap=softcap, scale=scale))
            return torch.cat([logps for logps, _ in found]), torch.cat([entropies for _, entropies in found])

        return head(rows, instead=scores)

    model.forward = types.MethodType(forward, model)


def _compute_inside(head: Any) -> None:
    """`head(rows, instead=f)` is f(rows), computed where a wrapper expects the head's forward."""
    original = head.forward

    @functools.wraps(type(head).forward)
    def forward(
        self: Any, rows: torch.Tensor, *, instead: Callable[[torch.Tensor], Any] | None = None
    ) -> Any:
        return original(rows) if instead is None else instead(rows)

    head.forward = types.MethodType(forward, head)


def _can_hold(rows: torch.Tensor, head: Any, softcap: float | None) -> bool:
    plain = softcap is None and head.bias is None and rows.dtype == head.weight.dtype == torch.float32
    return plain and rows.device.type == "cpu" and rows.shape[0] * head.weight.shape[0] <= HELD_LOGITS


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
