"""What the routers of a decoder do in a forward pass besides choosing experts: record, replay, compare, measure and balance.

Engine and learner may choose different experts for a token, because they round differently or because the weights have
changed since. Then the ratio of their probabilities says little. `EngineRecorder` stores the experts that an engine chose,
beside the keys of the same tokens. `LearnerRouting` compares them with the learner's own choice or replays them (R3,
2510.11370): the choice is the engine's, the weights are the learner's scores of those experts, with gradient. It can also
record the learner's own choice in one pass and replay that in later ones (R2 of verl).

The balance loss is that of DeepSeek-V3 (2412.19437), for each sequence by itself:

    f_e = E / (k T) * tokens of the sequence that chose expert e        P_e = mean over its T tokens of the scores of e
    loss = coefficient * mean over sequences and layers of sum_e f_e P_e

Processes that divide the rows of a sequence (context parallelism) add their counts for f_e; each has the term of its own rows' scores.

A sum over a whole batch, as in Switch (2101.03961), would depend on the split into micro-batches; this one does not. It sees
the router's own choice, not a replayed one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from burnish.core.routed_experts import UNKNOWN_EXPERT
from burnish.models.experts import Choice, ExpertMlp, choose_experts, route
from burnish.models.kernels.paged_cache import Placement
from burnish.models.kernels.shared_prefix import ComputedRows, RowShard, UnshardedRows

if TYPE_CHECKING:
    from burnish.models.decoder import Decoder

RECORD_DTYPE = torch.int16


class EngineRecorder:
    """The experts that an engine chose, stored by page and slot like the keys of the same tokens."""

    def __init__(self, model: Decoder, num_pages: int, page_size: int) -> None:
        shape = model.arch.experts
        assert shape is not None, "a model with experts"
        self.page_size = page_size
        sizes = (num_pages, page_size, model.arch.num_expert_layers, shape.experts_per_token)
        self.store = torch.full(sizes, UNKNOWN_EXPERT, dtype=RECORD_DTYPE, device=model.embedding.weight.device)
        self._where: tuple[Tensor, Tensor] | None = None
        self._which: Tensor | None = None

    def begin(self, placement: Placement, which: Tensor | None) -> None:
        """Prepare a forward pass of these tokens; after the last layer's attention only those of index `which` go on."""
        position = placement.position
        page = placement.table[placement.owner, position.clamp(min=0) // self.page_size].long()
        self._where, self._which = (page.masked_fill(position < 0, 0), position.clamp(min=0) % self.page_size), which
        if which is not None:  # the last layer may compute none of them, and an earlier request had these pages
            self.store[self._where] = UNKNOWN_EXPERT

    def choose(self, mlp: ExpertMlp, logits: Tensor, score_bias: Tensor | None) -> Choice:
        """Choose by the router and store the choice."""
        choice, _ = route(logits, mlp.shape, score_bias)
        assert self._where is not None, "begin comes first"
        page, slot = self._where
        if choice.experts.shape[0] != page.shape[0]:
            assert self._which is not None, "fewer tokens than were announced"
            page, slot = page[self._which], slot[self._which]
        self.store[page, slot, mlp.place] = choice.experts.to(RECORD_DTYPE)
        return choice

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the records of pages with their keys."""
        self.store[targets] = self.store[sources]

    def read(self, pages: list[int]) -> Tensor:
        """A copy of the records [tokens, layers, k] of some pages, on the device."""
        return self.store[torch.tensor(pages, dtype=torch.long, device=self.store.device)].flatten(0, 1)


@dataclass
class RouterSums:
    """Sums over tokens and layers, from which `router_stats` computes the metrics."""

    counts: Tensor
    """[layers, E] tokens of each expert."""
    entropy: Tensor
    """Sum of the entropies of the normalised scores."""
    rows: Tensor
    """Tokens times layers."""
    agreed: Tensor
    """Recorded experts that the learner's router chooses too."""
    recorded: Tensor
    """Recorded experts."""
    old_agreed: Tensor
    """Experts of the learner's earlier pass that its router chooses still."""
    old_recorded: Tensor
    """Experts of the learner's earlier pass."""
    balance: Tensor
    """The balance loss without its coefficient."""

    @staticmethod
    def zeros(num_layers: int, num_experts: int, device: torch.device) -> RouterSums:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        counts = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        return RouterSums(counts, *(zero.clone() for _ in range(7)))


def router_stats(sums: RouterSums) -> dict[str, float]:
    """Metrics of the routers.

    - `router/entropy`: mean entropy of a token's scores, in nats; `router/balance`: the balance loss, 1 if all is even;
    - `router/imbalance`: load of the busiest expert by the mean load, averaged over layers; `router/dead`: share of experts without a token;
    - `router/agreement`: share of the engine's experts that the learner's router chooses too, if they were recorded;
    - `router/old_agreement`: share of the experts of the pass of old log-probs that the router still chooses, if they are replayed.
    """
    if not float(sums.rows):
        return {}
    counts = sums.counts[sums.counts.sum(1) > 0]
    found = {
        "router/entropy": float(sums.entropy / sums.rows),
        "router/imbalance": float((counts.amax(1) / counts.mean(1)).mean()),
        "router/dead": float((counts == 0).double().mean()),
    }
    if float(sums.balance):
        found["router/balance"] = float(sums.balance)
    if float(sums.recorded):
        found["router/agreement"] = float(sums.agreed / sums.recorded)
    if float(sums.old_recorded):
        found["router/old_agreement"] = float(sums.old_agreed / sums.old_recorded)
    return found


@dataclass(frozen=True)
class ExpertStore:
    """Where the learner's own choice in one pass is written."""

    experts: Tensor
    """[N, layers, k] of the whole batch."""
    positions: Tensor
    """[n] positions in the batch of the tokens of the pass."""


@dataclass
class LearnerRouting:
    """The routers of one micro-batch of a learner."""

    sums: RouterSums | None = None
    """Where metrics are added up; None measures nothing."""
    recorded: Tensor | None = None
    """[N, layers, k] the engine's experts of each token."""
    replays: bool = False
    """Whether the recorded experts are used, not only compared."""
    num_sequences: int | None = None
    """Sequences of the whole mini-batch, for the balance loss; None computes none."""
    old_experts: Tensor | None = None
    """[N, layers, k] the learner's own experts of each token in an earlier pass, which are used."""
    store: ExpertStore | None = None
    """Where the choice of a pass without gradient is written; None writes nothing."""
    terms: list[Tensor] = field(default_factory=list)
    """The balance loss of each layer, with gradient."""
    _row_records: Tensor | None = None
    _row_old_experts: Tensor | None = None
    _stored_rows: tuple[Tensor, Tensor] | None = None
    """Positions in the batch of the tokens that this process computes, and their rows; None if the pass is not stored."""
    _membership: Tensor | None = None
    _sum_over_rows: Callable[[Tensor], Tensor] | None = None
    """The sum over the rows of all processes from a sum over those of this one."""
    _is_row: Tensor | None = None
    """[rows] whether a row is a token, not padding; None if all are."""
    _is_measured: bool = True
    _passed: set[int] = field(default_factory=set)
    """The places of the layers that this pass has computed; activation checkpointing computes them again."""

    def begin(
        self, offsets: Tensor, rows: ComputedRows | None, shard: RowShard, has_exact_pass: bool, is_exact: bool = False
    ) -> None:
        """Prepare a forward pass over the computed rows of packed sequences.

        In exact mode the pass that gives the log-probs is compared with the engine, not the one that gives the gradient.
        """
        self.terms.clear()
        self._passed.clear()
        self._is_measured = is_exact == has_exact_pass
        self._row_records = self._row_old_experts = self._membership = self._is_row = self._stored_rows = None
        if self.sums is not None and not isinstance(shard, UnshardedRows):
            num_rows = int(offsets[-1]) if rows is None else rows.num_rows
            self._is_row = shard.rows(torch.ones(num_rows, dtype=torch.bool, device=offsets.device))
        if self.recorded is not None:
            self._row_records = _of_rows(self.recorded, rows, shard)
        if self.old_experts is not None:
            self._row_old_experts = _of_rows(self.old_experts, rows, shard)
        if self.store is not None and self._is_measured:
            tokens, own = _token_rows(int(offsets[-1]), rows, shard, offsets.device)
            self._stored_rows = self.store.positions[tokens], own
        if self.num_sequences is not None and not is_exact:
            self._membership = shard.rows(_membership(offsets, rows).t()).t()
            self._sum_over_rows = shard.sum_over_rows

    def choose(self, mlp: ExpertMlp, logits: Tensor, score_bias: Tensor | None) -> Choice:
        """Choose by the router or by the record; compare, measure, and add a term of the balance loss."""
        record = None if self._row_records is None else self._row_records[:, mlp.place]
        old = None if self._row_old_experts is None else self._row_old_experts[:, mlp.place]
        replayed = record if self.replays else old
        choice, scores = route(logits, mlp.shape, score_bias, replayed)
        own = choice.experts if replayed is None else choose_experts(scores.detach(), mlp.shape, score_bias)
        if self._stored_rows is not None:
            assert self.store is not None
            positions, stored = self._stored_rows
            self.store.experts[positions, mlp.place] = choice.experts[stored].to(RECORD_DTYPE)
        is_first = mlp.place not in self._passed
        self._passed.add(mlp.place)
        if self.sums is not None and self._is_measured and is_first:
            rows = slice(None) if self._is_row is None else self._is_row
            records = (None if one is None else one[rows] for one in (record, old))
            _measure(self.sums, mlp, scores.detach()[rows], own[rows], *records)
        if self._membership is not None and self._sum_over_rows is not None and self.num_sequences is not None:
            # Computed in a recomputation too, which must save the same tensors.
            term = _balance(self._membership, self._sum_over_rows, own, scores, mlp) / self.num_sequences
            self.terms += [term] if is_first else []
        return choice

    def balance_term(self) -> Tensor | None:
        """The sum of the balance losses of this process's layers, without its coefficient; None if it has none.

        Where several processes divide the rows of a sequence (context parallelism), the loss is the sum of their terms.
        """
        return torch.stack(self.terms).sum() if self.terms else None


@torch.no_grad()
def _measure(
    sums: RouterSums, mlp: ExpertMlp, scores: Tensor, own: Tensor, record: Tensor | None, old: Tensor | None
) -> None:
    p = scores / scores.sum(-1, keepdim=True)
    sums.entropy += -torch.special.xlogy(p, p).sum(dtype=torch.float64)
    sums.rows += scores.shape[0]
    flat = own.reshape(-1)
    sums.counts[mlp.place].index_add_(0, flat, torch.ones_like(flat, dtype=torch.float64))
    if record is not None:
        sums.agreed += _num_shared(record, own)
        sums.recorded += (record >= 0).sum()
    if old is not None:
        sums.old_agreed += _num_shared(old, own)
        sums.old_recorded += (old >= 0).sum()


def _num_shared(record: Tensor, own: Tensor) -> Tensor:
    """How many known experts of a record [N, k] are among the router's own [N, k]."""
    return ((record[:, :, None] == own[:, None, :]).any(-1) & (record >= 0)).sum()


def _of_rows(column: Tensor, rows: ComputedRows | None, shard: RowShard) -> Tensor:
    """The rows of this process of a column [N, ...] of tokens."""
    return shard.rows(column if rows is None else column[rows.own])


def _token_rows(
    num_tokens: int, rows: ComputedRows | None, shard: RowShard, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The tokens [n] whose rows this process computes, and the row of each; sequences that share a prefix share its rows."""
    num_rows = num_tokens if rows is None else rows.num_rows
    if isinstance(shard, UnshardedRows):
        row_of = torch.arange(num_rows, device=device)
    else:
        computed = shard.rows(torch.arange(num_rows, device=device) + 1)  # 0 is padding
        row_of = torch.full((num_rows + 1,), -1, device=device)
        row_of[computed] = torch.arange(computed.shape[0], device=device)
        row_of = row_of[1:]
    if rows is not None:
        row_of = row_of[rows.row_of]
    tokens = (row_of >= 0).nonzero().squeeze(1)
    return tokens, row_of[tokens]


def _membership(offsets: Tensor, rows: ComputedRows | None) -> Tensor:
    """[S, rows] how often a sequence has a computed row, divided by the sequence's length."""
    lengths = offsets.diff()
    owner = torch.repeat_interleave(torch.arange(lengths.shape[0], device=offsets.device), lengths)
    row_of = torch.arange(owner.shape[0], device=offsets.device) if rows is None else rows.row_of
    num_rows = owner.shape[0] if rows is None else rows.own.shape[0]
    member = torch.zeros(lengths.shape[0], num_rows, dtype=torch.float64, device=offsets.device)
    member[owner, row_of] = 1.0
    return member / lengths[:, None]


def _balance(
    membership: Tensor, sum_over_rows: Callable[[Tensor], Tensor], own: Tensor, scores: Tensor, mlp: ExpertMlp
) -> Tensor:
    """The sum over sequences of sum_e f_e P_e, with f_e of all rows and the part of P_e that this process's rows have.

    Since f_e has no gradient, the sum over processes has the value and the gradient of the whole.
    """
    shape = mlp.shape
    chosen = torch.zeros_like(scores, dtype=membership.dtype).scatter_(1, own, 1.0)
    f = sum_over_rows(membership @ chosen) * (shape.num_experts / shape.experts_per_token)
    p = scores / scores.sum(-1, keepdim=True) if shape.scoring == "sigmoid" else scores
    return (f * (membership @ p.to(membership.dtype))).sum()
