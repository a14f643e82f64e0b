"""One settings model per process: TOML file < environment < flags. Unknown keys of a file are errors.

`LIGHTNING_DB` names the log for every command; `LIGHTNING_PROXY_*` and `LIGHTNING_TRAIN_*` set the fields of
one model. A field's description is what `--help` and docs/settings.md show.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings import SettingsError as UnreadableSettingError

from .errors import SettingsError, plain_words
from .records import CallKind

DEFAULT_DB = "sqlite:///lightning.db"


def root_url(url: str) -> str:
    """Without /v1 and slashes at its end. ValueError for what is no address."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("not a URL like http://HOST:PORT")
    _without_password(url)
    return url.rstrip("/").removesuffix("/v1")


def _without_password(url: str) -> str:
    """Addresses are shown, logged and stored."""
    if "@" in urlsplit(url).netloc:
        raise ValueError("an address with a user or password; a key has a setting of its own")
    return url


def _listed(value: Any) -> Any:
    """One URL, or several: a list in a file, separated by commas in a variable."""
    return [part for part in re.split(r"[,\s]+", value) if part] if isinstance(value, str) else value


def _distinct(urls: tuple[str, ...]) -> tuple[str, ...]:
    if not urls:
        raise ValueError("name at least one engine")
    return tuple(dict.fromkeys(urls))


RootUrl = Annotated[str, AfterValidator(root_url)]
RootUrls = Annotated[tuple[RootUrl, ...], NoDecode, BeforeValidator(_listed), AfterValidator(_distinct)]

PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]

_file_being_read: ContextVar[Path | None] = ContextVar("_file_being_read", default=None)


_FORMS = {
    "unrewarded": "write skip, error or fill=NUMBER",
    "failed": "write skip, as_rewarded or fill=NUMBER",
    "agent_policies": "a policy's name is of letters, digits, '.', '_' and '-'",
    "policy": "a name of letters, digits, '.', '_' and '-'",
    "redact": "write it as tables: [[redact]]",
    "name": "a name of at most 64 letters, digits, '.', '_' and '-'",
    "model": "write VENDOR/MODEL, for example openai/gpt-4o",
}
"""What a setting looks like, where a pattern or a type would be all that the library says."""


def _words(fault: Mapping[str, Any]) -> str:
    names = [part for part in fault["loc"] if isinstance(part, str)]
    if fault["type"] in ("string_pattern_mismatch", "list_type") and names:
        form = _FORMS.get(names[-1]) or _FORMS.get(names[0])
        return plain_words(fault) if form is None else form
    return plain_words(fault)


class _Layered(BaseSettings):
    """File, environment, flags; every mistake becomes one line."""

    @classmethod
    def load(cls, file: Path | None = None, **flags: Any) -> Self:
        """Read the layers. `flags` that are None were not given.

        Raises SettingsError with one line that names the setting, the value and where it came from.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        origin = f"{file}" if file else "the settings"

        if file is not None and not file.is_file():
            raise SettingsError(f"no such configuration file: {file}")
        reading = _file_being_read.set(file)
        try:
            return cls(**given)
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{file} is not valid TOML: {error}") from None
        except UnreadableSettingError as error:
            named = re.search(r'field "(\w+)"', str(error))
            variable = f"{cls.model_config.get('env_prefix', '')}{named[1] if named else ''}".upper()
            raise SettingsError(f"the variable {variable} can't be read; write its value as JSON") from None
        except ValidationError as error:
            # A default that hangs on a faulty setting is no fault of its own.
            faults = [fault for fault in error.errors() if fault["type"] != "default_factory_not_called"]
            # What is misspelt may be what is missing.
            first = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
            name = ".".join(str(part) for part in first["loc"])
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            if first["type"] == "extra_forbidden":
                raise SettingsError(
                    f"unknown setting {name!r} in {origin}{more}; see docs/settings.md"
                ) from None
            if first["type"] == "missing":
                flag = "" if "." in name else f"give --{name.replace('_', '-')}, or "
                raise SettingsError(f"setting {name!r} is missing: {flag}name it in --config") from None
            shown = f" (got {first['input']!r})"
            raise SettingsError(f"setting {name!r}: {_words(first)}{shown}{more}") from None
        finally:
            _file_being_read.reset(reading)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = _file_being_read.get()
        toml = () if file is None else (TomlConfigSettingsSource(settings_cls, file),)
        if isinstance(env_settings, EnvSettingsSource):
            # A variable called DB is somebody else's: the field's plain name is for files and flags.
            env_settings.env_vars = {k: v for k, v in env_settings.env_vars.items() if k != "db"}
        return (init_settings, env_settings, *toml)


def _db() -> Any:
    return Field(
        DEFAULT_DB,
        validation_alias=AliasChoices("db", "LIGHTNING_DB"),
        description="Database URL of the log, SQLite or Postgres.",
    )


class RedactionRule(BaseModel):
    """One `[[redact]]` of the proxy's file: a pattern of your own, or one that is built in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str | None = None  # a regular expression of Python's `re`
    builtin: Literal["email", "api-key", "bearer", "ip-address", "phone"] | None = None
    replacement: str = "[redacted]"  # as in `re.sub`
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,64}$")  # under which it is counted

    def shown_name(self) -> str:
        return self.name or self.builtin or "pattern"

    @model_validator(mode="after")
    def _is_usable(self) -> Self:
        if (self.pattern is None) == (self.builtin is None):
            raise ValueError("a rule has either a pattern or a builtin")
        try:
            compiled = re.compile(self.pattern or "x")
            compiled.sub(self.replacement, "")
        except (re.error, IndexError) as error:
            raise ValueError(f"not a regular expression with its replacement: {error}") from None
        if compiled.search(""):
            raise ValueError("the pattern matches the empty text, so everything")
        return self


class ProviderSettings(BaseModel):
    """One `[providers.NAME]` of the proxy's file: a vendor's model, asked for by NAME."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(pattern=r"^[^/]+/.+$")  # as LiteLLM names it: openai/gpt-4o
    api_base: Annotated[str, AfterValidator(_without_password)] | None = None  # None: the vendor's own
    api_key_env: str | None = None  # the variable that holds the key
    kind: Literal["judge", "side"] = "judge"  # what its calls are in the log
    num_retries: int = Field(0, ge=0)
    timeout_sec: float = Field(600, gt=0)


class EvaluationSettings(BaseModel):
    """`[evaluation]` of the proxy's file: the gate that a version passes before it serves."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str
    timeout_sec: float = Field(600, gt=0)

    @model_validator(mode="after")
    def _is_a_command(self) -> Self:
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ValueError(f"not a command line: {error}") from None
        if not words:
            raise ValueError("names no program")
        return self


class ProxySettings(_Layered):
    """What `lightning proxy serve` runs on."""

    model_config = SettingsConfigDict(env_prefix="LIGHTNING_PROXY_", extra="forbid", frozen=True)

    db: str = _db()
    host: str = Field("127.0.0.1", description="Address to listen on; anything but loopback needs a token.")
    port: int = Field(8400, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    token: SecretStr | None = Field(None, description="What clients must send as their API key.")
    engine_url: RootUrls = Field(
        ("http://127.0.0.1:8000",),
        description="Root URL of vLLM, without /v1; a list where several engines serve the same base model.",
    )
    engine_api_key: SecretStr | None = Field(None, description="API key that the engine expects.")
    policy: str = Field(
        "policy", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the policy being trained."
    )
    aliases: dict[str, str] = Field(
        default_factory=lambda data: dict.fromkeys(
            ("gpt-*", "o1*", "o3*", "o4*", "chatgpt-*", "claude-*"), data.get("policy", "policy")
        ),
        description="Model names that agents have hard-coded (shell patterns), and what serves them.",
    )
    agent_policies: dict[str, PolicyName] = Field(
        default_factory=dict,
        description="Agents (shell patterns) that have a policy of their own, a LoRA each on one base: "
        '`[agent_policies]` with `planner = "planner-lora"`. It serves their calls for the default policy '
        "(docs/publishing.md).",
    )
    durability: Literal["commit", "write-behind"] = Field(
        "commit",
        description="commit: an answer's end waits until its rows are committed. write-behind: it does not, "
        "and a crash loses the last moments.",
    )
    recording: Literal["required", "best-effort"] = Field(
        "required",
        description="When the log can't be written: answer 503 (required), or serve and count.",
    )
    kinds: dict[str, CallKind] = Field(
        default_factory=lambda: {"judge": CallKind.JUDGE, "grader": CallKind.JUDGE, "title": CallKind.SIDE},
        description="What the calls of an agent (a shell pattern) are: policy, side or judge. Only policy "
        "calls are trained.",
    )
    idle_timeout_sec: float | None = Field(
        None, ge=1, description="Episodes without a call for so long end; left out: they wait to be ended."
    )
    dialects: Literal["translate", "pass"] = Field(
        "translate",
        description="Responses and Messages: translate onto the chat API through LiteLLM, so that tokens are "
        "recorded, or pass to the engine's own routes, recorded but never trainable.",
    )
    attribute_by_trace: bool = Field(
        False, description="Calls without a mark: one W3C trace (header traceparent) is one episode."
    )
    attribute_by_prefix: bool = Field(
        False,
        description="Calls without a mark: what goes on from a call's messages and answer is of its episode; "
        "what goes on from nothing begins one.",
    )
    redact: list[RedactionRule] = Field(
        default_factory=list,
        description="What is replaced before it is written: `[[redact]]` with `pattern` or `builtin` (email, "
        "api-key, bearer, ip-address, phone), `replacement` and `name`; see docs/recording.md.",
    )
    providers: dict[str, ProviderSettings] = Field(
        default_factory=dict,
        description="Models of other vendors, by the name that requests use: `[providers.NAME]` with "
        "`model`, `api_base`, `api_key_env`, `kind`, `num_retries`, `timeout_sec` (docs/dialects.md).",
    )
    max_body_mb: int = Field(256, ge=1, description="Largest request body, in MiB.")
    drain_timeout_sec: int = Field(
        60,
        ge=0,
        description="At a signal: how long running answers may take to finish before they are cut off.",
    )
    publish: bool = Field(True, description="Whether this proxy loads new policy versions into the engine.")
    publish_poll_sec: float = Field(0.25, gt=0, description="How often candidates are looked for.")
    evaluation: EvaluationSettings | None = Field(
        None,
        description="`[evaluation]` with `command` (run without a shell) and `timeout_sec` (600): runs "
        "before a version goes live; exit code 0 lets it (docs/publishing.md).",
    )
    canary_share: float = Field(
        0,
        ge=0,
        le=1,
        description="Share of the episodes that begin which a new adapter serves before it is live; 0: none "
        "(docs/publishing.md).",
    )
    canary_episodes: int = Field(
        32,
        ge=2,
        description="So many of its episodes must have ended with a reward, and of the live version's.",
    )
    canary_tolerance: float = Field(
        0.05, ge=0, description="How far its mean reward may be below the live version's."
    )
    canary_max_sec: float = Field(3600, gt=0, description="How long it may take until a canary is judged.")
    canary_at_timeout: Literal["reject", "promote"] = Field(
        "reject", description="What becomes of a canary with too few rewarded episodes by then."
    )
    hold_max_sec: float = Field(
        600,
        gt=0,
        description="How long a call may be held (while full weights are exchanged and evaluated) before it "
        "gets 503.",
    )
    workers: int = Field(1, ge=1, le=64, description="Processes that share the port and the log.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Level of the log on stderr."
    )


_FILL = r"fill=-?[0-9]+(\.[0-9]+)?"


class TrainSettings(_Layered):
    """What `lightning train` runs on."""

    model_config = SettingsConfigDict(env_prefix="LIGHTNING_TRAIN_", extra="forbid", frozen=True)

    db: str = _db()
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
    credit: str | dict[str, Any] = Field(
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
        "stay, or fall to 0 along a line or a cosine, which need max_steps.",
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
    report_to: Annotated[list[str], NoDecode, BeforeValidator(_listed)] = Field(
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
