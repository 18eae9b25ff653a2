"""Slot `filters`: group filters, sample filters and resamplers.

A group filter drops whole groups, a sample filter takes samples or tokens out of the loss, a resampler chooses the
sequences to train on. `trainers/pipeline.py` applies them in the order of the config.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.spo import tokens_of_segments
from burnish.algorithms.batch_columns import (
    Groups,
    differs_within_trajectories,
    first_index,
    is_truncated,
    lexsort,
    required_accuracy,
    sampled_loss_mask,
    trajectory_groups,
)
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.random_keys import uniforms
from burnish.core.segments import (
    compact_ids,
    ids_from_offsets,
    offsets_from_lengths,
    running_sum,
    segment_count,
    segment_max,
    segment_mean,
    segment_min,
    segment_sum,
)

MIN_SPREAD = 1e-10
"""Rewards whose standard deviation is at most this are equal."""
MIN_DEVIATION = 1e-12
"""Scores of tokens whose standard deviation is below this are equal."""
MAX_EXPONENT = 700.0
"""Log-ratios are clamped to this before the exponential, which float64 can still sum."""
BALANCE_STREAM = 0x42_414C_414E_4345
"""XORed into the keys ("BALANCE" in ASCII), so that other draws by the same key have different noise."""

# --- Group filters, before advantages: [S] bool, the same for all samples of a prompt; True is kept
#
# They read only rewards and accuracies, so they run before any forward pass is spent on groups they drop.


def zero_signal(batch: Batch, *, metric: Literal["reward", "accuracy"]) -> Tensor:
    """[S] bool: keep groups whose metric differs between samples, and groups of one. DAPO's dynamic sampling (2503.14476).

    The other groups have no gradient under a group baseline. `algorithm.refill` draws more prompts for them.
    """
    groups, num = compact_ids(batch.sequence["group_ids"])
    values = batch.sequence["reward"] if metric == "reward" else required_accuracy(batch, "filter zero_signal")
    keep = segment_max(values, groups, num) > segment_min(values, groups, num)
    _, group_of_trajectory = trajectory_groups(batch)
    return (keep | (segment_count(group_of_trajectory, num) == 1))[groups]


def difficulty_band(batch: Batch, *, low: float, high: float) -> Tensor:
    """[S] bool: keep groups with low <= mean accuracy <= high; every trajectory counts once. Bae et al. (2504.03380).

    The expected improvement is bounded by the variance p(1-p), which is largest at 1/2. Also in PRIME (2502.01456).
    """
    accuracy = required_accuracy(batch, "filter difficulty_band")
    trajectory_ids, group_of_trajectory = trajectory_groups(batch)
    groups, num = compact_ids(batch.sequence["group_ids"])
    by_trajectory = segment_mean(accuracy, trajectory_ids, group_of_trajectory.numel())
    mean = segment_mean(by_trajectory, group_of_trajectory, num)
    return ((low <= mean) & (mean <= high))[groups]


def truncation(batch: Batch) -> Tensor:
    """[S] bool: keep groups without a truncated sample. PRIME (2502.01456)."""
    groups, num = compact_ids(batch.sequence["group_ids"])
    return (segment_max(batch.sequence["truncated"].double(), groups, num) == 0)[groups]


def snr(
    batch: Batch,
    *,
    mode: Literal["linear", "softmax", "top", "relative"],
    share: float,
    slack: float,
    include_zero: bool,
) -> Tensor:
    """[S] bool: keep the groups of largest reward spread, which have the highest signal-to-noise ratio. RAGEN-2 (2604.06268).

    The spread s_g is the sample standard deviation of the group's rewards, one per trajectory. Groups are taken in order of
    falling spread, ties in the order of the batch. Without `include_zero` only groups with s_g > 0 are taken.

    - linear: while the sum of the spreads taken so far is below share * (sum of all) - slack, and s_g > 0; all groups if `share` is 1.
    - softmax: the fewest groups whose softmax(s) add up to `share`.
    - top: the ceil(share * number of groups) first ones.
    - relative: those with s_g >= share * (largest s).
    """
    trajectory_ids, group_of_trajectory = trajectory_groups(batch)
    of_sequence, num = compact_ids(batch.sequence["group_ids"])
    rewards = segment_mean(batch.sequence["reward"], trajectory_ids, group_of_trajectory.numel())
    groups = Groups(group_of_trajectory, num)
    deviation = groups.deviation(rewards - groups.mean(rewards)).masked_fill(groups.is_constant(rewards), 0)
    spread = deviation[first_index(group_of_trajectory, num)]  # [G]
    ordered, order = spread.sort(descending=True, stable=True)
    has_spread = ordered > MIN_SPREAD
    if mode == "linear" and share == 1:
        taken = torch.ones_like(has_spread)
    elif mode == "linear":
        taken = (running_sum(ordered) - ordered < share * ordered.sum() - slack) & has_spread
    elif mode == "softmax":
        probabilities = ordered.softmax(0)
        taken = running_sum(probabilities) - probabilities < share - 1e-12  # rounding must not take one group more
    elif mode == "top":
        taken = torch.arange(num, device=order.device) < math.ceil(share * num - 1e-9)
    else:
        taken = ordered >= share * ordered[0]
    keep = torch.zeros_like(taken).index_copy(0, order, taken if include_zero else taken & has_spread)
    return keep[of_sequence]


GROUP_FILTERS: dict[str, Callable[..., Tensor]] = {
    "zero_signal": zero_signal,
    "difficulty_band": difficulty_band,
    "truncation": truncation,
    "snr": snr,
}
"""The function of each group filter."""


# --- Edges of a tree


def tree_edges(batch: Batch, *, most: int) -> Tensor:
    """[N] bool: keep at most `most` edges of each tree, only edges with a nonzero advantage. SPO-tree (2505.23564).

    Edges are taken in an order drawn from the keys of their sequences, which is the same for every use of the tree. The k-th
    use (column `use`) continues where the previous use ended, so no edge is trained twice.
    """
    paths = batch.ragged["nodes"]
    where, edge = tokens_of_segments(batch, paths)
    has_advantage, sequence = _edges_with_advantage(batch, where, edge)
    chosen = has_advantage.nonzero().squeeze(1)
    groups, num = compact_ids(batch.sequence["group_ids"])
    noise = uniforms(batch.sequence["key"][sequence], chosen - paths.offsets[sequence])
    order = lexsort(noise, groups[sequence])
    starts = offsets_from_lengths(segment_count(groups[sequence], num))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device) - starts[groups[sequence][order]]
    used = _num_uses(batch)[sequence]
    now = (rank >= most * used) & (rank < most * (used + 1))
    kept = torch.zeros_like(has_advantage).index_copy(0, chosen, now)
    mask = torch.zeros_like(batch.loss_mask).index_copy(0, where, kept[edge])
    return batch.loss_mask & mask


def has_untrained_edges(batch: Batch, most: int) -> Tensor:
    """[S] bool: whether the sequence's tree has edges that `tree_edges` keeps for later uses."""
    sequence = _edges_with_advantage(batch, *tokens_of_segments(batch, batch.ragged["nodes"]))[1]
    groups, num = compact_ids(batch.sequence["group_ids"])
    return segment_count(groups[sequence], num)[groups] > most * (_num_uses(batch) + 1)


def _edges_with_advantage(batch: Batch, where: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    """[E] bool: which edges of all paths have a nonzero advantage at any token; and the sequence of each of those."""
    sequence = ids_from_offsets(batch.ragged["nodes"].offsets)  # [E]
    has_advantage = torch.zeros(sequence.shape[0], dtype=torch.bool, device=where.device)
    has_advantage[edge[batch.token["advantages"][where] != 0]] = True
    return has_advantage, sequence[has_advantage]


def _num_uses(batch: Batch) -> Tensor:
    """[S] how often a sequence was used before."""
    if "use" not in batch.sequence:
        return torch.zeros_like(batch.sequence["group_ids"])
    return batch.sequence["use"].nan_to_num(0.0).long()


# --- Sample filters, after advantages: [N] the new loss mask, never wider than the old one
#
# Group statistics and advantages include the samples that these filters drop.


def overlong(batch: Batch) -> Tensor:
    """[N] bool: the loss mask without truncated trajectories. DAPO's overlong filtering (2503.14476)."""
    return batch.loss_mask & ~is_truncated(batch)[batch.sequence_ids]


def void_turns(batch: Batch) -> Tensor:
    """[N] bool: the loss mask without trajectories that have a void turn. SimpleTIR (2509.02479).

    A void turn has neither a complete block of code (or another call) nor a final answer: mostly text after the model has left its own
    distribution, whose low probabilities make gradients explode. The column `void_turns` has their number in the trajectory.
    """
    if "void_turns" not in batch.sequence:
        raise UserError(
            "filter void_turns needs an environment that counts void turns: tools, tags, retool, torl, search_r1 and research do; one of "
            "your own sets tells_void_turns = True and counts them in the metric void_turns of its observations and ends"
        )
    return batch.loss_mask & ~(batch.sequence["void_turns"] > 0)[batch.sequence_ids]


def non_stub(batch: Batch, *, min_chars: int) -> Tensor:
    """[N] bool: the loss mask without answers that are empty, or one line of fewer than `min_chars` characters (2604.01193).

    Reads the sequence columns `num_chars` and `num_lines` of the answer's text.
    """
    chars, lines = batch.sequence["num_chars"], batch.sequence["num_lines"]
    keep = (chars > 0) & ((lines > 1) | (chars >= min_chars))
    return batch.loss_mask & keep[batch.sequence_ids]


def positives_only(batch: Batch) -> Tensor:
    """[N] bool: the loss mask of samples with a reward above 0. RAFT++ (2504.11343)."""
    return batch.loss_mask & (batch.sequence["reward"] > 0)[batch.sequence_ids]


def cppo(batch: Batch, *, prune: float) -> Tensor:
    """[N] bool: of every group keep the max(1, floor(G (1 - prune))) samples of largest |A|. CPPO (2503.22342).

    |A| is the mean over a sample's tokens if advantages are per token; of ties the earlier sample is kept. A sample that
    another filter took out of the loss counts in G but is not kept.
    """
    trajectory_ids, groups = trajectory_groups(batch)
    num_groups = compact_ids(groups)[1]
    size = segment_count(groups, num_groups)
    num_kept = (
        (size.double() * (1 - prune) + 1e-9).floor().clamp(min=1)
    )  # 20 * (1 - 0.9) is 1.9999999999999996 in floats
    order = lexsort(
        first_index(trajectory_ids, groups.numel()),
        -_mean_abs_advantages(batch, trajectory_ids, groups.numel()),
        groups,
    )
    rank = torch.empty_like(order)
    starts = offsets_from_lengths(size)
    rank[order] = torch.arange(order.numel(), device=order.device) - starts[groups[order]]
    return batch.loss_mask & (rank < num_kept[groups])[trajectory_ids][batch.sequence_ids]


def _mean_abs_advantages(batch: Batch, trajectory_ids: Tensor, num: int) -> Tensor:
    """[T] mean |A| of each trajectory over its tokens in the loss; -inf without such a token."""
    trajectory_of_token = trajectory_ids[batch.sequence_ids]
    if "advantages" in batch.token:
        mean = segment_mean(batch.token["advantages"].abs(), trajectory_of_token, num, batch.loss_mask)
    else:
        mean = segment_mean(batch.sequence["advantages"].abs(), trajectory_ids, num)
    left = segment_count(trajectory_of_token, num, batch.loss_mask)
    return torch.where(left > 0, mean, torch.full_like(mean, -torch.inf))


def prob_mask(batch: Batch, *, below: float) -> Tensor:
    """[N] bool: keep tokens with probability below `below` under the old policy. Probability mask of SPO (2505.23564).

    Masked tokens leave the denominators too.
    """
    return batch.loss_mask & (batch.token["old_logp"] < math.log(below))


def seq_error(batch: Batch, *, threshold: float) -> Tensor:
    """[N] bool: the loss mask without trajectories whose log-probs of engine and trainer disagree, e_i > threshold. NeMo-RL.

    e_i = mean_t exp(|behaviour_t - old_t|) over the trajectory's tokens in the loss, at least 1. It is symmetric in the sign, unlike the
    rejection of a correction, and a mean, so that one bad token in a long answer does not show: combine it with a veto.
    """
    trajectory_ids, groups = trajectory_groups(batch)
    error = sequence_errors(batch, trajectory_ids, groups.numel())
    return batch.loss_mask & ~(error > threshold)[trajectory_ids][batch.sequence_ids]


def sequence_errors(batch: Batch, trajectory_ids: Tensor, num: int) -> Tensor:
    """[T] float64 mean of exp(|behaviour - old|) over each trajectory's sampled tokens in the loss; 0 without such a token."""
    mask = sampled_loss_mask(batch)
    gap = (batch.token["behaviour_logp"].double() - batch.token["old_logp"].double()).abs()
    return segment_mean(gap.clamp(max=MAX_EXPONENT).exp(), trajectory_ids[batch.sequence_ids], num, mask)


def seq_error_metrics(batch: Batch, threshold: float) -> dict[str, float]:
    """Metrics of `seq_error`: mean, min and max of e before and after, trajectories dropped, and the share of right ones among these."""
    trajectory_ids, groups = trajectory_groups(batch)
    error = sequence_errors(batch, trajectory_ids, groups.numel())
    is_dropped = error > threshold
    found = {"dropped": float(is_dropped.sum())}
    for when, values in (("before", error[error > 0]), ("after", error[(error > 0) & ~is_dropped])):
        if values.numel():
            found |= {f"{when}_mean": float(values.mean()), f"{when}_max": float(values.max())}
            found[f"{when}_min"] = float(values.min())
    if "accuracy" in batch.sequence and bool(is_dropped.any()):
        first = first_index(trajectory_ids, groups.numel())
        accuracy = batch.sequence["accuracy"][first][is_dropped]
        known = accuracy[~accuracy.isnan()]
        found |= {"dropped_accuracy": float(known.mean())} if known.numel() else {}
    return {f"seq_error/{name}": value for name, value in found.items()}


def clip_b(batch: Batch, *, mu: float) -> Tensor:
    """[N] bool: the loss mask without tokens of A < 0 whose S is more than mu deviations below the mean. CLIP_B of Trinity-RFT.

    S = p (H + log p), with p the probability at which the engine sampled the token and H the entropy there. Pushing down a token of low
    S sharpens the distribution. Mean and population deviation are over all sampled tokens in the loss of the batch.
    """
    mask = sampled_loss_mask(batch)
    logp = batch.token["behaviour_logp"].double()
    scores = (logp.exp() * (batch.token["old_entropy"].double() + logp))[mask]
    if scores.numel() == 0:
        return batch.loss_mask
    centred = scores - scores.mean()
    deviation = centred.square().mean().sqrt()
    is_low = (centred < -mu * deviation) & (deviation >= MIN_DEVIATION)
    low = torch.zeros_like(mask).masked_scatter(mask, is_low)
    return batch.loss_mask & ~(low & (_token_advantages(batch) < 0))


def balance(batch: Batch) -> Tensor:
    """[N] bool: of every group drop surplus samples of A < 0 at random, until there are no more of them than of A > 0. REC (2509.24203).

    The sign is that of the mean over a sample's tokens in the loss. The draw depends only on the key of a sample's first sequence.
    """
    trajectory_ids, groups = trajectory_groups(batch)
    num = groups.numel()
    mean = segment_mean(_token_advantages(batch), trajectory_ids[batch.sequence_ids], num, batch.loss_mask)
    num_groups = compact_ids(groups)[1]
    num_positive = segment_count(groups, num_groups, mean > 0)
    is_negative = mean < 0
    keys = batch.sequence["key"][first_index(trajectory_ids, num)] ^ BALANCE_STREAM
    order = lexsort(
        uniforms(keys, torch.zeros_like(keys)), (~is_negative).long(), groups
    )  # negatives first in each group
    rank = torch.empty_like(order)
    starts = offsets_from_lengths(segment_count(groups, num_groups))
    rank[order] = torch.arange(num, device=order.device) - starts[groups[order]]
    dropped = is_negative & (rank >= num_positive[groups])
    return batch.loss_mask & ~dropped[trajectory_ids][batch.sequence_ids]


def _token_advantages(batch: Batch) -> Tensor:
    """[N] the advantage of each token."""
    return (
        batch.token["advantages"] if "advantages" in batch.token else batch.sequence["advantages"][batch.sequence_ids]
    )


SAMPLE_FILTERS: dict[str, Callable[..., Tensor]] = {
    "overlong": overlong,
    "void_turns": void_turns,
    "non_stub": non_stub,
    "positives_only": positives_only,
    "cppo": cppo,
    "prob_mask": prob_mask,
    "seq_error": seq_error,
    "clip_b": clip_b,
    "balance": balance,
    "tree_edges": tree_edges,
}
"""The function of each sample filter."""


def loss_mask_from_plugin(result: Tensor, batch: Batch, name: str) -> Tensor:
    """[N] the loss mask after a user's filter, which may return what to keep per sequence or per token."""
    if not isinstance(result, Tensor):
        raise UserError(
            f"filter {name} returned {type(result).__name__}; expected a bool tensor: what to keep in the loss"
        )
    if result.dtype != torch.bool or result.shape not in ((batch.num_sequences,), (batch.num_tokens,)):
        raise UserError(
            f"filter {name} returned {result.dtype} of shape {tuple(result.shape)}; expected bool, one per sequence "
            f"[{batch.num_sequences}] or one per token [{batch.num_tokens}]: what to keep in the loss"
        )
    if result.shape == (batch.num_sequences,):
        if differs_within_trajectories(batch, result):
            raise UserError(
                f"filter {name} keeps some sequences of a trajectory and drops others: `trajectory_ids` tells which belong together; keep or "
                "drop all of them, or return one bool per token"
            )
        result = result[batch.sequence_ids]
    return batch.loss_mask & result


# --- Pairs, after advantages: the best and the worst sample of each group, for preference losses
#
# `chosen_of_pair` marks the better one after all filters. Online DPO (2402.04792), with any number of samples per prompt.


def pairs(batch: Batch) -> Tensor:
    """[2P] sequences: of each group the first of the best and the first of the worst by reward. Online DPO (2402.04792).

    Only sequences with a token in the loss count. A group gives no pair if the two are equal in reward or in every token.
    """
    best, worst = best_and_worst(batch)
    is_pair = ~(are_ties(batch, best, worst) | are_identical(batch, best, worst))
    return torch.stack([best[is_pair], worst[is_pair]], 1).flatten()


def pair_counts(batch: Batch) -> dict[str, float]:
    """Metrics: pairs made, groups whose best and worst sample have the same reward, and other groups where both are the same text."""
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
    """[G], [G]: the first sequence of highest and of lowest reward of each group, among those with a token in the loss."""
    if batch.sequence["trajectory_ids"].unique().numel() < batch.num_sequences:
        raise UserError(
            "filter pairs compares whole answers, and a sample of this environment is several sequences: use a policy loss"
        )
    in_loss = torch.zeros(batch.num_sequences, dtype=torch.bool, device=batch.offsets.device)
    in_loss[batch.sequence_ids[batch.loss_mask]] = True
    where = in_loss.nonzero().squeeze(1)
    groups, num = compact_ids(batch.sequence["group_ids"][where])
    rewards = batch.sequence["reward"][where]
    place = torch.arange(where.numel(), device=where.device).double()

    def first(extreme: Tensor) -> Tensor:
        """[G] the first sequence of each group whose reward is the group's `extreme`."""
        return where[segment_min(torch.where(rewards == extreme[groups], place, torch.inf), groups, num).long()]

    return first(segment_max(rewards, groups, num)), first(segment_min(rewards, groups, num))


def are_ties(batch: Batch, best: Tensor, worst: Tensor) -> Tensor:
    """[G] bool: equal rewards; a group of one is its own best and worst."""
    return batch.sequence["reward"][best] == batch.sequence["reward"][worst]


def are_identical(batch: Batch, best: Tensor, worst: Tensor) -> Tensor:
    """[G] bool: the same tokens with the same `action_mask`."""
    lengths = batch.lengths
    same = lengths[best] == lengths[worst]
    one, other = batch.select(best[same]), batch.select(worst[same])
    differs = (one.tokens != other.tokens) | (one.action_mask != other.action_mask)
    apart = torch.zeros(one.num_sequences, dtype=torch.bool, device=differs.device)
    apart[one.sequence_ids[differs]] = True
    return same.masked_scatter(same, ~apart)


# --- Resamplers, after advantages: [S'] int64, the sequences to train on, in order; repeats are allowed
#
# `batch.select(index)` takes the columns of a sample (advantages, old log-probs) with it.

PfPpoMode = Literal["power", "best_worst", "best_random", "best"]
PF_PPO_STREAM = 0x5046_5050_4F
"""XORed into the keys ("PFPPO" in ASCII), so that other draws by the same key, such as Clip-Cov's, have different noise."""


def pf_ppo(batch: Batch, *, mode: PfPpoMode, power: float) -> Tensor:
    """[S'] sequences: from each group as many draws as it has samples, with replacement. PF-PPO (2409.06957).

    The draws favour the extremes, where learned rewards are reliable. Draw d of a group depends only on the key of the group's
    first sequence and on d.
    """
    trajectory_ids, groups = trajectory_groups(batch)
    of_sequence, num = compact_ids(batch.sequence["group_ids"])
    rewards = segment_mean(batch.sequence["reward"], trajectory_ids, groups.numel())  # [T]
    order = lexsort(first_index(trajectory_ids, groups.numel()), groups)  # [T] trajectories, group after group
    starts = offsets_from_lengths(segment_count(groups, num))
    group = groups[order]
    draw = torch.arange(order.numel(), device=order.device) - starts[group]
    keys = batch.sequence["key"][first_index(of_sequence, num)] ^ PF_PPO_STREAM
    # The probabilities of a group sum to 1, so those of group g fill the interval from g to g + 1.
    cumulative = running_sum(pf_probabilities(rewards, groups, num, mode, power)[order])
    picked = torch.searchsorted(cumulative, group + uniforms(keys[group], draw))
    picked = picked.clamp(starts[group], starts[group + 1] - 1)  # rounding must not move a draw to the next group
    return _sequences_of(order[picked], trajectory_ids, groups.numel())


def pf_probabilities(scores: Tensor, groups: Tensor, num: int, mode: PfPpoMode, power: float) -> Tensor:
    """[T] probability of each sample in one draw from its group, proportional to weight + 1e-8.

    power: |s|^power. best_worst: 1 for the best and the worst, else 0. best_random: best 0.4, others 0.1. best: the best only.
    All samples that tie for an extreme have its weight.
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


def _sequences_of(trajectories: Tensor, trajectory_ids: Tensor, num: int) -> Tensor:
    """The sequences of each trajectory of a list, in order."""
    by_trajectory = trajectory_ids.argsort(stable=True)
    counts = segment_count(trajectory_ids, num)
    lengths = counts[trajectories]
    offsets = offsets_from_lengths(lengths)
    shift = torch.repeat_interleave(offsets_from_lengths(counts)[trajectories] - offsets[:-1], lengths)
    return by_trajectory[torch.arange(int(offsets[-1]), device=trajectory_ids.device) + shift]


RESAMPLERS: dict[str, Callable[..., Tensor]] = {"pf_ppo": pf_ppo, "pairs": pairs}
"""The function of each resampler."""
