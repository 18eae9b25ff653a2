"""The operations of the models a learner trains, as `models/flops.py` counts them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from burnish.config.lora import Lora
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.flops import Counts, backward, forward, recomputed
from burnish.models.score import ScoreModel
from burnish.models.value import ValueModel
from burnish.training.parallel.ranks import SOLO, Ranks


@dataclass(frozen=True)
class Cost:
    """What the operations of a model follow from, besides the shapes of its batches."""

    arch: Architecture
    head_size: int | None = None
    """Outputs of a token where they are not the vocabulary's logits."""
    lora: Lora | None = None
    activations: str = "keep"
    fused_attention: bool = False
    processes: int = 1
    """How many divide each micro-batch among them, by its rows or by the weights: this one does its part."""

    def of(self, counts: Counts, with_gradient: bool) -> tuple[int, int]:
        """Operations that the mathematics needs, and those that are executed."""
        needed = forward(self.arch, counts, self.head_size, self.lora).total
        if not with_gradient:
            return needed // self.processes, needed // self.processes
        needed += backward(self.arch, counts, self.head_size, self.lora).total
        again = recomputed(self.arch, counts, self.head_size, self.lora, self.activations, self.fused_attention)
        return needed // self.processes, (needed + again.total) // self.processes


def cost_of(model: nn.Module, ranks: Ranks = SOLO) -> Cost | None:
    """Of our decoder as a policy or below a scalar head, on one of several ranks; None where transformers does the forward."""
    decoder = model.backbone if isinstance(model, ValueModel | ScoreModel) else model
    if not isinstance(decoder, Decoder):
        return None
    return Cost(
        decoder.arch,
        None if decoder is model else 1,
        decoder.lora,
        decoder.activations,
        fused_attention=decoder.embedding.weight.is_cuda,
        processes=(ranks.sequence.size() if ranks.sequence is not None else 1)
        * (ranks.weights["tensor"].size() if ranks.weights is not None else 1),
    )
