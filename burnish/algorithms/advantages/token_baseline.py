"""A baseline for every position of a group's answers, weighted by how much gradient each answer has there."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.returns import is_constant, returns_at
from burnish.algorithms.advantages.written import Written, written
from burnish.algorithms.recurrence import running_sum
from burnish.core.batch import Batch
from burnish.core.segments import (
    compact_ids,
    ids_from_offsets,
    offsets_from_lengths,
    segment_count,
    segment_max,
    segment_sum,
)


def otb(batch: Batch, tail: Literal["raw", "zero"] = "raw") -> Tensor:
    """[N] return-to-go minus the optimal token baseline.

        w_t = 1 - 2 pi_t + sum_v pi_v^2;   W_t = w_1 + ... + w_t;   b_t = sum_g G_t W_t / (sum_g W_t + 1e-8);   A = G - b

    w is the squared gradient of the token's logits, pi the probability under the policy before the update (`sum_p2`, and
    `policy_logp` where there is that column, because `old_logp` is of other policies, else `old_logp`); t counts written tokens, and an answer that has ended has no weight. With a token column `rollout_weight`
    rho, w_t is multiplied by rho_t^2. Every sequence is an answer of its own. One answer alone in its group has no
    baseline; where one is longer than all others of its group, `tail` says whether what is beyond them keeps its raw
    return or gets 0.
    """
    tokens = written(batch)
    energy = running_sum(_logit_energy(batch, tokens), tokens.offsets)
    returns = _returns(batch, tokens).to(energy.dtype)
    groups, num = compact_ids(batch.sequence["group_ids"])
    longest = segment_max(tokens.lengths.double(), groups, num).long()  # [G]
    starts = offsets_from_lengths(longest)
    shift = tokens.spread(starts[groups] - tokens.offsets[:-1])
    cells, num_cells = torch.arange(shift.numel(), device=shift.device) + shift, int(starts[-1])
    baseline = segment_sum(returns * energy, cells, num_cells) / (segment_sum(energy, cells, num_cells) + 1e-8)
    lonely = _lonely(tokens.lengths, groups, longest)  # [cells]
    advantages = returns - baseline.masked_fill_(lonely, 0).index_select(0, cells)
    if tail == "zero":
        alone = lonely.index_select(0, cells) & ~tokens.spread((segment_count(groups, num) == 1)[groups])
        advantages = advantages.masked_fill_(alone, 0)
    return tokens.put(advantages)


def _returns(batch: Batch, tokens: Written) -> Tensor:
    """[M] return-to-go; with an outcome alone it is the same at every token of a sequence."""
    return tokens.spread(batch.sequence["reward"]) if is_constant(batch, 1.0) else returns_at(batch, tokens, 1.0)


def _lonely(lengths: Tensor, groups: Tensor, longest: Tensor) -> Tensor:
    """[cells] bool: the (group, position) pairs that a single answer reaches, from the second longest of the group on."""
    num = longest.numel()
    is_longest = lengths == longest[groups]
    others = segment_max(torch.where(is_longest, 0, lengths).double(), groups, num).long()
    second = torch.where(segment_count(groups, num, is_longest) > 1, longest, others)
    group_of_cell = ids_from_offsets(offsets_from_lengths(longest))
    first = offsets_from_lengths(longest)[:-1]
    position = torch.arange(group_of_cell.numel(), device=lengths.device) - first.index_select(0, group_of_cell)
    return position >= second.index_select(0, group_of_cell)


def _logit_energy(batch: Batch, tokens: Written) -> Tensor:
    """[M] w_t = 1 - 2 pi_t + sum_v pi_v^2, times rho_t^2 where there are rollout weights."""
    logp = batch.token["policy_logp" if "policy_logp" in batch.token else "old_logp"]
    energy = 1 - 2 * tokens.take(logp).exp() + tokens.take(batch.token["sum_p2"])
    if "rollout_weight" in batch.token:
        energy = energy * tokens.take(batch.token["rollout_weight"]) ** 2
    return energy
