"""Advantages from each sample's own rewards: return-to-go minus a baseline that needs no siblings.

With outcome rewards and no discount the return is the same at every token, so these stay one value a sequence [S].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.group_relative import group_normalised, group_rewards
from burnish.algorithms.advantages.reverse_scan import discount_cumsum, segment_cumsum
from burnish.algorithms.batch_columns import (
    ActionTokens,
    Groups,
    action_rewards,
    action_tokens,
    loss_lengths,
    place_rewards,
    sequence_rewards,
    token_rewards,
    tokens_of_mask,
    trajectory_groups,
    turns_of,
    whitened,
    whitened_tokens,
)
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import (
    compact_ids,
    contiguous_sum,
    ids_from_offsets,
    offsets_from_lengths,
    segment_broadcast,
    segment_count,
    segment_max,
    segment_mean,
    segment_sum,
)


def discounted_returns(rewards: Tensor, mask: Tensor, offsets: Tensor, gamma: float) -> Tensor:
    """[N] sum of this and later rewards in the same sequence, discounted per written token; 0 at other tokens."""
    tokens = tokens_of_mask(mask, offsets)
    return tokens.put(discount_cumsum(tokens.take(rewards), tokens.offsets, gamma))


def returns_to_go(batch: Batch, gamma: float = 1.0) -> Tensor:
    """[N] the discounted return from each written token on; 0 at other tokens."""
    tokens = action_tokens(batch)
    return tokens.put(action_returns(batch, tokens, gamma))


def action_returns(batch: Batch, tokens: ActionTokens, gamma: float) -> Tensor:
    """[M] the discounted return from each written token on."""
    return discount_cumsum(action_rewards(batch, tokens), tokens.offsets, gamma)


def has_constant_return(batch: Batch, gamma: float) -> bool:
    """Whether every token of a sequence has the same return."""
    return gamma == 1 and "token_rewards" not in batch.token


def reinforce(batch: Batch, gamma: float = 1.0, baseline: float = 0.0) -> Tensor:
    """Return-to-go minus a constant: A_t = sum_{s>=t} gamma^(s-t) r_s - baseline (Williams, 1992).

    Tokens the model did not write take no discount step. [S] for outcome rewards without discount, else [N].
    """
    if has_constant_return(batch, gamma):
        return batch.sequence["reward"] - baseline
    tokens = action_tokens(batch)
    return tokens.put(action_returns(batch, tokens, gamma).sub_(baseline))


def remax(batch: Batch) -> Tensor:
    """Return-to-go minus the reward of the prompt's greedy answer, `greedy_reward` [S]: A_t = sum_{s>=t} r_s - b(x).

    One extra decode a prompt instead of siblings; the greedy answer has no KL term in it and is never trained on.
    ReMax (2310.10505). [S] for outcome rewards, else [N].
    """
    baseline = batch.sequence["greedy_reward"]
    if has_constant_return(batch, 1.0):
        return batch.sequence["reward"] - baseline
    tokens = action_tokens(batch)
    return tokens.put(action_returns(batch, tokens, 1.0).sub_(tokens.spread(baseline)))


def reinforce_plus_plus(batch: Batch, gamma: float = 1.0, ddof: Literal[0, 1] = 1) -> Tensor:
    """Return-to-go, whitened over all tokens in the loss: no critic and no per-prompt baseline to overfit.

    REINFORCE++ (2501.03262). [S] for outcome rewards without discount, else [N].
    """
    if has_constant_return(batch, gamma):
        return whitened(batch.sequence["reward"], ddof, loss_lengths(batch))
    tokens = action_tokens(batch)
    return tokens.put(whitened_tokens(batch, tokens, action_returns(batch, tokens, gamma), ddof))


def raft(batch: Batch) -> Tensor:
    """[S] A = max(r, 0): learn from the good samples only. RAFT++ of Minimal-RL (2504.11343)."""
    return sequence_rewards(batch).clamp(min=0)


def zero_advantages(batch: Batch) -> Tensor:
    """[S] zeros, for losses that make their own signal."""
    return torch.zeros_like(batch.sequence["reward"])


# --- Advantages from a critic's values: generalised advantage estimation and its long-answer variants.


@dataclass(frozen=True)
class AdvantagesAndReturns:
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
) -> AdvantagesAndReturns:
    """Per-token credit from the critic's `values` [N], with bias traded for variance by lambda.

        delta_t = r_t + gamma V_{t+1} - V_t;   A_t = delta_t + gamma lambda A_{t+1};   returns = A + V

    t + 1 is the next written token, V after the last one is 0. `lam_critic` gives the critic's targets a lambda of their
    own (VC-PPO, 2503.01491); `length_adaptive` replaces the actor's by one that grows with the length of the answer
    (VAPO, 2504.05118). Both outputs are in the type of `values`. Schulman et al. (1506.02438).
    """
    tokens = action_tokens(batch)
    values = tokens.take(batch.token["values"])
    errors = _td_errors(batch, tokens, values, gamma)
    actor: float | Tensor = lam
    if length_adaptive is not None:
        actor = length_adaptive_lambda(tokens.lengths, length_adaptive)
    advantages = discount_cumsum(errors, tokens.offsets, gamma * actor)
    targets = advantages
    if lam_critic is not None:
        targets = discount_cumsum(errors, tokens.offsets, gamma * lam_critic)
    returns = tokens.put(targets + values)
    if whiten:
        advantages = whitened_tokens(batch, tokens, advantages, ddof)
    return AdvantagesAndReturns(tokens.put(advantages), returns)


def _td_errors(batch: Batch, tokens: ActionTokens, values: Tensor, gamma: float) -> Tensor:
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


# --- Advantages with dense process rewards beside the outcome.


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
    tokens = action_tokens(batch)
    owner, rewards, groups = group_rewards(batch)
    process = tokens.take(batch.token["process_rewards"])
    if norm == "batch" and process.numel():
        process = process / (discount_cumsum(process, tokens.offsets, 1.0).abs().max() + 1e-6)
    lengths = segment_sum(tokens.lengths, owner, rewards.numel())
    total = segment_sum(contiguous_sum(process, tokens.offsets), owner, rewards.numel())
    baseline = groups.others_mean(total / lengths.clamp(min=1))  # [T]
    dense = discount_cumsum(process - tokens.spread(baseline[owner]), tokens.offsets, 1.0)
    outcome = _leave_one_out(rewards, groups)[owner].to(dense.dtype)
    advantages = process_coef * dense + outcome_coef * tokens.spread(outcome)
    return tokens.put(whitened_tokens(batch, tokens, advantages, ddof) if whiten else advantages)


def _leave_one_out(rewards: Tensor, groups: Groups) -> Tensor:
    return groups.settled(rewards - groups.others_mean(rewards), rewards, rewards)


# --- Advantage `distillation`: every token is judged by a teacher, on what the policy itself wrote.


def distillation(batch: Batch, outcome: float = 0.0) -> Tensor:
    """[N] what the KL to the teacher takes off a token's reward, and nothing of any later token's; plus `outcome` times the
    sample's reward less its group's mean.

    With the estimator k1 and coefficient 1 this is log q - log p of the token: the policy gradient of the reverse KL of each
    next token, on the policy's own prefixes. GKD (2306.13649), MiniLLM (2306.08543).
    """
    advantages = batch.sequence["reward"].new_zeros(batch.num_tokens)
    if "token_rewards" in batch.token:
        advantages = token_rewards(batch) - place_rewards(batch)
    if outcome == 0:
        return advantages
    owner, ids = trajectory_groups(batch)
    rewards = segment_mean(batch.sequence["reward"], owner, ids.numel())
    relative = group_normalised(rewards, Groups(ids, int(ids.max()) + 1), "none", 0.0, "zero").index_select(0, owner)
    return advantages + outcome * segment_broadcast(relative, batch.sequence_ids) * batch.action_mask


# --- Advantages for agents of several turns: credit for the episode and for each turn.


def gigpo(batch: Batch, omega: float = 1.0, gamma: float = 0.95, normalise: Literal["none", "std"] = "none") -> Tensor:
    """[N] the episode relative to its group plus omega times the turn relative to all turns from the same state.

        A = (R - mean_g)/F + omega (Rs_k - mean_anchor)/F;   Rs_k = sum_{j>=k} gamma^(j-k) r_j over the trajectory's turns

    The ragged columns of the turns say where each begins, what it earned and the state it acted in; a reward that no turn
    earned is the last one's. An anchor is all turns of a group in one state, at any time; a turn alone in its state gets 0 from
    it. F is 1, or the deviation + 1e-6. GiGPO (2505.10978).
    """
    if "turn_state" not in batch.ragged:
        raise UserError(
            "advantage gigpo compares the turns of a group that begin in the same state, and the environment reports none: give every "
            "Turn a state (text, equal where the model knows the same), or use grpo"
        )
    owner, rewards, groups = group_rewards(batch)
    std = "group" if normalise == "std" else "none"
    episode = group_normalised(rewards, groups, std, eps=1e-6)
    turns = turns_of(batch)
    trajectory = owner[turns.sequence]
    states, num_states = compact_ids(batch.ragged["turn_state"].values)
    anchors, num = compact_ids(groups.ids[trajectory] * num_states + states)
    placed = token_rewards(batch) if "token_rewards" in batch.token else place_rewards(batch)
    earned = segment_sum(placed[turns.where], turns.of_token, turns.num)
    returns = turn_returns(earned, trajectory, gamma)
    step = group_normalised(returns, Groups(anchors, num), std, eps=1e-6, singleton="zero")
    advantages = episode[trajectory] + omega * step
    return advantages.new_zeros(batch.num_tokens).index_copy_(0, turns.where, advantages[turns.of_token])


def turn_returns(earned: Tensor, trajectory: Tensor, gamma: float) -> Tensor:
    """[K] the discounted return from each turn to the end of its trajectory, whose turns are in order."""
    order = torch.argsort(trajectory, stable=True)
    offsets = offsets_from_lengths(segment_count(trajectory, int(trajectory.max()) + 1))
    return torch.empty_like(earned).index_copy_(0, order, discount_cumsum(earned[order], offsets, gamma))


# --- A baseline for every position of a group's answers, weighted by how much gradient each answer has there.


def otb(batch: Batch, tail: Literal["raw", "zero"] = "raw") -> Tensor:
    """[N] return-to-go minus the optimal token baseline.

        w_t = 1 - 2 pi_t + sum_v pi_v^2;   W_t = w_1 + ... + w_t;   b_t = sum_g G_t W_t / (sum_g W_t + 1e-8);   A = G - b

    w is the squared gradient of the token's logits, pi the probability under the policy before the update (`sum_p2`, and
    `policy_logp` where there is that column, because `old_logp` is of other policies, else `old_logp`); t counts written tokens, and an answer that has ended has no weight. With a token column `rollout_weight`
    rho, w_t is multiplied by rho_t^2. Every sequence is an answer of its own. One answer alone in its group has no
    baseline; where one is longer than all others of its group, `tail` says whether what is beyond them keeps its raw
    return or gets 0.
    """
    tokens = action_tokens(batch)
    energy = segment_cumsum(_squared_logit_gradients(batch, tokens), tokens.offsets)
    returns = _undiscounted_returns(batch, tokens).to(energy.dtype)
    groups, num = compact_ids(batch.sequence["group_ids"])
    longest = segment_max(tokens.lengths.double(), groups, num).long()  # [G]
    starts = offsets_from_lengths(longest)
    shift = tokens.spread(starts[groups] - tokens.offsets[:-1])
    cells, num_cells = torch.arange(shift.numel(), device=shift.device) + shift, int(starts[-1])
    baseline = segment_sum(returns * energy, cells, num_cells) / (segment_sum(energy, cells, num_cells) + 1e-8)
    lonely = _reached_by_one_answer(tokens.lengths, groups, longest)  # [cells]
    advantages = returns - baseline.masked_fill_(lonely, 0).index_select(0, cells)
    if tail == "zero":
        alone = lonely.index_select(0, cells) & ~tokens.spread((segment_count(groups, num) == 1)[groups])
        advantages = advantages.masked_fill_(alone, 0)
    return tokens.put(advantages)


def _undiscounted_returns(batch: Batch, tokens: ActionTokens) -> Tensor:
    """[M] return-to-go; with an outcome alone it is the same at every token of a sequence."""
    return (
        tokens.spread(batch.sequence["reward"])
        if has_constant_return(batch, 1.0)
        else action_returns(batch, tokens, 1.0)
    )


def _reached_by_one_answer(lengths: Tensor, groups: Tensor, longest: Tensor) -> Tensor:
    """[cells] bool: the (group, position) pairs that a single answer reaches, from the second longest of the group on."""
    num = longest.numel()
    is_longest = lengths == longest[groups]
    others = segment_max(torch.where(is_longest, 0, lengths).double(), groups, num).long()
    second = torch.where(segment_count(groups, num, is_longest) > 1, longest, others)
    group_of_cell = ids_from_offsets(offsets_from_lengths(longest))
    first = offsets_from_lengths(longest)[:-1]
    position = torch.arange(group_of_cell.numel(), device=lengths.device) - first.index_select(0, group_of_cell)
    return position >= second.index_select(0, group_of_cell)


def _squared_logit_gradients(batch: Batch, tokens: ActionTokens) -> Tensor:
    """[M] w_t = 1 - 2 pi_t + sum_v pi_v^2, times rho_t^2 where there are rollout weights."""
    logp = batch.token["policy_logp" if "policy_logp" in batch.token else "old_logp"]
    energy = 1 - 2 * tokens.take(logp).exp() + tokens.take(batch.token["sum_p2"])
    if "rollout_weight" in batch.token:
        energy = energy * tokens.take(batch.token["rollout_weight"]) ** 2
    return energy
