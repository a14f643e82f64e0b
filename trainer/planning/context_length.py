"""How many tokens a model can read, by its own configuration. Knows no torch and loads no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STRETCHED = ("yarn", "linear", "dynamic")
"""Kinds of rotary scaling whose factor an engine applies to the length that the file names."""


def context_tokens(folder: Path) -> int | None:
    """None where there is no configuration (a dry run needs no model), or one that names no length."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    nested = config.get("text_config")
    config = nested if isinstance(nested, dict) else config
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or length < 2:
        return None
    return max(length, _stretched(config, length))


def _stretched(config: Mapping[str, Any], length: int) -> int:
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in _STRETCHED:
        return length
    return int(scaling.get("factor", 1.0) * scaling.get("original_max_position_embeddings", length))
