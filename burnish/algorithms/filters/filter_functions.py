"""Slot `filters`: which groups are used, which samples stay in the loss, and which are taken again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.spo import tokens_of_segments
from burnish.algorithms.batch_columns import first_index, lexsort, required_accuracy, trajectory_groups
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.random_keys import uniforms
from burnish.core.segments import (
    compact_ids,
    ids_from_offsets,
    offsets_from_lengths,
    segment_count,
    segment_max,
    segment_mean,
    segment_min,
    segment_sum,
)

# --- Group filters, before advantages: `[S] bool`, the same for all samples of a prompt. True is kept.
#
# They read rewards and accuracies alone, so they run before any forward pass is spent on what they drop.


def zero_signal(batch: Batch, *, metric: Literal["reward", "accuracy"]) -> Tensor:
    """[S] bool: keep groups whose metric differs between samples, and groups of one.

    The others have no gradient under a group baseline. DAPO's dynamic sampling (2503.14476), which adds the refill.
    """
    groups, num = compact_ids(batch.sequence["group_ids"])
    values = batch.sequence["reward"] if metric == "reward" else required_accuracy(batch, "filter zero_signal")
    keep = segment_max(values, groups, num) > segment_min(values, groups, num)
    _, group_of_trajectory = trajectory_groups(batch)
    return (keep | (segment_count(group_of_trajectory, num) == 1))[groups]


def difficulty_band(batch: Batch, *, low: float, high: float) -> Tensor:
    """[S] bool: keep groups with low <= mean accuracy <= high; every trajectory counts once.

    The expected improvement is bounded by the variance p(1-p), largest at one half. Bae et al. (2504.03380); PRIME
    (2502.01456).
    """
    accuracy = required_accuracy(batch, "filter difficulty_band")
    owner, group_of_trajectory = trajectory_groups(batch)
    groups, num = compact_ids(batch.sequence["group_ids"])
    by_trajectory = segment_mean(accuracy, owner, group_of_trajectory.numel())
    mean = segment_mean(by_trajectory, group_of_trajectory, num)
    return ((low <= mean) & (mean <= high))[groups]


def truncation(batch: Batch) -> Tensor:
    """[S] bool: keep groups none of whose samples was truncated (PRIME, 2502.01456)."""
    groups, num = compact_ids(batch.sequence["group_ids"])
    return (segment_max(batch.sequence["truncated"].double(), groups, num) == 0)[groups]


GROUP_FILTERS: dict[str, Callable[..., Tensor]] = {
    "zero_signal": zero_signal,
    "difficulty_band": difficulty_band,
    "truncation": truncation,
}


# --- The edges of a tree of rollouts that are trained on this time.


def tree_edges(batch: Batch, *, most: int) -> Tensor:
    """[N] bool: of each tree only edges with an advantage other than 0 stay, at most `most`. SPO-tree (2505.23564).

    They are taken in an order that is drawn from the keys of their sequences, the same whenever the tree is used: a tree that comes
    back for the k-th time (column `use`) goes on where it was, so no edge is trained twice.
    """
    paths = batch.ragged["nodes"]
    where, edge = tokens_of_segments(batch, paths)
    moves, owner = _edges_with_advantage(batch, where, edge)
    chosen = moves.nonzero().squeeze(1)
    groups, num = compact_ids(batch.sequence["group_ids"])
    noise = uniforms(batch.sequence["key"][owner], chosen - paths.offsets[owner])
    order = lexsort(noise, groups[owner])
    starts = offsets_from_lengths(segment_count(groups[owner], num))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device) - starts[groups[owner][order]]
    used = _num_uses(batch)[owner]
    now = (rank >= most * used) & (rank < most * (used + 1))
    kept = torch.zeros_like(moves).index_copy(0, chosen, now)
    mask = torch.zeros_like(batch.loss_mask).index_copy(0, where, kept[edge])
    return batch.loss_mask & mask


def has_untrained_edges(batch: Batch, most: int = 32) -> Tensor:
    """[S] bool: whether the tree of a sequence has edges that `tree_edges` keeps for a later time."""
    owner = _edges_with_advantage(batch, *tokens_of_segments(batch, batch.ragged["nodes"]))[1]
    groups, num = compact_ids(batch.sequence["group_ids"])
    return segment_count(groups[owner], num)[groups] > most * (_num_uses(batch) + 1)


def _edges_with_advantage(batch: Batch, where: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    """[E] bool, which edges of all paths have an advantage other than 0 at any of their tokens; and the sequence of each that has."""
    sequence = ids_from_offsets(batch.ragged["nodes"].offsets)  # [E]
    moves = torch.zeros(sequence.shape[0], dtype=torch.bool, device=where.device)
    moves[edge[batch.token["advantages"][where] != 0]] = True
    return moves, sequence[moves]


def _num_uses(batch: Batch) -> Tensor:
    """[S] how often a sequence was used before."""
    if "use" not in batch.sequence:
        return torch.zeros_like(batch.sequence["group_ids"])
    return batch.sequence["use"].nan_to_num(0.0).long()


# --- Sample filters, after advantages, whose statistics saw everything: a new loss mask `[N]`, never wider than the old.
#
# So is what a user's own filter answers (`loss_mask_from`).


def overlong(batch: Batch) -> Tensor:
    """[N] bool: the loss mask without truncated sequences (DAPO's overlong filtering, 2503.14476)."""
    return batch.loss_mask & ~batch.sequence["truncated"][batch.sequence_ids]


def positives_only(batch: Batch) -> Tensor:
    """[N] bool: only samples with a reward above 0 stay (RAFT++, 2504.11343)."""
    return batch.loss_mask & (batch.sequence["reward"] > 0)[batch.sequence_ids]


def cppo(batch: Batch, *, prune: float) -> Tensor:
    """[N] bool: of every group only the k = max(1, floor(G (1 - prune))) samples with the largest |A| stay.

    |A| is the mean over a sample's tokens where advantages are per token; of equals the earlier stays. A sample that
    another filter took out of the loss counts in G but takes no place. CPPO (2503.22342), per prompt as in the paper.
    """
    owner, groups = trajectory_groups(batch)
    num_groups = compact_ids(groups)[1]
    size = segment_count(groups, num_groups)
    places = (size.double() * (1 - prune) + 1e-9).floor().clamp(min=1)  # 20 * (1 - 0.9) is 1.9999999999999996 in floats
    order = lexsort(first_index(owner, groups.numel()), -_mean_abs_advantages(batch, owner, groups.numel()), groups)
    rank = torch.empty_like(order)
    starts = offsets_from_lengths(size)
    rank[order] = torch.arange(order.numel(), device=order.device) - starts[groups[order]]
    return batch.loss_mask & (rank < places[groups])[owner][batch.sequence_ids]


def _mean_abs_advantages(batch: Batch, owner: Tensor, num: int) -> Tensor:
    """[T] mean |A| of each trajectory over its tokens in the loss; -inf where it has none left."""
    owner_of_token = owner[batch.sequence_ids]
    if "advantages" in batch.token:
        mean = segment_mean(batch.token["advantages"].abs(), owner_of_token, num, batch.loss_mask)
    else:
        mean = segment_mean(batch.sequence["advantages"].abs(), owner, num)
    left = segment_count(owner_of_token, num, batch.loss_mask)
    return torch.where(left > 0, mean, torch.full_like(mean, -torch.inf))


def prob_mask(batch: Batch, *, below: float) -> Tensor:
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


def loss_mask_from_plugin(result: Tensor, batch: Batch, name: str) -> Tensor:
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


# --- Pairs from groups, after advantages: the best and the worst sample of each, for losses that compare two answers.
#
# Which of the two is the better one is the sequence column `chosen`, made when all filters are through (`better_of_two`).
# Online DPO (2402.04792), with as many samples of a prompt as there are.


def pairs(batch: Batch) -> Tensor:
    """[2 P] sequences: of each group the first of the best and the first of the worst, by reward, among those with a token in
    the loss. A group where these are equal, in reward or in every token, has no preference to learn from and gives none.
    """
    best, worst = best_and_worst(batch)
    is_pair = ~(are_ties(batch, best, worst) | are_identical(batch, best, worst))
    return torch.stack([best[is_pair], worst[is_pair]], 1).flatten()


def pair_counts(batch: Batch) -> dict[str, float]:
    """Groups whose best and worst sample have the same reward, and others where both are the same text."""
    best, worst = best_and_worst(batch)
    ties = are_ties(batch, best, worst)
    identical = are_identical(batch, best, worst) & ~ties
    made = float((~ties & ~identical).sum())
    return {"pairs/made": made, "pairs/ties": float(ties.sum()), "pairs/identical": float(identical.sum())}


def chosen_of_pair(batch: Batch) -> Tensor:
    """[S] bool: the sample of the pair with the higher reward."""
    groups, num = compact_ids(batch.sequence["group_ids"])
    rewards = batch.sequence["reward"]
    return rewards == segment_max(rewards, groups, num)[groups]


def best_and_worst(batch: Batch) -> tuple[Tensor, Tensor]:
    """[G] each: the first sequence of highest and of lowest reward of each group that has a token in the loss."""
    if batch.sequence["trajectory_ids"].unique().numel() < batch.num_sequences:
        raise UserError(
            "filter pairs compares whole answers, and a sample of this environment is several sequences: use a loss of the policy"
        )
    alive = torch.zeros(batch.num_sequences, dtype=torch.bool, device=batch.offsets.device)
    alive[batch.sequence_ids[batch.loss_mask]] = True
    where = alive.nonzero().squeeze(1)
    groups, num = compact_ids(batch.sequence["group_ids"][where])
    rewards = batch.sequence["reward"][where]
    place = torch.arange(where.numel(), device=where.device).double()

    def first(extreme: Tensor) -> Tensor:
        """[G] the first sequence whose reward is its group's."""
        return where[segment_min(torch.where(rewards == extreme[groups], place, torch.inf), groups, num).long()]

    return first(segment_max(rewards, groups, num)), first(segment_min(rewards, groups, num))


def are_ties(batch: Batch, best: Tensor, worst: Tensor) -> Tensor:
    """[G] bool: the same reward; a group of one is its own best and worst."""
    return batch.sequence["reward"][best] == batch.sequence["reward"][worst]


def are_identical(batch: Batch, best: Tensor, worst: Tensor) -> Tensor:
    """[G] bool: the same tokens, written at the same places."""
    lengths = batch.lengths
    same = lengths[best] == lengths[worst]
    one, other = batch.select(best[same]), batch.select(worst[same])
    differs = (one.tokens != other.tokens) | (one.action_mask != other.action_mask)
    apart = torch.zeros(one.num_sequences, dtype=torch.bool, device=differs.device)
    apart[one.sequence_ids[differs]] = True
    return same.masked_scatter(same, ~apart)


# --- Resamplers, after advantages: `[S'] int64`, the sequences to train on, in order; repeats are allowed.
#
# A batch of them is `batch.select(index)`: what was computed for a sample (advantages, old log-probs) goes with it.

PfPpoMode = Literal["power", "best_worst", "best_random", "best"]
PF_PPO_STREAM = 0x5046_5050_4F  # "PFPPO": other picks by the same key, such as Clip-Cov's, have noise of their own


def pf_ppo(batch: Batch, *, mode: PfPpoMode, power: float) -> Tensor:
    """[S'] sequences: from each group as many draws as it has samples, with replacement, favouring the extremes.

    Learned scores are reliable only there. Draw d of a group is a function of the identity of its first sequence and
    of d. Policy filtration, PF-PPO (2409.06957), per prompt as in the paper.
    """
    owner, groups = trajectory_groups(batch)
    of_sequence, num = compact_ids(batch.sequence["group_ids"])
    rewards = segment_mean(batch.sequence["reward"], owner, groups.numel())  # [T]
    order = lexsort(first_index(owner, groups.numel()), groups)  # [T] trajectories, group after group
    starts = offsets_from_lengths(segment_count(groups, num))
    group = groups[order]
    draw = torch.arange(order.numel(), device=order.device) - starts[group]
    keys = batch.sequence["key"][first_index(of_sequence, num)] ^ PF_PPO_STREAM
    # The probabilities of a group sum to 1, so those of group g fill the interval from g to g + 1.
    cumulative = pf_probabilities(rewards, groups, num, mode, power)[order].cumsum(0)
    picked = torch.searchsorted(cumulative, group + uniforms(keys[group], draw))
    picked = picked.clamp(starts[group], starts[group + 1] - 1)  # rounding must not hand a draw to the next group
    return _sequences_of(order[picked], owner, groups.numel())


def pf_probabilities(scores: Tensor, groups: Tensor, num: int, mode: PfPpoMode, power: float) -> Tensor:
    """[T] the chance of each sample in one draw from its group, proportional to weight + 1e-8.

    power: |s|^power. best_worst: 1 for the best and the worst, else 0. best_random: best 0.4, others 0.1. best: the
    best only. All samples that tie for an extreme get its weight.
    """
    best = scores == segment_max(scores, groups, num)[groups]
    worst = scores == segment_min(scores, groups, num)[groups]
    if mode == "power":
        weights = scores.abs() ** power
    elif mode == "best_worst":
        weights = (best | worst).to(scores.dtype)
    elif mode == "best_random":
        weights = torch.full_like(scores, 0.1).masked_fill(best, 0.4)
    else:
        weights = best.to(scores.dtype)
    weights = weights + 1e-8
    return weights / segment_sum(weights, groups, num)[groups]


def _sequences_of(trajectories: Tensor, owner: Tensor, num: int) -> Tensor:
    """The sequences of each trajectory of a list, in order."""
    by_owner = owner.argsort(stable=True)
    counts = segment_count(owner, num)
    lengths = counts[trajectories]
    offsets = offsets_from_lengths(lengths)
    shift = torch.repeat_interleave(offsets_from_lengths(counts)[trajectories] - offsets[:-1], lengths)
    return by_owner[torch.arange(int(offsets[-1]), device=owner.device) + shift]


RESAMPLERS: dict[str, Callable[..., Tensor]] = {"pf_ppo": pf_ppo, "pairs": pairs}
