"""Advantages with dense process rewards beside the outcome."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from burnish.algorithms.advantages.groups import Groups, group_rewards
from burnish.algorithms.advantages.written import whitened_tokens, written
from burnish.algorithms.recurrence import recurrence
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum, segment_sum


def prime_rloo(
    batch: Batch,
    process_coef: float = 5.0,
    outcome_coef: float = 5.0,
    norm: Literal["none", "batch"] = "batch",
    whiten: bool = True,
    ddof: Literal[0, 1] = 1,
) -> Tensor:
    """[N] leave-one-out returns of implicit process rewards plus the leave-one-out outcome. PRIME (2502.01456).

        A_it = sum_{s>=t} (p_is - mean of the siblings' token means of p) + (r_i - mean of the siblings' r)

    p is the token column `process_rewards`, beta times the log-ratio of the implicit process reward model to its
    reference. `norm="batch"` divides p by the largest absolute return of p in the batch.
    """
    tokens = written(batch)
    owner, rewards, groups = group_rewards(batch)
    process = tokens.take(batch.token["process_rewards"])
    if norm == "batch" and process.numel():
        process = process / (recurrence(process, tokens.offsets, 1.0).abs().max() + 1e-6)
    lengths = segment_sum(tokens.lengths, owner, rewards.numel())
    total = segment_sum(contiguous_sum(process, tokens.offsets), owner, rewards.numel())
    baseline = groups.others_mean(total / lengths.clamp(min=1))  # [T]
    dense = recurrence(process - tokens.spread(baseline[owner]), tokens.offsets, 1.0)
    outcome = _leave_one_out(rewards, groups)[owner].to(dense.dtype)
    advantages = process_coef * dense + outcome_coef * tokens.spread(outcome)
    return tokens.put(whitened_tokens(batch, tokens, advantages, ddof) if whiten else advantages)


def _leave_one_out(rewards: Tensor, groups: Groups) -> Tensor:
    return groups.settled(rewards - groups.others_mean(rewards), rewards, rewards)
