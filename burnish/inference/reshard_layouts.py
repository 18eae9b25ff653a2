"""Which blocks of a model's tensors the ranks of a learner's and of an engine's mesh hold, for plans of weight transfers.

The learner's mesh is [pp, dp, cp, ep, tp], tp fastest. Pipeline stages have consecutive layers. Tensor-parallel ranks divide the
matrices of a layer. Expert-parallel ranks divide the experts; for all other tensors they are data-parallel ranks. What is left on a rank is
sharded by rows over the data- and context-parallel ranks, as FSDP2 does.

An engine has tp x ep ranks. Those of a tensor-parallel group divide heads, MLP and vocabulary, the groups of an engine divide the
experts, and there are `replicas` engines. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from burnish.core.sharded_tensors import PlacedShard, Shard
from burnish.inference.resharding import TensorLayout, chunks_of
from burnish.models.tensor_shards import layer_ranges

Range = tuple[int, int]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a model, and how it may be divided."""

    name: str
    shape: tuple[int, ...]
    layer: int | None = None
    """Its decoder layer; None for the embedding, the final norm and the head."""
    dim: int | None = None
    """The dimension that tensor-parallel ranks divide; None if each has all of it."""
    segments: tuple[tuple[int, int], ...] = ()
    """(size, units) of the matrices that are fused along `dim`. Each is divided into whole units, such as heads; with fewer units than
    ranks, several ranks have the same one."""
    is_expert: bool = False
    """Whether the first dimension counts experts."""
    is_vocabulary: bool = False
    """Whether only engines divide it, by tokens."""


@dataclass(frozen=True)
class LearnerMesh:
    """The five numbers of a parallel learner; `replicate` copies of the `dp` ranks share no shards (HSDP)."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    replicate: int = 1
    head_layers: float = 0.0
    """The work of the output head in layers, by which the last stage has fewer (`training/parallel/pipeline.py`)."""

    @property
    def size(self) -> int:
        return self.pp * self.replicate * self.dp * self.cp * self.ep * self.tp

    def coordinates(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """(pp, replicate, dp, cp, ep, tp) of each rank."""
        yield from product(*(range(n) for n in (self.pp, self.replicate, self.dp, self.cp, self.ep, self.tp)))


@dataclass(frozen=True)
class EngineMesh:
    """The ranks of all engines."""

    tp: int = 1
    ep: int = 1
    replicas: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.ep * self.replicas


def layouts(
    specs: Sequence[TensorSpec], learner: LearnerMesh, engine: EngineMesh, first_engine_rank: int, item_size: int
) -> Iterator[TensorLayout]:
    """The layout of each tensor. Engine ranks are numbered from `first_engine_rank`: 0 if they share the learner's GPUs."""
    num_layers = 1 + max((spec.layer for spec in specs if spec.layer is not None), default=0)
    for spec in specs:
        sources = {
            rank: learner_blocks(spec, learner, place, num_layers) for rank, place in enumerate(learner.coordinates())
        }
        targets = {first_engine_rank + rank: engine_blocks(spec, engine, rank) for rank in range(engine.size)}
        yield TensorLayout(spec.name, item_size, {rank: blocks for rank, blocks in sources.items() if blocks}, targets)


def learner_blocks(
    spec: TensorSpec, mesh: LearnerMesh, place: tuple[int, int, int, int, int, int], num_layers: int
) -> list[PlacedShard]:
    """The blocks of a tensor on a rank; none if it belongs to another pipeline stage."""
    pp, _, dp, cp, ep, tp = place
    if stage_of(spec, mesh, num_layers) != pp:
        return []
    columns = _divided(spec, tp, 1 if spec.is_vocabulary else mesh.tp)
    experts: Range | None = None
    shards, shard = mesh.dp * mesh.cp, dp * mesh.cp + cp
    if spec.is_expert:
        experts = (ep * spec.shape[0] // mesh.ep, (ep + 1) * spec.shape[0] // mesh.ep)
    else:
        shards, shard = shards * mesh.ep, shard * mesh.ep + ep
    local = _blocks(spec, columns, experts)
    # A few experts on many ranks are sharded by their rows, not by experts.
    dim = 1 if experts is not None and experts[1] - experts[0] < shards else 0
    return rows_of(local, dim, shard, shards)


def engine_blocks(spec: TensorSpec, mesh: EngineMesh, rank: int) -> list[PlacedShard]:
    """The blocks of a tensor on a rank of an engine."""
    tp, ep = rank % mesh.tp, rank // mesh.tp % mesh.ep
    experts = (ep * spec.shape[0] // mesh.ep, (ep + 1) * spec.shape[0] // mesh.ep) if spec.is_expert else None
    return _blocks(spec, _divided(spec, tp, mesh.tp), experts)


def stage_of(spec: TensorSpec, mesh: LearnerMesh, num_layers: int) -> int:
    """The pipeline stage of a tensor: embeddings first, final norm and head last."""
    if spec.layer is None:
        return 0 if spec.name.startswith("embedding") else mesh.pp - 1
    ranges = layer_ranges(num_layers, mesh.pp, mesh.head_layers)
    return next(stage for stage, layers in enumerate(ranges) if spec.layer in layers)


def _divided(spec: TensorSpec, rank: int, size: int) -> list[Range]:
    """The ranges along `spec.dim` that a tensor-parallel rank has."""
    if spec.dim is None or size == 1:
        return [(0, spec.shape[spec.dim or 0])]
    if spec.is_vocabulary:
        return [chunks_of(spec.shape[0], size)[rank]]
    ranges, start = [], 0
    for total, units in spec.segments:
        if units % size and size % units:
            raise ValueError(f"{spec.name}: {units} units cannot be divided by {size} tensor-parallel ranks")
        each = total // units
        first, count = rank * units // size, max(1, units // size)
        ranges.append((start + first * each, start + (first + count) * each))
        start += total
    return ranges


def _blocks(spec: TensorSpec, ranges: Sequence[Range], experts: Range | None) -> list[PlacedShard]:
    """Blocks with these ranges along `spec.dim`, one after the other in the rank's tensor, of these experts."""
    dim, found, at = spec.dim or 0, [], 0
    for start, stop in ranges:
        offsets, sizes, place = [0] * len(spec.shape), list(spec.shape), [0] * len(spec.shape)
        offsets[dim], sizes[dim], place[dim] = start, stop - start, at
        if experts is not None:
            offsets[0], sizes[0] = experts[0], experts[1] - experts[0]
        found.append(PlacedShard(Shard(spec.shape, tuple(offsets), tuple(sizes)), tuple(place)))
        at += stop - start
    return found


def rows_of(blocks: Sequence[PlacedShard], dim: int, part: int, parts: int) -> list[PlacedShard]:
    """The part of a rank's tensor that remains after FSDP has sharded it along `dim`; places are in the shard."""
    total = max(block.at[dim] + block.shard.sizes[dim] for block in blocks)
    start, stop = chunks_of(total, parts)[part]
    found = []
    for block in blocks:
        low, high = max(start, block.at[dim]), min(stop, block.at[dim] + block.shard.sizes[dim])
        if low >= high:
            continue
        offsets, sizes, place = list(block.shard.offsets), list(block.shard.sizes), list(block.at)
        offsets[dim] += low - block.at[dim]
        sizes[dim], place[dim] = high - low, low - start
        found.append(PlacedShard(Shard(block.shard.shape, tuple(offsets), tuple(sizes)), tuple(place)))
    return found
