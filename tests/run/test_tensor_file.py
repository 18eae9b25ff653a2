"""safetensors files in chunks: the library's own bytes, and copies that training cannot reach."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from burnish.config.errors import UserError
from burnish.run.checkpoint import contents, saving
from burnish.run.checkpoint.contents import DTYPES, Blob, TensorFile, write_contents, write_file
from burnish.run.checkpoint.saving import HostCopy, Stage, free_memory, leave, wait_for_devices

STAGES: dict[str, Stage] = {"leave": leave, "copy": HostCopy()}


def random(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=5).filter(
            lambda n: n != "__metadata__"
        ),
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(list(DTYPES)), st.integers(0, 9)),
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
    monkeypatch.setattr(contents, "CHUNK", 16)
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
        left = leave(tensor)
        tensor.fill_(1)
        TensorFile("copied", {"x": copied}).write(tmp_path)
        assert not load_file(tmp_path / "copied")["x"].any()
        assert not copied.tensor.any()
        if is_contiguous:
            assert left.tensor.all()


def test_where_there_is_no_room_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SMALL", 100)
    stage, tensor = HostCopy(), torch.zeros(1000)
    monkeypatch.setattr(saving, "free_memory", lambda: (4000 + 1_000_000, 10_000_000))
    first = stage(tensor)
    assert (stage.is_short, stage.num_bytes) == (True, 0)
    tensor.fill_(1)
    assert first.tensor.all()
    monkeypatch.setattr(saving, "free_memory", lambda: (4001 + 1_000_000, 10_000_000))
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
    sums = write_contents(tmp_path, [Blob("a/b", "first"), Blob("a/b", "second", if_absent=True), Blob("c", b"", True)])
    assert (tmp_path / "a" / "b").read_text() == "first"
    assert {name: entry["size"] for name, entry in sums.items()} == {"a/b": 5, "c": 0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned copies need a GPU")
def test_a_gpus_tensors_are_copied_to_pinned_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SLAB", 1 << 12)
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
