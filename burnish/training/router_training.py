"""The routers of a learner's model with experts: balance loss, metrics, and experts compared, recorded or replayed.

A learner calls `start` before it accumulates the gradient of a mini-batch, `begin` before each forward pass, `term` after it,
and `end` after the backward pass. Models without experts have no `RouterTraining`.

To record the experts of the pass of old log-probs it calls `record` before the first forward pass, and `recorded` after the last.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from burnish.algorithms.terms.spec import Router
from burnish.core.batch import Batch
from burnish.core.routed_experts import ENGINE_EXPERTS, LEARNER_EXPERTS, UNKNOWN_EXPERT
from burnish.models.decoder import Decoder
from burnish.models.router_pass import RECORD_DTYPE, ExpertStore, LearnerRouting, RouterSums, router_stats
from burnish.training.forward import MicroBatch
from burnish.training.parallel.fsdp import backbone_of
from burnish.training.parallel.ranks import Ranks


class RouterTraining:
    """What the learner does with the routers of its decoder."""

    def __init__(self, decoder: Decoder, router: Router, ranks: Ranks) -> None:
        self.decoder, self.router, self.ranks = decoder, router, ranks
        self._num_sequences: int | None = None
        self._routing: LearnerRouting | None = None
        self._experts: Tensor | None = None
        """What a pass records, [N, layers, k]; None if it records nothing."""
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

    def record(self, batch: Batch) -> None:
        """Record the experts of the coming passes over the micro-batches of a batch."""
        arch = self.decoder.arch
        assert arch.experts is not None
        sizes = (batch.num_tokens, arch.num_expert_layers, arch.experts.experts_per_token)
        self._experts = torch.full(sizes, UNKNOWN_EXPERT, dtype=RECORD_DTYPE, device=batch.tokens.device)

    def recorded(self) -> Tensor:
        """The experts [N, layers, k] of the passes since `record`, of all rows and layers; unknown in sequences without a pass."""
        experts, self._experts = self._experts, None
        assert experts is not None, "record comes first"
        return self.ranks.max_over_parts(experts)

    def begin(self, micro_batch: MicroBatch, with_gradient: bool) -> None:
        """Set the routing of the next forward pass. Only passes with gradient have a balance loss and are measured."""
        is_counted = with_gradient and not micro_batch.is_padding
        token, store = micro_batch.batch.token, None
        if self._experts is not None and micro_batch.all_positions is not None:
            store = ExpertStore(self._experts, micro_batch.all_positions)
        self._routing = LearnerRouting(
            self.sums if is_counted else None,
            None if self.router.engine_experts == "ignore" else token.get(ENGINE_EXPERTS),
            self.router.engine_experts == "replay",
            self._num_sequences if is_counted else None,
            token.get(LEARNER_EXPERTS) if self.router.learner_experts == "replay" else None,
            store,
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
