"""Reading the columns of a batch: action tokens, turns, rewards, groups, accuracy, demonstrations and replayed groups.

Shapes: N tokens and S sequences of a batch, M action tokens, T trajectories, K turns. Action tokens are the tokens of
`action_mask`, which the model wrote. A trajectory may be several sequences (branches, where its context was rewritten). They are
adjacent and in order, each action token is in one of them, and every sequence column of a trajectory (its reward, its group) is
equal in all of them. Everything here treats a trajectory as if its action tokens were one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import (
    compact_ids,
    contiguous_sum,
    ids_from_offsets,
    segment_count,
    segment_max,
    segment_mean,
    segment_min,
    segment_sum,
)

# --- Trajectories

ANSWER_COLUMN = "answer_ids"
"""Sequence column: the answer of each sequence, a trajectory or one of several draws of it. It takes precedence over `trajectory_ids`."""


TEACHER_PROMPT = "teacher_prompt"
"""Ragged column: the tokens that the teacher reads before the answer."""
TEACHER_IDS = "teacher_ids"
"""Sequence column: the index of each row's teacher, for a reference of several teachers."""
TEACHER_ANSWER = "teacher_answer"
"""Ragged column: the answer in the tokens of a teacher with another tokenizer."""
TEACHER_GROUPS = "teacher_groups"
"""Ragged column: the group of each token of `teacher_answer` among those of its row, or -1."""
ALIGNED = "aligned_group"
"""Token column: the group of each token that spells the same as the tokens of the same group of `teacher_groups`, or -1."""
TAUGHT = "taught"
"""Bool sequence column: rows whose teacher has something to show. A batch without it has only such rows."""


def answer_ids(batch: Batch) -> Tensor | None:
    """[S] equal for the sequences of one answer; None if every sequence is an answer."""
    return batch.sequence.get(ANSWER_COLUMN, batch.sequence.get("trajectory_ids"))


def first_sequences(batch: Batch) -> Tensor | None:
    """[T] the first sequence of each trajectory; None if every sequence is a trajectory."""
    ids = answer_ids(batch)
    if ids is None or ids.numel() < 2:
        return None
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[1:] = ids[1:] != ids[:-1]
    num = int(is_first.sum())
    if ids.unique().numel() < num:
        raise ValueError("the sequences of a trajectory must be next to each other in a batch")
    return None if num == ids.numel() else is_first.nonzero().squeeze(1)


def trajectory_offsets(batch: Batch) -> Tensor:
    """[T+1] where the tokens of each trajectory start among the N."""
    first = first_sequences(batch)
    return batch.offsets if first is None else torch.cat([batch.offsets[first], batch.offsets[-1:]])


def per_trajectory(batch: Batch, values: Tensor) -> Tensor:
    """[S] to [T]: the value of each trajectory's first sequence."""
    first = first_sequences(batch)
    return values if first is None else values.index_select(0, first)


def per_sequence(batch: Batch, values: Tensor) -> Tensor:
    """[T] to [S]: the value of each sequence's trajectory. Inverse of `per_trajectory`."""
    first = first_sequences(batch)
    if first is None:
        return values
    ends = torch.cat([first[1:], first.new_tensor([batch.num_sequences])])
    return torch.repeat_interleave(values, ends - first)


def differs_within_trajectories(batch: Batch, values: Tensor) -> bool:
    """Whether values [S] differ between sequences of the same trajectory."""
    if first_sequences(batch) is None:
        return False
    return not torch.equal(values, per_sequence(batch, per_trajectory(batch, values)))


# --- Action tokens


@dataclass(frozen=True)
class ActionTokens:
    """M action tokens of T trajectories, in order.

    Estimators that work token by token compute on these. Prompts and tool results are left out: the next element is the next
    action token, discounts count action tokens only, and values at other tokens (even NaN) are never read.
    """

    indices: Tensor | None  # [M] their indices among the N tokens; None if all tokens are action tokens
    offsets: Tensor  # [T+1] where each trajectory's tokens start among the M
    num_tokens: int  # N
    first: Tensor | None = None  # [T] the first sequence of each trajectory; None if every sequence is a trajectory

    @property
    def lengths(self) -> Tensor:  # [T]
        return self.offsets.diff()

    @property
    def last(self) -> Tensor:
        """[T] index of each trajectory's last action token among the M; every trajectory must have one."""
        empty = self.lengths == 0
        if bool(empty.any()):
            sequence = int(self.of_trajectories(torch.arange(empty.numel(), device=empty.device))[empty][0])
            raise ValueError(f"sequence {sequence} has no token the model wrote to put its reward on")
        return self.offsets[1:] - 1

    def of_trajectories(self, values: Tensor) -> Tensor:
        """[S] to [T]: the value of each trajectory's first sequence."""
        return values if self.first is None else values.index_select(0, self.first)

    def gather(self, column: Tensor) -> Tensor:
        """[N] to [M]."""
        return column if self.indices is None else column.index_select(0, self.indices)

    def scatter(self, values: Tensor) -> Tensor:
        """[M] to [N], 0 at the other tokens."""
        if self.indices is None:
            return values
        return values.new_zeros(self.num_tokens).index_copy_(0, self.indices, values)

    def spread(self, values: Tensor) -> Tensor:
        """[S] to [M]: each trajectory's value, equal in all its sequences, at all its tokens."""
        return torch.repeat_interleave(self.of_trajectories(values), self.lengths)


def action_tokens(batch: Batch) -> ActionTokens:
    """The action tokens of a batch."""
    first = first_sequences(batch)
    offsets = batch.offsets if first is None else torch.cat([batch.offsets[first], batch.offsets[-1:]])
    return tokens_of_mask(batch.action_mask, offsets, first)


def tokens_of_mask(mask: Tensor, offsets: Tensor, first: Tensor | None = None) -> ActionTokens:
    """The tokens of a mask [N] over runs with boundaries `offsets`; run k begins with sequence `first[k]`, or is sequence k."""
    if bool(mask.all()):
        return ActionTokens(None, offsets, mask.numel(), first)
    where = mask.nonzero().squeeze(1)
    return ActionTokens(where, torch.searchsorted(where, offsets), mask.numel(), first)


def action_lengths(batch: Batch) -> Tensor:
    """[S] number of action tokens of each sequence."""
    return contiguous_sum(batch.action_mask.to(torch.float32), batch.offsets).long()


def loss_lengths(batch: Batch) -> Tensor:
    """[S] number of tokens of each sequence in the loss: action tokens without those a correction rejected."""
    return contiguous_sum(batch.token.get("loss_mask", batch.action_mask).to(torch.float32), batch.offsets).long()


def whitened(values: Tensor, ddof: int, counts: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the tokens in the loss; x - mean if there is only one.

    `values` holds one value per action token [M] or per sequence [S]. Each value counts `counts` times, once by default.
    `ddof` 1 divides the variance by n - 1 (verl), 0 by n (OpenRLHF).
    """
    n = values.numel() if counts is None else int(counts.sum())
    if n == 0:
        return values
    if counts is None:
        centred = values - values.mean()
        total = centred.square().sum()
    else:
        centred = values - (values * counts).sum() / n
        total = (centred.square() * counts).sum()
    if n == 1:
        return centred
    return centred.div_((total / (n - ddof) + 1e-8).sqrt())


def whitened_tokens(batch: Batch, tokens: ActionTokens, values: Tensor, ddof: int) -> Tensor:
    """`whitened` for one value per action token [M]. Tokens outside the loss are scaled too, but not part of the statistics."""
    mask = batch.token.get("loss_mask", batch.action_mask)
    in_loss = tokens.gather(mask)
    return whitened(values, ddof, None if bool(in_loss.all()) else in_loss)


# --- Turns


class Turns(NamedTuple):
    """K turns of an agent, in order, and the M action tokens.

    Turns are ragged columns of a batch. `turn_start` is where in its sequence a turn begins. The action tokens from there to
    the next turn belong to it. Tokens of the environment in between belong to no turn. A sequence has the turns whose action
    tokens it has; the turns of a trajectory are those of its sequences, in order.
    """

    token_indices: Tensor  # [M] indices of the action tokens among the N
    turn_of_token: Tensor  # [M] the turn of each, from 0
    sequence_of_turn: Tensor  # [K] the sequence of each turn

    @property
    def num_turns(self) -> int:
        return self.sequence_of_turn.numel()

    @property
    def last(self) -> Tensor:
        """[K] the last action token of each turn among the N."""
        turn_ids = torch.arange(self.num_turns, device=self.token_indices.device)
        return self.token_indices[torch.searchsorted(self.turn_of_token, turn_ids, right=True) - 1]


def turns_of(batch: Batch) -> Turns:
    """The turns of a batch. Without the column `turn_start`, a turn is a run of action tokens with no other token inside."""
    if "turn_start" not in batch.ragged:
        return _runs_of_action_tokens(batch)
    starts = batch.ragged["turn_start"]
    sequence = ids_from_offsets(starts.offsets)
    begins = torch.zeros(batch.num_tokens, dtype=torch.int64, device=batch.tokens.device)
    begins[starts.values + batch.offsets[:-1][sequence]] = 1
    where = batch.action_mask.nonzero().squeeze(1)
    of_token = begins.cumsum(0)[where] - 1
    if bool((of_token < 0).any()) or not torch.equal(sequence[of_token], batch.sequence_ids[where]):
        raise ValueError("a sequence has tokens the model wrote before its first turn, or no turns at all")
    return Turns(where, of_token, sequence)


def _runs_of_action_tokens(batch: Batch) -> Turns:
    where, sequence = batch.action_mask.nonzero().squeeze(1), batch.sequence_ids
    is_first = torch.ones_like(where, dtype=torch.bool)
    is_first[1:] = (where.diff() > 1) | (sequence[where[1:]] != sequence[where[:-1]])
    return Turns(where, is_first.cumsum(0) - 1, sequence[where[is_first]])


def with_turn_rewards(batch: Batch, rewards: Tensor, last: Tensor) -> Tensor:
    """Moves the rewards that turns earned from the outcome on `last` [T] to the last tokens of those turns.

    The part of a trajectory's reward beyond its turns' rewards (the configured reward, a shaper) stays on `last`.
    """
    turns, earned = turns_of(batch), batch.ragged["turn_reward"].values
    of_sequence = segment_sum(earned, turns.sequence_of_turn, batch.num_sequences)
    placed = rewards.clone()
    placed[last] -= sum_over_sequences(batch, of_sequence)
    return placed.index_add_(0, turns.last, earned)


def sum_over_sequences(batch: Batch, values: Tensor) -> Tensor:
    """[S] to [T]: the sum over the sequences of each trajectory."""
    first = first_sequences(batch)
    if first is None:
        return values
    return contiguous_sum(values, torch.cat([first, first.new_tensor([batch.num_sequences])]))


# --- Rewards


def sequence_rewards(batch: Batch) -> Tensor:
    """[S] total reward of each sequence's trajectory: `reward`, or the sum of `token_rewards` if there is that column."""
    if "token_rewards" not in batch.token:
        return batch.sequence["reward"]
    return per_sequence(batch, contiguous_sum(token_rewards(batch), trajectory_offsets(batch)))


def token_rewards(batch: Batch) -> Tensor:
    """[N] the column `token_rewards`; raises if a token outside `action_mask` has a reward.

    Outcome estimators would count such a reward and token recursions would not. The reward of a tool's answer belongs on the
    last action token before it.
    """
    rewards = batch.token["token_rewards"]
    stray = (rewards != 0).logical_and_(~batch.action_mask)
    if bool(stray.any()):
        at = int(stray.nonzero()[0])
        sequence = int(torch.searchsorted(batch.offsets, at, right=True)) - 1
        raise ValueError(
            f"token {at - int(batch.offsets[sequence])} of sequence {sequence} has a reward of {float(rewards[at])}, but "
            "the model did not write it; place the reward on the last token it wrote before"
        )
    return rewards


def action_rewards(batch: Batch, tokens: ActionTokens) -> Tensor:
    """[M] reward at each action token; an outcome is on the last one of its trajectory."""
    if "token_rewards" in batch.token:
        return tokens.gather(token_rewards(batch))
    outcome = tokens.of_trajectories(batch.sequence["reward"])
    rewards = outcome.new_zeros(int(tokens.offsets[-1]))
    rewards[tokens.last] = outcome
    return rewards


def place_rewards(batch: Batch) -> Tensor:
    """[N] outcome rewards on the last action token of each trajectory; a turn's reward on the turn's last token."""
    tokens = action_tokens(batch)
    last = tokens.last if tokens.indices is None else tokens.indices[tokens.last]
    rewards = batch.sequence["reward"].new_zeros(batch.num_tokens)
    rewards[last] = tokens.of_trajectories(batch.sequence["reward"])
    return with_turn_rewards(batch, rewards, last) if "turn_reward" in batch.ragged else rewards


# --- Groups


@dataclass(frozen=True)
class Groups:
    """T values in groups 0..num-1. Every statistic is returned per value [T]."""

    ids: Tensor  # [T]
    num: int

    def sum(self, values: Tensor) -> Tensor:
        return segment_sum(values, self.ids, self.num).index_select(0, self.ids)

    def mean(self, values: Tensor) -> Tensor:
        return segment_mean(values, self.ids, self.num).index_select(0, self.ids)

    def max(self, values: Tensor) -> Tensor:
        return segment_max(values, self.ids, self.num).index_select(0, self.ids)

    def min(self, values: Tensor) -> Tensor:
        return segment_min(values, self.ids, self.num).index_select(0, self.ids)

    @property
    def size(self) -> Tensor:
        return segment_count(self.ids, self.num).index_select(0, self.ids)

    def deviation(self, centred: Tensor, ddof: int = 1) -> Tensor:
        """Standard deviation of centred values, with n - ddof in the denominator; 0 in a group of one."""
        return (self.sum(centred**2) / (self.size - ddof).clamp(min=1)).sqrt()

    def is_constant(self, values: Tensor) -> Tensor:
        """Whether all values of the group are equal; False in a group of one."""
        return (self.max(values) == self.min(values)) & (self.size > 1)

    def log_mean_exp(self, values: Tensor) -> Tensor:
        """log mean_g exp(x), with the group's maximum subtracted before the exponential, which could overflow."""
        best = self.max(values)
        return best + self.mean((values - best).exp()).log()

    def others_mean(self, values: Tensor) -> Tensor:
        """Mean of the other values of the group; 0 in a group of one."""
        return (self.sum(values) - values) / (self.size - 1).clamp(min=1)

    def with_degenerate(self, advantages: Tensor, rewards: Tensor, singletons: Tensor) -> Tensor:
        """The advantages, with exactly 0 in groups of equal rewards and `singletons` in groups of one."""
        advantages = torch.where(self.is_constant(rewards), torch.zeros_like(advantages), advantages)
        return torch.where(self.size == 1, singletons, advantages)


def trajectory_groups(batch: Batch) -> tuple[Tensor, Tensor]:
    """[S] the trajectory of each sequence and [T] the group of each trajectory, both numbered from 0.

    Without an id column every sequence is its own trajectory.
    """
    groups, _ = compact_ids(batch.sequence["group_ids"])
    ids = answer_ids(batch)
    if ids is None:
        return torch.arange(batch.num_sequences, device=groups.device), groups
    trajectory_ids, num = compact_ids(ids)
    return trajectory_ids, groups.new_zeros(num).index_copy(0, trajectory_ids, groups)


# --- Accuracy, lengths and orders


def required_accuracy(batch: Batch, user: str) -> Tensor:
    """[S] the accuracy; a sample without one is an error that names `user`, the option that needs it."""
    accuracy = batch.sequence["accuracy"]
    unjudged = int(accuracy.isnan().sum())
    if unjudged:
        raise UserError(
            f"{user} needs to know right from wrong, but {unjudged} of {accuracy.numel()} samples have no accuracy: "
            "add a reward part that judges the answer (exact, number, choice, math, task) for every data source, or set correct_at of a "
            "graded part (your own function) to the value from which an answer is correct; an environment that gives the rewards says it with "
            "End.success or its correct_at (zero_signal and dapo can compare rewards instead: metric: reward)"
        )
    return accuracy


def is_correct(batch: Batch, user: str) -> Tensor:
    """[S] bool: whether the accuracy is 1. The verifiers of the reward define the accuracy."""
    return required_accuracy(batch, user) >= 1


def trajectory_lengths(batch: Batch) -> Tensor:
    """[S] int64: number of action tokens of the whole trajectory."""
    trajectory_ids, groups = trajectory_groups(batch)
    return segment_count(trajectory_ids[batch.sequence_ids], groups.numel(), batch.action_mask)[trajectory_ids]


def is_truncated(batch: Batch) -> Tensor:
    """[S] bool: whether any sequence of the trajectory was truncated."""
    trajectory_ids, groups = trajectory_groups(batch)
    return (segment_max(batch.sequence["truncated"].double(), trajectory_ids, groups.numel()) > 0)[trajectory_ids]


def lexsort(*keys: Tensor) -> Tensor:
    """The stable order that sorts by the last key, ties by the key before it, and so on."""
    order = torch.arange(keys[0].numel(), device=keys[0].device)
    for key in keys:
        order = order[key[order].argsort(stable=True)]
    return order


def first_index(ids: Tensor, num: int) -> Tensor:
    """[num] the index at which each id occurs first."""
    return segment_min(torch.arange(ids.numel(), device=ids.device).double(), ids, num).long()


# --- Demonstrations

DEMONSTRATION_COLUMN = "demonstration"
"""Bool sequence column: whether the sequence is a demonstration, which the policy did not sample."""


def has_demonstrations(batch: Batch) -> bool:
    """Whether any sequence is a demonstration."""
    return DEMONSTRATION_COLUMN in batch.sequence and bool(batch.sequence[DEMONSTRATION_COLUMN].any())


def sampled_sequences(batch: Batch) -> Batch:
    """The sequences that the policy sampled; comparisons of sampler and trainer use only these."""
    return (
        batch.select((~batch.sequence[DEMONSTRATION_COLUMN]).nonzero().squeeze(1))
        if has_demonstrations(batch)
        else batch
    )


def sampled_token_mask(batch: Batch) -> Tensor:
    """[N] bool: tokens of the sequences that the policy sampled."""
    if not has_demonstrations(batch):
        return torch.ones_like(batch.loss_mask)
    return ~batch.sequence[DEMONSTRATION_COLUMN][batch.sequence_ids]


def sampled_loss_mask(batch: Batch) -> Tensor:
    """[N] bool: tokens in the loss that the policy sampled."""
    return batch.loss_mask & sampled_token_mask(batch)


def scatter_sampled(batch: Batch, column: Tensor, elsewhere: float | bool) -> Tensor:
    """[N] from a token column of `sampled_sequences(batch)`, with the value `elsewhere` at tokens of demonstrations."""
    whole = torch.full((batch.num_tokens,), elsewhere, dtype=column.dtype, device=column.device)
    whole[~batch.sequence[DEMONSTRATION_COLUMN][batch.sequence_ids]] = column
    return whole


# --- Replayed groups
#
# A batch with replayed groups has the sequence column `use`: 0 for a new group, k for a group that is replayed the k-th time.
# Without replay the column is absent.


def is_replayed(batch: Batch) -> Tensor:
    """[S] bool: whether the group was trained on in an earlier step."""
    use = batch.sequence.get("use")
    if use is None:
        return torch.zeros(batch.num_sequences, dtype=torch.bool, device=batch.offsets.device)
    return use > 0


def without_replayed(batch: Batch) -> Batch:
    """The sequences that are trained on for the first time."""
    if "use" not in batch.sequence:  # selecting all sequences would copy every column
        return batch
    return batch.select((~is_replayed(batch)).nonzero().squeeze(1))


def with_replayed_behaviour_logp(batch: Batch, logp: Tensor) -> Tensor:
    """[N] from the log-probs of `without_replayed(batch)`, with `behaviour_logp` at replayed sequences."""
    new = (~is_replayed(batch)[batch.sequence_ids]).nonzero().squeeze(1)
    return batch.token["behaviour_logp"].to(logp.dtype).index_copy(0, new, logp)


def replay_anchor_logp(batch: Batch) -> Tensor:
    """[N] `old_logp`, with `behaviour_logp` at replayed action tokens.

    The ratio of a replayed token is then pi / pi_behaviour, so a clip bounds all drift since it was sampled. With the
    log-probs before this step as the anchor, the drift of earlier steps would not be bounded.
    """
    replayed = is_replayed(batch)[batch.sequence_ids] & batch.action_mask
    old = batch.token["old_logp"]
    return torch.where(replayed, batch.token["behaviour_logp"].to(old.dtype), old)


def replay_drift(batch: Batch, logp: Tensor) -> dict[str, float]:
    """`replay/kl`: mean of behaviour_logp - logp over the replayed tokens in the loss; empty if nothing is replayed.

    `logp` [N] is the current policy's. The metric estimates how far the policy has moved since these tokens were sampled.
    """
    replayed = is_replayed(batch)[batch.sequence_ids] & batch.loss_mask
    if not bool(replayed.any()):
        return {}
    difference = batch.token["behaviour_logp"][replayed].double() - logp[replayed].double()
    return {"replay/kl": float(difference.mean())}
