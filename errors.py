"""Every error that the product raises on purpose.

    LightningError                 somebody has to do something; one line says what, where and what to do
    ├── UserError                  a mistake in a command, a setting or a file: exit code 2 or a 4xx
    │   ├── SettingsError          an unknown key, a value out of range
    │   ├── UnknownEpisodeError    no such episode in the log
    │   ├── UnknownCallError       no such call in the log
    │   ├── NothingToTrainError    no rewarded episodes, no variance, everything excluded
    │   ├── OvertakenError         a run's version serves nobody any more: somebody wants another one
    │   ├── ModelMismatchError     a tokenizer or model that does not fit the engine or the log
    │   └── RankLostError          another process of a training run has ended, or does not answer
    ├── StoreError                 the database can't be opened, written or understood
    │   └── SchemaError            its schema is older or newer than this program
    └── EngineError                the engine is unreachable, lacks something, or refused
        └── PublishError           a policy version could not be made live

Invariants are `assert`; a traceback is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LightningError(Exception):
    """Base of all. `str(error)` is one line: what is wrong, where, and what to do next."""


class UserError(LightningError):
    """A mistake that the person at the keyboard (or the client of our API) can mend."""


class SettingsError(UserError):
    """A setting is unknown, missing or out of range."""


class UnknownEpisodeError(UserError):
    """The log holds no episode of that name."""


class UnknownCallError(UserError):
    """The log holds no call, or no answer of a call, of that name."""


class NothingToTrainError(UserError):
    """The selection leaves no choice with an advantage; the message counts why."""


class OvertakenError(UserError):
    """Somebody has put another version live while a run went on from its own."""


class ModelMismatchError(UserError):
    """The model or its tokenizer is not the one that the log was recorded with."""


class RankLostError(UserError):
    """This process is one of several of a training run, and another one has ended or does not answer."""


class StoreError(LightningError):
    """The database can't be opened, read or written."""


class SchemaError(StoreError):
    """The database's schema and this program are of different versions."""


class EngineError(LightningError):
    """The engine is unreachable, lacks a capability, or answered with an error."""


class PublishError(EngineError):
    """A policy version could not be loaded, probed or made live."""


_PLAIN_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "is not a field of this request",
    "string_type": "must be text",
    "string_unicode": "must be text without half characters (lone surrogates)",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "is too large",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "too_short": "must have at least {min_length}",
    "too_long": "must have at most {max_length}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "value_error": "{error}",
}
"""By pydantic's type of error; a type that is not here keeps pydantic's own sentence."""


def plain_words(fault: Mapping[str, Any]) -> str:
    """What is wrong with a value, as it reads behind the value's name; one of a ValidationError's errors."""
    text = _PLAIN_WORDS.get(str(fault["type"]))
    return str(fault["msg"]) if text is None else text.format(**fault.get("ctx", {}))
