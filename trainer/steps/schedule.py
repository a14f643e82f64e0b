"""How large each optimizer step is: the learning rate over the steps of a run.

One count is one optimizer step over whole groups, whatever number of micro-batches it was computed in; every
epoch is one, and a step that trains nothing is none. The shapes are transformers' own. They begin with a rate
of 0, which would make a version that equals the one before, so they are read one step ahead:

    warm-up over w steps          1/(w+1), 2/(w+1), ..., w/(w+1), 1
    linear to the end N           (N - k) / (N - w) from step k = w on: the last step is the smallest, not 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ScheduleName = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Schedule:
    name: ScheduleName = "constant"
    warmup_steps: int = 0
    num_steps: int | None = None  # of the whole run; None: nobody knows, and only `constant` can do without

    def scheduler(self, optimizer: Any) -> Any:
        """For transformers' trainer, which steps it once per optimizer step."""
        # Here, so that whoever names a schedule does not load transformers before the bridge has prepared it.
        import torch
        from torch.optim.lr_scheduler import LambdaLR
        from transformers import get_scheduler

        assert self.name == "constant" or self.num_steps is not None, "the settings were checked"
        shape = get_scheduler(
            "constant_with_warmup" if self.name == "constant" else self.name,
            torch.optim.SGD([torch.zeros(1)], lr=1.0),  # the shape is a function; it needs one to be made
            num_warmup_steps=self.warmup_steps + 1,
            num_training_steps=None if self.num_steps is None else self.num_steps + 1,
        )
        (factor,) = shape.lr_lambdas
        return LambdaLR(optimizer, lambda done: factor(done + 1))
