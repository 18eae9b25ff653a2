"""Advantages from returns: return-to-go with a baseline, a critic, process rewards, or a teacher.

Discounts count action tokens. With outcome rewards and no discount the return is the same at every token, so such
advantages stay one value per sequence [S].
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
    trajectory_offsets,
    whitened,
    whitened_tokens,
)
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

PREFIX_EPS = 1e-8
"""Lower bound of a sequence's summed disagreement with its teacher before dividing by it."""


def discounted_returns(rewards: Tensor, mask: Tensor, offsets: Tensor, gamma: float) -> Tensor:
    """[N] sum_{s>=t} gamma^(s-t) r_s over the tokens of `mask` in the same sequence; 0 at other tokens."""
    tokens = tokens_of_mask(mask, offsets)
    return tokens.scatter(discount_cumsum(tokens.gather(rewards), tokens.offsets, gamma))


def action_returns(batch: Batch, tokens: ActionTokens, gamma: float) -> Tensor:
    """[M] sum_{s>=t} gamma^(s-t) r_s at each action token."""
    return discount_cumsum(action_rewards(batch, tokens), tokens.offsets, gamma)


def has_constant_return(batch: Batch, gamma: float) -> bool:
    """Whether every token of a sequence has the same return."""
    return gamma == 1 and "token_rewards" not in batch.token


def reinforce(batch: Batch, *, gamma: float, baseline: float) -> Tensor:
    """A_t = sum_{s>=t} gamma^(s-t) r_s - baseline. REINFORCE, Williams (1992).

    [S] for outcome rewards without discount, else [N].
    """
    if has_constant_return(batch, gamma):
        return batch.sequence["reward"] - baseline
    tokens = action_tokens(batch)
    return tokens.scatter(action_returns(batch, tokens, gamma).sub_(baseline))


def remax(batch: Batch) -> Tensor:
    """A_t = sum_{s>=t} r_s - reward of the prompt's greedy answer, `greedy_reward` [S]. ReMax (2310.10505).

    It costs one extra decode per prompt instead of a group of samples. The greedy answer is not trained on, and its reward
    has no KL term. [S] for outcome rewards, else [N].
    """
    baseline = batch.sequence["greedy_reward"]
    if has_constant_return(batch, 1.0):
        return batch.sequence["reward"] - baseline
    tokens = action_tokens(batch)
    return tokens.scatter(action_returns(batch, tokens, 1.0).sub_(tokens.spread(baseline)))


def reinforce_plus_plus(batch: Batch, *, gamma: float, ddof: Literal[0, 1]) -> Tensor:
    """A = whiten(sum_{s>=t} gamma^(s-t) r_s), whitened over all tokens in the loss. REINFORCE++ (2501.03262).

    There is no critic, and no baseline per prompt to overfit. [S] for outcome rewards without discount, else [N].
    """
    if has_constant_return(batch, gamma):
        return whitened(batch.sequence["reward"], ddof, loss_lengths(batch))
    tokens = action_tokens(batch)
    return tokens.scatter(whitened_tokens(batch, tokens, action_returns(batch, tokens, gamma), ddof))


def raft(batch: Batch) -> Tensor:
    """[S] A = max(r, 0): trains on samples with a positive reward only. RAFT++, Minimal-RL (2504.11343)."""
    return sequence_rewards(batch).clamp(min=0)


def zero_advantages(batch: Batch) -> Tensor:
    """[S] zeros, for losses that do not use advantages."""
    return torch.zeros_like(batch.sequence["reward"])


# --- With a critic


@dataclass(frozen=True)
class AdvantagesAndReturns:
    """Advantages for the actor and value targets for the critic."""

    advantages: Tensor  # [N]
    returns: Tensor  # [N] before any whitening


def gae(
    batch: Batch,
    *,
    gamma: float,
    lam: float,
    lam_critic: float | None,
    length_adaptive: float | None,
    whiten: bool,
    ddof: Literal[0, 1],
) -> AdvantagesAndReturns:
    """Generalised advantage estimation from the critic's `values` [N]. GAE (1506.02438).

        delta_t = r_t + gamma V_{t+1} - V_t;   A_t = delta_t + gamma lam A_{t+1};   returns = A + V

    t + 1 is the next action token, and V after the last one is 0. `lam_critic` gives the critic's targets their own lambda
    (VC-PPO, 2503.01491). `length_adaptive` replaces the actor's lambda by one that grows with the answer's length (VAPO,
    2504.05118). Both results have the dtype of `values`.
    """
    tokens = action_tokens(batch)
    values = tokens.gather(batch.token["values"])
    errors = _td_errors(batch, tokens, values, gamma)
    actor_lam: float | Tensor = lam
    if length_adaptive is not None:
        actor_lam = length_adaptive_lambda(tokens.lengths, length_adaptive)
    advantages = discount_cumsum(errors, tokens.offsets, gamma * actor_lam)
    targets = advantages
    if lam_critic is not None:
        targets = discount_cumsum(errors, tokens.offsets, gamma * lam_critic)
    returns = tokens.scatter(targets + values)
    if whiten:
        advantages = whitened_tokens(batch, tokens, advantages, ddof)
    return AdvantagesAndReturns(tokens.scatter(advantages), returns)


def _td_errors(batch: Batch, tokens: ActionTokens, values: Tensor, gamma: float) -> Tensor:
    """[M] delta_t = r_t + gamma V_{t+1} - V_t."""
    errors = value_differences(values, tokens.offsets, gamma)
    if "token_rewards" in batch.token:
        return errors.add_(tokens.gather(token_rewards(batch)).to(values.dtype))
    errors[tokens.last] += tokens.of_trajectories(batch.sequence["reward"]).to(values.dtype)
    return errors


def value_differences(values: Tensor, offsets: Tensor, gamma: float) -> Tensor:
    """[M] gamma V_{t+1} - V_t inside each run values[offsets[i]:offsets[i+1]]; V behind a run is 0."""
    differences = values.neg()
    differences[:-1].add_(values[1:], alpha=gamma)
    last = offsets[1:][offsets.diff() > 0] - 1
    differences[last] = -values[last]
    return differences


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """[S] lambda = 1 - 1/(alpha l) for length l, at least 0. The weights of later errors then sum to about alpha l."""
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)


# --- Process rewards


def prime_rloo(
    batch: Batch,
    *,
    process_coef: float,
    outcome_coef: float,
    norm: Literal["none", "batch"],
    whiten: bool,
    ddof: Literal[0, 1],
) -> Tensor:
    """[N] A_it = c_p sum_{s>=t} (p_is - mean_{j != i} mean_t p_jt) + c_o (r_i - mean_{j != i} r_j). PRIME (2502.01456).

    p is the token column `process_rewards`: beta times the log-ratio of the implicit process reward model to its reference.
    c_p is `process_coef`, c_o is `outcome_coef`. `norm` batch divides p by its largest absolute return in the batch.
    """
    tokens = action_tokens(batch)
    trajectory_ids, rewards, groups = group_rewards(batch)
    process = tokens.gather(batch.token["process_rewards"])
    if norm == "batch" and process.numel():
        process = process / (discount_cumsum(process, tokens.offsets, 1.0).abs().max() + 1e-6)
    owner = tokens.of_trajectories(trajectory_ids)
    lengths = segment_sum(tokens.lengths, owner, rewards.numel())
    total = segment_sum(contiguous_sum(process, tokens.offsets), owner, rewards.numel())
    baseline = groups.others_mean(total / lengths.clamp(min=1))  # [T]
    dense = discount_cumsum(process - tokens.spread(baseline[trajectory_ids]), tokens.offsets, 1.0)
    outcome = _leave_one_out(rewards, groups)[trajectory_ids].to(dense.dtype)
    advantages = process_coef * dense + outcome_coef * tokens.spread(outcome)
    return tokens.scatter(whitened_tokens(batch, tokens, advantages, ddof) if whiten else advantages)


def _leave_one_out(rewards: Tensor, groups: Groups) -> Tensor:
    """[T] r_i - mean_{j != i} r_j."""
    return groups.with_degenerate(rewards - groups.others_mean(rewards), rewards, rewards)


# --- Distillation


def distillation(batch: Batch, *, outcome: float, prefix_weight: float) -> Tensor:
    """[N] A_it = -coef KL_it W_it + outcome (r_i - mean_g): the teacher's signal at each token, without later tokens.

    -coef KL_it is what `kl.reward` takes off the token's reward. With estimator k1 and coefficient 1 it is log q - log p of the
    token: the policy gradient of the reverse KL of each next token, on the policy's own prefixes. GKD (2306.13649), MiniLLM
    (2306.08543).

    W_it = 1 + prefix_weight (1 - sum_{s<t} |KL_is| / sum_s |KL_is|) is largest at the first token. Late tokens count less, because
    the teacher judges them behind a prefix that it would not have written. IW-OPD (2606.22600).
    """
    advantages = batch.sequence["reward"].new_zeros(batch.num_tokens)
    if "token_rewards" in batch.token:
        advantages = token_rewards(batch) - place_rewards(batch)
    if prefix_weight > 0:
        advantages = advantages * prefix_weights(batch, advantages, prefix_weight)
    if outcome == 0:
        return advantages
    trajectory_ids, ids = trajectory_groups(batch)
    rewards = segment_mean(batch.sequence["reward"], trajectory_ids, ids.numel())
    groups = Groups(ids, int(ids.max()) + 1)
    relative = group_normalised(rewards, groups, "none", 0.0, "zero").index_select(0, trajectory_ids)
    return advantages + outcome * segment_broadcast(relative, batch.sequence_ids) * batch.action_mask


def prefix_weights(batch: Batch, gap: Tensor, gamma: float) -> Tensor:
    """[N] 1 + gamma (1 - share of |gap| before the token), within each trajectory; from 1 + gamma down to just above 1."""
    sizes = torch.where(batch.action_mask, gap.abs(), torch.zeros_like(gap)).double()
    offsets = trajectory_offsets(batch)
    ids, total = ids_from_offsets(offsets), contiguous_sum(sizes, offsets)
    before = sizes.cumsum(0) - sizes - (total.cumsum(0) - total)[ids]
    return (1 + gamma * (1 - before / total[ids].clamp(min=PREFIX_EPS))).to(gap.dtype)


# --- Optimal token baseline


def otb(batch: Batch, *, tail: Literal["raw", "zero"]) -> Tensor:
    """[N] A_t = G_t - b_t: return-to-go minus the optimal token baseline (verl's optimal_token_baseline).

        w_t = 1 - 2 pi_t + sum_v pi_v^2;   W_t = w_1 + ... + w_t;   b_t = sum_g G_t W_t / (sum_g W_t + 1e-8)

    w is the squared norm of the gradient with respect to the token's logits. pi is the policy before the update: log pi_t is
    the column `policy_logp` if there is one, else `old_logp`, and sum_v pi_v^2 is `sum_p2`. t counts action tokens. The sums
    over a group leave out answers that have ended before t. With a token column `rollout_weight` rho, w_t is multiplied by
    rho_t^2. Every trajectory is one answer. A group of one has no baseline. Where only the longest answer of a group
    continues, its advantage is the raw return (`tail` raw) or 0 (`tail` zero).
    """
    tokens = action_tokens(batch)
    cumulative = segment_cumsum(_squared_logit_gradients(batch, tokens), tokens.offsets)
    returns = _undiscounted_returns(batch, tokens).to(cumulative.dtype)
    of_sequence, num = compact_ids(batch.sequence["group_ids"])
    groups = tokens.of_trajectories(of_sequence)  # [T]
    longest = segment_max(tokens.lengths.double(), groups, num).long()  # [G]
    starts = offsets_from_lengths(longest)
    shift = torch.repeat_interleave(starts[groups] - tokens.offsets[:-1], tokens.lengths)
    # A cell is a (group, position) pair; `cells` [M] is the cell of each token.
    cells, num_cells = torch.arange(shift.numel(), device=shift.device) + shift, int(starts[-1])
    baseline = segment_sum(returns * cumulative, cells, num_cells) / (segment_sum(cumulative, cells, num_cells) + 1e-8)
    is_single = _reached_by_one_answer(tokens.lengths, groups, longest)  # [cells]
    advantages = returns - baseline.masked_fill_(is_single, 0).index_select(0, cells)
    if tail == "zero":
        alone = torch.repeat_interleave((segment_count(groups, num) == 1)[groups], tokens.lengths)
        in_tail = is_single.index_select(0, cells) & ~alone
        advantages = advantages.masked_fill_(in_tail, 0)
    return tokens.scatter(advantages)


def _undiscounted_returns(batch: Batch, tokens: ActionTokens) -> Tensor:
    """[M] return-to-go without discount."""
    return (
        tokens.spread(batch.sequence["reward"])
        if has_constant_return(batch, 1.0)
        else action_returns(batch, tokens, 1.0)
    )


def _reached_by_one_answer(lengths: Tensor, groups: Tensor, longest: Tensor) -> Tensor:
    """[cells] bool: (group, position) cells that only the longest answer of the group reaches."""
    num = longest.numel()
    is_longest = lengths == longest[groups]
    others = segment_max(torch.where(is_longest, 0, lengths).double(), groups, num).long()
    second = torch.where(segment_count(groups, num, is_longest) > 1, longest, others)
    group_of_cell = ids_from_offsets(offsets_from_lengths(longest))
    first = offsets_from_lengths(longest)[:-1]
    position = torch.arange(group_of_cell.numel(), device=lengths.device) - first.index_select(0, group_of_cell)
    return position >= second.index_select(0, group_of_cell)


def _squared_logit_gradients(batch: Batch, tokens: ActionTokens) -> Tensor:
    """[M] w_t = 1 - 2 pi_t + sum_v pi_v^2, times rho_t^2 if there are rollout weights."""
    logp = batch.token["policy_logp" if "policy_logp" in batch.token else "old_logp"]
    norms = 1 - 2 * tokens.gather(logp).exp() + tokens.gather(batch.token["sum_p2"])
    if "rollout_weight" in batch.token:
        norms = norms * tokens.gather(batch.token["rollout_weight"]) ** 2
    return norms
