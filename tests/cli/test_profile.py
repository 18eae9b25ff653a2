"""`--profile` records one step in the run folder and does not change the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.training.profiler import read_trace
from tests.trainers.tiny import TINY, run_of

SFT = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, device: cpu}
sft: {data: {task: sort_digits, options: {num: 24}}, updates: 3, batch_size: 8}
"""


@pytest.fixture(autouse=True)
def _recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    Path("sft.yaml").write_text(SFT)


def test_one_step_of_rl_is_recorded_and_the_run_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "training.steps=2", "--profile"]) == 0
    assert "step 2 was profiled" in capsys.readouterr().out
    run = Path("runs/tiny-0")
    page = (run / "profile.txt").read_text()
    assert page.startswith("step 2: ")
    head = next(line for line in page.splitlines() if line.startswith("kind "))
    assert [word for word in head.split() if word != "communication"] == [
        "kind",
        "rollout",
        "forward",
        "backward",
        "optimizer",
        "other",
        "all",
        "share",
    ]
    kinds = {line.split("  ")[0] for line in page.splitlines()}
    assert {"matmul", "attention", "norm and activation", "head", "optimizer", "outside operators"} <= kinds
    names = {event["name"] for event in read_trace(run / "trace.json.gz")}
    assert {"rollout", "forward", "backward", "optimizer", "_HeadLogprobBackward"} <= names
    plain = run_of(Path("plain"), TINY, ["training.steps=2"])
    rows = [
        [
            {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
            for row in read_metrics(folder / "metrics.jsonl")
        ]
        for folder in (run, plain)
    ]
    assert rows[0] == rows[1]
    assert not (plain / "profile.txt").exists()


def test_one_supervised_update_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "sft.yaml", "--profile", "3"]) == 0
    assert "update 3 was profiled" in capsys.readouterr().out
    page = Path("runs/sft-0/profile.txt").read_text()
    assert page.startswith("update 3: ")
    assert "backward" in page
    row = read_metrics(Path("runs/sft-0/metrics.jsonl"))[-1]
    assert row["performance/learn_tokens_per_s"] > 0
    assert row["memory/peak_gib"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft", "sft.yaml", "--profile", "9"], "has only 3 steps"),
        (["sft", "sft.yaml", "--profile", "sft.updates=2"], "is not a step: give a number"),
        (["sft", "sft.yaml", "--profile", "0"], "is not a step: give a number"),
    ],
)
def test_a_step_that_will_not_come_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as stopped:  # argparse's way
        status = int(str(stopped.code))
    assert status == 2
    assert message in capsys.readouterr().err
