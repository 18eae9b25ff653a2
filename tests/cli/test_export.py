"""`burnish export` writes a directory that transformers loads, with the exact weights of the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.cli.main import main
from burnish.config.model import Model
from burnish.models.lora.peft_files import is_adapter
from burnish.models.policy import load_policy
from burnish.run.checkpoint.checkpoints import MANIFEST_FILE, Checkpoints
from tests.trainers.tiny import TINY, run_of

OPTIONS = [
    "algorithm=ppo",
    "algorithm.kl={reward: {coef: 0.1}, reference: {name: ema, eta: 0.2}}",
    "rollout.mismatch={name: stale, steps: 1}",
    "data.validation=[{task: sort_digits, options: {min_digits: 2, max_digits: 3}}]",
    "validation={every: 2, limit: 8}",
    "training.steps=3",
    "run.keep_last=3",
    "run.save_every=1",
]
"""A run that saves everything a run can: critic, reference, the past of a stale sampler."""
STATE = ("optimizer", "critic", "reference", "engine", "trainer", "burnish")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("finished") / "run", TINY, OPTIONS)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def logits(directory: Path, **options: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, **options)
    text = AutoTokenizer.from_pretrained(directory)("53>", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(text).logits


def test_transformers_finds_the_checkpoints_model_in_what_was_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run / "checkpoints" / "step-000003"
    assert any(file.name.startswith(STATE) for file in checkpoint.iterdir())
    assert main(["export", str(run), str(tmp_path / "out"), "--step", "last"]) == 0
    assert torch.equal(logits(tmp_path / "out"), logits(checkpoint))
    written = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert not any(name.startswith(STATE) for name in written)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(written)
    shown = capsys.readouterr().out
    assert "step-000003 (its last)" in shown
    assert all(name in shown for name in written)


def test_another_type_is_what_transformers_makes_of_it(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step-000003"
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(tmp_path / "out", dtype="auto"), logits(checkpoint, dtype="bfloat16"))
    sizes = [(d / "model.safetensors").stat().st_size for d in (tmp_path / "out", checkpoint)]
    assert sizes[0] < 0.7 * sizes[1]


def test_a_step_is_chosen_by_number_by_score_or_by_age(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {c.step: c.score for c in Checkpoints(run / "checkpoints", 1).all()}
    assert scores.keys() == {1, 2, 3}
    assert scores[1] is None
    best = 3 if (scores[3] or 0) > (scores[2] or 0) else 2
    for number, (options, step) in enumerate(
        {(): best, ("--step", "best"): best, ("--step", "last"): 3, ("--step", "1"): 1}.items()
    ):
        assert main(["export", str(run), str(tmp_path / str(number)), *options]) == 0
        assert f"step-{step:06d} (" in capsys.readouterr().out
    for wrong, why in {
        "4": "no checkpoint of step 4: there are 1, 2, 3",
        "beste": "expected the number of a step",
    }.items():
        assert main(["export", str(run), str(tmp_path / "none"), "--step", wrong]) == 2
        assert why in capsys.readouterr().err
    manifest = run / "checkpoints" / "step-000002" / MANIFEST_FILE
    for name in ("step-000002", "step-000003"):
        manifest = run / "checkpoints" / name / MANIFEST_FILE
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "score": None}))
    assert main(["export", str(run), str(tmp_path / "unscored")]) == 0
    assert "step-000003 (its last, none has a score)" in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "none"), "--step", "best"]) == 2
    assert "none is best" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_damaged_checkpoint_is_named_and_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run / "checkpoints" / "step-000003" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert main(["export", str(run), str(tmp_path / "out"), "--step", "last"]) == 2
    error = capsys.readouterr().err
    assert "step-000003 is damaged (model.safetensors has another checksum" in error
    assert "the checkpoints of step 1, 2 are undamaged (--step)" in error
    (run / "checkpoints" / "step-000002" / "config.json").unlink()
    assert main(["export", str(run / "checkpoints" / "step-000002"), str(tmp_path / "out")]) == 2
    assert "step-000002 is damaged (config.json is missing)" in capsys.readouterr().err
    (run / "checkpoints" / "step-000001" / MANIFEST_FILE).unlink()
    assert main(["export", str(run), str(tmp_path / "out"), "--step", "1"]) == 2
    assert "burnish.json is missing" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_model_whose_optimizer_is_damaged_can_still_be_had(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step-000003" / "optimizer.safetensors").write_bytes(b"gone")
    assert main(["export", str(run), str(tmp_path / "out"), "--step", "last"]) == 0


def test_nothing_is_overwritten(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert main(["export", str(run), str(out)]) == 0, "an empty directory is as good as none"
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert main(["export", str(run), str(out)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before
    (tmp_path / "file").write_text("mine")
    assert main(["export", str(run), str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_no_run_is_refused_with_the_reason(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, options, why in [
        (tmp_path / "ran", [], "is not a run: it has no config.yaml; did you mean 'run'"),
        (run / "checkpoints" / "step-000003", ["--step", "last"], "is a checkpoint already"),
        (run / "checkpoints" / "step-000003", ["--merged"], "has no adapters to merge"),
    ]:
        assert main(["export", str(source), str(tmp_path / "out"), *options]) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_are_exported_alone_or_merged_into_their_base(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = finished / "checkpoints" / "step-000003"
    shown = "data.demonstrations={task: sort_digits, options: {num: 64, clean: true, min_digits: 2, max_digits: 3}}"
    options = ["model.new=null", f"model.path={base}", "model.lora={rank: 2, alpha: 16}", "algorithm.auxiliary.sft=1.0"]
    run = run_of(tmp_path / "lora", TINY, [*options, shown])
    for name, flags in {"alone": [], "merged": ["--merged"], "small": ["--merged", "--dtype", "bfloat16"]}.items():
        assert main(["export", str(run), str(tmp_path / name), *flags]) == 0
    assert "adapter_model.safetensors" in capsys.readouterr().out
    assert not (tmp_path / "alone" / "model.safetensors").exists()
    assert is_adapter(tmp_path / "alone")
    policy = load_policy(Model(device="cpu"), tmp_path / "alone", None, seed=0)
    tokens = torch.tensor(policy.tokenizer.encode("53>"))
    with torch.no_grad():
        hidden = policy.module.hidden(tokens, torch.tensor([0, len(tokens)]))
        expected = policy.module.logits(hidden)
    found = logits(tmp_path / "merged")[0]
    assert (found - expected).abs().max() < 1e-5
    assert (found - logits(base)[0]).abs().max() > 1e-3, "the adapters do nothing"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype="auto").dtype == torch.bfloat16
