"""Sharded checkpoints: tensors saved by any number of processes in any layout are read by any other."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.config.errors import UserError
from burnish.core.sharded_tensors import (
    PlacedShard,
    Shard,
    at_origin,
    blocks_of_permuted_rows,
    full_shard,
    in_block_units,
    overlap,
    plan_reads,
)
from burnish.run.checkpoint.checkpoints import Checkpoints, checkpoint_damage
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import WriterRank
from burnish.training.sharded_checkpoint import StoredTensors, shard_file
from tests.training.resharding_worker import LAYOUTS, PAIRS, RANKS

# --- shards -------------------------------------------------------------------------------------------------------------


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
        part = WriterRank(index, len(shards))
        shard_file("it", {"x": cut(tensor, shard)}, {"x": [at_origin(shard)]}, keep_in_place, part).write(folder)


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
            assert torch.equal(stored.read("x", [at_origin(shard)], shard.sizes), cut(tensor, shard))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_exactly_what_is_needed_is_read(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    stored, wanted = data.draw(grids(shape)), data.draw(grids(shape))
    counts = torch.zeros(shape)
    for shard in wanted:
        for index, read in plan_reads([at_origin(shard)], [at_origin(block) for block in stored]):
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
        blocks = blocks_of_permuted_rows(shard, orders[0])
        mine = cut(tensor[list(orders[0])], shard)
        shard_file("it", {"x": mine}, {"x": blocks}, keep_in_place, WriterRank(index, len(rows[0]))).write(folder)
    with StoredTensors(folder, "it") as stored:
        assert torch.equal(stored.read("x"), tensor)
        for shard in rows[1]:
            got = stored.read("x", blocks_of_permuted_rows(shard, orders[1]), shard.sizes)
            assert torch.equal(got, cut(tensor[list(orders[1])], shard))


def test_the_usual_order_is_one_block() -> None:
    shard = Shard((6, 2), (2, 0), (3, 2))
    assert blocks_of_permuted_rows(shard, None) == blocks_of_permuted_rows(shard, range(6)) == [at_origin(shard)]
    assert blocks_of_permuted_rows(shard, [0, 3, 1, 4, 5, 2]) == [
        PlacedShard(Shard((6, 2), (1, 0), (1, 2)), (0, 0)),
        PlacedShard(Shard((6, 2), (4, 0), (2, 2)), (1, 0)),
    ]


def test_a_coarser_tensor_is_cut_at_the_same_places() -> None:
    placed = PlacedShard(Shard((8, 512), (2, 256), (3, 256)), (1, 0))
    assert in_block_units(placed, (1, 128)) == PlacedShard(Shard((8, 4), (2, 2), (3, 2)), (1, 0))
    with pytest.raises(ValueError, match="cannot be counted in blocks"):
        in_block_units(placed, (2, 1))


def test_what_is_missing_or_there_twice_is_counted() -> None:
    top, bottom = Shard((4, 3), (0, 0), (2, 3)), Shard((4, 3), (2, 0), (2, 3))
    all_of_it = [at_origin(full_shard((4, 3)))]
    assert len(plan_reads(all_of_it, [at_origin(top), at_origin(bottom), at_origin(top)])) == 2, "copies are read once"
    with pytest.raises(ValueError, match="6 of 12 elements are not stored"):
        plan_reads(all_of_it, [at_origin(top)])
    with pytest.raises(ValueError, match="6 of 12 elements are stored more than once"):
        plan_reads(all_of_it, [at_origin(full_shard((4, 3))), at_origin(top)])
    with pytest.raises(ValueError, match="different shapes"):
        overlap(at_origin(top), at_origin(full_shard((4, 2))))
    for offsets, sizes in [((3, 0), (2, 3)), ((-1, 0), (1, 3)), ((0,), (1,))]:
        with pytest.raises(ValueError, match=r"of shape|number of dimensions"):
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
    shard_file("it", {"y": numbers((2,))}, {}, keep_in_place, WriterRank(2, 4)).write(tmp_path)
    with (
        StoredTensors(tmp_path, "it") as stored,
        pytest.raises(UserError, match=r"of x, 1 of 4 elements are not stored"),
    ):
        stored.read("x")


# --- checkpoints of several processes, loaded in other layouts ----------------------------------------------------------

CUT = [name for name in LAYOUTS if name != "alone"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    command = [sys.executable, "-m", "tests.training.resharding_worker", str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1800, check=False
    )
    told = "\n".join(file.read_text() for file in sorted(folder.glob("*.txt")))
    assert done.returncode == 0, told or done.stderr
    return folder


def tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    with StoredTensors(checkpoint, name) as stored:
        return {key: stored.read(key).clone() for key in stored.names}


def checkpoint(folder: Path, name: str) -> Path:
    path = folder / name / "step-000001"
    assert checkpoint_damage(path) is None
    return path


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.mark.parametrize("optimizer", PAIRS)
def test_layouts_go_on_from_others_bit_for_bit(saved: Path, optimizer: str) -> None:
    for source, other in PAIRS[optimizer]:
        first, again = checkpoint(saved / optimizer, source), checkpoint(saved / optimizer, f"{source} as {other}")
        for name in ("optimizer", "shadow", "model"):
            assert_same(tensors(again, name), tensors(first, name))
        assert (again / "optimizer.json").read_text() == (first / "optimizer.json").read_text() == '{"updates": 2}'


def test_all_layouts_have_learnt_the_same(saved: Path) -> None:
    """What is compared above is worth comparing: moments are there, and they are those of one process."""
    alone = checkpoint(saved / "adamw", "alone")
    expected = {name: tensors(alone, name) for name in ("optimizer", "shadow", "model")}
    assert all(tensor.any() for tensor in expected["optimizer"].values())
    for layout in CUT:
        for name, named in expected.items():
            found = tensors(checkpoint(saved / "adamw", layout), name)
            assert found.keys() == named.keys()
            assert max(float((found[key] - named[key]).abs().max()) for key in named) < 1e-4


def test_each_process_writes_its_own_and_no_more(saved: Path) -> None:
    for layout in CUT:
        path = checkpoint(saved / "adamw", layout)
        files = sorted(file.name for file in path.glob("optimizer-*"))
        assert files == [f"optimizer-{rank + 1:05d}-of-{RANKS:05d}.safetensors" for rank in range(RANKS)]
        held = [sum(t.numel() for t in load_file(path / file).values()) for file in files]
        total = sum(t.numel() for t in tensors(path, "optimizer").values())
        assert sum(held) == total, "no element is written twice"
        idle = 2 if "copies" in layout else 0
        assert [count > 0 for count in held] == [True] * (RANKS - idle) + [False] * idle
        assert max(held) < 0.6 * total
        weights = sorted(path.glob("model-*.safetensors"))
        assert len(weights) == RANKS
        sizes = [file.stat().st_size for file in weights]
        assert max(sizes) < 2 * min(sizes)


def test_transformers_loads_what_several_processes_wrote(saved: Path) -> None:
    for layout in CUT:
        path = checkpoint(saved / "adamw", layout)
        names = tensors(path, "model")
        model = AutoModelForCausalLM.from_pretrained(path)
        assert_same({key: t for key, t in model.state_dict().items() if key in names}, names)


def test_damage_to_any_file_is_named_and_the_checkpoint_before_is_taken(saved: Path, tmp_path: Path) -> None:
    source = checkpoint(saved / "adamw", "rows")
    files = sorted(str(file.relative_to(source)) for file in source.rglob("*") if file.is_file())
    assert len(files) > 3 * RANKS
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        shutil.copytree(source, folder / f"step-{step:06d}")
    manifest = folder / "step-000002" / "burnish.json"
    manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 2'))
    for name in files:
        said: list[str] = []
        file = folder / "step-000002" / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if name != "burnish.json" else b"{")
        latest = Checkpoints(folder, keep_last=2, report=said.append).latest()
        assert latest is not None
        assert latest.step == 1
        assert len(said) == 1
        assert name in said[0]
        file.write_bytes(content)
    latest = Checkpoints(folder, keep_last=2).latest()
    assert latest is not None
    assert latest.step == 2, "whole again, it is used"
