"""Plans of weight transfers: every rank of an engine gets its blocks, with the fewest bytes, from any mesh to any other."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.sharded_tensors import PlacedShard, Shard, at_origin, full_shard
from burnish.inference.reshard_layouts import EngineMesh, LearnerMesh, TensorSpec, layouts
from burnish.inference.reshard_transfer import _packed, _unpack
from burnish.inference.resharding import Plan, TensorLayout, Transfer, lower_bound, make_plan
from burnish.inference.weight_sync import SyncError

SPECS = [
    TensorSpec("embedding.weight", (13, 6), dim=0, is_vocabulary=True),
    *(
        spec
        for layer in range(3)
        for spec in (
            TensorSpec(f"layers.{layer}.norm.weight", (6,), layer),
            TensorSpec(f"layers.{layer}.qkv.weight", (32, 6), layer, 0, ((16, 4), (8, 2), (8, 2))),
            TensorSpec(f"layers.{layer}.out.weight", (6, 16), layer, 1, ((16, 4),)),
            TensorSpec(f"layers.{layer}.gate_up", (4, 16, 6), layer, 1, ((8, 4), (8, 4)), is_expert=True),
            TensorSpec(f"layers.{layer}.down", (4, 6, 8), layer, 2, ((8, 4),), is_expert=True),
        )
    ),
    TensorSpec("norm.weight", (6,)),
    TensorSpec("head.weight", (13, 6), dim=0, is_vocabulary=True),
]
SHAPES = {spec.name: spec.shape for spec in SPECS}
FEW = st.sampled_from([1, 2, 3])
EVEN = st.sampled_from([1, 2, 4])


def local(full: np.ndarray, blocks: list[PlacedShard], fill: float) -> np.ndarray:
    """A rank's tensor: its blocks at their places."""
    sizes = [max((b.at[d] + b.shard.sizes[d] for b in blocks), default=0) for d in range(full.ndim)]
    made = np.full(sizes, fill)
    for block in blocks if not np.isnan(fill) else ():
        made[cut(block.at, block.shard.sizes)] = full[cut(block.shard.offsets, block.shard.sizes)]
    return made


def cut(at: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))


def executed(plan: Plan, tensors: list[TensorLayout]) -> None:
    """Carry the plan out on numbers; every element of every target must be written once, with the right number."""
    full = {name: np.arange(float(np.prod(shape))).reshape(shape) for name, shape in SHAPES.items()}
    have = {(t.name, r): local(full[t.name], list(b), 0.0) for t in tensors for r, b in t.sources.items()}
    want = {(t.name, r): local(full[t.name], list(b), np.nan) for t in tensors for r, b in t.targets.items()}
    for one in plan.transfers:
        source = (want if one.is_relayed else have)[one.tensor, one.source][cut(one.source_at, one.sizes)]
        target = want[one.tensor, one.target][cut(one.target_at, one.sizes)]
        assert not np.isnan(source).any(), "a block was handed on before it had come"
        assert np.isnan(target).all(), "a block came twice"
        target[...] = source
    for tensor in tensors:
        for rank, blocks in tensor.targets.items():
            assert (want[tensor.name, rank] == local(full[tensor.name], list(blocks), 0.0)).all(), (tensor.name, rank)


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(FEW, FEW, EVEN, EVEN, EVEN, st.sampled_from([1, 2])),
    st.tuples(EVEN, EVEN, FEW),
    st.booleans(),
    st.sampled_from([1, 2, 8]),
)
def test_any_mesh_reaches_any_other_with_the_fewest_bytes(
    learner: tuple[int, ...], engine: tuple[int, ...], colocated: bool, node: int
) -> None:
    trains, samples = LearnerMesh(*learner), EngineMesh(*engine)
    first = 0 if colocated else -(-trains.size // node) * node
    tensors = list(layouts(SPECS, trains, samples, first, item_size=2))
    plan = make_plan(tensors, lambda rank: rank // node)
    executed(plan, tensors)
    bound = lower_bound(tensors, lambda rank: rank // node)
    assert plan.moved_bytes == bound.moved_bytes
    assert plan.across.total == bound.across_bytes
    needed = sum(b.shard.numel for t in tensors for blocks in t.targets.values() for b in blocks) * 2
    assert plan.moved_bytes + plan.kept_bytes == needed


def test_a_rank_that_holds_what_it_needs_receives_nothing() -> None:
    tensors = list(layouts(SPECS, LearnerMesh(tp=2), EngineMesh(tp=2), 0, 2))
    plan = make_plan(tensors, lambda rank: 0)
    norms = [s for s in SPECS if s.dim is None]
    assert plan.moved_bytes == 0, "the learner's ranks hold the whole vocabulary"
    assert plan.kept_bytes == 2 * sum(int(np.prod(s.shape)) for s in (*SPECS, *norms)), "both have the norms"


def test_copies_share_the_work_of_sending() -> None:
    """Four holders of the same tensors, four ranks on other machines that want them: each sends about a quarter."""
    whole = {rank: [at_origin(full_shard((8, 4)))] for rank in range(4)}
    wanted = {rank: [at_origin(full_shard((8, 4)))] for rank in range(4, 8)}
    tensors = [TensorLayout(f"t{k}", 4, whole, wanted) for k in range(16)]
    plan = make_plan(tensors, lambda rank: rank)
    assert plan.across.sent == Counter(dict.fromkeys(range(4), 16 * 128))
    assert plan.across.busiest == 16 * 128
    assert plan.seconds(within_per_s=1e9, across_per_s=2048.0) == 1.0


def test_a_machine_receives_a_block_once_and_hands_it_on() -> None:
    tensors = [
        TensorLayout("t", 4, {0: [at_origin(full_shard((6,)))]}, {r: [at_origin(full_shard((6,)))] for r in (2, 3)})
    ]
    plan = make_plan(tensors, lambda rank: rank // 2)
    assert [(t.source, t.target, t.is_relayed) for t in plan.transfers] == [(0, 2, False), (2, 3, True)]
    assert (plan.across.total, plan.within.total) == (24, 24)


def test_what_no_rank_holds_or_two_hold_in_part_is_refused() -> None:
    half = PlacedShard(Shard((6,), (0,), (3,)), (0,))
    most = PlacedShard(Shard((6,), (2,), (4,)), (0,))
    wanted = {2: [at_origin(full_shard((6,)))]}
    with pytest.raises(ValueError, match="t: 3 of 6 elements are not held by any rank"):
        make_plan([TensorLayout("t", 4, {0: [half]}, wanted)], lambda rank: 0)
    with pytest.raises(ValueError, match="t: 1 of 6 elements are held in blocks that overlap"):
        make_plan([TensorLayout("t", 4, {0: [half], 1: [most]}, wanted)], lambda rank: 0)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.qkv\.weight: 4 units cannot be divided by 3"):
        list(layouts(SPECS[1:3], LearnerMesh(), EngineMesh(tp=3), 0, 2))


def test_a_wrong_bit_is_noticed_after_the_tensors_are_written() -> None:
    theirs, ours = torch.arange(12.0).view(3, 4), {"t": torch.zeros(3, 4)}
    block = Transfer("t", (2, 2), 0, (1, 1), 1, (1, 1), 16)
    message = _packed([theirs[1:3, 1:3]])
    _unpack(message, [block], ours, peer=0)
    assert torch.equal(ours["t"][1:3, 1:3], theirs[1:3, 1:3])
    message[5] ^= 1
    with pytest.raises(SyncError, match="weights from rank 0 did not arrive: t and 0 more blocks"):
        _unpack(message, [block], ours, peer=0)


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, burnish.inference.reshard_layouts, burnish.models.tensor_shards; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
