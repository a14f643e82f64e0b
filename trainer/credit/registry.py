"""The credit rules by name. A rule is a pure function in a file of its own; see `base.CreditRule`."""

from __future__ import annotations

from ...errors import SettingsError
from .base import CreditRule
from .lightning import lightning

RULES: dict[str, CreditRule] = {"lightning": lightning}


def credit_rule(name: str) -> CreditRule:
    try:
        return RULES[name]
    except KeyError:
        known = ", ".join(sorted(RULES))
        raise SettingsError(f"no credit rule is called {name!r}; there is: {known}") from None
