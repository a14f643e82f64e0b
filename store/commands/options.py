"""Options that several commands of the log share."""

from __future__ import annotations

from typing import Annotated

import typer

DbOption = Annotated[str, typer.Option("--db", envvar="LIGHTNING_DB", help="Database URL of the log.")]
