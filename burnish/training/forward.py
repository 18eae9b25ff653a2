"""The learner's forward pass: what a model says about chosen tokens of a batch, micro-batch by micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from burnish.core.batch import Batch
from burnish.training.packing import micro_batches

Needs = frozenset[str]
"""What is wanted of a model: `value` of a critic; of a policy always log-probs, and `entropy` or `sum_p2` if named."""


class Policy(Protocol):
    """What the learner asks of a policy: our decoder and `models/hf.py` both have it."""

    def token_logprobs(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token given its past) at the `wanted` positions, and entropies if asked."""

    def token_statistics(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and sums of squared probabilities, without gradient."""


class Values(Protocol):
    """What the learner asks of a critic's model."""

    def token_values(self, tokens: Tensor, offsets: Tensor, wanted: Tensor) -> Tensor:
        """The value of the state before each `wanted` token."""


@dataclass(frozen=True)
class Piece:
    """A micro-batch, the positions of the wanted tokens in it, and where those stand in the whole batch; [M] each."""

    batch: Batch
    wanted: Tensor
    positions: Tensor


def split(batch: Batch, budget: int) -> list[tuple[Tensor, Batch]]:
    """(sequence indices, micro-batch) pairs under the token budget."""
    parts = [torch.tensor(p) for p in micro_batches(batch.lengths.tolist(), budget)]
    return [(part, batch.select(part)) for part in parts]


def element_positions(batch: Batch, part: Tensor) -> Tensor:
    """Where the tokens of the micro-batch `part` stand in the whole batch."""
    starts, lengths = batch.offsets[:-1][part], batch.lengths[part]
    shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return torch.arange(int(lengths.sum()), device=shift.device) + shift


def pieces(batch: Batch, budget: int, mask: str) -> list[Piece]:
    """The micro-batches that have a token of the mask column, with those tokens as the wanted ones."""
    found = []
    for part, micro in split(batch, budget):
        wanted = micro.token[mask].nonzero().squeeze(1)
        if wanted.numel():
            found.append(Piece(micro, wanted, element_positions(batch, part)[wanted]))
    return found


def names_of(needs: Needs) -> list[str]:
    """The outputs a forward pass gives for these needs; the first is the one every token has."""
    return ["value"] if "value" in needs else ["logp", *sorted(needs & {"entropy", "sum_p2"})]


def forward(model: nn.Module, piece: Piece, needs: Needs, temperature: float) -> dict[str, Tensor]:
    """[M] outputs at the wanted tokens of a micro-batch, by name; with gradient, unless `sum_p2` is among them."""
    where = piece.batch.tokens, piece.batch.offsets, piece.wanted
    if "value" in needs:
        return {"value": cast(Values, model).token_values(*where)}
    policy = cast(Policy, model)
    if "sum_p2" in needs:
        found = dict(zip(("logp", "entropy", "sum_p2"), policy.token_statistics(*where, temperature), strict=True))
        return {name: found[name] for name in names_of(needs)}
    logp, entropy = policy.token_logprobs(*where, temperature, "entropy" in needs)
    return {"logp": logp} if entropy is None else {"logp": logp, "entropy": entropy}


@torch.no_grad()
def batch_outputs(
    model: nn.Module, batch: Batch, needs: Needs, budget: int, temperature: float, mask: str = "action_mask"
) -> dict[str, Tensor]:
    """[N] outputs at the tokens of the mask column, by name, without gradient; 0 elsewhere."""
    columns: dict[str, Tensor] = {}
    for piece in pieces(batch, budget, mask):
        for name, values in forward(model, piece, needs, temperature).items():
            if name not in columns:
                columns[name] = values.new_zeros(batch.num_tokens)
            columns[name][piece.positions] = values
    nothing = torch.zeros(batch.num_tokens, device=batch.tokens.device)
    return {name: columns.get(name, nothing) for name in names_of(needs)}
