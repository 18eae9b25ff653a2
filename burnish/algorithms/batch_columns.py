"""burnish.algorithms.batch_columns"""

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

# --- The tokens the model wrote, side by side: what every estimator that works token by token computes on.
#
# Prompts and tool answers are not there at all, so the next element is the next written token, observation tokens take no
# discount step, and whatever those tokens hold (NaN even) is never read.


@dataclass(frozen=True)
class ActionTokens:
    """M written tokens of S sequences, in order."""

    where: Tensor | None  # [M] their places among the N tokens; None when the model wrote all of them
    offsets: Tensor  # [S+1] where each sequence's tokens start among the M
    num_tokens: int  # N

    @property
    def lengths(self) -> Tensor:  # [S]
        return self.offsets.diff()

    @property
    def last(self) -> Tensor:
        """[S] each sequence's last written token among the M; every sequence must have one."""
        empty = self.lengths == 0
        if bool(empty.any()):
            sequence = int(empty.nonzero()[0])
            raise ValueError(f"sequence {sequence} has no token the model wrote, so its reward has no place")
        return self.offsets[1:] - 1

    def take(self, column: Tensor) -> Tensor:
        """[N] to [M]."""
        return column if self.where is None else column.index_select(0, self.where)

    def put(self, values: Tensor) -> Tensor:
        """[M] to [N], 0 at the other tokens."""
        if self.where is None:
            return values
        return values.new_zeros(self.num_tokens).index_copy_(0, self.where, values)

    def spread(self, values: Tensor) -> Tensor:
        """[S] to [M]: each sequence's value at all its tokens."""
        return torch.repeat_interleave(values, self.lengths)


def action_tokens(batch: Batch) -> ActionTokens:
    """The tokens of a batch that the model wrote."""
    return tokens_of_mask(batch.action_mask, batch.offsets)


def tokens_of_mask(mask: Tensor, offsets: Tensor) -> ActionTokens:
    """The tokens of a mask [N] over sequences with these boundaries [S+1]."""
    if bool(mask.all()):
        return ActionTokens(None, offsets, mask.numel())
    where = mask.nonzero().squeeze(1)
    return ActionTokens(where, torch.searchsorted(where, offsets), mask.numel())


def action_lengths(batch: Batch) -> Tensor:
    """[S] how many tokens the model wrote in each sequence."""
    return contiguous_sum(batch.action_mask.to(torch.float32), batch.offsets).long()


def loss_lengths(batch: Batch) -> Tensor:
    """[S] how many tokens of each sequence are in the loss: what the model wrote, less what a correction rejected."""
    return contiguous_sum(batch.token.get("loss_mask", batch.action_mask).to(torch.float32), batch.offsets).long()


def whitened(values: Tensor, ddof: int, counts: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the tokens in the loss; with one token or none, x - mean.

    `values` is one a written token [M], or one a sequence [S]; each stands for `counts` tokens, for one where none are given.
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
    """`whitened` for one value a written token [M]: rejected tokens are scaled like the others but do not count."""
    mask = batch.token.get("loss_mask", batch.action_mask)
    in_loss = tokens.take(mask)
    return whitened(values, ddof, None if bool(in_loss.all()) else in_loss)


# --- The turns of an agent: which turn every written token belongs to, and what each turn earned.
#
# Turns are ragged columns of a batch: `turn_start` says where in its sequence a turn begins; the tokens the model wrote from there to the
# next turn are its own, what an environment said between them is nobody's.


class Turns(NamedTuple):
    """K turns of a batch, in order, and the M tokens the model wrote."""

    where: Tensor  # [M] the written tokens among the N
    of_token: Tensor  # [M] the turn of each, from 0
    sequence: Tensor  # [K] the sequence of each turn

    @property
    def num(self) -> int:
        return self.sequence.numel()

    @property
    def last(self) -> Tensor:
        """[K] the last token of each turn among the N."""
        every = torch.arange(self.num, device=self.where.device)
        return self.where[torch.searchsorted(self.of_token, every, right=True) - 1]


def turns_of(batch: Batch) -> Turns:
    """The turns of a batch whose environment told them."""
    starts = batch.ragged["turn_start"]
    sequence = ids_from_offsets(starts.offsets)
    begins = torch.zeros(batch.num_tokens, dtype=torch.int64, device=batch.tokens.device)
    begins[starts.values + batch.offsets[:-1][sequence]] = 1
    where = batch.action_mask.nonzero().squeeze(1)
    of_token = begins.cumsum(0)[where] - 1
    if bool((of_token < 0).any()) or not torch.equal(sequence[of_token], batch.sequence_ids[where]):
        raise ValueError("a sequence has written tokens before its first turn, or no turns at all")
    return Turns(where, of_token, sequence)


def with_turn_rewards(batch: Batch, rewards: Tensor, last: Tensor) -> Tensor:
    """Outcomes on the tokens `last` [S] with what turns earned moved to the last tokens of those turns.

    What a trajectory's reward has beyond its turns' (the configured reward, a shaper) stays where it is.
    """
    turns, earned = turns_of(batch), batch.ragged["turn_reward"].values
    of_sequence = segment_sum(earned, turns.sequence, batch.num_sequences)
    if "trajectory_ids" in batch.sequence:
        owner = batch.sequence["trajectory_ids"].unique(return_inverse=True)[1]
        of_sequence = segment_sum(of_sequence, owner, batch.num_sequences)[owner]
    placed = rewards.clone()
    placed[last] -= of_sequence
    return placed.index_add_(0, turns.last, earned)


# --- Where rewards stand: one a sequence, or placed on the tokens the model wrote.


def sequence_rewards(batch: Batch) -> Tensor:
    """[S] total reward of each sequence: the outcome itself where rewards do not stand on tokens."""
    if "token_rewards" not in batch.token:
        return batch.sequence["reward"]
    return contiguous_sum(token_rewards(batch), batch.offsets)


def token_rewards(batch: Batch) -> Tensor:
    """[N] the `token_rewards` column, refused if a token the model did not write has a reward.

    Outcome estimators would count such a reward and token recursions would not; what a tool's answer earned belongs on
    the last written token before it.
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
    """[M] the reward at each written token; an outcome stands on the last one of its sequence."""
    if "token_rewards" in batch.token:
        return tokens.take(token_rewards(batch))
    outcome = batch.sequence["reward"]
    rewards = outcome.new_zeros(int(tokens.offsets[-1]))
    rewards[tokens.last] = outcome
    return rewards


def place_rewards(batch: Batch) -> Tensor:
    """[N] outcome rewards: each sequence's on the last token the model wrote in it, but what a turn earned on the turn's last."""
    tokens = action_tokens(batch)
    last = tokens.last if tokens.where is None else tokens.where[tokens.last]
    rewards = batch.sequence["reward"].new_zeros(batch.num_tokens)
    rewards[last] = batch.sequence["reward"]
    return with_turn_rewards(batch, rewards, last) if "turn_reward" in batch.ragged else rewards


@dataclass(frozen=True)
class Groups:
    """T values in groups 0..num-1. Every statistic comes spread over the values [T]."""

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
        """The deviation of values whose mean was taken off, the sample's unless ddof is 0; 0 in a group of one."""
        return (self.sum(centred**2) / (self.size - ddof).clamp(min=1)).sqrt()

    def is_constant(self, values: Tensor) -> Tensor:
        """Whether a group of two or more has equal values only."""
        return (self.max(values) == self.min(values)) & (self.size > 1)

    def others_mean(self, values: Tensor) -> Tensor:
        """The mean of the other values of the group; 0 in a group of one."""
        return (self.sum(values) - values) / (self.size - 1).clamp(min=1)

    def settled(self, advantages: Tensor, rewards: Tensor, alone: Tensor) -> Tensor:
        """The advantages, exactly 0 where a group's rewards are all equal and `alone` in groups of one."""
        advantages = torch.where(self.is_constant(rewards), torch.zeros_like(advantages), advantages)
        return torch.where(self.size == 1, alone, advantages)


def trajectory_groups(batch: Batch) -> tuple[Tensor, Tensor]:
    """[S] the trajectory of each sequence and [T] the group of each trajectory, both numbered from 0.

    Without `trajectory_ids` every sequence is a trajectory of its own.
    """
    groups, _ = compact_ids(batch.sequence["group_ids"])
    if "trajectory_ids" not in batch.sequence:
        return torch.arange(batch.num_sequences, device=groups.device), groups
    owner, num = compact_ids(batch.sequence["trajectory_ids"])
    return owner, groups.new_zeros(num).index_copy(0, owner, groups)


# --- What filters and shapers read of a batch: right or wrong, how long, cut short; and orders within groups.
#
# A trajectory may be several sequences. What is said of a trajectory is said of each of its sequences.


def required_accuracy(batch: Batch, user: str) -> Tensor:
    """[S] the accuracy; a sample nobody judged is an error that names `user`, who cannot do without."""
    accuracy = batch.sequence["accuracy"]
    unjudged = int(accuracy.isnan().sum())
    if unjudged:
        raise UserError(
            f"{user} needs to know right from wrong, but {unjudged} of {accuracy.numel()} samples have no accuracy: "
            "add a reward part that judges the answer (exact, number, choice, math, task) for every data source, or set correct_at of a "
            "graded part (your own function) to the value from which an answer is correct"
        )
    return accuracy


def is_correct(batch: Batch, user: str) -> Tensor:
    """[S] bool: the accuracy is 1; what counts as correct is said by the reward (`rewards.parts.accuracy_of`)."""
    return required_accuracy(batch, user) >= 1


def trajectory_lengths(batch: Batch) -> Tensor:
    """[S] int64: the tokens the model wrote in the whole trajectory."""
    owner, groups = trajectory_groups(batch)
    return segment_count(owner[batch.sequence_ids], groups.numel(), batch.action_mask)[owner]


def is_truncated(batch: Batch) -> Tensor:
    """[S] bool: some sequence of the trajectory was truncated."""
    owner, groups = trajectory_groups(batch)
    return (segment_max(batch.sequence["truncated"].double(), owner, groups.numel()) > 0)[owner]


def lexsort(*keys: Tensor) -> Tensor:
    """The order that sorts by the last key, ties by the one before it, and so on; what is still equal keeps its order."""
    order = torch.arange(keys[0].numel(), device=keys[0].device)
    for key in keys:
        order = order[key[order].argsort(stable=True)]
    return order


def first_index(ids: Tensor, num: int) -> Tensor:
    """[num] where each id occurs first."""
    return segment_min(torch.arange(ids.numel(), device=ids.device).double(), ids, num).long()


# --- Which sequences of a batch the policy sampled, and which somebody else wrote: demonstrations inside the groups.

DEMONSTRATION_COLUMN = "demonstration"


def has_demonstrations(batch: Batch) -> bool:
    """Whether any sequence is one."""
    return DEMONSTRATION_COLUMN in batch.sequence and bool(batch.sequence[DEMONSTRATION_COLUMN].any())


def sampled_sequences(batch: Batch) -> Batch:
    """The sequences that the policy sampled: what a comparison of the sampler with the trainer is of."""
    return (
        batch.select((~batch.sequence[DEMONSTRATION_COLUMN]).nonzero().squeeze(1))
        if has_demonstrations(batch)
        else batch
    )


def sampled_token_mask(batch: Batch) -> Tensor:
    """[N] the tokens of the sequences that the policy sampled."""
    if not has_demonstrations(batch):
        return torch.ones_like(batch.loss_mask)
    return ~batch.sequence[DEMONSTRATION_COLUMN][batch.sequence_ids]


def sampled_loss_mask(batch: Batch) -> Tensor:
    """[N] the tokens in the loss that the policy sampled."""
    return batch.loss_mask & sampled_token_mask(batch)


def scatter_sampled(batch: Batch, column: Tensor, elsewhere: float | bool) -> Tensor:
    """[N] a token column of `sampled(batch)`, with a value of their own at the tokens of demonstrations."""
    whole = torch.full((batch.num_tokens,), elsewhere, dtype=column.dtype, device=column.device)
    whole[~batch.sequence[DEMONSTRATION_COLUMN][batch.sequence_ids]] = column
    return whole


# --- Groups that were learnt from before: which they are, what their ratio is taken to, how far the policy has moved from them.
#
# A batch with such groups has the sequence column `use`: 0 where a group is new, k where it comes back for the k-th time. It
# is absent where nothing ever comes back.


def is_replayed(batch: Batch) -> Tensor:
    """[S] bool."""
    use = batch.sequence.get("use")
    if use is None:
        return torch.zeros(batch.num_sequences, dtype=torch.bool, device=batch.offsets.device)
    return use > 0


def without_replayed(batch: Batch) -> Batch:
    """The sequences that are here for the first time."""
    if "use" not in batch.sequence:  # to select all of them would copy every column
        return batch
    return batch.select((~is_replayed(batch)).nonzero().squeeze(1))


def with_replayed_behaviour_logp(batch: Batch, logp: Tensor) -> Tensor:
    """[N] log-probs of `new_ones(batch)`, and at the sequences that come back those of the policy that wrote them."""
    new = (~is_replayed(batch)[batch.sequence_ids]).nonzero().squeeze(1)
    return batch.token["behaviour_logp"].to(logp.dtype).index_copy(0, new, logp)


def replay_anchor_logp(batch: Batch) -> Tensor:
    """[N] `old_logp`, and at the tokens that come back the log-probs of the policy that wrote them.

    The ratio of such a token is then pi / pi_behaviour, and whatever bounds it bounds all that happened since: its log-probs
    of now would hide the steps in between.
    """
    back = is_replayed(batch)[batch.sequence_ids] & batch.action_mask
    old = batch.token["old_logp"]
    return torch.where(back, batch.token["behaviour_logp"].to(old.dtype), old)


def replay_drift(batch: Batch, logp: Tensor) -> dict[str, float]:
    """`replay/kl`: the mean of behaviour_logp - logp at the tokens in the loss that come back, `logp` [N] being the policy's of now.
    It estimates how far that has moved from the policies that wrote them. {} where nothing comes back.
    """
    back = is_replayed(batch)[batch.sequence_ids] & batch.loss_mask
    if not bool(back.any()):
        return {}
    moved = batch.token["behaviour_logp"][back].double() - logp[back].double()
    return {"replay/kl": float(moved.mean())}
