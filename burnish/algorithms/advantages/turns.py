"""Advantages of agents, whose trajectories are turns: one value per turn, or a critic that looks from turn to turn.

All functions return [N]. Discounts named per turn count turns, however long they are. The turns of a trajectory may be in
several sequences. Reward that no turn earned (the configured reward, a shaper) counts for the last turn.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.advantages.group_relative import group_normalised, group_rewards
from burnish.algorithms.advantages.returns import AdvantagesAndReturns, value_differences
from burnish.algorithms.advantages.reverse_scan import discount_cumsum
from burnish.algorithms.batch_columns import (
    Groups,
    Turns,
    action_tokens,
    place_rewards,
    token_rewards,
    trajectory_groups,
    turns_of,
    whitened_tokens,
)
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, contiguous_sum, offsets_from_lengths, segment_count, segment_sum

CLUSTER_EPS = 1e-6
"""Added to deviations, and to the sum of the weights of HGPO."""
BATCH_EPS = 1e-9
"""Added to the deviation of all returns of a batch."""


class TurnRewards(NamedTuple):
    """K turns with the trajectory and the reward of each."""

    turns: Turns
    trajectory: Tensor  # [K] from 0, as numbered by `trajectory_groups`
    rewards: Tensor  # [K]

    def spread(self, batch: Batch, values: Tensor) -> Tensor:
        """[K] to [N]: each turn's value at its action tokens, 0 elsewhere."""
        tokens = self.turns.token_indices
        return values.new_zeros(batch.num_tokens).index_copy_(0, tokens, values[self.turns.turn_of_token])


def turn_rewards(batch: Batch) -> TurnRewards:
    """The turns of a batch, and what each earned: the sum of the rewards on its tokens."""
    turns = turns_of(batch)
    placed = token_rewards(batch) if "token_rewards" in batch.token else place_rewards(batch)
    rewards = segment_sum(placed[turns.token_indices], turns.turn_of_token, turns.num_turns)
    return TurnRewards(turns, trajectory_groups(batch)[0][turns.sequence_of_turn], rewards)


def turn_returns(rewards: Tensor, trajectory: Tensor, gamma: float) -> Tensor:
    """[K] discounted return from each turn to the end of its trajectory; turns of a trajectory are in order."""
    order = torch.argsort(trajectory, stable=True)
    offsets = offsets_from_lengths(segment_count(trajectory, int(trajectory.max()) + 1))
    return torch.empty_like(rewards).index_copy_(0, order, discount_cumsum(rewards[order], offsets, gamma))


def _required_states(batch: Batch, name: str) -> Tensor:
    """[K] the state in which each turn begins, numbered from 0."""
    if "turn_state" not in batch.ragged:
        raise UserError(
            f"advantage {name} compares the turns of a group that begin in the same state, and the environment reports none: give every "
            "Turn a state (a text, equal for equal states), or use grpo"
        )
    return compact_ids(batch.ragged["turn_state"].values)[0]


# --- Groups of turns


def gigpo(batch: Batch, *, omega: float, gamma: float, normalise: Literal["none", "std"]) -> Tensor:
    """[N] A = (R - mean_g) / F + omega (Rs_k - mean_anchor) / F, with Rs_k = sum_{j>=k} gamma^(j-k) r_j. GiGPO (2505.10978).

    R is the episode's reward, Rs_k the return from turn k on. An anchor is all turns of a group that begin in the same state,
    at any time; a turn alone in its anchor gets 0 from it. F is 1, or the deviation + 1e-6. The ragged columns of the turns
    give where each begins, what it earned and its state. Every trajectory counts once in R's mean.
    """
    states = _required_states(batch, "gigpo")
    _, rewards, groups = group_rewards(batch)
    std = "group" if normalise == "std" else "none"
    episode = group_normalised(rewards, groups, std, eps=CLUSTER_EPS)
    found = turn_rewards(batch)
    anchors = Groups(*compact_ids(groups.ids[found.trajectory] * (int(states.max()) + 1) + states))
    returns = turn_returns(found.rewards, found.trajectory, gamma)
    step = group_normalised(returns, anchors, std, eps=CLUSTER_EPS, singleton="zero")
    return found.spread(batch, episode[found.trajectory] + omega * step)


def hgpo(
    batch: Batch, *, history: int, alpha: float, gamma: float, normalise: Literal["none", "std"], episode: bool
) -> Tensor:
    """[N] A = sum_k w_k a_k over clusters of turns with equal histories, w_k = (k+1)^alpha / (sum of those + 1e-6). HGPO (verl-agent).

    Cluster k = 1 .. history + 1 of a turn is all turns of the group whose last k states, the own one included, are equal to its.
    a_k = (Rs - mean of the cluster) / F, with Rs as in `gigpo`; F is 1, or the cluster's population deviation + 1e-6. Clusters of
    one turn and a_k of 0 are left out, also of the weights. `episode` adds a_0, the episode's reward relative to its group.
    """
    states = _required_states(batch, "hgpo")
    _, rewards, groups = group_rewards(batch)
    found = turn_rewards(batch)
    std = "group" if normalise == "std" else "none"
    returns = turn_returns(found.rewards, found.trajectory, gamma)
    total, weights = torch.zeros_like(returns), torch.zeros_like(returns)
    if episode:
        relative = group_normalised(rewards, groups, std, CLUSTER_EPS, "zero", ddof=0)[found.trajectory]
        total, weights = relative.clone(), (relative != 0).to(returns.dtype)
    num_states = int(states.max()) + 1
    before = _previous_turns(found.trajectory)  # [K] -1 for a first turn
    clusters = compact_ids(groups.ids[found.trajectory] * num_states + states)[0]
    has_history = torch.ones_like(before, dtype=torch.bool)  # whether the turn has k states
    for k in range(1, history + 2):
        if k > 1:
            has_history = (before >= 0) & has_history[before]
            clusters = compact_ids(clusters[before] * num_states + states)[0]
        inside = has_history.nonzero().squeeze(1)
        if inside.numel() == 0:
            break
        members = Groups(*compact_ids(clusters[inside]))
        part = group_normalised(returns[inside], members, std, CLUSTER_EPS, "zero", ddof=0)
        total = total.index_add(0, inside, (k + 1) ** alpha * part)
        weights = weights.index_add(0, inside, (k + 1) ** alpha * (part != 0).to(part.dtype))
    return found.spread(batch, total / (weights + CLUSTER_EPS))


def mt_grpo(batch: Batch, *, outcome: float, std: Literal["group", "none"]) -> Tensor:
    """[N] A_k = n(r_k) + outcome A_O before the last turn, A_O in the last; n(x) = (x - mean)/(std + 1e-6). MT-GRPO (2505.11821).

    A_O = n(the last turn's reward) among the group's trajectories, and n(r_k) is among their k-th turns. The paper has two turns, a
    call and an answer, with a reward each. For other numbers of turns, chosen here: turn k is compared with k-th turns that are not the last
    of their trajectory, and one alone gets 0; the last turn's reward is the outcome, whichever its number.
    """
    _, rewards, groups = group_rewards(batch)
    found = turn_rewards(batch)
    place = _places_in_trajectories(found.trajectory)
    is_last = place == segment_count(found.trajectory, rewards.numel())[found.trajectory] - 1
    last = rewards.index_copy(0, found.trajectory[is_last], found.rewards[is_last].to(rewards.dtype))
    final = outcome_of_turn = group_normalised(last, groups, std, CLUSTER_EPS, "zero")[found.trajectory]
    earlier = (~is_last).nonzero().squeeze(1)
    if earlier.numel():
        peers = Groups(*compact_ids(groups.ids[found.trajectory[earlier]] * (int(place.max()) + 1) + place[earlier]))
        own = group_normalised(found.rewards[earlier].to(final.dtype), peers, std, CLUSTER_EPS, "zero")
        final = final.index_copy(0, earlier, own + outcome * outcome_of_turn[earlier])
    return found.spread(batch, final)


def step_broadcast(
    batch: Batch, *, std: Literal["group", "none", "batch"], eps: float, step_norm: bool, min_std: float | None
) -> Tensor:
    """[N] A = (R - mean_g) / (std + eps) of the last step's reward R, the same in all steps of a run. Trinity-RFT, rLLM.

    `step_norm` divides A by the number of steps (turns) of the run, so that a long run counts no more than a short one. Groups whose
    standard deviation is at most `min_std` get 0. Rewards of earlier steps do not count.
    """
    _, rewards, groups = group_rewards(batch)
    found = turn_rewards(batch)
    num_steps = segment_count(found.trajectory, rewards.numel())
    is_last = _places_in_trajectories(found.trajectory) == num_steps[found.trajectory] - 1
    last = torch.zeros_like(rewards).index_copy(0, found.trajectory[is_last], found.rewards[is_last].to(rewards.dtype))
    advantages = group_normalised(last, groups, std, eps)
    if min_std is not None:
        advantages = advantages.masked_fill(groups.deviation(last - groups.mean(last)) <= min_std, 0.0)
    if step_norm:
        advantages = advantages / num_steps.clamp(min=1)
    return found.spread(batch, advantages[found.trajectory])


def _places_in_trajectories(trajectory: Tensor) -> Tensor:
    """[K] the number of each turn in its trajectory, from 0; the turns of a trajectory are in order."""
    order = torch.argsort(trajectory, stable=True)
    starts = offsets_from_lengths(segment_count(trajectory, int(trajectory.max()) + 1))
    places = torch.arange(order.numel(), device=order.device) - starts[trajectory[order]]
    return torch.empty_like(order).index_copy_(0, order, places)


def _previous_turns(trajectory: Tensor) -> Tensor:
    """[K] the turn before each in its trajectory, -1 for the first; the turns of a trajectory are in order."""
    order = torch.argsort(trajectory, stable=True)
    follows = torch.zeros_like(order, dtype=torch.bool)
    follows[1:] = trajectory[order[1:]] == trajectory[order[:-1]]
    return torch.full_like(order, -1).index_copy_(0, order, torch.where(follows, order.roll(1), -1))


# --- Returns of turns


def rebn(batch: Batch, *, gamma: float) -> Tensor:
    """[N] A_k = (G_k - mean) / (std + 1e-9), with G_k = r_k + gamma G_{k+1} the return from turn k on. ReBN, GEM (2510.01051).

    Mean and sample deviation are over all turns of the batch, each counted once, however long it is. It needs no group that
    begins in one state, so turns may have rewards of their own and a discount. Equal returns have advantage 0.
    """
    found = turn_rewards(batch)
    returns = turn_returns(found.rewards, found.trajectory, gamma)
    if float(returns.max()) == float(returns.min()):
        return found.spread(batch, torch.zeros_like(returns))
    return found.spread(batch, (returns - returns.mean()) / (returns.std() + BATCH_EPS))


# --- With a critic


def bilevel_gae(
    batch: Batch,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float,
    turn_lam: float | None,
    lam_critic: float | None,
    whiten: bool,
    ddof: Literal[0, 1],
) -> AdvantagesAndReturns:
    """GAE between turns, and GAE between the tokens of each turn. RAGEN (2504.20073), VAGEN (2510.16907).

        turns:   D_k = R_k + turn_gamma V(e_{k+1}) - V(e_k);   B_k = D_k + turn_gamma turn_lam B_{k+1};   Y_k = B_k + V(e_k)
        tokens:  delta_t = y_t + gamma V_{t+1} - V_t;   A_t = delta_t + gamma lam A_{t+1};   returns = A + V

    e_k is the last action token of turn k, R_k the sum of the rewards on its tokens, and V behind the last turn is 0. Inside a turn
    y is the reward of each token, but at e_k the rest of Y_k; V after e_k is 0, and nothing else flows in from later turns. With
    gamma and lam 1 credit passes whole through a turn, and only turns are discounted. `turn_lam` None is `lam`. `lam_critic`
    replaces both lambdas for the critic's targets. A trajectory of one turn has the advantages of `gae`.
    """
    tokens, turns = action_tokens(batch), turns_of(batch)
    values = tokens.gather(batch.token["values"])
    placed = token_rewards(batch) if "token_rewards" in batch.token else place_rewards(batch)
    rewards = tokens.gather(placed).to(values.dtype)
    of_turns = offsets_from_lengths(segment_count(turns.turn_of_token, turns.num_turns))  # [K+1] among the M
    chains = torch.searchsorted(
        of_turns[:-1].contiguous(), tokens.offsets
    )  # [T+1] turns of each trajectory among the K
    ends = of_turns[1:] - 1
    earned = contiguous_sum(rewards, of_turns)
    turn_errors = value_differences(values[ends], chains, turn_gamma).add_(earned)
    token_errors = value_differences(values, of_turns, gamma).add_(rewards)

    def advantages_with(token_lam: float, between_turns: float) -> Tensor:
        targets = discount_cumsum(turn_errors, chains, turn_gamma * between_turns) + values[ends]
        errors = token_errors.index_add(0, ends, targets - earned)
        return discount_cumsum(errors, of_turns, gamma * token_lam)

    advantages = targets = advantages_with(lam, lam if turn_lam is None else turn_lam)
    if lam_critic is not None:
        targets = advantages_with(lam_critic, lam_critic)
    returns = tokens.scatter(targets + values)
    if whiten:
        advantages = whitened_tokens(batch, tokens, advantages, ddof)
    return AdvantagesAndReturns(tokens.scatter(advantages), returns)
