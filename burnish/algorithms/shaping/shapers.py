"""Slot `shaping`: changes of the reward between the verifier and the advantages, in the order of the config.

A shaper is called as `f(batch, step, **options)`. It returns the new reward of each sequence [S], or, if its record is
`dense`, token rewards to add [N]. `step` is the training step of the batch, counted from 1. The accuracy never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.advantages.returns import discounted_returns
from burnish.algorithms.batch_columns import (
    Groups,
    first_index,
    is_correct,
    is_truncated,
    trajectory_groups,
    trajectory_lengths,
    trajectory_offsets,
    turns_of,
)
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.random_keys import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, to_int64
from burnish.core.segments import compact_ids, ids_from_offsets, segment_count, segment_max, segment_mean, segment_min

# --- Length
#
# Lengths are the action tokens of a trajectory, so that tool results and prompts cost nothing.


def soft_overlong(batch: Batch, step: int, *, max_tokens: int | None, cache: int | None, factor: float) -> Tensor:
    """[S] r - factor * clip((len - (max_tokens - cache)) / cache, 0, 1). DAPO's soft overlong punishment (2503.14476).

    The penalty grows linearly over the last `cache` tokens before the limit, instead of a cliff at truncation. A `cache` of
    None is a fifth of max_tokens, at least 1.
    """
    limit = _required_max_tokens(max_tokens, "soft_overlong")
    cache = max(1, limit // 5) if cache is None else cache
    if not 0 < cache <= limit:
        raise UserError(f"soft_overlong.cache is {cache}; expected 1 to max_tokens ({limit})")
    over = (trajectory_lengths(batch).double() - (limit - cache)) / cache
    return batch.sequence["reward"] - factor * over.clamp(0, 1)


def kimi_length(batch: Batch, step: int, *, weight: float, warmup_steps: int) -> Tensor:
    """[S] r + weight * b with lambda_i = 1/2 - (len_i - min_g) / (max_g - min_g). Kimi k1.5 (2501.12599).

    b is lambda_i for a right answer, min(0, lambda_i) for a wrong one, and 0 in a group of equal lengths. The term is off for
    the first `warmup_steps` steps.
    """
    correct = is_correct(batch, "shaper kimi_length")
    groups, num = compact_ids(batch.sequence["group_ids"])
    lengths = trajectory_lengths(batch).double()
    shortest, longest = segment_min(lengths, groups, num)[groups], segment_max(lengths, groups, num)[groups]
    relative = 0.5 - (lengths - shortest) / (longest - shortest).clamp(min=1)
    bonus = torch.where(correct, relative, relative.clamp(max=0))
    bonus = torch.where(longest > shortest, bonus, torch.zeros_like(bonus))
    return batch.sequence["reward"] + (weight if step > warmup_steps else 0.0) * bonus


def linear_length(batch: Batch, step: int, *, output: float, input: float, turns: float) -> Tensor:
    """[S] r - mean_g(r) (output len / max_g len + input in / max_g in + turns k / max_g k). prime-rl's length penalty.

    `len` are the tokens written, `in` the tokens read (`num_read_tokens`), k the turns; each maximum is at least 1. The factor
    mean_g(r) is the pass rate: prompts that are not solved are not punished.
    """
    trajectory_ids, group_ids = trajectory_groups(batch)
    groups, num = Groups(group_ids, int(group_ids.max()) + 1), group_ids.numel()
    first = first_index(trajectory_ids, num)
    rewards = segment_mean(batch.sequence["reward"], trajectory_ids, num)
    turn_counts = segment_count(trajectory_ids[turns_of(batch).sequence_of_turn], num).double()
    counts = (trajectory_lengths(batch)[first].double(), num_read_tokens(batch), turn_counts)
    relative = [x / groups.max(x).clamp(min=1) for x in counts]
    share = output * relative[0] + input * relative[1] + turns * relative[2]
    return (rewards - groups.mean(rewards) * share)[trajectory_ids]


def num_read_tokens(batch: Batch) -> Tensor:
    """[T] float64 tokens of a trajectory that the model did not write; what a later sequence repeats of the one before counts once."""
    trajectory_ids, groups = trajectory_groups(batch)
    lengths, sequence = batch.lengths, batch.sequence_ids
    continues = torch.zeros_like(trajectory_ids, dtype=torch.bool)
    continues[1:] = trajectory_ids[1:] == trajectory_ids[:-1]
    before = (sequence - 1).clamp(min=0)
    has_counterpart = continues[sequence] & (batch.positions < lengths[before])
    counterpart = torch.where(has_counterpart, batch.offsets[:-1][before] + batch.positions, 0)
    same = has_counterpart & (batch.tokens == batch.tokens[counterpart])
    # The common prefix of a sequence and the one before it ends at the first token that differs.
    ends = segment_min(torch.where(same, torch.inf, batch.positions.double()), sequence, batch.num_sequences)
    is_new = batch.positions >= torch.where(continues, ends, 0.0)[sequence]
    return segment_count(trajectory_ids[sequence], groups.numel(), is_new & ~batch.action_mask).double()


def cosine(
    batch: Batch,
    step: int,
    *,
    max_tokens: int | None,
    correct: tuple[float, float],
    wrong: tuple[float, float],
    exceeded: float,
    margin: int,
) -> Tensor:
    """[S] x_T + (x_0 - x_T) (1 + cos(pi t / T)) / 2 with t the length, in place of the reward (2502.03373).

    T = max_tokens; (x_0, x_T) is `correct` or `wrong`; from T - margin tokens on the reward is `exceeded`. Short right answers
    beat long ones, and long wrong answers beat short ones. The paper is Demystifying long chain-of-thought; its code has a
    margin of 16.
    """
    limit = _required_max_tokens(max_tokens, "cosine")
    right = is_correct(batch, "shaper cosine")
    lengths = trajectory_lengths(batch)
    fade = (1 + torch.cos(torch.pi * lengths.double() / limit)) / 2
    value = torch.where(right, _interpolate(correct, fade), _interpolate(wrong, fade))
    return torch.where(lengths + margin >= limit, torch.full_like(value, exceeded), value)


def lcpo_exact(batch: Batch, step: int, *, alpha: float) -> Tensor:
    """[S] 1[right] - alpha |budget - len|, in place of the reward. LCPO, L1 (2503.04697)."""
    correct = is_correct(batch, "shaper lcpo_exact").double()
    return correct - alpha * (_required_budgets(batch, "lcpo_exact") - trajectory_lengths(batch)).abs()


def lcpo_max(batch: Batch, step: int, *, alpha: float, delta: float) -> Tensor:
    """[S] 1[right] clip(alpha (budget - len) + delta, 0, 1), in place of the reward. LCPO, L1-Max (2503.04697).

    The slope is the paper's; its code has half of it.
    """
    correct = is_correct(batch, "shaper lcpo_max").double()
    return correct * (alpha * (_required_budgets(batch, "lcpo_max") - trajectory_lengths(batch)) + delta).clamp(0, 1)


def _interpolate(ends: tuple[float, float], fade: Tensor) -> Tensor:
    """The first end if `fade` is 1, the second if it is 0."""
    return ends[1] + (ends[0] - ends[1]) * fade


def _required_max_tokens(max_tokens: int | None, name: str) -> int:
    if max_tokens is None:
        raise ValueError(f"{name}.max_tokens is null here; the caller fills in rollout.max_tokens")
    return max_tokens


def _required_budgets(batch: Batch, name: str) -> Tensor:
    budget = batch.sequence["budget"]
    missing = int(budget.isnan().sum())
    if missing:
        raise UserError(
            f"shaper {name} needs a token budget for every prompt, but {missing} of {budget.numel()} samples have none: "
            "give each row a budget (LCPO draws it and asks for it in the prompt)"
        )
    return budget


# --- Repeated n-grams
#
# Every window of n action tokens has a 64-bit hash, to which the hash of its trajectory is added. One sort makes equal
# windows neighbours. A window never crosses from one trajectory into another, and tool results are not part of it.


class NgramWindows(NamedTuple):
    """The W windows of n action tokens of a batch."""

    start: Tensor  # [W] its first token among the action tokens
    trajectory: Tensor  # [W] its trajectory, 0..T-1
    repeated: Tensor  # [W] bool: the same n tokens began earlier in this trajectory


def ngram_windows(batch: Batch, ngram: int) -> NgramWindows:
    """All windows of n action tokens, and whether each is a repeat."""
    action_index = batch.action_mask.nonzero().squeeze(1)
    trajectory_ids, _ = trajectory_groups(batch)
    trajectory = trajectory_ids[batch.sequence_ids[action_index]]
    hashes = ngram_hashes(batch.tokens[action_index], ngram)
    start = (trajectory[: hashes.numel()] == trajectory[ngram - 1 :]).nonzero().squeeze(1)
    keys = hashes[start] + _mix_bits(~trajectory[start])  # ~ makes it negative, unlike any token
    keys, order = keys.sort(stable=True)  # of equal windows the earliest is first
    repeated = torch.zeros_like(start, dtype=torch.bool)
    repeated[order[1:]] = keys[1:] == keys[:-1]
    return NgramWindows(start, trajectory[start], repeated)


def repeated_ngram_share(batch: Batch, ngram: int) -> Tensor:
    """[S] 1 - unique / total over the n-grams of each trajectory; 0 if it has none."""
    trajectory_ids, groups = trajectory_groups(batch)
    found = ngram_windows(batch, ngram)
    total = segment_count(found.trajectory, groups.numel())
    num_repeated = segment_count(found.trajectory, groups.numel(), found.repeated)
    return (num_repeated / total.clamp(min=1).double())[trajectory_ids]


def ngram_hashes(tokens: Tensor, ngram: int) -> Tensor:
    """[M - n + 1] int64 hash of every n tokens in a row, by doubling: a hash of 2k tokens joins two of k."""
    if tokens.numel() < ngram:
        return tokens.new_zeros(0)
    hashes, covered = tokens.new_zeros(tokens.numel() + 1), 0  # of the first `covered` tokens of each window
    block, size = _mix_bits(tokens), 1  # of `size` tokens in a row
    factor = MULTIPLIER_2
    while True:
        if ngram & size:
            hashes, covered = _combine_hashes(hashes, block[covered:], factor), covered + size
        if covered == ngram:
            return hashes
        block, size = _combine_hashes(block, block[size:], factor), 2 * size
        # Every size has its own factor: powers of one factor modulo 2^64 collide on long periodic texts, which must be found.
        factor = factor * GOLDEN


def _combine_hashes(left: Tensor, right: Tensor, factor: int) -> Tensor:
    """right + factor * left modulo 2^64, over the shorter length."""
    return torch.add(right[: left.numel()], left[: right.numel()], alpha=to_int64(factor))


def _mix_bits(x: Tensor) -> Tensor:
    """A 64-bit hash of each integer, without collisions."""
    x = x * to_int64(GOLDEN)
    x = (x ^ ((x >> 32) & 0xFFFF_FFFF)) * to_int64(MULTIPLIER_1)
    return x ^ ((x >> 29) & ((1 << 35) - 1))


# --- Outcome


def signed_reward(batch: Batch, step: int, *, right: float, wrong: float) -> Tensor:
    """[S] `right` if accuracy is 1, else `wrong`, in place of the reward. DAPO (2503.14476) has 1 and -1."""
    correct = is_correct(batch, "shaper signed").double()
    return right * correct + wrong * (1 - correct)


def stop_properly(batch: Batch, step: int, *, coef: float) -> Tensor:
    """[S] the reward; for a truncated sample r * coef, or coef itself if coef is negative. ProRL (2505.24864)."""
    reward = batch.sequence["reward"]
    cut = reward * coef if coef >= 0 else torch.full_like(reward, coef)
    return torch.where(is_truncated(batch), cut, reward)


def t1_penalty(
    batch: Batch, step: int, *, ngram: int, share: float, script_part: str | None, script_low: float
) -> Tensor:
    """[S] -1 if the answer is truncated, repetitive or mixes scripts, else the reward. T1 (2501.11651).

    Repetitive: more than `share` of its n-grams are repeats. Mixes scripts: the reward part `script_part` (such as the
    verifier language) is below `script_low`.
    """
    reward = batch.sequence["reward"]
    unexpected = is_truncated(batch) | (repeated_ngram_share(batch, ngram) > share)
    if script_part is not None:
        unexpected = unexpected | (_reward_part(batch, script_part) < script_low)
    return torch.where(unexpected, torch.full_like(reward, -1.0), reward)


def _reward_part(batch: Batch, name: str) -> Tensor:
    column = f"part/{name}"
    if column not in batch.sequence:
        parts = sorted(k.removeprefix("part/") for k in batch.sequence if k.startswith("part/"))
        raise UserError(f"t1_penalty.script_part is {name!r}, but the reward parts are: {', '.join(parts) or 'none'}")
    return batch.sequence[column]


# --- Repetition, which length rewards invite (Demystifying long chain-of-thought, 2502.03373)


def repetition(batch: Batch, step: int, *, ngram: int, penalty: float) -> Tensor:
    """[S] r + penalty * (1 - unique n-grams / all n-grams)."""
    return batch.sequence["reward"] + penalty * repeated_ngram_share(batch, ngram)


def repetition_dense(batch: Batch, step: int, *, ngram: int, penalty: float, gamma: float) -> Tensor:
    """[N] token rewards R_t - R_{t+1}, with R_t = sum_{s>=t} gamma^(s-t) p_s and p = `penalty` at tokens of repeated n-grams.

    The undiscounted return of these rewards is R_t, so the penalties have their own discount and the outcome has none.
    """
    mask, offsets = batch.action_mask, trajectory_offsets(batch)
    ids = ids_from_offsets(offsets)
    penalties = penalty * repeated_ngram_tokens(batch, ngram).double()
    returns = discounted_returns(penalties, mask, offsets, gamma)
    action_index = mask.nonzero().squeeze(1)
    own, following = returns[action_index], torch.zeros_like(returns[action_index])
    same = ids[action_index[1:]] == ids[action_index[:-1]]
    following[:-1] = torch.where(same, own[1:], following[:-1])
    return torch.zeros_like(returns).index_copy(0, action_index, own - following)


def repeated_ngram_tokens(batch: Batch, ngram: int) -> Tensor:
    """[N] bool: action tokens that are part of an n-gram that began earlier in the trajectory."""
    action_index = batch.action_mask.nonzero().squeeze(1)
    found = ngram_windows(batch, ngram)
    start = found.start[found.repeated]
    edges = torch.zeros(action_index.numel() + 1, dtype=torch.int64, device=action_index.device)
    ones = torch.ones_like(start)
    depth = edges.index_add(0, start, ones).index_add(0, start + ngram, -ones).cumsum(0)[:-1]
    return torch.zeros_like(batch.action_mask).index_copy(0, action_index, depth > 0)


# --- Turns

ANSWER_PROBABILITY = "answer_probability"
"""Ragged column: the probability of the known answer in the context in which each turn begins, p_0 .. p_{K-1} of K turns."""


def information_gain(batch: Batch, step: int, *, weight: float) -> Tensor:
    """[N] weight (p_k - p_{k-1}) on the last token of each turn k before the last of its trajectory. IGPO (2510.14967).

    p_k is the ragged column `answer_probability`, which `trainers/answer_probability.py` measures. It has no gradient.
    """
    turns, probability = turns_of(batch), batch.ragged[ANSWER_PROBABILITY].values
    trajectory = trajectory_groups(batch)[0][turns.sequence_of_turn]
    has_next = torch.zeros_like(trajectory, dtype=torch.bool)
    has_next[:-1] = trajectory[1:] == trajectory[:-1]
    gains = weight * (probability.roll(-1) - probability)
    rewards = torch.zeros(batch.num_tokens, dtype=torch.float64, device=gains.device)
    return rewards.index_copy(0, turns.last[has_next], gains[has_next].double())


SHAPERS: dict[str, Callable[..., Tensor]] = {
    "soft_overlong": soft_overlong,
    "kimi_length": kimi_length,
    "linear_length": linear_length,
    "cosine": cosine,
    "repetition": repetition,
    "repetition_dense": repetition_dense,
    "information_gain": information_gain,
    "lcpo_exact": lcpo_exact,
    "lcpo_max": lcpo_max,
    "stop_properly": stop_properly,
    "t1_penalty": t1_penalty,
    "signed": signed_reward,
}
"""The function of each choice of `algorithm.shaping`."""
