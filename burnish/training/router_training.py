"""The routers of a learner's model with experts: balance loss, metrics, and the engine's experts compared or replayed.

A learner calls `start` before it accumulates the gradient of a mini-batch, `begin` before each forward pass, `term` after it,
and `end` after the backward pass. Models without experts have no `RouterTraining`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from burnish.algorithms.terms.spec import Router
from burnish.core.routed_experts import ENGINE_EXPERTS
from burnish.models.decoder import Decoder
from burnish.models.router_pass import LearnerRouting, RouterSums, router_stats
from burnish.training.forward import MicroBatch
from burnish.training.parallel.fsdp import backbone_of
from burnish.training.parallel.ranks import Ranks


class RouterTraining:
    """What the learner does with the routers of its decoder."""

    def __init__(self, decoder: Decoder, router: Router, ranks: Ranks) -> None:
        self.decoder, self.router, self.ranks = decoder, router, ranks
        self._num_sequences: int | None = None
        self._routing: LearnerRouting | None = None
        self._reset()

    @staticmethod
    def of(model: nn.Module, router: Router | None, ranks: Ranks) -> RouterTraining | None:
        """The routers of a model; None if it has no experts or `router` is None."""
        if router is None:
            return None
        backbone = backbone_of(model)
        if not isinstance(backbone, Decoder) or backbone.arch.experts is None:
            return None
        return RouterTraining(backbone, router, ranks)

    def _reset(self) -> None:
        arch = self.decoder.arch
        assert arch.experts is not None
        device = self.ranks.device or self.decoder.embedding.weight.device
        self.sums = RouterSums.zeros(arch.num_expert_layers, arch.experts.num_experts, device)

    def start(self, micro_batches: list[MicroBatch]) -> None:
        """Start a mini-batch: the balance loss is a mean over its sequences on all ranks."""
        if self.router.balance:
            own = sum(one.batch.num_sequences for one in micro_batches if not one.is_padding)
            self._num_sequences = int(self.ranks.sum_over_ranks({"sequences": own})["sequences"])

    def begin(self, micro_batch: MicroBatch, with_gradient: bool) -> None:
        """Set the routing of the next forward pass. Only passes with gradient have a balance loss and are measured."""
        is_counted = with_gradient and not micro_batch.is_padding
        recorded = None
        if self.router.engine_experts != "ignore":
            recorded = micro_batch.batch.token.get(ENGINE_EXPERTS)
        self._routing = LearnerRouting(
            self.sums if is_counted else None,
            recorded,
            self.router.engine_experts == "replay",
            self._num_sequences if is_counted else None,
        )
        self.decoder.set_routing(self._routing)

    def term(self) -> Tensor | None:
        """The balance loss of the last forward pass; None if it has none."""
        found = None if self._routing is None else self._routing.balance_term()
        if found is None:
            return None
        found = found / self.decoder.arch.num_expert_layers
        self.sums.balance += found.detach()
        return self.router.balance * found

    def end(self) -> None:
        """Let the routers only choose again."""
        self._routing = None
        self.decoder.set_routing(None)

    def stats(self) -> dict[str, float]:
        """The metrics of the passes since the last call, over all ranks and all stages of a pipeline."""
        sums, places = self.sums, list(vars(self.sums))
        values = self.ranks.sum_over_work(torch.cat([vars(sums)[name].reshape(-1) for name in places])).cpu()
        parts = values.split([vars(sums)[name].numel() for name in places])
        found = RouterSums(*(part.view(vars(sums)[name].shape) for name, part in zip(places, parts, strict=True)))
        self._reset()
        return router_stats(found)
