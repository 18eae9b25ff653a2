"""ECHO (prime-rl): cross-entropy on what the environment said, added to the policy loss.

    L = L_rl + sum over selected tokens of lam_role (-logp) / N_obs

Selected are the tokens of message bodies whose role has a weight above 0 (`core/observations.py`); N_obs is their number in the whole mini-batch. The
weights are not divided out: with one role the term is lam times the mean NLL. The policy loss and its denominators do not change.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from burnish.algorithms.terms.spec import Observations
from burnish.core.batch import Batch
from burnish.core.observations import OBSERVED, OBSERVED_ROLES

OBSERVATION_WEIGHT = "observation_weight"
"""The token column with the weight of each token's NLL, the coefficient and the denominator included."""
OBSERVATIONS = "observations"
"""What a loss needs that adds the term."""


def role_weights(observations: Observations) -> dict[str, float]:
    """The weight of each role."""
    return {role: getattr(observations, role) for role in OBSERVED_ROLES}


def with_observation_weights(mini: Batch, weights: Mapping[str, float]) -> Batch:
    """Return the mini-batch with the weights of the NLL of observations; unchanged if no token has one."""
    if OBSERVED not in mini.token:
        return mini
    table = torch.tensor([0.0, *(weights[role] for role in OBSERVED_ROLES)], dtype=torch.float64)
    found = table.to(mini.tokens.device)[mini.token[OBSERVED].long()].masked_fill(mini.action_mask, 0)
    return mini.with_token(**{OBSERVATION_WEIGHT: found / (found > 0).sum().clamp(min=1)})


def observation_nll(logp: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss of observed tokens with their weights, and sums for the metrics."""
    loss = -(weight.to(logp.dtype) * logp).sum()
    count = torch.full((), float(logp.numel()), dtype=torch.float64, device=logp.device)
    return loss, {
        "observation_loss": loss.detach().double(),
        "observation_nll": -logp.detach().double().sum(),
        "observation_tokens": count,
    }
