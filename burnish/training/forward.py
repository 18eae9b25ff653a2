"""The learner's forward pass: what a model says about chosen tokens of a batch, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from burnish.core.batch import Batch
from burnish.core.segments import contiguous_count
from burnish.models.decoder import Decoder
from burnish.models.kernels.logprob import Distribution
from burnish.models.kernels.shared_prefix import SharedPrefixes
from burnish.training.packing import (
    ATTENTION_COST,
    Unit,
    group_units,
    pack_units,
    sequence_units,
    shared_prefixes,
    sharing_pays,
    whole_group_units,
)
from burnish.training.parallel.ranks import SOLO, Ranks

Needs = frozenset[str]
"""What is wanted of a model: `value` of a critic; of a policy always log-probs, and `entropy`, `kl` or `sum_p2` if named."""


class PolicyForward(Protocol):
    """What the learner asks of a policy: our decoder and `models/transformers_model.py` both have it.

    `shared_prefix` says which sequences begin with another's tokens; one that shares nothing may leave it unread.
    """

    def token_logprobs(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        shared_prefix: SharedPrefixes | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token given its past) at the `wanted` positions, and entropies if asked."""

    def token_statistics(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        shared_prefix: SharedPrefixes | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and sums of squared probabilities, without gradient."""


class ValueForward(Protocol):
    """What the learner asks of a critic's model."""

    def token_values(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, shared_prefix: SharedPrefixes | None = None
    ) -> Tensor:
        """The value of the state before each `wanted` token."""


@dataclass(frozen=True)
class Packing:
    """How a model's micro-batches are made."""

    token_budget: int
    attention_cost: float = ATTENTION_COST
    """b / a of the cost a L + b L^2 of a sequence of L tokens."""
    shares: bool = False
    """Whether the model computes tokens that the samples of a group begin with once."""

    @staticmethod
    def of(model: nn.Module, token_budget: int, share_prompts: bool = True) -> Packing:
        """As suits a model: ours shares prompts and knows what its attention costs."""
        cost = getattr(model, "attention_cost", None)
        return Packing(token_budget, ATTENTION_COST if cost is None else cost, share_prompts and cost is not None)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, the positions of the wanted tokens in it, and where those stand in the whole batch; [M] each."""

    batch: Batch
    wanted: Tensor
    positions: Tensor
    shared_prefix: SharedPrefixes | None = None
    """Which of its sequences begin with another's tokens."""

    @property
    def is_filler(self) -> bool:
        """Whether it is only there because another rank has one more: nothing of it counts."""
        return not self.positions.numel()


ReferenceFn = Callable[[MicroBatch], Distribution]
"""The reference's distributions at the wanted tokens of a micro-batch."""


def token_positions(batch: Batch, part: Tensor) -> Tensor:
    """Where the tokens of the micro-batch `part` stand in the whole batch."""
    part = part.to(batch.offsets.device)
    starts, lengths = batch.offsets[:-1][part], batch.lengths[part]
    shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return torch.arange(int(lengths.sum()), device=shift.device) + shift


def micro_batches_of(
    batch: Batch, packing: Packing, mask: str, ranks: Ranks = SOLO, whole_groups: bool = False
) -> list[MicroBatch]:
    """The micro-batches of the sequences that have a token of the mask column, with those tokens as the wanted ones.

    All ranks get the same number, by fillers: they gather the parameters of a layer together, whoever has work for it. With
    `whole_groups` no group is divided (`groups_fit` says whether they can be).
    """
    found = _micro_batches(batch, packing, mask, whole_groups)
    return found + [padding_micro_batch(batch.tokens.device)] * (ranks.max_over_ranks(len(found)) - len(found))


def padding_micro_batch(device: torch.device) -> MicroBatch:
    """A micro-batch with a wanted token, which has no place in the batch."""
    two, one = torch.zeros(2, dtype=torch.long, device=device), torch.ones(1, dtype=torch.long, device=device)
    return MicroBatch(Batch(two, torch.tensor([0, 2], device=device)), one, one[:0])


def zero_loss(outputs: Mapping[str, Tensor]) -> Tensor:
    """The loss of a filler: 0 whatever the outputs are, with a gradient of 0 for each."""
    return torch.stack([(output * output.new_zeros(0)).sum() for output in outputs.values()]).sum()


def groups_fit_budget(batch: Batch, packing: Packing, mask: str, ranks: Ranks = SOLO) -> bool:
    """Whether every group of a batch is within the token budget, on all ranks, and all its sequences are computed at all."""
    fit = True
    if batch.num_sequences:
        wanted = contiguous_count(batch.token[mask], batch.offsets)
        largest = max(unit.num_tokens for unit in _whole_group_units(batch, packing)[0])
        fit = largest <= packing.token_budget and bool((wanted > 0).all())
    return ranks.max_over_ranks(int(not fit)) == 0


def _micro_batches(batch: Batch, packing: Packing, mask: str, whole_groups: bool) -> list[MicroBatch]:
    has_one = torch.zeros(batch.num_sequences, dtype=torch.bool, device=batch.tokens.device)
    has_one[batch.sequence_ids[batch.token[mask]]] = True
    chosen = has_one.nonzero().squeeze(1)
    if not chosen.numel():
        return []
    whole = chosen.numel() == batch.num_sequences
    units, shared = (_whole_group_units if whole_groups else _units)(batch if whole else batch.select(chosen), packing)
    return [_micro_batch(batch, chosen, part, shared, mask) for part in pack_units(units, packing.token_budget)]


def _units(batch: Batch, packing: Packing) -> tuple[list[Unit], list[int] | None]:
    """What is packed, and the tokens each sequence shares with its group, where that pays."""
    lengths = batch.lengths.tolist()
    if packing.shares and "group_ids" in batch.sequence:
        groups, shared = batch.sequence["group_ids"].tolist(), shared_prefixes(batch).tolist()
        if sharing_pays(lengths, groups, shared):
            return group_units(lengths, groups, shared, packing.token_budget, packing.attention_cost), shared
    return sequence_units(lengths, packing.attention_cost), None


def _whole_group_units(batch: Batch, packing: Packing) -> tuple[list[Unit], list[int] | None]:
    """Every group as one unit, and the tokens each sequence shares with its group, where that pays."""
    lengths, groups = batch.lengths.tolist(), batch.sequence["group_ids"].tolist()
    shared = shared_prefixes(batch).tolist() if packing.shares else [0] * len(lengths)
    if sharing_pays(lengths, groups, shared):
        return whole_group_units(lengths, groups, shared, packing.attention_cost), shared
    return whole_group_units(lengths, groups, [0] * len(lengths), packing.attention_cost), None


def _micro_batch(batch: Batch, chosen: Tensor, part: list[Unit], shared: list[int] | None, mask: str) -> MicroBatch:
    members = [i for unit in part for i in unit.members]
    index = chosen[torch.tensor(members, device=chosen.device)]
    micro = batch.select(index)
    shared_prefix = None
    if shared is not None:
        owner: list[int] = []
        for unit in part:
            first = len(owner)  # one that shares nothing stands by itself
            owner += [first if shared[i] else first + k for k, i in enumerate(unit.members)]
        shared_prefix = SharedPrefixes(*torch.tensor([owner, [shared[i] for i in members]], device=chosen.device))
    wanted = micro.token[mask].nonzero().squeeze(1)
    return MicroBatch(micro, wanted, token_positions(batch, index)[wanted], shared_prefix)


def output_names(needs: Needs) -> list[str]:
    """The outputs a forward pass gives for these needs; the first is the one every token has."""
    return ["value"] if "value" in needs else ["logp", *sorted(needs & {"entropy", "kl", "sum_p2"})]


def forward(
    model: nn.Module, piece: MicroBatch, needs: Needs, temperature: float, reference: ReferenceFn | None = None
) -> dict[str, Tensor]:
    """[M] outputs at the wanted tokens of a micro-batch, by name; with gradient, unless `sum_p2` is among them."""
    where = piece.batch.tokens, piece.batch.offsets, piece.wanted
    if "value" in needs:
        return {"value": cast(ValueForward, model).token_values(*where, shared_prefix=piece.shared_prefix)}
    policy = cast(PolicyForward, model)
    if "sum_p2" in needs:
        statistics = policy.token_statistics(*where, temperature, shared_prefix=piece.shared_prefix)
        found = dict(zip(("logp", "entropy", "sum_p2"), statistics, strict=True))
        return {name: found[name] for name in output_names(needs)}
    if "kl" in needs:
        assert reference is not None, "a KL over the vocabulary is one to a reference"
        other = reference(piece)  # first: it may put other weights into the policy for a moment
        found = dict(
            zip(
                ("logp", "entropy", "kl"),
                cast(Decoder, model).token_kl(*where, other, temperature, shared_prefix=piece.shared_prefix),
                strict=True,
            )
        )
        return {name: found[name] for name in output_names(needs)}
    logp, entropy = policy.token_logprobs(*where, temperature, "entropy" in needs, shared_prefix=piece.shared_prefix)
    return {"logp": logp} if entropy is None else {"logp": logp, "entropy": entropy}


@torch.no_grad()
def batch_outputs(
    model: nn.Module,
    batch: Batch,
    needs: Needs,
    packing: Packing,
    temperature: float,
    mask: str = "action_mask",
    on_piece: Callable[[MicroBatch], None] | None = None,
    ranks: Ranks = SOLO,
    reference: ReferenceFn | None = None,
) -> dict[str, Tensor]:
    """[N] outputs at the tokens of the mask column, by name, without gradient; 0 elsewhere."""
    columns: dict[str, Tensor] = {}
    for piece in micro_batches_of(batch, packing, mask, ranks):
        if on_piece is not None:
            on_piece(piece)
        for name, values in forward(model, piece, needs, temperature, reference).items():
            if name not in columns:
                columns[name] = values.new_zeros(batch.num_tokens)
            columns[name][piece.positions] = values
    ranks.reshard(model)
    nothing = torch.zeros(batch.num_tokens, device=batch.tokens.device)
    return {name: columns.get(name, nothing) for name in output_names(needs)}
