"""Slot `shaping`: what is done to rewards between the verifier and the advantages, in the listed order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.advantages.returns import discounted_returns
from burnish.algorithms.batch_columns import is_correct, is_truncated, trajectory_groups, trajectory_lengths
from burnish.algorithms.curriculum.prompt_selection import weight_after_warmup
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.random_keys import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, to_int64
from burnish.core.segments import compact_ids, segment_count, segment_max, segment_min

# --- Shapers that look at how much was written: `[S] float64`, the new reward.
#
# Lengths are the tokens the model wrote in a trajectory, so that tool results and prompts cost nothing.


def soft_overlong(batch: Batch, step: int, *, max_tokens: int | None, cache: int | None, factor: float) -> Tensor:
    """[S] the reward less a penalty that grows over the last `cache` tokens before the limit.

    0 up to max_tokens - cache, then linear down to -factor at max_tokens and beyond: truncation becomes a slope, not a
    cliff. A cache of None is a fifth of max_tokens, at least 1. DAPO's soft overlong punishment (2503.14476).
    """
    limit = _required_max_tokens(max_tokens, "soft_overlong")
    cache = max(1, limit // 5) if cache is None else cache
    if not 0 < cache <= limit:
        raise UserError(f"soft_overlong.cache is {cache}; expected 1 to max_tokens ({limit})")
    over = (trajectory_lengths(batch).double() - (limit - cache)) / cache
    return batch.sequence["reward"] - factor * over.clamp(0, 1)


def kimi_length(batch: Batch, step: int, *, weight: float, warmup_steps: int) -> Tensor:
    """[S] the reward plus `weight` times a length reward relative to the group, off for the first `warmup_steps` steps.

    lambda_i = 1/2 - (len_i - min_g) / (max_g - min_g); a right answer gets lambda_i, a wrong one min(0, lambda_i), and
    a group of equal lengths 0. Kimi k1.5 (2501.12599).
    """
    correct = is_correct(batch, "shaper kimi_length")
    groups, num = compact_ids(batch.sequence["group_ids"])
    lengths = trajectory_lengths(batch).double()
    shortest, longest = segment_min(lengths, groups, num)[groups], segment_max(lengths, groups, num)[groups]
    relative = 0.5 - (lengths - shortest) / (longest - shortest).clamp(min=1)
    bonus = torch.where(correct, relative, relative.clamp(max=0))
    bonus = torch.where(longest > shortest, bonus, torch.zeros_like(bonus))
    return batch.sequence["reward"] + weight_after_warmup(step, weight, warmup_steps) * bonus


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
    """[S] a reward from correctness and length alone, in place of the old one.

    x_T + (x_0 - x_T) (1 + cos(pi t / T)) / 2 with T = max_tokens and (x_0, x_T) = `correct` or `wrong`; `exceeded` from
    T - margin tokens on. Short right beats long right, long wrong beats short wrong. Demystifying long chain-of-thought
    (2502.03373), whose code has a margin of 16.
    """
    limit = _required_max_tokens(max_tokens, "cosine")
    right = is_correct(batch, "shaper cosine")
    lengths = trajectory_lengths(batch)
    fade = (1 + torch.cos(torch.pi * lengths.double() / limit)) / 2
    value = torch.where(right, _interpolate(correct, fade), _interpolate(wrong, fade))
    return torch.where(lengths + margin >= limit, torch.full_like(value, exceeded), value)


def lcpo_exact(batch: Batch, step: int, *, alpha: float) -> Tensor:
    """[S] 1[right] - alpha |budget - length|, in place of the old reward: as long as asked. LCPO, L1 (2503.04697)."""
    correct = is_correct(batch, "shaper lcpo_exact").double()
    return correct - alpha * (_required_budgets(batch, "lcpo_exact") - trajectory_lengths(batch)).abs()


def lcpo_max(batch: Batch, step: int, *, alpha: float, delta: float) -> Tensor:
    """[S] 1[right] clip(alpha (budget - length) + delta, 0, 1), in place of the old reward: at most as long as asked.

    LCPO, L1-Max (2503.04697), with the slope of the paper; its code has half of it.
    """
    correct = is_correct(batch, "shaper lcpo_max").double()
    return correct * (alpha * (_required_budgets(batch, "lcpo_max") - trajectory_lengths(batch)) + delta).clamp(0, 1)


def _interpolate(ends: tuple[float, float], fade: Tensor) -> Tensor:
    """The first end where `fade` is 1, the second where it is 0."""
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


# --- Repeated n-grams of everything that was written, in all sequences at once.
#
# Every window of n written tokens gets a 64-bit hash, to which its trajectory adds its own; equal ones are neighbours after
# one sort. A window never crosses from one sequence into another; tokens the model did not write (tool results) take no
# place in it.


class NgramWindows(NamedTuple):
    """The W windows of n written tokens of a batch."""

    start: Tensor  # [W] where each begins among the written tokens
    owner: Tensor  # [W] its trajectory, 0..T-1
    repeated: Tensor  # [W] bool: the same n tokens began earlier in this trajectory


def ngram_windows(batch: Batch, ngram: int) -> NgramWindows:
    """All windows and whether each is a repeat."""
    written = batch.action_mask.nonzero().squeeze(1)
    sequence = batch.sequence_ids[written]
    hashes = ngram_hashes(batch.tokens[written], ngram)
    start = (sequence[: hashes.numel()] == sequence[ngram - 1 :]).nonzero().squeeze(1)
    of_sequence, _ = trajectory_groups(batch)
    keys = (
        hashes[start] + _mix_bits(~of_sequence)[sequence[start]]
    )  # ~ keeps a trajectory's number apart from any token's
    keys, order = keys.sort(stable=True)  # of equals the earliest comes first
    repeated = torch.zeros_like(start, dtype=torch.bool)
    repeated[order[1:]] = keys[1:] == keys[:-1]
    return NgramWindows(start, of_sequence[sequence[start]], repeated)


def repeated_ngram_share(batch: Batch, ngram: int) -> Tensor:
    """[S] 1 - unique / total over the n-grams of each trajectory; 0 where it has none."""
    owner, groups = trajectory_groups(batch)
    found = ngram_windows(batch, ngram)
    total = segment_count(found.owner, groups.numel())
    return (segment_count(found.owner, groups.numel(), found.repeated) / total.clamp(min=1).double())[owner]


def ngram_hashes(tokens: Tensor, ngram: int) -> Tensor:
    """[M - n + 1] int64 hash of every n tokens in a row, by doubling: hashes of 2k tokens join two of k."""
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
        # A factor of its own for every size: powers of a single one modulo 2^64 collide on long regular texts, which
        # are just what is looked for here.
        factor = factor * GOLDEN


def _combine_hashes(left: Tensor, right: Tensor, factor: int) -> Tensor:
    """right + factor * left, wrapping, as far as both reach."""
    return torch.add(right[: left.numel()], left[: right.numel()], alpha=to_int64(factor))


def _mix_bits(x: Tensor) -> Tensor:
    """Small integers spread over 64 bits."""
    x = x * to_int64(GOLDEN)
    x = (x ^ ((x >> 32) & 0xFFFF_FFFF)) * to_int64(MULTIPLIER_1)
    return x ^ ((x >> 29) & ((1 << 35) - 1))


# --- Shapers that look at how an answer ended and whether it was right: `[S] float64`, the new reward.


def signed_reward(batch: Batch, step: int, *, right: float, wrong: float) -> Tensor:
    """[S] `right` or `wrong` by the accuracy, in place of the old reward (DAPO, 2503.14476, has 1 and -1)."""
    correct = is_correct(batch, "shaper signed").double()
    return right * correct + wrong * (1 - correct)


def stop_properly(batch: Batch, step: int, *, coef: float) -> Tensor:
    """[S] the reward; of a truncated sample reward * coef, or coef itself where that is negative (ProRL, 2505.24864)."""
    reward = batch.sequence["reward"]
    cut = reward * coef if coef >= 0 else torch.full_like(reward, coef)
    return torch.where(is_truncated(batch), cut, reward)


def t1_penalty(
    batch: Batch, step: int, *, ngram: int, share: float, script_part: str | None, script_low: float
) -> Tensor:
    """[S] -1 where the answer was truncated, repeats itself or mixes scripts; else the reward as it was.

    It repeats itself when more than `share` of its n-grams were there before, and mixes scripts when the reward part
    `script_part` (the verifier language, say) is below `script_low`. T1 (2501.11651).
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


# --- Shapers against repetition, which length rewards invite (Demystifying long chain-of-thought, 2502.03373).


def repetition(batch: Batch, step: int, *, ngram: int, penalty: float) -> Tensor:
    """[S] the reward plus penalty * (1 - unique / total) over the n-grams written; 0 with fewer than n tokens."""
    return batch.sequence["reward"] + penalty * repeated_ngram_share(batch, ngram)


def repetition_dense(batch: Batch, step: int, *, ngram: int, penalty: float, gamma: float) -> Tensor:
    """[N] token rewards to add: `penalty` at every token of an n-gram already seen, with its own discount.

    With R_t the gamma-discounted return of the penalties, token t gets R_t - R_{t+1}: the undiscounted return-to-go of
    that is R_t, so the sum of the two streams has the outcome undiscounted and the penalties discounted.
    """
    mask, ids = batch.action_mask, batch.sequence_ids
    penalties = penalty * repeated_ngram_tokens(batch, ngram).double()
    returns = discounted_returns(penalties, mask, batch.offsets, gamma)
    written = mask.nonzero().squeeze(1)
    own, following = returns[written], torch.zeros_like(returns[written])
    same = ids[written[1:]] == ids[written[:-1]]
    following[:-1] = torch.where(same, own[1:], following[:-1])
    return torch.zeros_like(returns).index_copy(0, written, own - following)


def repeated_ngram_tokens(batch: Batch, ngram: int) -> Tensor:
    """[N] bool: the token is written and part of an n-gram that began earlier in the trajectory."""
    written = batch.action_mask.nonzero().squeeze(1)
    found = ngram_windows(batch, ngram)
    start = found.start[found.repeated]
    edges = torch.zeros(written.numel() + 1, dtype=torch.int64, device=written.device)
    ones = torch.ones_like(start)
    depth = edges.index_add(0, start, ones).index_add(0, start + ngram, -ones).cumsum(0)[:-1]
    return torch.zeros_like(batch.action_mask).index_copy(0, written, depth > 0)


SHAPERS: dict[str, Callable[..., Tensor]] = {
    "soft_overlong": soft_overlong,
    "kimi_length": kimi_length,
    "cosine": cosine,
    "repetition": repetition,
    "repetition_dense": repetition_dense,
    "lcpo_exact": lcpo_exact,
    "lcpo_max": lcpo_max,
    "stop_properly": stop_properly,
    "t1_penalty": t1_penalty,
    "signed": signed_reward,
}
"""`f(batch, step, **options)`: [S] the new reward column, or [N] token rewards to add where the record says `dense`.

`step` is the training step the batch is for, counted from 1. A shaper never changes the accuracy.
"""
