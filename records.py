"""What the log says, as frozen values: the words that every other room uses.

Owns no I/O and imports neither torch nor SQL. Token ids are `array('I')`, logprobs `array('f')`: compact,
comparable, and readable by numpy and torch without a copy.
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

TokenIds: TypeAlias = "array[int]"  # array('I'), one unsigned 32-bit id per position
Logprobs: TypeAlias = "array[float]"  # array('f'), natural logarithms, aligned with the ids they belong to

MALFORMED_MARK = "not a name: "
"""Begins the conflict of a call that carried a mark which can't be the name of anything."""

MISSING_LOGPROB = -9999.0
"""What vLLM writes where it has no logprob; also its clamp for -inf. Kept in place, never filtered out."""

HIGHEST_LOGPROB = 1e-5
"""A logarithm of a probability is at most 0; engines overshoot by rounding."""


def now_ms() -> int:
    """Wall clock, milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def new_id() -> str:
    """A 32-digit hexadecimal id that sorts by creation time: milliseconds, then this process's own count.

    48 bits of milliseconds, 24 of the count (two events of one millisecond keep their order), 56 random ones.
    """
    # Not a secret, so no system call each time; the generator is seeded by the system, anew after a fork.
    return f"{now_ms():012x}{next(_count) & 0xFFFFFF:06x}{random.getrandbits(56):014x}"


_count = itertools.count()


def token_ids(values: Sequence[int] = ()) -> TokenIds:
    return array("I", values)


def logprobs(values: Sequence[float] = ()) -> Logprobs:
    return array("f", values)


class Purpose(StrEnum):
    """What an episode was produced for. Only `TRAIN` is ever trained."""

    TRAIN = "train"
    EVAL = "eval"


class EpisodeStatus(StrEnum):
    """Only `ENDED` episodes are trained; `FAILED` follow a stated policy; `EXCLUDED` never are."""

    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"
    EXCLUDED = "excluded"


class CallKind(StrEnum):
    POLICY = "policy"
    SIDE = "side"
    JUDGE = "judge"
    RETRY_ORPHAN = "retry_orphan"


class CallStatus(StrEnum):
    """How the engine's answer went. Whether the client received it is `Call.delivered`, another fact."""

    OPEN = "open"  # the intent is in the log, the answer is not (yet): after a crash it stays so
    COMPLETE = "complete"  # every choice has a finish reason that is not an abort
    ABORTED = "aborted"  # the engine gave up: finish reason `abort`, or none
    ERROR = "error"  # an error body, an in-stream error, or a connection that broke
    DISCONNECTED = "disconnected"  # the client left before the engine had finished


class Quarantine(StrEnum):
    """Why a recorded choice must not be trained. The log keeps it all the same."""

    INCOMPLETE = "incomplete"  # the engine did not finish this answer
    NO_PROMPT_IDS = "no_prompt_ids"
    NO_COMPLETION_IDS = "no_completion_ids"
    MISALIGNED = "misaligned"  # as many logprobs as ids is not given
    BAD_LOGPROB = "bad_logprob"  # not finite, above 1e-5, or the engine's "missing" marker
    COUNT_MISMATCH = "count_mismatch"  # ids of all choices together differ from the engine's own count
    UNRECORDABLE = "unrecordable"  # injection would have changed the answer (see Call.unrecordable)
    TEMPERATURE_ZERO = "temperature_zero"
    TRUNCATED_SUPPORT = "truncated_support"  # top_p, top_k or min_p below full support
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"
    CONSTRAINED = "constrained"  # grammar, forced tool choice or structured output
    IMAGES = "images"
    NOT_POLICY = "not_policy"  # no policy of ours served it
    VERSION_CHANGED = "version_changed"  # weights changed between its first and its last token
    REDACTED = "redacted"
    PROMPT_PARITY = "prompt_parity"  # a translated call whose prompt is not proven to be the engine's own


class RewardTarget(StrEnum):
    EPISODE = "episode"
    AGENT = "agent"
    CALL = "call"
    TOKENS = "tokens"


class VersionStatus(StrEnum):
    """candidate -> loading -> probing (-> evaluating) (-> canary) -> live -> draining -> retired, or rejected
    on the way."""

    CANDIDATE = "candidate"
    LOADING = "loading"
    PROBING = "probing"
    EVALUATING = "evaluating"  # a command of the operator's looks at it; it serves nobody else
    CANARY = "canary"  # it serves a share of the episodes that begin
    LIVE = "live"
    DRAINING = "draining"
    RETIRED = "retired"
    REJECTED = "rejected"


class WeightsKind(StrEnum):
    LORA = "lora"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Attribution:
    """Who is calling: what the address of one request says.

    `rule` names the mark that won (`path`, `header`, `alias:X-Session-Id`, `key`, `body`, `none`;
    `evaluation` where an evaluation's call had none); `conflict` says which weaker mark named another
    episode, or is None.
    """

    episode_id: str | None = None
    task_id: str | None = None
    batch: str | None = None
    agent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    rule: str = "none"
    conflict: str | None = None
    purpose: Purpose = Purpose.TRAIN  # of the episode, once any of its calls is for evaluation


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What identical token ids need to mean the same thing: engine, base model, tokenizer, chat template.

    `tokenizer_probe` and `template_probe` are hashes of what the engine's own /tokenize makes of a fixed text
    and of fixed messages (engine/fingerprint.py); None where it would not say. `id` hashes all other fields.
    """

    id: str
    engine: str  # e.g. "vllm 0.32.0"
    base_model: str  # the name or path that the engine gives as `root`
    tokenizer_probe: str | None
    template_probe: str | None
    max_model_tokens: int | None
    logprobs_mode: str | None  # "raw_logprobs" | "processed_logprobs" | None (unknown)


@dataclass(frozen=True, slots=True)
class CallIntent:
    """Everything known before the engine is asked; the row that survives a crash of the proxy."""

    id: str
    attribution: Attribution
    kind: CallKind
    route: str  # engine route, e.g. "/v1/chat/completions"
    dialect: str  # "chat" | "completions" | "responses" | "messages" | "other"
    streaming: bool
    requested_model: str | None  # as the agent wrote it
    served_model: str | None  # as the engine was asked
    policy: str | None  # None: not served by a policy of ours
    policy_version: int | None  # 0 is the base model
    engine_url: str
    fingerprint_id: str | None
    sampling: Mapping[str, Any]  # sampling parameters as sent, defaults not filled in
    request_body: bytes  # as the agent sent it
    request_hash: bytes | None  # of the body: recognises retries
    state_key: str | None
    parent_call_id: str | None
    unrecordable: str | None  # why nothing was injected, or None
    idempotency_key: str | None
    retry_count: int
    started_at_ms: int
    client_keys: tuple[bytes, ...] = field(default=(), repr=False)
    """API keys that came with the request: never written, only looked for in what is (proxy/redaction.py)."""


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """One answer of a call. `completion_ids` and `behavior_logprobs` have shape (T,) and are aligned.

    Both are None where the engine gave none. `quarantine` None means trainable.
    """

    index: int
    completion_ids: TokenIds | None
    behavior_logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    message: Mapping[str, Any] | None  # assembled for people and judges, never re-tokenised
    quarantine: Quarantine | None


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The engine's answer (or its absence), written before the client sees its end."""

    call_id: str
    status: CallStatus
    http_status: int | None
    upstream_id: str | None  # the answer's own `id`, as the client saw it
    prompt_ids: TokenIds | None  # (P,)
    choices: tuple[RecordedChoice, ...]
    policy_version_end: int | None
    reported_completion_tokens: int | None  # the engine's own count, where it could be had
    error: str | None
    first_byte_at_ms: int | None
    ended_at_ms: int
    reported_prompt_tokens: int | None = None  # another vendor's count: there are no prompt ids
    usage_estimated: bool | None = None  # the counts are our estimate; None: there was nothing to estimate


@dataclass(frozen=True, slots=True)
class CallMoved:
    """Nobody listened at the engine that the intent names: another one was asked."""

    call_id: str
    engine_url: str
    fingerprint_id: str | None


@dataclass(frozen=True, slots=True)
class CallDelivered:
    """The client has seen the answer's end (or left before it: `delivered` False)."""

    call_id: str
    delivered: bool


LogEntry = CallIntent | CallEnd | CallDelivered | CallMoved


@dataclass(frozen=True, slots=True)
class Reward:
    """A number that somebody gave. Append-only: a later row may supersede it, none overwrites it."""

    id: str
    episode_id: str
    target: RewardTarget
    value: float
    source: str
    created_at_ms: int
    agent: str | None = None
    call_id: str | None = None
    choice_index: int | None = None
    token_start: int | None = None  # half-open range over the completion ids
    token_end: int | None = None
    final: bool = False  # ends the episode
    note: str | None = None
    supersedes: str | None = None  # id of the row it replaces


@dataclass(frozen=True, slots=True)
class Choice:
    """A recorded choice as the trainer reads it; `used` None means that nobody said."""

    call_id: str
    index: int
    completion_ids: TokenIds  # (T,)
    behavior_logprobs: Logprobs  # (T,)
    finish_reason: str | None
    quarantine: Quarantine | None
    used: bool | None


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the trainer reads it, with its exact prompt."""

    id: str
    episode_id: str
    ordinal: int  # 0-based order within the episode, counted by the log
    agent: str | None
    kind: CallKind
    parent_call_id: str | None
    state_key: str | None
    policy: str | None
    policy_version: int | None
    policy_version_end: int | None
    status: CallStatus
    delivered: bool | None
    fingerprint_id: str | None
    sampling: Mapping[str, Any]
    prompt_ids: TokenIds  # (P,); empty where the log holds none
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Episode:
    id: str
    task_id: str | None
    group_id: str | None
    purpose: Purpose
    status: EpisodeStatus
    created_at_ms: int
    ended_at_ms: int | None
    tags: Mapping[str, str]
    calls: tuple[Call, ...]  # by ordinal
    rewards: tuple[Reward, ...]  # by (created_at_ms, id), superseded rows included
    has_gap: bool = False  # a call of it was served but could not be recorded


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task produced together. `expected_size` None: nobody said how many."""

    id: str
    task_id: str
    batch: str
    expected_size: int | None
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class Transition:
    """What the loss needs of one choice; aligned as the names say."""

    call_id: str
    choice_index: int
    prompt_ids: TokenIds  # (P,)
    completion_ids: TokenIds  # (T,)
    behavior_logprobs: Logprobs  # (T,)
    temperature: float
    advantage: float  # of this choice
    multiplier: float  # of every token's loss term, >= 0 (weights.py)


@dataclass(frozen=True, slots=True)
class ManifestChoice:
    """One choice in a step manifest. `advantage` None: not trained, and `reason` says why."""

    call_id: str
    choice_index: int
    episode_id: str
    group_id: str | None
    agent: str | None
    advantage: float | None
    multiplier: float
    reason: str | None


@dataclass(frozen=True, slots=True)
class StepManifest:
    """What one optimizer step trains; written by the dry run, consumed by the training run."""

    run_id: str
    step: int  # 0-based within the run
    policy: str
    from_version: int  # the version that the step starts from
    choices: tuple[ManifestChoice, ...]
    reward_ids: Mapping[str, tuple[str, ...]]  # episode id -> the reward rows that its value came from
    returns: Mapping[str, float]  # episode id -> resolved reward


@dataclass(frozen=True, slots=True)
class ProbeSequence:
    """A fixed sequence with the trainer's logprobs before and after the step, all (T-1,) over ids[1:]."""

    ids: TokenIds  # (T,)
    logprobs_before: Logprobs
    logprobs_after: Logprobs


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    policy: str
    version: int  # 0 is the base model
    status: VersionStatus
    kind: WeightsKind
    path: str | None  # immutable folder of this version's weights; None for the base
    checksum: str | None  # of the weights file, "sha256:…"
    probe: tuple[ProbeSequence, ...]
    base_model: str | None
    run_id: str | None
    step: int | None
    created_at_ms: int
    verdict: Mapping[str, Any] | None = None  # what the probe found, or why it was rejected
    live_at_ms: int | None = None  # when it last went live; None: it never was
