"""Tensors cut over processes: whatever number wrote them, in whatever way, any other number reads what it needs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.sharded_tensors import Placed, Shard, alone, coarser, in_usual_order, overlap, reads, whole
from burnish.run.checkpoint.contents import Part
from burnish.run.checkpoint.saving import leave
from burnish.training.sharded_checkpoint import StoredTensors, shard_file

# --- cutting -------------------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """A dimension in pieces (start, size), some of them empty, no two need be alike."""
    borders = draw(st.lists(st.integers(0, length), max_size=4))
    edges = [0, *sorted(borders), length]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Shard]:
    """A tensor cut in every dimension: each block is one process's."""
    per_dimension = [draw(cuts(length)) for length in shape]
    return [
        Shard(shape, tuple(start for start, _ in block), tuple(size for _, size in block))
        for block in itertools.product(*per_dimension)
    ]


SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def cut(tensor: Tensor, shard: Shard) -> Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(shard.offsets, shard.sizes, strict=True))]


def write(folder: Path, tensor: Tensor, shards: list[Shard]) -> None:
    for index, shard in enumerate(shards):
        part = Part(index, len(shards))
        shard_file("it", {"x": cut(tensor, shard)}, {"x": [alone(shard)]}, leave, part).write(folder)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_way_to_cut_is_read_from_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    written, wanted = data.draw(grids(shape)), data.draw(grids(shape))
    folder, tensor = tmp_path_factory.mktemp("shards"), numbers(shape)
    write(folder, tensor, written)
    with StoredTensors(folder, "it") as stored:
        assert (stored.names, stored.shape("x"), stored.dtype("x")) == ({"x"}, shape, torch.float32)
        assert torch.equal(stored.read("x"), tensor)
        for shard in wanted:
            assert torch.equal(stored.read("x", [alone(shard)], shard.sizes), cut(tensor, shard))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_exactly_what_is_needed_is_read(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    stored, wanted = data.draw(grids(shape)), data.draw(grids(shape))
    counts = torch.zeros(shape)
    for shard in wanted:
        for index, read in reads([alone(shard)], [alone(block) for block in stored]):
            block = stored[index]
            assert all(part.stop <= size for part, size in zip(read.source, block.sizes, strict=True))
            cut(counts, block)[read.source] += 1
    assert bool((counts == 1).all()), "each element is read once, by the process that holds it"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_in_another_order_are_stored_as_usual(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Fused matrices of a tensor-parallel model: 2 processes cut rows that 3 others put together differently."""
    height = data.draw(st.integers(1, 9))
    orders = [data.draw(st.permutations(range(height))) for _ in range(2)]
    tensor, folder = numbers((height, 3)), tmp_path_factory.mktemp("orders")
    rows = [[Shard((height, 3), (a, 0), (n, 3)) for a, n in data.draw(cuts(height))] for _ in range(2)]
    for index, shard in enumerate(rows[0]):
        blocks = in_usual_order(shard, orders[0])
        mine = cut(tensor[list(orders[0])], shard)
        shard_file("it", {"x": mine}, {"x": blocks}, leave, Part(index, len(rows[0]))).write(folder)
    with StoredTensors(folder, "it") as stored:
        assert torch.equal(stored.read("x"), tensor)
        for shard in rows[1]:
            got = stored.read("x", in_usual_order(shard, orders[1]), shard.sizes)
            assert torch.equal(got, cut(tensor[list(orders[1])], shard))


def test_the_usual_order_is_one_block() -> None:
    shard = Shard((6, 2), (2, 0), (3, 2))
    assert in_usual_order(shard, None) == in_usual_order(shard, range(6)) == [alone(shard)]
    assert in_usual_order(shard, [0, 3, 1, 4, 5, 2]) == [
        Placed(Shard((6, 2), (1, 0), (1, 2)), (0, 0)),
        Placed(Shard((6, 2), (4, 0), (2, 2)), (1, 0)),
    ]


def test_a_coarser_tensor_is_cut_at_the_same_places() -> None:
    placed = Placed(Shard((8, 512), (2, 256), (3, 256)), (1, 0))
    assert coarser(placed, (1, 128)) == Placed(Shard((8, 4), (2, 2), (3, 2)), (1, 0))
    with pytest.raises(ValueError, match="cannot be counted in blocks"):
        coarser(placed, (2, 1))


def test_what_is_missing_or_there_twice_is_counted() -> None:
    top, bottom = Shard((4, 3), (0, 0), (2, 3)), Shard((4, 3), (2, 0), (2, 3))
    all_of_it = [alone(whole((4, 3)))]
    assert len(reads(all_of_it, [alone(top), alone(bottom), alone(top)])) == 2, "copies are read once"
    with pytest.raises(ValueError, match="6 of 12 elements are not stored"):
        reads(all_of_it, [alone(top)])
    with pytest.raises(ValueError, match="6 of 12 elements are stored more than once"):
        reads(all_of_it, [alone(whole((4, 3))), alone(top)])
    with pytest.raises(ValueError, match="different shapes"):
        overlap(alone(top), alone(whole((4, 2))))
    for offsets, sizes in [((3, 0), (2, 3)), ((-1, 0), (1, 3)), ((0,), (1,))]:
        with pytest.raises(ValueError, match="of shape"):
            Shard((4, 3), offsets, sizes)


# --- files ---------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it\.safetensors is not there"):
        StoredTensors(tmp_path, "it")
    rows = [Shard((4,), (start,), (1,)) for start in range(4)]
    write(tmp_path, numbers((4,)), rows)
    third = tmp_path / "it-00003-of-00004.safetensors"
    content = third.read_bytes()
    third.write_bytes(content[:20])
    with pytest.raises(UserError, match=r"it-00003-of-00004\.safetensors cannot be read as safetensors"):
        StoredTensors(tmp_path, "it")
    third.unlink()
    with pytest.raises(UserError, match=r"it-00003-of-00004\.safetensors is not there: the checkpoint is incomplete"):
        StoredTensors(tmp_path, "it")
    shard_file("it", {"y": numbers((2,))}, {}, leave, Part(2, 4)).write(tmp_path)
    with (
        StoredTensors(tmp_path, "it") as stored,
        pytest.raises(UserError, match=r"of x, 1 of 4 elements are not stored"),
    ):
        stored.read("x")
