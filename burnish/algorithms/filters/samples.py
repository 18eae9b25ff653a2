"""Sample filters, after advantages, whose statistics saw everything: a new loss mask `[N]`, never wider than the old.

So is what a user's own filter answers (`loss_mask_from`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from burnish.algorithms.advantages import trajectory_groups
from burnish.algorithms.filters.columns import first_index, lexsort
from burnish.algorithms.filters.edges import tree_edges
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, offsets_from_lengths, segment_count, segment_mean


def overlong(batch: Batch) -> Tensor:
    """[N] bool: the loss mask without truncated sequences (DAPO's overlong filtering, 2503.14476)."""
    return batch.loss_mask & ~batch.sequence["truncated"][batch.sequence_ids]


def positives_only(batch: Batch) -> Tensor:
    """[N] bool: only samples with a reward above 0 stay (RAFT++, 2504.11343)."""
    return batch.loss_mask & (batch.sequence["reward"] > 0)[batch.sequence_ids]


def cppo(batch: Batch, prune: float = 0.5) -> Tensor:
    """[N] bool: of every group only the k = max(1, floor(G (1 - prune))) samples with the largest |A| stay.

    |A| is the mean over a sample's tokens where advantages are per token; of equals the earlier stays. A sample that
    another filter took out of the loss counts in G but takes no place. CPPO (2503.22342), per prompt as in the paper.
    """
    owner, groups = trajectory_groups(batch)
    num_groups = compact_ids(groups)[1]
    size = segment_count(groups, num_groups)
    places = (size.double() * (1 - prune) + 1e-9).floor().clamp(min=1)  # 20 * (1 - 0.9) is 1.9999999999999996 in floats
    order = lexsort(first_index(owner, groups.numel()), -_strength(batch, owner, groups.numel()), groups)
    rank = torch.empty_like(order)
    starts = offsets_from_lengths(size)
    rank[order] = torch.arange(order.numel(), device=order.device) - starts[groups[order]]
    return batch.loss_mask & (rank < places[groups])[owner][batch.sequence_ids]


def _strength(batch: Batch, owner: Tensor, num: int) -> Tensor:
    """[T] mean |A| of each trajectory over its tokens in the loss; -inf where it has none left."""
    owner_of_token = owner[batch.sequence_ids]
    if "advantages" in batch.token:
        mean = segment_mean(batch.token["advantages"].abs(), owner_of_token, num, batch.loss_mask)
    else:
        mean = segment_mean(batch.sequence["advantages"].abs(), owner, num)
    left = segment_count(owner_of_token, num, batch.loss_mask)
    return torch.where(left > 0, mean, torch.full_like(mean, -torch.inf))


def prob_mask(batch: Batch, below: float = 0.9) -> Tensor:
    """[N] bool: only tokens the old policy gave a probability under `below` stay: where it had a choice.

    The probability mask of SPO (2505.23564); masked tokens leave the denominators too.
    """
    return batch.loss_mask & (batch.token["old_logp"] < math.log(below))


SAMPLE_FILTERS: dict[str, Callable[..., Tensor]] = {
    "overlong": overlong,
    "positives_only": positives_only,
    "cppo": cppo,
    "prob_mask": prob_mask,
    "tree_edges": tree_edges,
}


def loss_mask_from(result: Tensor, batch: Batch, name: str) -> Tensor:
    """[N] the loss mask after a user's filter, which may answer per sequence (keep it?) or per token (keep it?)."""
    if not isinstance(result, Tensor):
        raise UserError(
            f"filter {name} returned {type(result).__name__}; expected a bool tensor: what to keep in the loss"
        )
    if result.dtype != torch.bool or result.shape not in ((batch.num_sequences,), (batch.num_tokens,)):
        raise UserError(
            f"filter {name} returned {result.dtype} of shape {tuple(result.shape)}; expected bool, one a sequence "
            f"[{batch.num_sequences}] or one a token [{batch.num_tokens}]: what to keep in the loss"
        )
    if result.shape == (batch.num_sequences,):
        result = result[batch.sequence_ids]
    return batch.loss_mask & result
