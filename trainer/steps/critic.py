"""The critic: what the rest of an episode is worth, read at the last token of a call's prompt.

One value per call (StepPO, arXiv 2604.18401; Turn-PPO, arXiv 2512.17008): V(s_k) is a linear head on the
hidden state of the last prompt token, before the agent's model has said anything, and the loss is taken at
that token alone. What is computed underneath is either a model of the critic's own (full weights) or a second
adapter on the frozen base (LoRA), so that a policy's step moves no value and a critic's step no policy.

    loss = mean over calls of 1/2 max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2)      (PPO, 1707.06347)
    or, for outcomes in [0, 1]: binary cross entropy of sigmoid(V) against R

Prompts of one step share their prefixes as the policy's sequences do (batches/). Knows neither the log nor
which rule reads its values.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.nn import functional

from ...errors import UserError
from ...records import TokenIds, Transition, logprobs, token_ids
from ..batches.packing import MicroBatch, ModelShape, cheapest_batches
from .attention import model_inputs
from .scoring import on_device
from .values import CRITIC_FILE

ADAPTER = "critic"


@dataclass(frozen=True, slots=True)
class CriticSettings:
    learning_rate: float
    epochs: int = 1  # passes over a step's calls
    clip: float = 0.2  # how far a value may move from its old one before the loss stops pulling
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 2048
    loss: Literal["mse", "bce"] = "mse"  # bce: returns in [0, 1], values are probabilities


@dataclass(frozen=True, slots=True)
class CriticMetrics:
    """Of one `fit`. `explained_variance` = 1 - var(R - V) / var(R), with V before the fit; None where the
    returns do not vary."""

    loss: float
    grad_norm: float
    explained_variance: float | None
    value_mean: float


class Body(Protocol):
    """The network under the head."""

    hidden_size: int

    def parameters(self) -> list[torch.nn.Parameter]: ...
    def active(self) -> contextlib.AbstractContextManager[Any]:
        """The module that gives `last_hidden_state`, with the critic's weights in effect."""
        ...

    def state(self) -> dict[str, torch.Tensor]: ...
    def load(self, state: dict[str, torch.Tensor]) -> None: ...


class OwnBody:
    """A model of the critic's own, as large as the policy: for runs that train all weights."""

    def __init__(self, backbone: Any) -> None:
        self._backbone = backbone
        self.hidden_size = int(backbone.config.get_text_config().hidden_size)

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self._backbone.parameters())

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        yield self._backbone

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self._backbone.state_dict())

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self._backbone.load_state_dict(state)


class AdapterBody:
    """A second adapter on the policy's frozen base.

    `adapted` is the policy's PeftModel; its own adapter is active again after each use, with the gradients
    that it had.
    """

    def __init__(self, adapted: Any, config: Any) -> None:
        self._adapted = adapted
        adapted.add_adapter(ADAPTER, config)
        self._policy = adapted.active_adapter
        self.hidden_size = int(adapted.get_base_model().config.get_text_config().hidden_size)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [value for name, value in self._adapted.named_parameters() if f".{ADAPTER}." in name]

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        self._adapted.set_adapter(ADAPTER)
        try:
            yield self._adapted.get_base_model().base_model
        finally:
            self._adapted.set_adapter(self._policy)

    def state(self) -> dict[str, torch.Tensor]:
        return {
            name: value.detach().clone()
            for name, value in self._adapted.named_parameters()
            if f".{ADAPTER}." in name
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        own = dict(self._adapted.named_parameters())
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)


class Critic:
    """Values of calls, and the step that makes them better. One device; float32 head."""

    def __init__(self, body: Body, settings: CriticSettings, shape: ModelShape, device: torch.device) -> None:
        self._body, self._settings, self._shape, self._device = body, settings, shape, device
        self._head = torch.nn.Linear(body.hidden_size, 1, device=device, dtype=torch.float32)
        # A head of zeros: every call is worth nothing (or one half) until something was learnt.
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        self._trained = [*body.parameters(), *self._head.parameters()]
        self._optimizer = torch.optim.AdamW(self._trained, lr=settings.learning_rate, weight_decay=0.0)

    def values(self, prompts: Sequence[TokenIds]) -> list[float]:
        """V of each prompt, in the order given."""
        found: list[float] = [0.0] * len(prompts)
        with torch.no_grad(), self._body.active() as backbone:
            for batch, members in self._batches(prompts):
                values = self._shown(self._raw(backbone, batch))
                for member, value in zip(members, values.tolist(), strict=True):
                    found[member] = float(value)
        return found

    def fit(
        self, prompts: Sequence[TokenIds], returns: Sequence[float], old: Sequence[float]
    ) -> CriticMetrics:
        """Move the values of `prompts` towards `returns`; `old` is what `values` said of them last. Aligned,
        one of each per call."""
        assert len(prompts) == len(returns) == len(old), "one return and one old value per prompt"
        assert prompts, "a fit needs calls"
        loss = norm = 0.0
        for _ in range(self._settings.epochs):
            loss, norm = self._epoch(prompts, returns, old)
        return CriticMetrics(
            loss=loss,
            grad_norm=norm,
            explained_variance=explained_variance(old, returns),
            value_mean=statistics.fmean(old),
        )

    def _epoch(
        self, prompts: Sequence[TokenIds], returns: Sequence[float], old: Sequence[float]
    ) -> tuple[float, float]:
        total = 0.0
        with self._body.active() as backbone:
            for batch, members in self._batches(prompts):
                raw = self._raw(backbone, batch)
                wanted = torch.tensor([returns[i] for i in members], device=self._device)
                before = torch.tensor([old[i] for i in members], device=self._device)
                loss = self._loss(raw, wanted, before).sum() / len(prompts)
                loss.backward()
                total += float(loss.detach())
            norm = torch.nn.utils.clip_grad_norm_(self._trained, self._settings.max_grad_norm)
            self._optimizer.step()
        # On an adapter it is part of the policy's model, whose gradients are scaled down by their whole norm.
        self._optimizer.zero_grad(set_to_none=True)
        return total, float(norm)

    def _loss(self, raw: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        if self._settings.loss == "bce":
            return functional.binary_cross_entropy_with_logits(raw, wanted, reduction="none")
        clipped = before + (raw - before).clamp(-self._settings.clip, self._settings.clip)
        return 0.5 * torch.maximum((raw - wanted) ** 2, (clipped - wanted) ** 2)

    def _shown(self, raw: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(raw) if self._settings.loss == "bce" else raw

    def _raw(self, backbone: Any, batch: MicroBatch) -> torch.Tensor:
        """(B,) head's output at the last prompt token of each member of the batch."""
        hidden = backbone(**model_inputs(batch, self._device), use_cache=False).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1])[on_device(batch.terms.position, self._device)]
        value: torch.Tensor = self._head(rows.float())[:, 0]
        return value

    def _batches(self, prompts: Sequence[TokenIds]) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Micro-batches, each with the indexes of its members, in the order of its loss terms.

        A completion of one token puts the one loss term of each row at the last prompt token.
        """
        asked = [
            Transition(str(i), 0, ids, token_ids([0]), logprobs([0.0]), 1.0, 0.0, 0.0)
            for i, ids in enumerate(prompts)
        ]
        for batch in cheapest_batches(asked, self._settings.micro_batch_tokens, self._shape):
            yield batch, [int(batch.choices[row][0]) for row in batch.terms.row]

    # --- kept between runs ---

    @staticmethod
    def is_in(folder: Path) -> bool:
        return (folder / CRITIC_FILE).is_file()

    def save(self, folder: Path) -> None:
        """Weights, head and optimizer into `folder`; whole or not at all."""
        partial = folder / f".{CRITIC_FILE}"
        state = {
            "body": self._body.state(),
            "head": self._head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, partial)
        partial.rename(folder / CRITIC_FILE)

    def load(self, folder: Path) -> None:
        """What `save` wrote. UserError where it is of another shape."""
        file = folder / CRITIC_FILE
        try:
            state = torch.load(file, map_location=self._device, weights_only=True)
            self._body.load(state["body"])
            self._head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file} can't be loaded as this run's critic: {reason}; train it anew") from None


def explained_variance(values: Sequence[float], returns: Sequence[float]) -> float | None:
    """How much of the returns' variance the values account for; at most 1, None without variance."""
    whole = statistics.pvariance(returns)
    if whole == 0.0:
        return None
    rest = statistics.pvariance([wanted - value for value, wanted in zip(values, returns, strict=True)])
    return 1.0 - rest / whole
