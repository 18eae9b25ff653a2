"""SAPO's gate: the further a token is from the anchor the less it counts, without an edge."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.view import View


def soft(
    view: View,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A sigmoid(tau (r-1)) 4/tau, with tau_positive where A > 0, else tau_negative.

    The gate's slope at r = 1 is 1, so on-policy the gradient is that of plain policy gradient. SAPO (2511.20347).
    """
    tau = torch.full_like(advantages, tau_negative).masked_fill_(advantages > 0, tau_positive)
    return (advantages / tau).mul_(-4) * (tau * (ratio - 1)).sigmoid(), {}
