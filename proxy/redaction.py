"""What must not be in the log is replaced before it is written: what rules match, and keys.

Runs in the recorder's thread, on the entries of a batch. A replaced text takes the token ids along that spell
it: a call whose request matched keeps neither prompt nor completion ids, an answer that matched loses its
own; their choices are quarantined as `redacted`. Sees texts, never tokens: what stands only in token ids (a
prompt that was sent as ids) is beyond it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from ..records import CallEnd, CallIntent, LogEntry, Quarantine, RecordedChoice
from ..settings.proxy import RedactionRule
from ..store.names import EPISODE_KEY, EPISODE_KEY_PREFIX

BUILT_IN = {
    "email": r"(?<![\w.%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b",
    "api-key": r"\b(?:sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{40,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{35}|hf_[A-Za-z0-9]{30,}|glpat-[\w-]{20,})",
    "bearer": r"(?i:\bbearer\s+)[A-Za-z0-9._~+/-]{16,}=*",
    "ip-address": r"\b(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)\b",
    "phone": r"(?<![\w.])\+\d{1,3}[ .-]?(?:\(?\d{1,4}\)?[ .-]?){2,5}\d{2,4}\b",
}
"""Patterns with a name. Rough on purpose: what they find too much costs training examples, not privacy."""

MIN_KEY_BYTES = 12
"""Shorter keys are placeholders ("EMPTY", "secret"), which may well stand in a prompt."""

_HIDDEN_KEY = "[key]"
_SCALARS = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*', re.DOTALL)
MAX_OPEN = 100_000


@dataclass(frozen=True, slots=True)
class Rule:
    """`replacement` as in `re.sub`."""

    name: str
    pattern: re.Pattern[str]
    replacement: str


def rules_of(settings: Sequence[RedactionRule]) -> list[Rule]:
    return [
        Rule(given.shown_name(), re.compile(given.pattern or BUILT_IN[str(given.builtin)]), given.replacement)
        for given in settings
    ]


class Redactor:
    """`prepare` in one thread only. `secrets`: keys of the proxy itself, hidden wherever they turn up."""

    def __init__(self, rules: Sequence[Rule] = (), secrets: Sequence[str] = ()) -> None:
        self._rules = tuple(rules)
        self._secrets = tuple(secret.encode() for secret in secrets if len(secret) >= MIN_KEY_BYTES)
        self._hidden: dict[str, tuple[Rule, ...]] = {}  # call whose request matched -> its keys, as rules
        self.num_by_rule: Counter[str] = Counter()
        """Calls in which the rule found something."""

    def prepare(self, entry: LogEntry) -> LogEntry:
        """The entry as it may be written. Once per entry, intents before their ends."""
        if isinstance(entry, CallIntent):
            return self._prepare_intent(entry)
        if isinstance(entry, CallEnd):
            return self._prepare_end(entry)
        return entry

    def _prepare_intent(self, intent: CallIntent) -> CallIntent:
        keys = self._keys_in(intent)
        rules = (*keys, *self._rules)
        if not rules:
            return intent
        found: set[str] = set()
        body = _redact_body(intent.request_body, rules, found)
        if not found:
            return intent
        self.num_by_rule.update(found)
        self._hidden[intent.id] = keys
        if len(self._hidden) > MAX_OPEN:  # calls that never got an end
            del self._hidden[next(iter(self._hidden))]
        return replace(
            intent,
            request_body=body,
            sampling=_redact_value(intent.sampling, rules, found),
            requested_model=_redact_text(intent.requested_model or "", rules, found) or None,
            served_model=_redact_text(intent.served_model or "", rules, found) or None,
            # Hashes of what is kept: those of the text itself would let it be guessed.
            request_hash=hashlib.blake2b(body, digest_size=16).digest(),
            state_key=None,
        )

    def _keys_in(self, intent: CallIntent) -> tuple[Rule, ...]:
        """The client's keys and our own, where the body holds one: no more than a search for bytes."""
        body = intent.request_body
        keys = [key for key in intent.client_keys if len(key) >= MIN_KEY_BYTES and key in body]
        keys += [secret for secret in self._secrets if secret in body]
        if EPISODE_KEY_PREFIX in body:
            keys += EPISODE_KEY.findall(body)
        return tuple(
            Rule("key", re.compile(re.escape(key.decode("latin-1"))), _HIDDEN_KEY) for key in set(keys)
        )

    def _prepare_end(self, end: CallEnd) -> CallEnd:
        keys = self._hidden.pop(end.call_id, None)
        rules = (*(keys or ()), *self._rules)
        if not rules and keys is None:
            return end
        found: set[str] = set()
        choices = tuple(_redact_choice(choice, rules, found, keys is not None) for choice in end.choices)
        error = end.error if end.error is None else _redact_text(end.error, rules, found)
        if keys is None:
            self.num_by_rule.update(found)
        if keys is None and not found:
            return end
        return replace(end, choices=choices, error=error, prompt_ids=end.prompt_ids if keys is None else None)


def _redact_choice(
    choice: RecordedChoice, rules: Sequence[Rule], found: set[str], is_hidden: bool
) -> RecordedChoice:
    """Without its tokens where it matched, or where its prompt did."""
    here: set[str] = set()
    message = choice.message and _redact_value(choice.message, rules, here)
    stop = choice.stop_reason
    stop = _redact_text(stop, rules, here) if isinstance(stop, str) else stop
    found |= here
    if not here and not is_hidden:
        return choice
    return replace(
        choice,
        message=message,
        stop_reason=stop,
        completion_ids=None,
        behavior_logprobs=None,
        quarantine=Quarantine.REDACTED,
    )


def _redact_text(text: str, rules: Sequence[Rule], found: set[str]) -> str:
    for rule in rules:
        text, count = rule.pattern.subn(rule.replacement, text)
        if count:
            found.add(rule.name)
    return text


def _redact_value(value: Any, rules: Sequence[Rule], found: set[str]) -> Any:
    """Every text in it, names of members too."""
    if isinstance(value, str):
        return _redact_text(value, rules, found)
    if isinstance(value, Mapping):
        return {
            _redact_text(str(key), rules, found): _redact_value(item, rules, found)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact_value(item, rules, found) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = _redact_text(str(value), rules, found)
        return value if text == str(value) else text
    return value


def _redact_body(body: bytes, rules: Sequence[Rule], found: set[str]) -> bytes:
    """JSON is redacted text by text, and keeps every other byte; anything else as one text."""
    text = body.decode("utf-8", "surrogateescape")
    if not _is_json(body, text):
        return _redact_text(text, rules, found).encode("utf-8", "surrogateescape")

    def redacted(match: re.Match[str]) -> str:
        scalar = match.group()
        said: str = json.loads(scalar, strict=False) if scalar[0] == '"' else scalar
        kept = _redact_text(said, rules, found)
        return scalar if kept == said else json.dumps(kept)

    return _SCALARS.sub(redacted, text).encode("utf-8", "surrogateescape")


def _is_json(body: bytes, text: str) -> bool:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            json.loads(text)  # takes more: numbers past all bounds, NaN, text that is not UTF-8
        except (ValueError, RecursionError):
            return False
    return True
