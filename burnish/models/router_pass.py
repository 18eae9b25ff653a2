"""What the routers of a decoder do in a forward pass besides choosing experts: record, replay, compare, measure and balance.

Engine and learner may choose different experts for a token, because they round differently or because the weights have
changed since. Then the ratio of their probabilities says little. `EngineRecorder` stores the experts that an engine chose,
beside the keys of the same tokens. `LearnerRouting` compares them with the learner's own choice or replays them (R3,
2510.11370): the choice is the engine's, the weights are the learner's scores of those experts, with gradient.

The balance loss is that of DeepSeek-V3 (2412.19437), for each sequence by itself:

    f_e = E / (k T) * tokens of the sequence that chose expert e        P_e = mean over its T tokens of the scores of e
    loss = coefficient * mean over sequences and layers of sum_e f_e P_e

A sum over a whole batch, as in Switch (2101.03961), would depend on the split into micro-batches; this one does not. It sees
the router's own choice, not a replayed one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from burnish.config.errors import UserError
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
    balance: Tensor
    """The balance loss without its coefficient."""

    @staticmethod
    def zeros(num_layers: int, num_experts: int, device: torch.device) -> RouterSums:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        counts = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        return RouterSums(counts, *(zero.clone() for _ in range(5)))


def router_stats(sums: RouterSums) -> dict[str, float]:
    """Metrics of the routers.

    - `router/entropy`: mean entropy of a token's scores, in nats; `router/balance`: the balance loss, 1 if all is even;
    - `router/imbalance`: load of the busiest expert by the mean load, averaged over layers; `router/dead`: share of experts without a token;
    - `router/agreement`: share of the engine's experts that the learner's router chooses too, if they were recorded.
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
    return found


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
    terms: list[Tensor] = field(default_factory=list)
    """The balance loss of each layer, with gradient."""
    _row_records: Tensor | None = None
    _membership: Tensor | None = None
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
        self._row_records = self._membership = self._is_row = None
        if self.sums is not None and not isinstance(shard, UnshardedRows):
            num_rows = int(offsets[-1]) if rows is None else rows.num_rows
            self._is_row = shard.rows(torch.ones(num_rows, dtype=torch.bool, device=offsets.device))
        if self.recorded is not None:
            own = self.recorded if rows is None else self.recorded[rows.own]
            self._row_records = shard.rows(own)
        if self.num_sequences is not None and not is_exact:
            if not isinstance(shard, UnshardedRows):
                raise UserError(
                    "algorithm.router.balance needs whole sequences in a process: set it to 0, or parallel.context=1"
                )
            self._membership = _membership(offsets, rows)

    def choose(self, mlp: ExpertMlp, logits: Tensor, score_bias: Tensor | None) -> Choice:
        """Choose by the router or by the record; compare, measure, and add a term of the balance loss."""
        record = None if self._row_records is None else self._row_records[:, mlp.place]
        choice, scores = route(logits, mlp.shape, score_bias, record if self.replays else None)
        own = choice.experts
        if self.replays and record is not None:
            own = choose_experts(scores.detach(), mlp.shape, score_bias)
        is_first = mlp.place not in self._passed
        self._passed.add(mlp.place)
        if self.sums is not None and self._is_measured and is_first:
            measured = scores.detach(), own, record
            if self._is_row is not None:
                measured = (
                    scores.detach()[self._is_row],
                    own[self._is_row],
                    None if record is None else record[self._is_row],
                )
            _measure(self.sums, mlp, *measured)
        if self._membership is not None and self.num_sequences is not None:
            # Computed in a recomputation too, which must save the same tensors.
            term = _balance(self._membership, own, scores, mlp) / self.num_sequences
            self.terms += [term] if is_first else []
        return choice

    def balance_term(self) -> Tensor | None:
        """The sum of the balance losses of this process's layers, without its coefficient; None if it has none."""
        return torch.stack(self.terms).sum() if self.terms else None


@torch.no_grad()
def _measure(sums: RouterSums, mlp: ExpertMlp, scores: Tensor, own: Tensor, record: Tensor | None) -> None:
    p = scores / scores.sum(-1, keepdim=True)
    sums.entropy += -torch.special.xlogy(p, p).sum(dtype=torch.float64)
    sums.rows += scores.shape[0]
    flat = own.reshape(-1)
    sums.counts[mlp.place].index_add_(0, flat, torch.ones_like(flat, dtype=torch.float64))
    if record is not None:
        is_known = record >= 0
        sums.agreed += ((record[:, :, None] == own[:, None, :]).any(-1) & is_known).sum()
        sums.recorded += is_known.sum()


def _membership(offsets: Tensor, rows: ComputedRows | None) -> Tensor:
    """[S, rows] how often a sequence has a computed row, divided by the sequence's length."""
    lengths = offsets.diff()
    owner = torch.repeat_interleave(torch.arange(lengths.shape[0], device=offsets.device), lengths)
    row_of = torch.arange(owner.shape[0], device=offsets.device) if rows is None else rows.row_of
    num_rows = owner.shape[0] if rows is None else rows.own.shape[0]
    member = torch.zeros(lengths.shape[0], num_rows, dtype=torch.float64, device=offsets.device)
    member[owner, row_of] = 1.0
    return member / lengths[:, None]


def _balance(membership: Tensor, own: Tensor, scores: Tensor, mlp: ExpertMlp) -> Tensor:
    """The sum over sequences of sum_e f_e P_e."""
    shape = mlp.shape
    chosen = torch.zeros_like(scores, dtype=membership.dtype).scatter_(1, own, 1.0)
    f = membership @ chosen * (shape.num_experts / shape.experts_per_token)
    p = scores / scores.sum(-1, keepdim=True) if shape.scoring == "sigmoid" else scores
    return (f * (membership @ p.to(membership.dtype))).sum()
