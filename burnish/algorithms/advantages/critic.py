"""Advantages from a critic's values: generalised advantage estimation and its long-answer variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from burnish.algorithms.advantages.rewards import token_rewards
from burnish.algorithms.advantages.written import Written, whitened_tokens, written
from burnish.algorithms.recurrence import recurrence
from burnish.core.batch import Batch


@dataclass(frozen=True)
class Estimate:
    """What an estimator with a critic gives: the actor's signal and the critic's targets."""

    advantages: Tensor  # [N]
    returns: Tensor  # [N] before any whitening


def gae(
    batch: Batch,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_critic: float | None = None,
    length_adaptive: float | None = None,
    whiten: bool = True,
    ddof: Literal[0, 1] = 1,
) -> Estimate:
    """Per-token credit from the critic's `values` [N], with bias traded for variance by lambda.

        delta_t = r_t + gamma V_{t+1} - V_t;   A_t = delta_t + gamma lambda A_{t+1};   returns = A + V

    t + 1 is the next written token, V after the last one is 0. `lam_critic` gives the critic's targets a lambda of their
    own (VC-PPO, 2503.01491); `length_adaptive` replaces the actor's by one that grows with the length of the answer
    (VAPO, 2504.05118). Both outputs are in the type of `values`. Schulman et al. (1506.02438).
    """
    tokens = written(batch)
    values = tokens.take(batch.token["values"])
    errors = _temporal_differences(batch, tokens, values, gamma)
    actor: float | Tensor = lam
    if length_adaptive is not None:
        actor = length_adaptive_lambda(tokens.lengths, length_adaptive)
    advantages = recurrence(errors, tokens.offsets, gamma * actor)
    targets = advantages
    if lam_critic is not None:
        targets = recurrence(errors, tokens.offsets, gamma * lam_critic)
    returns = tokens.put(targets + values)
    if whiten:
        advantages = whitened_tokens(batch, tokens, advantages, ddof)
    return Estimate(tokens.put(advantages), returns)


def _temporal_differences(batch: Batch, tokens: Written, values: Tensor, gamma: float) -> Tensor:
    """[M] r_t + gamma V_{t+1} - V_t."""
    errors = values.neg()
    errors[:-1].add_(values[1:], alpha=gamma)
    last = tokens.offsets[1:][tokens.lengths > 0] - 1
    errors[last] = -values[last]
    if "token_rewards" in batch.token:
        return errors.add_(tokens.take(token_rewards(batch)).to(values.dtype))
    errors[tokens.last] += batch.sequence["reward"].to(values.dtype)
    return errors


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """[S] lambda = 1 - 1/(alpha l), so that the weights of later errors sum to about alpha l; 0 up to l = 1/alpha."""
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)
