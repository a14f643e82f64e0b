"""GRPO: the group's mean as the baseline, its standard deviation as the scale.

Paper: DeepSeekMath (arXiv 2402.03300).

    A_{e,k} = (R_e - mean_g R) / (std_g R + eps)

The same numbers as `lightning` by default; a name of its own, since the paper treats one answer and the other
an episode of calls. With `std = "sample"` and `eps = 1e-4` the numbers are TRL's, with 1e-6 verl's, with
`std = "population"` and 1e-8 those of TRL's AsyncGRPO; `std = "none"` is GRPO without the deviation.

Departures: a group whose rewards are all equal gets None with the cause, where the paper gives 0, and a lone
survivor gets None, where an implementation that drops episodes first may give it anything.
"""

from __future__ import annotations

from .base import CreditRule
from .compare import GroupOptions
from .lightning import broadcast

RULE = CreditRule(
    name="grpo",
    formula="A_e = (R_e - mean_g R) / (std_g R + eps)",
    paper="GRPO, arXiv 2402.03300",
    options=GroupOptions,
    assign=broadcast,
)
