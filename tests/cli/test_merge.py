"""`burnish merge`: exact averages of models, and refusal of models that do not match."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.cli.main import main
from burnish.models import export_and_merge, weight_files
from burnish.models.export_and_merge import angle_between, slerp_weights, weighted_average
from tests.trainers.tiny import TINY, run_of

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [run_of(folder / f"{seed}", TINY, ["training.steps=1", f"seed={seed}"]) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, run in zip("ab", runs, strict=True):
        assert main(["export", str(run), str(folder / name)]) == 0
    return [folder / "a", folder / "b"]


def weights(folder: Path) -> Weights:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def merge(out: Path, *words: object) -> int:
    return main(["merge", str(out), *map(str, words)])


def with_weights(model: Path, out: Path, change) -> Path:
    """A copy of a model whose weights are what `change` makes of them."""
    shutil.copytree(model, out)
    save_file({k: change(k, v).contiguous() for k, v in weights(model).items()}, out / "model.safetensors")
    return out


def test_the_average_is_that_of_every_tensor_and_transformers_loads_it(models: list[Path], tmp_path: Path) -> None:
    assert merge(tmp_path / "out", *models, "--weights", "0.25", "0.75") == 0
    first, second = weights(models[0]), weights(models[1])
    expected = {k: weighted_average([v, second[k]], [0.25, 0.75]).to(v.dtype) for k, v in first.items()}
    found = weights(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert any(not torch.equal(found[name], weights(models[0])[name]) for name in found)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    token = AutoTokenizer.from_pretrained(tmp_path / "out")("53>", return_tensors="pt")["input_ids"]
    assert torch.isfinite(loaded(token).logits).all()


@pytest.mark.parametrize("method", ["linear", "slerp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_one_and_zero_give_a_model_back_bit_for_bit(
    models: list[Path], tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    def odd(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(dtype)
        tensor.view(-1)[0] = -0.0  # which plus 0 would be 0
        return tensor

    first = with_weights(models[0], tmp_path / "a", odd)
    second = with_weights(models[1], tmp_path / "b", lambda _, t: torch.full_like(t, torch.inf))
    assert merge(tmp_path / "out", first, second, "--weights", 1, 0, "--method", method) == 0
    found, bits = weights(tmp_path / "out"), {torch.float32: torch.int32}.get(dtype, torch.int16)
    assert all(torch.equal(found[n].view(bits), t.view(bits)) for n, t in weights(first).items())


def test_bfloat16_is_summed_in_float32(models: list[Path], tmp_path: Path) -> None:
    folders = [
        with_weights(model, tmp_path / f"{k}", lambda _, t, k=k: torch.full_like(t, 1 + k * 2**-7).bfloat16())
        for k, model in enumerate([*models, models[0]])
    ]
    assert merge(tmp_path / "out", *folders) == 0  # the mean of 1, 1 + 1/128 and 1 + 2/128
    assert {float(t.float().unique()) for t in weights(tmp_path / "out").values()} == {1 + 2**-7}


def test_a_large_model_goes_through_in_blocks_and_several_files(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert merge(tmp_path / "whole", *models, "--method", "slerp", "--weights", 0.3, 0.7) == 0
    monkeypatch.setattr(export_and_merge, "BLOCK_ELEMENTS", 40)
    monkeypatch.setattr(weight_files, "FILE_BYTES", 3000)
    assert merge(tmp_path / "parts", *models, "--method", "slerp", "--weights", 0.3, 0.7) == 0
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], rtol=1e-6, atol=1e-8)
    AutoModelForCausalLM.from_pretrained(tmp_path / "parts")


def test_slerp_keeps_the_length_that_an_average_loses() -> None:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    share = slerp_weights(angle_between(0.0, 1.0, 1.0), 0.5)
    torch.testing.assert_close(weighted_average([a, b], share), torch.tensor([0.5, 0.5]).sqrt())
    assert weighted_average([a, b], [0.5, 0.5]).tolist() == [0.5, 0.5]
    assert slerp_weights(angle_between(2.0, 1.0, 4.0), 0.25) == (0.75, 0.25)  # parallel: along the line
    assert slerp_weights(angle_between(-1.0, 1.0, 1.0), 0.25) == (0.75, 0.25)  # opposite: likewise
    assert slerp_weights(angle_between(0.0, 0.0, 1.0), 0.25) == (0.75, 0.25)  # of nothing


def test_runs_and_checkpoints_are_models_too_and_provenance_names_them(runs: list[Path], tmp_path: Path) -> None:
    checkpoint = runs[1] / "checkpoints" / "step-000001"
    assert merge(tmp_path / "out", runs[0], checkpoint, "--dtype", "bfloat16") == 0
    said = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert (said["method"], said["weights"], said["dtype"]) == ("linear", [0.5, 0.5], "bfloat16")
    assert [(s["step"], Path(s["path"]).name) for s in said["sources"]] == [(1, "step-000001")] * 2
    assert len({s["weights"][0]["sha256"] for s in said["sources"]}) == 2
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "merge.json", "model.safetensors", "tokenizer.json"} <= names
    assert not [name for name in names if name.startswith(("optimizer", "trainer", "burnish"))]


def test_models_that_are_not_alike_are_refused_with_the_first_difference(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object) -> str:
        assert merge(tmp_path / "out", *words) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    def edited(name: str, file: str, change) -> Path:
        folder = Path(shutil.copytree(models[1], tmp_path / name))
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))
        return folder

    wider = edited("wider", "config.json", lambda c: c.update(intermediate_size=64))
    assert "mlp_size is 32 in" in refused(models[0], wider)
    other = edited("other", "config.json", lambda c: c.update(model_type="mistral"))
    assert "is 'mistral'" in refused(models[0], other)
    vocabulary = edited("vocabulary", "tokenizer.json", lambda c: c["model"]["vocab"].update({"7": 10, "8": 9}))
    assert "the token '7' has 9 in the first and 10 in the second" in refused(models[0], vocabulary)
    short = with_weights(models[1], tmp_path / "short", lambda n, t: t[:3] if n == "model.norm.weight" else t)
    assert "differ in model.norm.weight: (16,) in" in refused(models[0], short)
    assert "add up to 0.9" in refused(*models, "--weights", 0.5, 0.4)
    assert "3 weights for 2 models" in refused(*models, "--weights", 0.5, 0.4, 0.1)
    assert "two models" in refused(*models, models[0], "--method", "slerp")
    assert "two models or more" in refused(models[0])


def test_nothing_is_overwritten(models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("precious")
    assert merge(tmp_path, *models) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
