"""Writes docs/settings.md and docs/cli.md from the code (`make docs`); a test holds the pages against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import SecretStr
from pydantic_core import PydanticUndefined
from typer.main import get_command

from lightning_rl.cli import app
from lightning_rl.records import CallKind
from lightning_rl.settings.proxy import EvaluationSettings, ProviderSettings, ProxySettings
from lightning_rl.settings.train import TrainSettings

HERE = Path(__file__).parent

_TABLES = {str: "table of strings", CallKind: "table of strings", ProviderSettings: "table of tables"}
_TABLE = (EvaluationSettings,)


def _type(annotation: Any) -> str:
    arguments = get_args(annotation)
    if arguments and all(isinstance(argument, str) for argument in arguments):
        return " \\| ".join(f"`{argument}`" for argument in arguments)
    if get_origin(annotation) is tuple:
        return "list of str"
    if get_origin(annotation) is dict:
        return _TABLES.get(getattr(arguments[1], "__origin__", arguments[1]), "table of numbers")
    if get_origin(annotation) is list and arguments == (str,):
        return "list of strings"
    names = [
        "table" if argument in _TABLE else argument.__name__
        for argument in arguments
        if isinstance(argument, type) and argument is not type(None)
    ]
    shown = ", ".join(names) if names else getattr(annotation, "__name__", str(annotation))
    return shown.replace(SecretStr.__name__, "secret")


def _default(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"`{key} = {item}`" for key, item in value.items())
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return "required" if value is PydanticUndefined else "" if value is None else f"`{value}`"


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "A TOML file (`--config FILE`) < environment variables < flags. Unknown keys of a file are an error;",
        "a variable that no setting is called by is ignored.",
        "",
    ]
    for title, model in (("lightning proxy serve", ProxySettings), ("lightning train", TrainSettings)):
        prefix = str(model.model_config["env_prefix"])
        lines += [
            f"## `{title}`",
            "",
            "| key | environment | type | default | meaning |",
            "|---|---|---|---|---|",
        ]
        for name, info in model.model_fields.items():
            variable = "LIGHTNING_DB" if name == "db" else f"{prefix}{name.upper()}"
            value = info.default
            if not info.is_required():
                value = info.get_default(call_default_factory=True, validated_data={"policy": "policy"})
            default = _default(value)
            lines.append(
                f"| `{name}` | `{variable}` | {_type(info.annotation)} | {default} | {info.description} |"
            )
        lines.append("")
    return "\n".join(lines)


def _command(command: Any, path: str, context: Any) -> list[str]:
    """`command` is a click command, of click itself or of the copy that typer brings."""
    lines = [f"## `{path}`", "", (command.help or "").strip(), ""]
    for parameter in command.get_params(context):
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        names = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else []
        shown = ", ".join(f"`{name}`" for name in names) or f"`{parameter.name.upper()}`"
        lines.append(f"- {shown}: {getattr(parameter, 'help', None) or ''}".rstrip(": "))
    lines.append("")
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        lines += _command(inner, f"{path} {name}", type(context)(inner, info_name=name, parent=context))
    return lines


def cli_page() -> str:
    root = get_command(app)
    context = root.make_context("lightning", [], resilient_parsing=True)
    lines = [
        "# Commands",
        "",
        "`lightning-rl` is the same program, for machines where `lightning` is taken.",
        "",
    ]
    return "\n".join(lines + _command(root, "lightning", context))


PAGES = {"settings.md": settings_page, "cli.md": cli_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page().rstrip() + "\n")
