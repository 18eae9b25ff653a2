"""Advantages from a value of each prompt that was estimated before training. A*-PO (2505.20686)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from burnish.algorithms.batch_columns import sequence_rewards
from burnish.config.errors import UserError
from burnish.core.batch import Batch


def offline_value(batch: Batch) -> Tensor:
    """[S] A = r - V*(x), with the optimal value of the prompt in the sequence column `prompt_value`. A*-PO (2505.20686)."""
    if "prompt_value" not in batch.sequence or bool(batch.sequence["prompt_value"].isnan().any()):
        raise UserError(
            "advantage offline_value needs the value of every prompt, which `burnish train` estimates before its first step; in a loop of "
            "your own, give each trajectory metadata['prompt_value']"
        )
    return sequence_rewards(batch) - batch.sequence["prompt_value"]


def optimal_value(rewards: Sequence[float], beta: float) -> float:
    """V* = beta log mean exp(r / beta): the value of the best policy near the one that sampled the rewards.

    It lies between their mean (beta to infinity) and their maximum (beta to 0).
    """
    best = max(rewards)
    return best + beta * math.log(math.fsum(math.exp((r - best) / beta) for r in rewards) / len(rewards))
