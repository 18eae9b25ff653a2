"""`burnish sample`, `eval` and `export` on a PEFT adapter directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from burnish.cli.main import main
from burnish.config.model import Lora, Model, NewModel
from burnish.models.lora.adapters import adapter_weights
from burnish.models.policy import load_policy, save_merged


@pytest.fixture(scope="module", params=["dtype", "nf4"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, an adapter that matters and both merged."""
    folder = tmp_path_factory.mktemp("models")
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=32)
    for name in ("base", "adapter", "merged"):
        (folder / name).mkdir()
    load_policy(Model(new=new, device="cpu"), None, "0123456789>", seed=1).save(folder / "base")
    policy = load_policy(Model(device="cpu", lora=Lora(rank=4, base=request.param)), folder / "base", None, 0)
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter_weights(policy.module).values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    policy.save(folder / "adapter")
    save_merged(policy, folder / "merged")
    return folder


def said(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["sample", str(folder / name), "31>", "--temperature", "0", "--max-tokens", "20", "--device=cpu"]) == 0
    return capsys.readouterr().out


def test_sample_speaks_with_the_adapter(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter, merged = (said(models, name, capsys) for name in ("base", "adapter", "merged"))
    assert adapter == merged
    assert adapter != base


def test_eval_measures_with_the_adapter(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for name in ("adapter", "merged", "base"):
        out = tmp_path / f"{name}.jsonl"
        command = ["eval", str(models / name), "task:sort_digits", "--limit", "8", "reward.workers=1"]
        assert main([*command, "--device", "cpu", "--out", str(out)]) == 0
        answers.append([json.loads(line)["completion"] for line in out.read_text().splitlines()])
        note = "LoRA of rank 4 x 8 on all projections" in capsys.readouterr().err
        assert note == (name == "adapter")
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("key", ["model.adapter=x", "model.lora.rank=4"])
def test_eval_takes_the_model_from_its_argument_alone(
    key: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(models / "base"), "task:sort_digits", "--out", "o.jsonl", key]) == 2
    assert f"{key.split('.')[1].split('=')[0]} has no effect here" in capsys.readouterr().err


def test_a_base_that_is_gone_is_named(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (models / "adapter").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone"}))
    assert main(["sample", str(tmp_path), "31>"]) == 2
    assert "base_model_name_or_path is '/gone', and there is no such directory here" in capsys.readouterr().err
