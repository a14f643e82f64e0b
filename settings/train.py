"""What the trainer runs on: `LIGHTNING_TRAIN_*` set the fields of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from .layers import Layered, db_field, listed

_FILL = r"fill=-?[0-9]+(\.[0-9]+)?"


def _rule(value: Any) -> Any:
    """One sentence, where each half of the union would say its own."""
    if not isinstance(value, str | dict):
        raise ValueError('write a rule\'s name ("gigpo omega=0.5") or a table [credit]')
    return value


class TrainSettings(Layered):
    """What `lightning train` runs on."""

    model_config = SettingsConfigDict(env_prefix="LIGHTNING_TRAIN_", extra="forbid", frozen=True)

    db: str = db_field()
    model: Path = Field(description="Folder of the base model, the one that the engine serves.")
    output: Path = Field(Path("runs"), description="Folder for runs: checkpoints, versions, the step log.")
    policy: str = Field("policy", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the policy to train.")
    weights: Literal["lora", "full"] = Field("lora", description="Train an adapter or all weights.")
    lora_rank: int = Field(16, ge=1, description="Rank of the adapter.")
    lora_alpha: float | None = Field(
        None, gt=0, description="Scale of the adapter: alpha / rank multiplies it; by default twice the rank."
    )
    lora_targets: list[str] = Field(
        default_factory=list,
        description="Modules that get an adapter, by the ends of their names (`q_proj`); empty: every linear "
        "layer but the head.",
    )
    from_base: bool = Field(
        False,
        description="Start from the base model, with all episodes, even if the policy has a live version.",
    )
    credit: Annotated[str | dict[str, Any], BeforeValidator(_rule)] = Field(
        "lightning",
        description="The rule that makes advantages of rewards: a name, a name with options "
        "(`gigpo omega=0.5`), or a table `[credit]` of `rule`, its options, and `agents` (docs/credit.md).",
    )
    train_agents: list[str] = Field(
        default_factory=list, description="Train the calls of these agents only; empty: of all."
    )
    sources: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="Weights of reward sources against each other; 1 if not named, 0 silences one.",
    )
    weighting: Literal["episode", "token", "constant"] = Field(
        "episode", description="What weighs the same in the loss: each episode, each token, or a constant."
    )
    constant_tokens: int = Field(1024, ge=1, description="What the constant weighting divides by.")
    objective: Literal["clip", "gspo", "cispo", "sapo"] = Field(
        "clip", description="What the loss does with a probability ratio (docs/training.md)."
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip of the probability ratio: 1 - clip_low.")
    clip_high: float = Field(0.28, gt=0, description="Upper clip of the probability ratio: 1 + clip_high.")
    ratio_cap: float = Field(5.0, gt=0, description="Largest ratio that counts, for the objective cispo.")
    kl_weight: float = Field(0.0, ge=0, description="Weight of the KL divergence to the base model.")
    entropy_weight: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    epochs: int = Field(1, ge=1, description="Optimizer steps on each batch of groups.")
    correction: Literal["auto", "off", "truncate", "mask"] = Field(
        "auto",
        description="What becomes of the difference between the weights that sampled and those of now: a "
        "weight of the token, truncated at correction_cap or masked above it. auto: truncate where epochs > "
        "1 or calls are of an older version.",
    )
    correction_cap: float = Field(2.0, ge=1, description="Largest weight of a correction.")
    learning_rate: float = Field(1e-5, gt=0, description="Adam's step size.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="What the learning rate does over the run's optimizer steps (max_steps times epochs): "
        "stay, or fall along a line or a cosine, which need max_steps.",
    )
    warmup_steps: int = Field(
        0, ge=0, description="Optimizer steps over which the learning rate rises to its full size."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm.")
    critic_learning_rate: float = Field(
        1e-4, gt=0, description="Adam's step size of the critic, for credit rules that read values."
    )
    critic_epochs: int = Field(1, ge=1, description="Passes of the critic over a step's calls.")
    critic_clip: float = Field(
        0.2, gt=0, description="How far a value may move in a step before its loss stops pulling."
    )
    critic_loss: Literal["mse", "bce"] = Field(
        "mse", description="mse: values are returns. bce: probabilities of success, for outcomes in [0, 1]."
    )
    critic_warmup_steps: int = Field(
        0, ge=0, description="The run's first steps teach the critic and leave the policy as it is."
    )
    groups_per_step: int = Field(8, ge=1, description="Groups in one optimizer step.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps.")
    max_staleness: int | None = Field(
        None, ge=0, description="Leave out calls of a version older by more than this."
    )
    max_sequence_tokens: int | None = Field(
        None,
        ge=2,
        description="Calls whose prompt and answer have more tokens are not trained: none is ever cut, so "
        "the longest decides how much memory a step needs. Left out: the model's own context length.",
    )
    too_long: Literal["call", "episode"] = Field(
        "call",
        description="What a call beyond max_sequence_tokens takes along: its own loss, or that of its whole "
        "episode. Rewards and credit stay as they are.",
    )
    unrewarded: str = Field(
        "skip",
        pattern=rf"^(skip|error|{_FILL})$",
        description="Ended episodes without a reward: skip, error, or fill=NUMBER.",
    )
    failed: str = Field(
        "skip",
        pattern=rf"^(skip|as_rewarded|{_FILL})$",
        description="Failed episodes: skip, as_rewarded (like ended ones), or fill=NUMBER.",
    )
    unequal_sources: Literal["set_aside", "common"] = Field(
        "set_aside",
        description="Siblings judged by different sources: set aside those that differ from most, or count "
        "only the sources that all have in common.",
    )
    manifests: Path | None = Field(
        None, description="Folder of a dry run: written by --dry-run, trained as it is without."
    )
    watch: bool = Field(False, description="Wait for new groups and go on.")
    publish: bool = Field(True, description="Hand each version to the proxy that serves the policy.")
    share_gpu: bool = Field(
        False,
        description="The engines sleep while a step is computed, so that one GPU does for both "
        "(docs/publishing.md).",
    )
    publish_timeout_sec: float = Field(300, gt=0, description="How long to wait for a version to go live.")
    keep_versions: int = Field(3, ge=2, description="Folders of retired versions to keep.")
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compute activations a second time instead of keeping them: less memory, a third more "
        "time. auto: on a GPU.",
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=64,
        description="Tokens in one forward pass, and sampled tokens in its loss; 2048 on a CPU and 8192 on a "
        "GPU where nothing is said.",
    )
    attention: Literal["auto", "flex", "chunked", "rows"] = Field(
        "auto",
        description="How shared prefixes are computed: flex (GPU) or chunked, both always as a prefix tree; "
        "rows: not shared, but inside longer sequences. auto: what is cheapest for the step.",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Precision of the trained weights.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to train.")
    processes: int | None = Field(
        None, ge=1, description="Processes to train with, one a GPU; started through accelerate."
    )
    accelerate: Path | None = Field(
        None,
        description="Configuration file of accelerate: how the processes share the model (docs/scaling.md).",
    )
    rank_timeout_sec: float = Field(
        600, gt=0, description="How long a process waits for the others where they compute together."
    )
    seed: int = Field(0, description="Seed of adapter initialisation.")
    report_to: Annotated[list[str], NoDecode, BeforeValidator(listed)] = Field(
        default_factory=list,
        description="Trackers of experiments that get every step's figures: tensorboard, wandb, trackio or "
        "another that transformers knows. None by default: nothing leaves the machine.",
    )
    progress: bool = Field(True, description="Show a progress bar.")


class DryRunSettings(TrainSettings):
    """What `lightning train --dry-run` runs on: the same, but it needs no model."""

    model: Path = Field(Path(), description="Not needed by a dry run.")


class ResumeSettings(TrainSettings):
    """What `lightning train --resume` is given beside the run: everything else is the run's own."""

    model: Path = Field(Path(), description="The run's own, unless it was moved.")
