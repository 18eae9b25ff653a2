"""Runs whose files were damaged while stopped: they name the file, and either recover exactly or say what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from burnish.config.errors import UserError
from burnish.run.journal import Journal
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.trainers import rl
from tests.trainers.tiny import TINY, WARM, run_of

OVERRIDES = [
    "algorithm.kl={loss: {coef: 0.1}, reference: frozen}",
    "data.validation={task: sort_digits, options: {min_digits: 2, max_digits: 3}}",
    "validation={limit: 4}",
    "warm_start.updates=10",
    "training.steps=5",
    "run.save_every=2",
    "run.keep_last=2",
]


def result(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    metrics = [
        {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    last = max((run / "checkpoints").glob("step-*"))
    return metrics, {f"{f.name} {n}": t.tobytes() for f in last.rglob("*.safetensors") for n, t in load_file(f).items()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a run that was killed in its last step, and what it would have come to."""
    folder = tmp_path_factory.mktemp("runs")
    expected = result(run_of(folder / "whole", TINY + WARM, OVERRIDES))

    def killed(context: Any, step: int, *args: Any) -> Any:
        if step == 5:
            raise RuntimeError("killed")
        return after_step(context, step, *args)

    after_step = rl.after_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "after_step", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_of(folder / "killed", TINY + WARM, OVERRIDES)
    return folder / "killed", expected


def flip(path: Path, at: int = -20) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def rename_key(path: Path, key: str) -> None:
    """Another letter in a key: the file is valid JSON still."""
    path.write_text(path.read_text().replace(f'"{key}"', f'"{key[:-1]}f"'))


def cut_metrics(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:2], "{torn\n", *lines[3:]]))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "warm start": (
        lambda run: flip(run / "warm_start" / "model.safetensors"),
        "warm_start: model.safetensors has another checksum than when it was written; the warm start is made again",
    ),
    "warm start's checksums": (
        lambda run: (run / "warm_start.json").unlink(),
        "warm_start: warm_start.json, which has its checksums, is missing or damaged; the warm start is made again",
    ),
    "a key of the warm start's checksums": (
        lambda run: rename_key(run / "warm_start.json", "size"),
        "warm_start: warm_start.json, which has its checksums, is missing or damaged; the warm start is made again",
    ),
    "a key of a manifest": (
        lambda run: rename_key(run / "checkpoints" / "step-000004" / "burnish.json", "size"),
        "is damaged (burnish.json is missing or damaged); trying the one before",
    ),
    "checkpoint": (
        lambda run: flip(run / "checkpoints" / "step-000004" / "optimizer.safetensors"),
        "is damaged (optimizer.safetensors has another checksum than when it was written); trying the one before",
    ),
    "trainer state": (
        lambda run: flip(run / "checkpoints" / "step-000004" / "trainer.json"),
        "is damaged (trainer.json has another checksum than when it was written); trying the one before",
    ),
    "rollouts": (lambda run: (run / "journal" / "completed-000005.safetensors").unlink(), ""),
    "scores": (lambda run: flip(run / "journal" / "scored-000005.safetensors"), ""),
    "inputs": (lambda run: (run / "inputs.json").unlink(), "inputs.json is missing: models and plug-ins are taken as"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_with_a_damaged_file_ends_as_if_it_had_none(
    name: str, unbroken: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, said = DAMAGES[name]
    shutil.copytree(unbroken[0], tmp_path / "run")
    damage(tmp_path / "run" / "it")
    assert result(run_of(tmp_path / "run", TINY + WARM, OVERRIDES)) == unbroken[1]
    assert said in "".join(capsys.readouterr())


def test_a_warm_start_that_cannot_be_made_again_is_an_error_that_says_what_to_do(
    unbroken: tuple[Path, Any], tmp_path: Path
) -> None:
    shutil.copytree(unbroken[0], tmp_path / "run")
    sums = tmp_path / "run" / "it" / "warm_start.json"
    known = json.loads(sums.read_text())
    known["model.safetensors"]["crc32"] ^= 1  # as if it had been made elsewhere
    sums.write_text(json.dumps(known))
    with pytest.raises(
        UserError, match=r"gives other weights than the run began with .* or start the run anew: move its folder"
    ):
        run_of(tmp_path / "run", TINY + WARM, OVERRIDES)


def test_without_a_whole_checkpoint_it_is_said_what_to_do(unbroken: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(unbroken[0], tmp_path / "run")
    for manifest in (tmp_path / "run" / "it" / "checkpoints").glob("step-*/burnish.json"):
        rename_key(manifest, "size")
    with pytest.raises(
        UserError, match=r"no checkpoint of this run can be used:\n.*(?s:.*)restore one from a copy, or"
    ):
        run_of(tmp_path / "run", TINY + WARM, OVERRIDES)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"models": 1, "plugins": {}}',
        '{"models": {}, "plugins": {}, "weights": []}',
        '{"models": {}, "plugins": {}, "weights": {"model.path": {"model.safetensors": {"sizf": 1, "crc32": 2}}}}',
    ],
)
def test_damaged_inputs_say_what_to_do(unbroken: tuple[Path, Any], tmp_path: Path, content: str) -> None:
    shutil.copytree(unbroken[0], tmp_path / "run")
    (tmp_path / "run" / "it" / "inputs.json").write_text(content)
    with pytest.raises(UserError, match=r"inputs\.json is damaged .* or delete it to go on with them as they are now"):
        run_of(tmp_path / "run", TINY + WARM, OVERRIDES)


def test_lost_lines_of_the_metrics_are_told(
    unbroken: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(unbroken[0], tmp_path / "cut")
    cut_metrics(tmp_path / "cut" / "it")
    run = run_of(tmp_path / "cut", TINY + WARM, OVERRIDES)
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 3, 4, 5]
    said = capsys.readouterr().out
    assert "metrics.jsonl: skipped line 3, which cannot be read; the original file is kept as" in said
    assert "metrics.jsonl has no line of step 2: it was cut, deleted or damaged" in said
    assert "{torn" in (run / "metrics.damaged.jsonl").read_text()
    shutil.copytree(unbroken[0], tmp_path / "gone")
    (tmp_path / "gone" / "it" / "metrics.jsonl").unlink()
    run_of(tmp_path / "gone", TINY + WARM, OVERRIDES)
    assert "metrics.jsonl has no line of steps 1 to 4 (4 in all)" in capsys.readouterr().out


def test_step_0_is_logged_once_when_a_kill_comes_before_its_record(tmp_path: Path) -> None:
    def killed(*_: Any) -> None:
        raise RuntimeError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append_many", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_of(tmp_path / "run", TINY, OVERRIDES[1:3])
    run = run_of(tmp_path / "run", TINY, OVERRIDES[1:3])
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
