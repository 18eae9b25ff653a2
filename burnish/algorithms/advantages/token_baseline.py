"""A baseline for every position of a group's answers, weighted by how much gradient each answer has there."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.returns import returns_at
from burnish.algorithms.advantages.written import Written, written
from burnish.algorithms.recurrence import running_sum
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, offsets_from_lengths, segment_count, segment_max, segment_sum


def otb(batch: Batch, tail: Literal["raw", "zero"] = "raw") -> Tensor:
    """[N] return-to-go minus the optimal token baseline.

        w_t = 1 - 2 pi_t + sum_v pi_v^2;   W_t = w_1 + ... + w_t;   b_t = sum_g G_t W_t / (sum_g W_t + 1e-8);   A = G - b

    w is the squared gradient of the token's logits, pi the probability under the policy before the update (`old_logp`,
    `sum_p2`); t counts written tokens, and an answer that has ended has no weight. With a token column `rollout_weight`
    rho, w_t is multiplied by rho_t^2. Every sequence is an answer of its own. One answer alone in its group has no
    baseline; where one is longer than all others of its group, `tail` says whether what is beyond them keeps its raw
    return or gets 0.
    """
    tokens = written(batch)
    returns = returns_at(batch, tokens, 1.0)
    energy = running_sum(_logit_energy(batch, tokens).to(returns.dtype), tokens.offsets)
    groups, num = compact_ids(batch.sequence["group_ids"])
    cells, num_cells = _cells(tokens, groups, num)
    weighted = segment_sum(returns * energy, cells, num_cells)
    baseline = (weighted / (segment_sum(energy, cells, num_cells) + 1e-8))[cells]
    alone = (segment_count(cells, num_cells) == 1)[cells]
    advantages = torch.where(alone, returns, returns - baseline)
    if tail == "zero":
        single = (segment_count(groups, num) == 1)[groups]
        advantages = torch.where(alone & ~tokens.spread(single), 0.0, advantages)
    return tokens.put(advantages)


def _logit_energy(batch: Batch, tokens: Written) -> Tensor:
    """[M] w_t = 1 - 2 pi_t + sum_v pi_v^2, times rho_t^2 where there are rollout weights."""
    energy = 1 - 2 * tokens.take(batch.token["old_logp"]).exp() + tokens.take(batch.token["sum_p2"])
    if "rollout_weight" in batch.token:
        energy = energy * tokens.take(batch.token["rollout_weight"]) ** 2
    return energy


def _cells(tokens: Written, groups: Tensor, num: int) -> tuple[Tensor, int]:
    """[M] the (group, position) of each written token, numbered, and how many there are."""
    longest = segment_max(tokens.lengths.double(), groups, num).long()  # [G]
    starts = offsets_from_lengths(longest)
    shift = tokens.spread(starts[groups] - tokens.offsets[:-1])
    return torch.arange(shift.numel(), device=shift.device) + shift, int(starts[-1])
