"""safetensors files in chunks: the library's own bytes, and copies that training cannot reach."""

from __future__ import annotations

import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from burnish.config.errors import UserError
from burnish.run.checkpoint import saver, snapshot, tensor_file
from burnish.run.checkpoint.checkpoints import MANIFEST_FILE, Checkpoints, checkpoint_damage
from burnish.run.checkpoint.saver import HostCopy, TensorStaging, free_memory, keep_in_place, wait_for_devices
from burnish.run.checkpoint.snapshot import BytesFile, Checksums, Snapshot, WriterRank, write_contents, write_file
from burnish.run.checkpoint.tensor_file import SAFETENSORS_DTYPES, TensorFile
from burnish.run.durable_files import remove_leftovers

STAGES: dict[str, TensorStaging] = {"leave": keep_in_place, "copy": HostCopy()}


def random(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=5).filter(
            lambda n: n != "__metadata__"
        ),
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3), st.sampled_from(list(SAFETENSORS_DTYPES)), st.integers(0, 9)
        ),
        max_size=6,
    ),
    metadata=st.dictionaries(st.sampled_from(["a", "format"]), st.text(max_size=3), max_size=1),
    stage=st.sampled_from(list(STAGES)),
)
def test_the_bytes_are_those_the_library_writes(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict, metadata: dict[str, str], stage: str
) -> None:
    folder = tmp_path_factory.mktemp("files")
    made = {name: random(*spec) for name, spec in tensors.items()}
    sums = TensorFile("ours", {name: STAGES[stage](t) for name, t in made.items()}, metadata).write(folder)
    save_file(made, folder / "theirs", metadata=metadata or None)
    content = (folder / "ours").read_bytes()
    assert sums == {"ours": {"size": len(content), "crc32": zlib.crc32(content)}}
    assert content == (folder / "theirs").read_bytes()


def test_tensors_in_any_layout_come_back_through_any_number_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "COPY_CHUNK_BYTES", 16)
    whole = torch.randn(9, 8)
    tensors = {
        "turned": whole.t(),
        "rows": whole[2:5],
        "columns": whole[:, 1:3],
        "half": whole.bfloat16(),
        "one": whole[0, 0],
    }
    for name, stage in STAGES.items():
        TensorFile(name, {key: stage(t) for key, t in tensors.items()}).write(tmp_path)
        found = load_file(tmp_path / name)
        assert all(torch.equal(found[key], t) and found[key].dtype == t.dtype for key, t in tensors.items())


def test_a_copy_is_out_of_reach_and_what_is_left_is_not(tmp_path: Path) -> None:
    for is_contiguous in (True, False):
        tensor = torch.zeros(4, 3) if is_contiguous else torch.zeros(3, 4).t()
        copied = HostCopy()(torch.nn.Parameter(tensor))
        left = keep_in_place(tensor)
        tensor.fill_(1)
        TensorFile("copied", {"x": copied}).write(tmp_path)
        assert not load_file(tmp_path / "copied")["x"].any()
        assert not copied.tensor.any()
        if is_contiguous:
            assert left.tensor.all()


def test_where_there_is_no_room_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "SMALL_TENSOR_BYTES", 100)
    stage, tensor = HostCopy(), torch.zeros(1000)
    monkeypatch.setattr(saver, "free_memory", lambda: (4000 + 1_000_000, 10_000_000))
    first = stage(tensor)
    assert (stage.is_short, stage.num_bytes) == (True, 0)
    tensor.fill_(1)
    assert first.tensor.all()
    monkeypatch.setattr(saver, "free_memory", lambda: (4001 + 1_000_000, 10_000_000))
    assert stage(torch.ones(2)).tensor.all()
    assert stage.num_bytes == 0, "all of a checkpoint is copied, or none"
    other = HostCopy()
    other(tensor)
    other(torch.zeros(10))
    assert (other.is_short, other.num_bytes) == (False, 4040)


def test_the_machine_has_memory() -> None:
    found = free_memory()
    if found is None:
        pytest.skip("this system does not say how much memory is free")
    free, total = found
    assert 0 < free <= total


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "weights").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot write .*weights: No space left on device") as caught:
        write_file(tmp_path, "weights", [b"x" * 10_000])
    assert isinstance(caught.value.__cause__, OSError)


def test_a_file_may_give_way_to_one_that_is_there(tmp_path: Path) -> None:
    sums = write_contents(
        tmp_path, [BytesFile("a/b", "first"), BytesFile("a/b", "second", if_absent=True), BytesFile("c", b"", True)]
    )
    assert (tmp_path / "a" / "b").read_text() == "first"
    assert {name: entry["size"] for name, entry in sums.items()} == {"a/b": 5, "c": 0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned copies need a GPU")
def test_a_gpus_tensors_are_copied_to_pinned_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "SLAB_BYTES", 1 << 12)
    stage = HostCopy()
    tensors = {
        f"{k}": torch.randn(700 * k + 1, device="cuda").to(d) for k, d in enumerate((torch.float32, torch.bfloat16))
    }
    tensors["byte"] = torch.arange(5, dtype=torch.uint8, device="cuda")
    tensors["after"] = torch.randn(3000, device="cuda")
    expected = {name: t.clone() for name, t in tensors.items()}
    held = {name: stage(t) for name, t in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    wait_for_devices()
    assert all(piece.is_pinned() for one in held.values() for piece in one.pieces)
    assert len(held["after"].pieces) > 1
    TensorFile("file", held).write(tmp_path)
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], t.cpu()) for name, t in expected.items())
    assert all(torch.equal(one.tensor, expected[name].cpu()) for name, one in held.items())


# A checkpoint written by several processes. Here they are threads that share only the folder.

COUNT = 4


def snapshot_of(rank: int) -> Snapshot:
    return Snapshot(
        [BytesFile(f"model-{rank}", "w" * rank)], [BytesFile(f"state-{rank}", f"{rank}")], WriterRank(rank, COUNT)
    )


class Fails:
    """What cannot be written."""

    def write(self, folder: Path) -> Checksums:
        raise UserError("cannot write optimizer-00003: No space left on device")


def test_all_parts_make_one_checkpoint_which_appears_when_the_last_is_there(tmp_path: Path) -> None:
    late = threading.Event()

    class Late:
        def write(self, folder: Path) -> Checksums:
            assert late.wait(20)
            return BytesFile("late", "at last").write(folder)

    taken = [snapshot_of(rank) for rank in range(COUNT)]
    taken[2] = Snapshot(taken[2].model, [*taken[2].state, Late()], taken[2].part)
    with ThreadPoolExecutor(COUNT) as pool:
        writes = [pool.submit(Checkpoints(tmp_path, 1).write, 7, taken[rank], 0.5) for rank in range(COUNT)]
        others = [writes[rank].result(20) for rank in (1, 3)]
        assert not writes[0].done()
        assert not (tmp_path / "step-000007").exists()
        late.set()
        path = writes[0].result(20)
    assert {path, *others, writes[2].result()} == {tmp_path / "step-000007"}
    assert checkpoint_damage(path) is None
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    assert (manifest["step"], manifest["score"]) == (7, 0.5)
    names = {f"{kind}-{rank}": kind for kind in ("model", "state") for rank in range(COUNT)} | {"late": "state"}
    assert {name: entry["of"] for name, entry in manifest["files"].items()} == names
    assert sorted(f.name for f in path.iterdir()) == sorted([*names, MANIFEST_FILE])
    assert sorted(f.name for f in tmp_path.iterdir()) == ["index.json", "step-000007"]


def test_the_first_process_hears_why_another_could_not_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No space left"):
        Checkpoints(tmp_path, 1).write(7, Snapshot([Fails()], (), WriterRank(2, COUNT)))
    with pytest.raises(UserError, match=r"process 2 of 4 could not write its part of .*optimizer-00003: No space left"):
        Checkpoints(tmp_path, 1).write(7, snapshot_of(0))
    assert Checkpoints(tmp_path, 1).latest() is None


def test_a_process_that_never_comes_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PARTS_DEADLINE_S", 0.1)
    for rank in (1, 3):
        Checkpoints(tmp_path, 1).write(7, snapshot_of(rank))
    with pytest.raises(UserError, match=r"processes \[2\] of 4 have not written their parts after 0 s"):
        Checkpoints(tmp_path, 1).write(7, snapshot_of(0))


def test_what_killed_processes_left_is_swept_away(tmp_path: Path) -> None:
    Checkpoints(tmp_path, 1).write(7, snapshot_of(1))
    assert Checkpoints(tmp_path, 1).latest() is None
    assert remove_leftovers(tmp_path) == [".tmp-parts-step-000007"]
