"""A checkpoint of several processes is the same checkpoint to any other number of them, cut in any other way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.run.checkpoint.checkpoints import Checkpoints, damage
from burnish.training.sharded_checkpoint import StoredTensors
from tests.training.resharding import LAYOUTS, PAIRS, RANKS

CUT = [name for name in LAYOUTS if name != "alone"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    command = [sys.executable, "-m", "tests.training.resharding", str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False
    )
    told = "\n".join(file.read_text() for file in sorted(folder.glob("*.txt")))
    assert done.returncode == 0, told or done.stderr
    return folder


def tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    with StoredTensors(checkpoint, name) as stored:
        return {key: stored.read(key).clone() for key in stored.names}


def checkpoint(folder: Path, name: str) -> Path:
    path = folder / name / "step-000001"
    assert damage(path) is None
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
