"""One rank's part of a decoder, for an engine whose ranks hold the model together (Megatron, 1909.08053).

Each rank has some heads, some columns of the MLP and some tokens of the vocabulary (`models/tensor_shards.py`). It computes its part
of a layer's output from the whole input, and the parts are summed: two all-reduces per layer, one for the embedding. Of a mixture of
experts a rank has some whole experts: since every rank has all tokens, the same sum takes the place of an exchange of tokens. The logits are
gathered on rank 0, which samples. The modules have the names of the whole decoder's, and `arch` is the shape of the rank's layers, so
that the paged forward, its kernels and its cache run on it unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.core.sharded_tensors import PlacedShard
from burnish.memory_plan.kv_cache import num_cache_ranks
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, Layer
from burnish.models.expert_shape import ExpertShape
from burnish.models.experts import Choice, ExpertLinear, ExpertMlp, dispatch
from burnish.models.kernels.elementwise import RMSNorm
from burnish.models.kernels.grouped_products import grouped_product, sum_slots
from burnish.models.lora.adapters import LoraLinear, wrap_with_lora
from burnish.models.nf4 import quantised_weights
from burnish.models.tensor_shards import (
    BY_INPUTS,
    ENGINE_KEY,
    check_engine_divisible,
    rank_architecture,
    rank_blocks,
    vocabulary_range,
)
from burnish.models.weight_layout import lora_targets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

IDLE_TIMEOUT = timedelta(days=365)
"""How long a rank may wait for the next command: an engine may be idle for as long as the learner trains. A rank that ends closes its
connection, which the others notice at once."""


@dataclass
class EngineRanks:
    """One process among those that hold a model together, and their collectives."""

    rank: int
    size: int
    group: ProcessGroup
    """For tensors: NCCL on GPUs, gloo on CPUs."""
    control: ProcessGroup
    """For Python objects, over gloo."""
    cache_group: ProcessGroup | None = None
    """Among these ranks, which are neighbours, a cache of latents is divided (`kernels/latent_ops.py`); None if each has all of it."""
    is_muted: bool = False
    """While set, collectives do nothing: kernels compile in threads, in another order on each rank."""

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @contextmanager
    def muted(self) -> Iterator[None]:
        self.is_muted = True
        try:
            yield
        finally:
            self.is_muted = False

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place."""
        from torch.distributed import all_reduce

        if not self.is_muted:
            all_reduce(x, group=self.group)
        return x

    @property
    def index(self) -> int:
        """This rank among those that divide a cache."""
        return self.rank % self.num

    @property
    def num(self) -> int:
        return 1 if self.cache_group is None else self.cache_group.size()

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks that divide a cache [num, ...]."""
        from torch.distributed import all_gather_into_tensor

        found = x.new_zeros(self.num * x.shape[0], *x.shape[1:])
        if not self.is_muted:
            all_gather_into_tensor(found, x.contiguous(), group=self.cache_group)
        return found.unflatten(0, (self.num, -1))

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i of `parts` [num, ...] to rank i of those that divide a cache; return what they sent to this one."""
        from torch.distributed import all_to_all_single

        found = torch.zeros_like(parts)
        if not self.is_muted:
            all_to_all_single(found, parts, group=self.cache_group)
        return found

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over the ranks that divide a cache, in place."""
        from torch.distributed import all_reduce

        if not self.is_muted:
            all_reduce(x, group=self.cache_group)
        return x

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """On the leader, the columns of all ranks [N, num_columns]; elsewhere x. Each rank has an equal part, the last ones less."""
        from torch.distributed import gather

        width = -(-num_columns // self.size)
        own = functional.pad(x, (0, width - x.shape[1])).contiguous() if x.shape[1] < width else x.contiguous()
        if self.is_muted:
            return x
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.is_leader else None
        gather(own, parts, group_dst=0, group=self.group)
        return x if parts is None else torch.cat(parts, 1)[:, :num_columns]

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x with the leader's."""
        from torch.distributed import broadcast

        if not self.is_muted:
            broadcast(x, group_src=0, group=self.group)
        return x

    def share(self, value: Any) -> Any:
        """The leader's object; the value of the others is ignored."""
        from torch.distributed import broadcast_object_list

        values = [value]
        broadcast_object_list(values, group_src=0, group=self.control)
        return values[0]

    def minimum(self, number: int) -> int:
        """The smallest number of all ranks."""
        from torch.distributed import ReduceOp, all_reduce

        found = torch.tensor(number)
        all_reduce(found, ReduceOp.MIN, group=self.control)
        return int(found)


def join_engine_ranks(on_gpu: bool) -> EngineRanks:
    """Join the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); one GPU a process."""
    from torch import distributed

    if on_gpu:
        torch.cuda.set_device(0)
    if not distributed.is_initialized():
        distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    world = distributed.group.WORLD
    assert world is not None, "the process group was just made"
    control = distributed.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    num = num_cache_ranks(size)
    groups = (
        [distributed.new_group(list(range(first, first + num))) for first in range(0, size, num)] if num > 1 else []
    )
    return EngineRanks(rank, size, world, control, groups[rank // num] if groups else None)


class ParallelDecoder(Decoder):
    """A rank's part of a decoder of the architecture `whole`. Its parameters have no values until they are loaded."""

    def __init__(
        self,
        whole: Architecture,
        ranks: EngineRanks,
        dtype: torch.dtype,
        device: torch.device,
        lora: Lora | None = None,
    ) -> None:
        check_engine_divisible(whole, ranks.size)
        if lora is not None and lora.base != "dtype":
            raise UserError(f"{ENGINE_KEY} cannot cut matrices in 4 bits: set model.lora.base=dtype")
        start, stop = vocabulary_range(whole.vocab_size, ranks.rank, ranks.size)
        with torch.device("meta"):
            super().__init__(rank_architecture(whole, ranks.size))
            self.embedding = nn.Embedding(stop - start, whole.hidden_size)
            if self.head is not None:
                self.head = nn.Linear(whole.hidden_size, stop - start, bias=False)
            if lora is not None:
                wrap_with_lora(self, lora)
            for layer in cast("list[Layer]", self.layers):
                for name in BY_INPUTS if layer.has_dense_mlp else ("out",):
                    setattr(layer, name, divided_by_inputs(getattr(layer, name), ranks))
                if layer.experts is not None and whole.experts is not None:
                    layer.experts = DividedExperts(layer.experts, whole.hidden_size, whole.experts, ranks)
                if whole.wide_qk_norm:
                    layer.q_norm, layer.k_norm = DividedNorm(layer.q_norm, ranks), DividedNorm(layer.k_norm, ranks)
        self.whole, self.ranks, self.vocabulary = whole, ranks, (start, stop)
        self.to(dtype).to_empty(device=device).requires_grad_(False)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings of the rank's own tokens; the others come from the ranks that have them."""
        start, stop = self.vocabulary
        is_own = (tokens >= start) & (tokens < stop)
        local = super().embedded(torch.where(is_own, tokens - start, 0))
        return self.ranks.all_reduce(local.masked_fill_(~is_own[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] on rank 0, and of its own tokens on every other rank, which does not sample."""
        return self.ranks.gather_columns(super().logits(hidden), self.whole.vocab_size)

    @torch.no_grad()
    def load_full(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's part of full tensors into its parameters."""
        parameters: Mapping[str, Tensor] = dict(self.named_parameters())
        for name, full in named_tensors:
            part = rank_part(self.whole, self.lora, name, full, self.ranks.rank, self.ranks.size)
            parameters[name].copy_(part)


def part_blocks(
    arch: Architecture, lora: Lora | None, name: str, shape: Sequence[int], rank: int, size: int
) -> list[PlacedShard]:
    """The blocks of a decoder's parameter that a rank of an engine has."""
    adapted: list[str] = []
    if lora is not None and name.endswith(".lora_b"):
        _, layer, *_, module, _ = name.split(".")
        adapted = [target.name for target in lora_targets(arch, lora, int(layer)) if target.module == module]
    return rank_blocks(arch, name, shape, rank, size, lora_projections=adapted)


def rank_part(arch: Architecture, lora: Lora | None, name: str, full: Tensor, rank: int, size: int) -> Tensor:
    """The part of a decoder's parameter that a rank of an engine has: a view of the full tensor if its rows are adjacent there."""
    parts = []
    for block in part_blocks(arch, lora, name, full.shape, rank, size):
        starts, sizes = block.shard.offsets, block.shard.sizes
        parts.append(full[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def parallel_decoder_of(model: Decoder, ranks: EngineRanks) -> ParallelDecoder:
    """This rank's part of a whole decoder, with its weights."""
    if quantised_weights(model):
        raise UserError(f"{ENGINE_KEY} cannot cut matrices in 4 bits: set model.lora.base=dtype")
    weight = model.embedding.weight
    part = ParallelDecoder(model.arch, ranks, weight.dtype, weight.device, model.lora)
    part.load_full(model.named_parameters())
    return part


class DividedLinear(nn.Linear):
    """A linear layer that is divided by its inputs: the products of all ranks are summed, then the bias is added once."""

    def __init__(self, base: nn.Linear, ranks: EngineRanks) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self.ranks = base.weight, base.bias, ranks

    def forward(self, x: Tensor) -> Tensor:
        y = self.ranks.all_reduce(functional.linear(x, self.weight))
        return y if self.bias is None else y.add_(self.bias)


class DividedLoraLinear(LoraLinear):
    """The same with adapters: a rank has columns of W and of A, and all of B."""

    def __init__(self, base: LoraLinear, ranks: EngineRanks) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self.ranks = base.weight, base.bias, ranks
        self.spans, self.rank, self.scale, self.is_on = base.spans, base.rank, base.scale, base.is_on
        self.lora_a, self.lora_b = base.lora_a, base.lora_b

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Tensor), "4-bit matrices are refused"
        y = self.ranks.all_reduce(self.product(x, self.weight, None, self.lora_a, self.lora_b))
        return y if self.bias is None else y.add_(self.bias)


class DividedExperts(ExpertMlp):
    """Some experts of a layer and its whole router. Every rank has all tokens, so the ranks' outputs are summed and no token moves."""

    def __init__(self, part: ExpertMlp, hidden_size: int, shape: ExpertShape, ranks: EngineRanks) -> None:
        nn.Module.__init__(self)
        self.shape, self.activate, self.place, self.ranks = shape, part.activate, part.place, ranks
        self.router_pass, self.exchange = None, None
        self.router = nn.Linear(hidden_size, shape.num_experts, bias=False)
        self.gate_up, self.down = part.gate_up, part.down
        if shape.has_score_bias:
            self.score_bias = nn.Parameter(torch.zeros(shape.num_experts), requires_grad=False)
        self.num_own = shape.num_experts // ranks.size

    def infer(self, x: Tensor) -> Tensor:
        """As in training: the decode kernels would take the numbers of all experts for those of this rank."""
        return self(x)

    def compute(self, x: Tensor, choice: Choice) -> Tensor:
        own = choice.experts - self.ranks.rank * self.num_own
        is_own = (own >= 0) & (own < self.num_own)
        if type(self.down) is ExpertLinear:
            return self.ranks.all_reduce(self._own_output(x, choice, torch.where(is_own, own, self.num_own)))
        # Adapted experts compute all pairs; those of other ranks have weight 0.
        weights = choice.weights.masked_fill(~is_own, 0)
        way = dispatch(own.clamp(0, self.num_own - 1), self.num_own)
        activated = self.activated(self.gate_up.from_tokens(x, way), weights, way.slots)
        return self.ranks.all_reduce(self.down.to_tokens(activated, way))

    def _own_output(self, x: Tensor, choice: Choice, experts: Tensor) -> Tensor:
        """The weighted sum of this rank's experts. Pairs of others are sorted behind all rows that products read."""
        way = dispatch(experts, self.num_own)
        activated = self.activated(self.gate_up.from_tokens(x, way), choice.weights, way.slots)
        outputs = grouped_product(activated, self.down.matrices(), way.ends)
        is_other = torch.arange(outputs.shape[0], device=x.device) >= way.ends[-1]
        return sum_slots(outputs.masked_fill_(is_other[:, None], 0), way.rows)  # their rows were never written


class DividedNorm(RMSNorm):
    """A norm of a vector whose parts are on several ranks (the heads of OLMoE)."""

    def __init__(self, part: RMSNorm, ranks: EngineRanks) -> None:
        assert part.eps is not None
        super().__init__(part.weight.shape[0], part.eps, part.shift)
        self.ranks, self.epsilon = ranks, part.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Heads that several ranks hold are counted once for each of them, in the sum and in the width.
        mean = self.ranks.all_reduce(wide.square().sum(-1, keepdim=True)) / (self.ranks.size * x.shape[-1])
        normed = wide * torch.rsqrt(mean + self.epsilon)
        return normed.to(x.dtype) * (self.weight + self.shift if self.shift else self.weight)


def divided_by_inputs(base: nn.Linear, ranks: EngineRanks) -> nn.Linear:
    """A rank's layer with a sum over the ranks after its product."""
    return DividedLoraLinear(base, ranks) if isinstance(base, LoraLinear) else DividedLinear(base, ranks)
