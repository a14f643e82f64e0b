"""What the loss does with a token's probability ratio, and what is added to it. No torch.

    r   = exp(policy - old)                      old: the behaviour's logprob, or a correction's (below)
    clip   -min(r A, clip(r, 1 - low, 1 + high) A)                                    PPO, arXiv 1707.06347
    gspo   the same with s = exp(mean over the choice's tokens of log r) for r        GSPO, arXiv 2507.18071
    cispo  -stop_gradient(min(r, cap)) A log policy                                   CISPO, arXiv 2506.13585
    sapo   -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A                    SAPO, arXiv 2511.20347

TRL computes these; the weighting is ours (weights.py), so whatever TRL divides by is multiplied in again.
KL and entropy have weights of their own and go by the same weighting:

    + kl_weight * sum m (exp(d) - d - 1), d = reference - policy                      k3, unbiased
    - entropy_weight * sum m H

The correction is decoupled PPO (arXiv 2505.24298): old becomes the policy's own logprob before the step, and
rho = exp(old - behaviour), what the policy has moved since the call and what engine and trainer disagree on,
becomes a weight of the token: `truncate` min(rho, cap), `mask` rho where it is at most cap, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

ObjectiveName = Literal["clip", "gspo", "cispo", "sapo"]
Correction = Literal["auto", "off", "truncate", "mask"]

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Objective:
    name: ObjectiveName = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio_cap: float = 5.0  # of cispo; its cap is the ratio itself, not a distance from 1
    kl_weight: float = 0.0
    entropy_weight: float = 0.0


def correction_weights(
    old: npt.NDArray[np.float32], behavior: npt.NDArray[np.float32], mode: Correction, cap: float
) -> npt.NDArray[np.float32]:
    """(M,) weight of each token; see the module's docstring."""
    rho = np.exp(np.clip(old - behavior, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    weights = np.minimum(rho, cap) if mode == "truncate" else np.where(rho <= cap, rho, 0.0)
    return weights.astype(np.float32)
