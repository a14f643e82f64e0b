"""TOML file < environment < flags, for every settings model. Unknown keys of a file are errors.

`LIGHTNING_DB` names the log for every command.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    TomlConfigSettingsSource,
)
from pydantic_settings import SettingsError as UnreadableSettingError

from ..errors import SettingsError, plain_words

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
    without_password(url)
    return url.rstrip("/").removesuffix("/v1")


def without_password(url: str) -> str:
    """Addresses are shown, logged and stored."""
    if "@" in urlsplit(url).netloc:
        raise ValueError("an address with a user or password; a key has a setting of its own")
    return url


def listed(value: Any) -> Any:
    """One URL, or several: a list in a file, separated by commas in a variable."""
    return [part for part in re.split(r"[,\s]+", value) if part] if isinstance(value, str) else value


def _distinct(urls: tuple[str, ...]) -> tuple[str, ...]:
    if not urls:
        raise ValueError("name at least one engine")
    return tuple(dict.fromkeys(urls))


RootUrl = Annotated[str, AfterValidator(root_url)]
RootUrls = Annotated[tuple[RootUrl, ...], NoDecode, BeforeValidator(listed), AfterValidator(_distinct)]

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


class Layered(BaseSettings):
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


def db_field() -> Any:
    return Field(
        DEFAULT_DB,
        validation_alias=AliasChoices("db", "LIGHTNING_DB"),
        description="Database URL of the log, SQLite or Postgres.",
    )
