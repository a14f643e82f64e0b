"""The only file that knows TRL: recorded micro-batches through TRL's own GRPO loss.

`RecordedTrainer` overrides three methods of GRPOTrainer (facts checked by tests/unit/test_trl_contract.py
against the pinned range): where batches come from (`get_train_dataloader`, `_prepare_inputs`), how a token's
logprob is computed (`_get_per_token_logps_and_entropies`: prefix tree, head only where a loss is), and the
step (`training_step`: a loop over micro-batches of unequal size). Loss, clipping, optimizer, schedule and
logging are TRL's and transformers'.

TRL divides its `dapo` loss by `num_items_in_batch / num_processes`. We hand over 1, so what is left is the
sum over all ranks and micro-batches of the advantages that the plan has already weighted. (What it divides
`sapo` by is multiplied into the advantages: loss_inputs.py.)
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Read by huggingface_hub when it is first imported: nothing of a training run looks at the network or reports
# home.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from datasets import Dataset
from transformers import PrinterCallback
from transformers.integrations import TensorBoardCallback
from transformers.utils import logging as transformers_logging
from trl import import_utils as trl_imports

# Where vLLM is installed, TRL imports it here and warns of its version. Our engine is another process.
_has_vllm = trl_imports.is_vllm_available
trl_imports.is_vllm_available = lambda min_version=None: False
try:
    from trl import GRPOConfig, GRPOTrainer
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
finally:
    trl_imports.is_vllm_available = _has_vllm

from ...records import Logprobs, TokenIds, Transition, logprobs
from ..batches.packing import MicroBatch, cheapest_batches
from . import training_state
from .attention import model_inputs
from .loss_inputs import loss_inputs
from .measure import measure
from .metrics import StepMetrics
from .objective import MAX_LOG_RATIO, Correction, Objective, correction_weights
from .rounding import RoundingWatch
from .schedule import Schedule
from .scoring import add_scoring_head, on_device
from .shape import Asked, shape_of
from .sharding import is_sharded, sharding_on_cpu, whole_state

_VOCABULARY_CHUNK = 32768
_LOGGED = ("loss", "grad_norm", "learning_rate")  # of what transformers says of each optimizer step
_UNBOUNDED_STEPS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    output: Path
    learning_rate: float
    objective: Objective
    max_grad_norm: float
    seed: int
    on_gpu: bool
    bfloat16: bool
    report_to: tuple[str, ...] = ()  # trackers of experiments; none: nothing is logged anywhere
    gradient_checkpointing: bool = False
    served_as_bfloat16: bool = False
    attention: Asked = "auto"
    schedule: Schedule = field(default_factory=Schedule)


class RecordedTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer fed from the log. `steps` yields the micro-batches of one optimizer step after another."""

    def __init__(self, model: Any, tokenizer: Any, settings: BridgeSettings, reference: Any = None) -> None:
        """`reference`: a frozen model to stay close to; None with an adapter: the model without it."""
        transformers_logging.set_verbosity_error()
        # It warns of how its losses weigh rows, which our multipliers decide.
        logging.getLogger("trl").setLevel(logging.ERROR)
        config = _grpo_config(settings)
        if config.n_gpu > 1:
            config._n_gpu = 1  # else TRL asks for nn.DataParallel, only to refuse it
        super().__init__(
            model=model,
            args=config,
            reward_funcs=_no_reward,
            train_dataset=Dataset.from_dict({"prompt": ["recorded"]}),
            processing_class=tokenizer,
        )
        self.remove_callback(PrinterCallback)
        self.shape = shape_of(self.model, settings.attention)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(settings.output / "tensorboard")
        adapted = hasattr(self.model, "get_base_model")
        self._objective = settings.objective
        self._schedule = settings.schedule
        # Entropies that are read are cheaper than those that a gradient goes through.
        holds = settings.objective.entropy_weight == 0.0
        add_scoring_head(self.model.get_base_model() if adapted else self.model, _project, holds_logits=holds)
        self._dtypes = {name: weight.dtype for name, weight in self.model.named_parameters()}
        self._reference = reference
        if reference is not None:
            add_scoring_head(reference.to(self.args.device), _project)
        assert reference is not None or adapted or not settings.objective.kl_weight, (
            "nothing to stay close to"
        )
        self.steps: Iterable[Sequence[MicroBatch]] = ()
        self.metrics = StepMetrics()
        self.num_ranks = 1  # those that are led from here; a rank knows nothing of the others
        self.combined: Callable[[StepMetrics], StepMetrics] = lambda own: own  # the metrics of all ranks
        served = settings.served_as_bfloat16
        self.add_callback(RoundingWatch(lambda: self.metrics, served_as_bfloat16=served))
        self.on_micro_batch: Callable[[int, int], None] = lambda done, total: None
        self._current: MicroBatch | None = None
        self._old_logps: Any = None  # (B, C), the tensor that the loss is about to read
        self._scored: tuple[torch.Tensor, torch.Tensor] | None = None  # (M,) logprobs and entropies

    def create_accelerator_and_postprocess(self) -> None:
        with sharding_on_cpu():
            super().create_accelerator_and_postprocess()

    # (a) where batches come from

    def get_train_dataloader(self) -> Iterator[dict[str, Sequence[MicroBatch]]]:
        """One item per optimizer step, asked for only after the one before it was taken: no look-ahead."""
        for micro_batches in self.steps:
            yield {"micro_batches": micro_batches}
        self.control.should_training_stop = True

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch

    # (b) how a token's logprob is computed

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """(B, C) logprobs and entropies of the current micro-batch, one row per choice."""
        assert self._current is not None, "training_step sets the micro-batch before it asks for the loss"
        logps, entropies = self._scored = self._score(model, self._current)
        terms = self._current.terms
        place = (on_device(terms.row, logps.device), on_device(terms.column, logps.device))
        shape = (len(self._current.choices), logits_to_keep)
        measure(self.metrics, self._current, logps.detach(), entropies.detach(), self._objective)
        rows = logps.new_zeros(shape).index_put(place, logps)
        # TRL never bounds the ratio before exp(): an infinite one would turn a clipped token's zero into NaN.
        self._old_logps.clamp_(rows.detach() - MAX_LOG_RATIO, rows.detach() + MAX_LOG_RATIO)
        return (
            rows,
            entropies.new_zeros(shape).index_put(place, entropies),
            None,
        )

    # (c) the step

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward over every micro-batch of the step; gradients are summed, synchronised
        once."""
        model.train()
        self.metrics = StepMetrics()
        micro_batches = inputs["micro_batches"]
        total = torch.zeros((), device=self.args.device)
        for number, micro_batch in enumerate(micro_batches, 1):
            last = number == len(micro_batches)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                self._current = micro_batch
                num_ranks = self.accelerator.num_processes
                read = loss_inputs(micro_batch, self.args.device, self._objective, num_ranks)
                self._old_logps = read["old_per_token_logps"]
                with _no_gathering(self.accelerator):
                    loss = self.compute_loss(model, read)
                loss = loss + self._added(micro_batch)
                self.accelerator.backward(loss)
            total += loss.detach()
            self.on_micro_batch(number, len(micro_batches))
        self._current = self._old_logps = self._scored = None
        self.metrics.loss = float(total) / self.accelerator.num_processes
        if self.lr_scheduler is not None:
            self.metrics.learning_rate = float(self._get_learning_rate())
        self.metrics = self.combined(self.metrics)
        return total

    def _added(self, batch: MicroBatch) -> torch.Tensor | float:
        """KL and entropy of a micro-batch, by the weighting of its tokens."""
        objective = self._objective
        if objective.kl_weight == 0.0 and objective.entropy_weight == 0.0:
            return 0.0
        assert self._scored is not None, "the loss was computed"
        logps, entropies = self._scored
        multiplier = on_device(batch.terms.multiplier, logps.device)
        added = -objective.entropy_weight * (multiplier * entropies).sum()
        if objective.kl_weight:
            apart = (self._reference_logps(batch) - logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            kl = apart.exp() - apart - 1.0
            self.metrics.kl_sum += float(kl.detach().sum())
            added = added + objective.kl_weight * (multiplier * kl).sum()
        # DDP averages over ranks, and the sum over all of them is wanted.
        return added * self.accelerator.num_processes

    def _reference_logps(self, batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            if self._reference is not None:
                return self._score(self._reference, batch)[0]
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                return self._score(self.model, batch)[0]

    def corrected(self, batches: Sequence[MicroBatch], mode: Correction, cap: float) -> list[MicroBatch]:
        """The same micro-batches for decoupled PPO: ratios against the weights of now, and each token weighed
        by what those have moved from the behaviour's (objective.py)."""
        found = []
        for batch in batches:
            with torch.no_grad():
                old = self._score(self.model, batch)[0].float().cpu().numpy()
            terms = batch.terms
            weights = correction_weights(old, terms.behavior_logprob, mode, cap)
            terms = replace(terms, old_logprob=old, multiplier=terms.multiplier * weights)
            found.append(replace(batch, terms=terms))
        return found

    def share(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return batches

    def gathered(self) -> dict[str, torch.Tensor] | None:
        return whole_state(self.model, self._dtypes) if is_sharded(self.model) else None

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """transformers' own would count to `num_training_steps`, which a run's loader does not know."""
        self.lr_scheduler = self._schedule.scheduler(self.optimizer if optimizer is None else optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Once per optimizer step. TRL's own means over rows say less than the step's figures."""
        self.metrics.grad_norm = float(logs.get("grad_norm", self.metrics.grad_norm))
        self._metrics["train"].clear()
        self.log_figures({name: logs[name] for name in _LOGGED if name in logs})

    def log_figures(self, figures: Mapping[str, float]) -> None:
        """To the trackers, at the number of optimizer steps so far."""
        if figures:
            self.callback_handler.on_log(self.args, self.state, self.control, dict(figures))

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # transformers' estimate reads padded inputs, which there are none of

    # what the run asks for beside steps

    def save_state(self, folder: Path | None) -> None:
        training_state.save_state(self, folder)

    def load_state(self, folder: Path) -> None:
        """Not before the first item of `steps` is asked for: until then there is no optimizer."""
        training_state.load_state(self, folder)

    def sequence_logprobs(self, sequences: Sequence[TokenIds], max_tokens: int) -> list[Logprobs]:
        """Of each sequence the logprobs of ids[1:] at temperature 1, with the current weights."""
        asked = [
            Transition(str(i), 0, ids[:1], ids[1:], logprobs([0.0] * (len(ids) - 1)), 1.0, 0.0, 0.0)
            for i, ids in enumerate(sequences)
        ]
        found: dict[str, Logprobs] = {}
        for batch in cheapest_batches(asked, max_tokens, self.shape):
            with torch.no_grad():
                logps, _ = self._score(self.model, batch)
            values = logps.float().cpu().numpy()
            for row, (call_id, _) in enumerate(batch.choices):
                found[call_id] = logprobs(values[batch.terms.row == row].tolist())
        return [found[str(i)] for i in range(len(sequences))]

    def _score(self, model: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(M,) logprob of each loss term's target at its temperature, and the entropy at its position."""
        device = self.args.device
        head = batch.terms.head_rows()
        with self.accelerator.autocast():
            logps, entropies = model(**model_inputs(batch, device), scored=head)
        row_of_term = on_device(head.row_of_term, device)
        return logps[row_of_term], entropies[row_of_term]


_LOSS_TYPES = {"clip": "dapo", "gspo": "dapo", "cispo": "cispo", "sapo": "sapo"}
"""TRL's names. `dapo` and `cispo` divide by a number that we hand over, `sapo` by rows (loss_inputs.py)."""


@contextlib.contextmanager
def _no_gathering(accelerator: Any) -> Iterator[None]:
    """TRL's loss gathers figures of every micro-batch over ranks, as if all were of one shape. Ours are
    summed once a step."""
    names = ("gather", "gather_for_metrics", "reduce")
    for name in names:
        setattr(accelerator, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)


def _no_reward(**kwargs: Any) -> list[float]:
    raise AssertionError("rewards come from the log")


def _grpo_config(settings: BridgeSettings) -> Any:
    objective = settings.objective
    return GRPOConfig(
        output_dir=str(settings.output),
        loss_type=_LOSS_TYPES[objective.name],
        importance_sampling_level="sequence" if objective.name == "gspo" else "token",
        beta=0.0,  # KL and entropy are added in training_step
        epsilon=objective.clip_low,
        epsilon_high=objective.ratio_cap if objective.name == "cispo" else objective.clip_high,
        num_iterations=1,
        # The smallest shape that TRL accepts. One item of our loader is one optimizer step.
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        max_steps=_UNBOUNDED_STEPS,
        learning_rate=settings.learning_rate,
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=settings.max_grad_norm,
        disable_dropout=True,
        gradient_checkpointing=settings.gradient_checkpointing,
        ddp_find_unused_parameters=False,
        bf16=settings.bfloat16 and settings.on_gpu,
        use_cpu=not settings.on_gpu,
        seed=settings.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=list(settings.report_to) or "none",
        run_name=settings.output.name,
        project="lightning",
        trackio_static_space_id=False,  # nothing of a run is put on the Hub
        disable_tqdm=True,
        remove_unused_columns=False,
    )


def _project(
    rows: Any, targets: Any, head: Any, *, temperature: float, softcap: float | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's chunked head: (U,) logprobs and entropies without ever holding (U, vocabulary) logits."""
    found = ChunkedLogProbFunction.apply(
        rows,
        head.weight,
        head.bias,
        targets,
        temperature,
        _VOCABULARY_CHUNK,
        softcap,
        scale,
        ("entropy",),
    )
    return found[0], found[1]
