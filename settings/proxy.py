"""What the proxy runs on: `LIGHTNING_PROXY_*` set the fields of one model."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from ..records import CallKind
from .layers import Layered, PolicyName, RootUrls, db_field, listed, without_password


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
    api_base: Annotated[str, AfterValidator(without_password)] | None = None  # None: the vendor's own
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


class ProxySettings(Layered):
    """What `lightning proxy serve` runs on."""

    model_config = SettingsConfigDict(env_prefix="LIGHTNING_PROXY_", extra="forbid", frozen=True)

    db: str = db_field()
    host: str = Field("127.0.0.1", description="Address to listen on; anything but loopback needs a token.")
    port: int = Field(8400, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    token: SecretStr | None = Field(None, description="What clients must send as their API key.")
    allowed_hosts: Annotated[list[str], NoDecode, BeforeValidator(listed)] = Field(
        default_factory=list,
        description="Public names by which a proxy without a token may be called, and of web pages that may "
        "call it; addresses and local names always may (docs/recording.md).",
    )
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
