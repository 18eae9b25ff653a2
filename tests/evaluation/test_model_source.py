"""Which model a directory stands for, and how many tokens it has room for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burnish.config.environment import Environment
from burnish.config.errors import UserError
from burnish.evaluation.model_source import (
    ModelSource,
    compute_dtype,
    find_model,
    fit_max_tokens,
    stored_dtype,
)
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.checkpoint.snapshot import BytesFile, Snapshot


def run_with(path: Path, scores: list[float | None]) -> Path:
    """A run with a checkpoint a step."""
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.yaml").write_text("seed: 3\n")
    checkpoints = Checkpoints(path / "checkpoints", keep_last=10)
    for step, score in enumerate(scores, start=1):
        checkpoints.write(step, Snapshot([BytesFile("config.json", "{}")]), score)
    return path


def test_a_model_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    subject = find_model(tmp_path)
    assert (subject.path, subject.note, subject.config) == (tmp_path, None, {})


def test_a_run_stands_for_its_best_checkpoint_and_says_so(tmp_path: Path) -> None:
    subject = find_model(run_with(tmp_path / "r", [0.2, 0.9, 0.4]))
    assert subject.path.name == "step-000002"
    assert subject.note is not None
    assert "step-000002 (its best: score 0.900)" in subject.note
    assert subject.config == {"seed": 3}


def test_a_run_without_scores_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    subject = find_model(run_with(tmp_path / "r", [None, None]))
    assert subject.path.name == "step-000002"
    assert subject.note is not None
    assert "newest" in subject.note


def test_what_is_no_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoint yet"):
        find_model(run_with(tmp_path / "fresh", []))
    with pytest.raises(UserError, match=r"neither a Hugging Face model directory .* nor a run"):
        find_model(tmp_path)
    with pytest.raises(UserError, match="is not a directory; did you mean 'fresh'"):
        find_model(tmp_path / "frech")


def test_max_tokens_is_cut_to_the_positions_left() -> None:
    assert fit_max_tokens(10, 20, 30) == (10, None)
    assert fit_max_tokens(10, 20, None) == (10, None)
    assert fit_max_tokens(11, 20, 30) == (10, "max_tokens cut from 11 to 10: 30 positions, 20 of them prompt")
    with pytest.raises(UserError, match="30 tokens, but the model is made for 30 positions"):
        fit_max_tokens(1, 30, 30)


def test_max_tokens_is_cut_to_what_an_environment_leaves_each_turn() -> None:
    game = Environment(name="guess_number", max_turns=3, max_tokens=29)
    assert fit_max_tokens(9, 20, 99, game) == (9, None)
    told = "max_tokens cut from 10 to 3: environment.max_tokens=29, 20 of them prompt, the rest for 3 turns"
    assert fit_max_tokens(10, 20, 99, game) == fit_max_tokens(10, 20, None, game) == (3, told)
    assert fit_max_tokens(10, 20, 26, game)[1] == "max_tokens cut from 10 to 2: 26 positions, 20 of them prompt, the rest for 3 turns"  # fmt: skip
    with pytest.raises(
        UserError, match=r"27 tokens, but environment\.max_tokens=29 is for all 3 turns together; raise it"
    ):
        fit_max_tokens(3, 27, 99, game)


def test_the_stored_type_is_the_configs_and_of_an_adapter_its_bases(tmp_path: Path) -> None:
    for name, config in (("old", {"torch_dtype": "bfloat16"}), ("new", {"dtype": "float16"}), ("none", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../old"}))
    found = {name: stored_dtype(tmp_path / name) for name in ("old", "new", "none", "adapter")}
    assert found == {"old": "bfloat16", "new": "float16", "none": None, "adapter": "bfloat16"}


def test_a_model_is_sampled_in_the_type_its_run_computed_in(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    plain = tmp_path / "plain"
    for folder in (checkpoint, plain):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    for ran_in, on_gpu, on_cpu in (
        ("bfloat16", "bfloat16", "float32"),
        ("float32", "float32", "float32"),
        ("float64", "float64", "float64"),
        (None, "float32", "float32"),
    ):
        config = {"model": {"path": "x"} | ({"dtype": ran_in} if ran_in else {})}
        (tmp_path / "run" / "config.yaml").write_text(json.dumps(config))
        for subject in (ModelSource(checkpoint, config=config), ModelSource(checkpoint)):
            assert [compute_dtype(subject, is_gpu) for is_gpu in (True, False)] == [on_gpu, on_cpu], ran_in
    for stored, on_gpu in (("float32", "bfloat16"), ("float16", "float16"), ("bfloat16", "bfloat16")):
        (plain / "config.json").write_text(json.dumps({"dtype": stored}))
        assert [compute_dtype(ModelSource(plain), is_gpu) for is_gpu in (True, False)] == [on_gpu, "float32"]
