"""`lightning credit`: which rules there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .base import CreditRule

credit_app = typer.Typer(no_args_is_help=True, help="Credit rules: what makes advantages of rewards.")


@credit_app.callback()
def _group() -> None:
    """Keeps `list` a command of its own."""


@credit_app.command("list")
def list_rules(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Every rule with its formula, paper and options; those of installed packages too."""
    import json

    from rich.table import Table

    from ...errors import SettingsError
    from ...store.commands.tables import terminal
    from .registry import known_rules

    found = list(known_rules())
    if as_json:
        rules = [
            {"rule": name, "error": str(rule)} if isinstance(rule, SettingsError) else _as_json(name, rule)
            for name, rule in found
        ]
        typer.echo(json.dumps({"rules": rules}))
        return
    table = Table("rule", "formula", "options (default)", "paper")
    for name, rule in found:
        if isinstance(rule, SettingsError):
            table.add_row(name, f"broken: {rule}", "", "")
        else:
            table.add_row(name, rule.formula, _options(rule), rule.paper)
    terminal().print(table, markup=False)


def _options(rule: CreditRule[Any]) -> str:
    return "\n".join(f"{name} ({field.default})" for name, field in rule.options.model_fields.items())


def _as_json(name: str, rule: CreditRule[Any]) -> dict[str, Any]:
    schema = rule.options.model_json_schema()["properties"] if rule.options.model_fields else {}
    return {
        "rule": name,
        "formula": rule.formula,
        "paper": rule.paper,
        "fewest_episodes": rule.fewest_episodes,
        "options": {
            option: {key: value for key, value in said.items() if key != "title"}
            for option, said in schema.items()
        },
    }
