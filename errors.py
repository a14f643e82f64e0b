"""Every error that the product raises on purpose.

    LightningError                 somebody has to do something; one line says what, where and what to do
    ├── UserError                  a mistake in a command, a setting or a file: exit code 2 or a 4xx
    │   ├── SettingsError          an unknown key, a value out of range
    │   ├── UnknownEpisodeError    no such episode in the log
    │   ├── NothingToTrainError    no rewarded episodes, no variance, everything excluded
    │   └── ModelMismatchError     a tokenizer or model that does not fit the engine or the log
    ├── StoreError                 the database can't be opened, written or understood
    │   └── SchemaError            its schema is older or newer than this program
    └── EngineError                the engine is unreachable, lacks something, or refused
        └── PublishError           a policy version could not be made live

Invariants are `assert`; a traceback is a bug of ours.
"""


class LightningError(Exception):
    """Base of all. `str(error)` is one line: what is wrong, where, and what to do next."""


class UserError(LightningError):
    """A mistake that the person at the keyboard (or the client of our API) can mend."""


class SettingsError(UserError):
    """A setting is unknown, missing or out of range."""


class UnknownEpisodeError(UserError):
    """The log holds no episode of that name."""


class NothingToTrainError(UserError):
    """The selection leaves no choice with an advantage; the message counts why."""


class ModelMismatchError(UserError):
    """The model or its tokenizer is not the one that the log was recorded with."""


class StoreError(LightningError):
    """The database can't be opened, read or written."""


class SchemaError(StoreError):
    """The database's schema and this program are of different versions."""


class EngineError(LightningError):
    """The engine is unreachable, lacks a capability, or answered with an error."""


class PublishError(EngineError):
    """A policy version could not be loaded, probed or made live."""
