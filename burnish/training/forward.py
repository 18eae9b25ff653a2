"""The learner's forward pass: splits a batch into micro-batches and computes the model's outputs at chosen tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from burnish.core.batch import Batch
from burnish.core.pipeline_stage import stage_of
from burnish.core.segments import contiguous_count
from burnish.models.decoder import Decoder
from burnish.models.kernels.aligned_groups import AlignedGroups
from burnish.models.kernels.logprob import Distribution, Distributions
from burnish.training.packing import (
    ATTENTION_COST,
    Unit,
    pack_units,
    prefix_trees,
    sequence_units,
    sharing_pays,
    tree_units,
    unshared_trees,
    whole_tree_units,
)
from burnish.training.parallel.fsdp import backbone_of
from burnish.training.parallel.ranks import SOLO, Ranks
from burnish.training.pictures import reading_pictures

Needs = frozenset[str]
"""Outputs wanted of a model: `value` of a critic; of a policy always `logp`, plus `entropy`, `kl` or `sum_p2` if named.

`learner_experts` is none of a forward pass: the learner's routers record it (`router_training.py`).
"""


class PolicyForward(Protocol):
    """The methods that a policy's model must have. Our decoder and `models/transformers_model.py` implement them.

    `shared_prefix` [S] has the number of tokens that each sequence shares with the one before it. A model that cannot share
    computation may ignore it.
    """

    def token_logprobs(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        shared_prefix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token | its past) at the `wanted` positions, and entropies if requested."""

    def token_statistics(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        shared_prefix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and sums of squared probabilities, without gradient."""


class ValueForward(Protocol):
    """The method that a critic's model must have."""

    def token_values(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, shared_prefix: Tensor | None = None
    ) -> Tensor:
        """The value of the state before each `wanted` token."""


@dataclass(frozen=True)
class Packing:
    """How the micro-batches of a model are made."""

    token_budget: int
    attention_cost: float = ATTENTION_COST
    """b / a in the cost a L + b L^2 of a sequence of L tokens."""
    shares: bool = False
    """Whether the model computes shared prefixes of a group's sequences once."""

    @staticmethod
    def of(model: nn.Module, token_budget: int, share_prefixes: bool = True) -> Packing:
        """The packing for a model: a native decoder shares prefixes and knows its attention cost."""
        cost = getattr(model, "attention_cost", None)
        return Packing(token_budget, ATTENTION_COST if cost is None else cost, share_prefixes and cost is not None)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, the positions of the wanted tokens in it, and their positions in the whole batch; [M] each."""

    batch: Batch
    wanted: Tensor
    positions: Tensor
    shared_prefix: Tensor | None = None
    """[S] how many tokens each sequence shares with the one before it; None if nothing is shared."""
    all_positions: Tensor | None = None
    """[n] the positions of all its tokens in the whole batch; None of a dummy, and where they are not needed."""

    @property
    def is_padding(self) -> bool:
        """Whether this is a dummy, because another rank has one micro-batch more: its tokens do not count."""
        return not self.positions.numel()


ReferenceStates = Distribution | Distributions | AlignedGroups
ReferenceFn = Callable[[MicroBatch], ReferenceStates]
"""Returns the reference's distributions at the wanted tokens of a micro-batch."""


def token_positions(batch: Batch, part: Tensor) -> Tensor:
    """Positions in the whole batch of the tokens of the sequences in `part`."""
    part = part.to(batch.offsets.device)
    starts, lengths = batch.offsets[:-1][part], batch.lengths[part]
    shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return torch.arange(int(lengths.sum()), device=shift.device) + shift


def micro_batches_of(
    batch: Batch, packing: Packing, mask: str, ranks: Ranks = SOLO, whole_groups: bool = False
) -> list[MicroBatch]:
    """Micro-batches of the sequences that have a token of the mask column; those tokens are the wanted ones.

    All ranks get the same number of micro-batches, by padding: FSDP gathers a layer's parameters on all ranks together. With
    `whole_groups` no group is divided; check `groups_fit_budget` first.
    """
    found = _micro_batches(batch, packing, mask, whole_groups)
    return found + [padding_micro_batch(batch.tokens.device)] * (ranks.max_over_ranks(len(found)) - len(found))


def padding_micro_batch(device: torch.device) -> MicroBatch:
    """A dummy micro-batch: one wanted token without a position in the batch."""
    two, one = torch.zeros(2, dtype=torch.long, device=device), torch.ones(1, dtype=torch.long, device=device)
    return MicroBatch(Batch(two, torch.tensor([0, 2], device=device)), one, one[:0])


def zero_loss(outputs: Mapping[str, Tensor]) -> Tensor:
    """The loss of a padding micro-batch: 0 for any outputs, with gradient 0."""
    return torch.stack([(output * output.new_zeros(0)).sum() for output in outputs.values()]).sum()


def groups_fit_budget(batch: Batch, packing: Packing, mask: str, ranks: Ranks = SOLO) -> bool:
    """Whether on all ranks every group fits the token budget and every sequence has a wanted token."""
    fit = True
    if batch.num_sequences:
        wanted = contiguous_count(batch.token[mask], batch.offsets)
        largest = max(unit.num_tokens for unit in _whole_group_units(batch, packing))
        fit = largest <= packing.token_budget and bool((wanted > 0).all())
    return ranks.max_over_ranks(int(not fit)) == 0


def _micro_batches(batch: Batch, packing: Packing, mask: str, whole_groups: bool) -> list[MicroBatch]:
    has_one = torch.zeros(batch.num_sequences, dtype=torch.bool, device=batch.tokens.device)
    has_one[batch.sequence_ids[batch.token[mask]]] = True
    chosen = has_one.nonzero().squeeze(1)
    if not chosen.numel():
        return []
    whole = chosen.numel() == batch.num_sequences
    units = (_whole_group_units if whole_groups else _units)(batch if whole else batch.select(chosen), packing)
    return [_micro_batch(batch, chosen, part, mask) for part in pack_units(units, packing.token_budget)]


def _units(batch: Batch, packing: Packing) -> list[Unit]:
    """The units to pack: parts of prefix trees if sharing pays, else single sequences."""
    lengths = batch.lengths.tolist()
    if packing.shares and "group_ids" in batch.sequence:
        trees = prefix_trees(batch)
        if sharing_pays(lengths, trees):
            return tree_units(lengths, trees, packing.token_budget, packing.attention_cost)
    return sequence_units(lengths, packing.attention_cost)


def _whole_group_units(batch: Batch, packing: Packing) -> list[Unit]:
    """Every group as one unit, as a prefix tree if sharing pays."""
    lengths = batch.lengths.tolist()
    trees = prefix_trees(batch) if packing.shares else []
    if not sharing_pays(lengths, trees):
        trees = unshared_trees(batch.sequence["group_ids"].tolist())
    return whole_tree_units(lengths, trees, packing.attention_cost)


def _micro_batch(batch: Batch, chosen: Tensor, part: list[Unit], mask: str) -> MicroBatch:
    index = chosen[torch.tensor([i for unit in part for i in unit.members], device=chosen.device)]
    micro = batch.select(index)
    shared = [count for unit in part for count in unit.shared]
    shared_prefix = torch.tensor(shared, device=chosen.device) if any(shared) else None
    wanted = micro.token[mask].nonzero().squeeze(1)
    positions = token_positions(batch, index)
    return MicroBatch(micro, wanted, positions[wanted], shared_prefix, positions)


def output_names(needs: Needs) -> list[str]:
    """Names of the outputs of a forward pass; the first is `value` or `logp`."""
    return ["value"] if "value" in needs else ["logp", *sorted(needs & {"entropy", "kl", "sum_p2"})]


def has_outputs(model: nn.Module) -> bool:
    """Whether a forward pass of this process ends with the model's outputs: not on the earlier stages of a pipeline."""
    stage = stage_of(model)
    return stage is None or stage.is_last


def forward(
    model: nn.Module, micro_batch: MicroBatch, needs: Needs, temperature: float, reference: ReferenceFn | None = None
) -> dict[str, Tensor]:
    """[M] outputs at the wanted tokens of a micro-batch, by name; with gradient unless `sum_p2` is among the needs.

    A pipeline stage without the head returns placeholders of one element. Their gradient is that of the hidden states it sent on.
    """
    with reading_pictures(model, micro_batch.batch):
        return _outputs(model, micro_batch, needs, temperature, reference)


def _outputs(
    model: nn.Module, micro_batch: MicroBatch, needs: Needs, temperature: float, reference: ReferenceFn | None
) -> dict[str, Tensor]:
    where = micro_batch.batch.tokens, micro_batch.batch.offsets, micro_batch.wanted
    if not has_outputs(model):
        if "kl" in needs and "value" not in needs:
            assert reference is not None, "the KL over the vocabulary needs a reference"
            reference(micro_batch)  # a stage of the reference, whose hidden states travel before the policy's
        backbone = cast(Decoder, backbone_of(model))
        with torch.set_grad_enabled(torch.is_grad_enabled() and "sum_p2" not in needs):
            sent, _ = backbone.states(where[0], where[1], where[2][:1] - 1, micro_batch.shared_prefix)
        return dict.fromkeys(output_names(needs), sent.sum().view(1))
    if "value" in needs:
        return {"value": cast(ValueForward, model).token_values(*where, shared_prefix=micro_batch.shared_prefix)}
    policy = cast(PolicyForward, model)
    if "sum_p2" in needs:
        statistics = policy.token_statistics(*where, temperature, shared_prefix=micro_batch.shared_prefix)
        found = dict(zip(("logp", "entropy", "sum_p2"), statistics, strict=True))
        return {name: found[name] for name in output_names(needs)}
    if "kl" in needs:
        assert reference is not None, "the KL over the vocabulary needs a reference"
        other = reference(
            micro_batch
        )  # before the policy's pass: it may temporarily load other weights into the policy
        found = dict(
            zip(
                ("logp", "entropy", "kl"),
                cast(Decoder, model).token_kl(*where, other, temperature, shared_prefix=micro_batch.shared_prefix),
                strict=True,
            )
        )
        return {name: found[name] for name in output_names(needs)}
    logp, entropy = policy.token_logprobs(
        *where, temperature, "entropy" in needs, shared_prefix=micro_batch.shared_prefix
    )
    return {"logp": logp} if entropy is None else {"logp": logp, "entropy": entropy}


@torch.no_grad()
def batch_outputs(
    model: nn.Module,
    batch: Batch,
    needs: Needs,
    packing: Packing,
    temperature: float,
    mask: str = "action_mask",
    on_micro_batch: Callable[[MicroBatch], None] | None = None,
    ranks: Ranks = SOLO,
    reference: ReferenceFn | None = None,
) -> dict[str, Tensor]:
    """[N] outputs at the tokens of the mask column, by name, without gradient; 0 elsewhere."""
    columns: dict[str, Tensor] = {}
    for micro_batch in micro_batches_of(batch, packing, mask, ranks):
        if on_micro_batch is not None:
            on_micro_batch(micro_batch)
        for name, values in forward(model, micro_batch, needs, temperature, reference).items():
            if not has_outputs(model):
                continue
            if name not in columns:
                columns[name] = values.new_zeros(batch.num_tokens)
            columns[name][micro_batch.positions] = values
    ranks.reshard(model)
    columns = ranks.columns_from_last_stage(columns, batch)
    nothing = torch.zeros(batch.num_tokens, device=batch.tokens.device)
    return {name: columns.get(name, nothing) for name in output_names(needs)}
