"""A process reward model whose work Ray's workers do: the numbers of one process, also from a checkpoint that others wrote.

A Ray of its own and four short runs: about half a minute.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.distributed.shared_runs import made, numbers

pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory, "ray-process", ["process"], deadline_s=1800)


@pytest.mark.parametrize("name", ["two", "half"])
def test_workers_learn_reward_and_save_as_one_process_does(folder: Path, name: str) -> None:
    assert json.loads((folder / "facts.json").read_text())["half"]  # it did stop half way
    expected, found = numbers(folder, "one"), numbers(folder, name)
    assert len(found) == len(expected) == 4
    for row, other in zip(found, expected, strict=True):
        keys = [key for key in row if key.startswith(("process/", "actor/loss", "actor/grad_norm", "reward/"))]
        assert "process/accuracy" in keys
        for key in keys:
            assert row[key] == pytest.approx(other[key], abs=1e-9), key
    assert abs(expected[-1]["process/loss"] - expected[0]["process/loss"]) > 1e-4


@pytest.mark.parametrize("name", ["one", "two", "half"])
def test_a_checkpoint_has_the_model_and_its_optimizer(folder: Path, name: str) -> None:
    saved = folder / name / "checkpoints" / "step-000004" / "process"
    files = sorted(path for path in saved.glob("model*.safetensors"))
    assert len(files) == (2 if name == "two" else 1)
    assert all(load_file(file) for file in files)
    assert (saved / "optimizer.json").read_text() == '{"updates": 8}'
