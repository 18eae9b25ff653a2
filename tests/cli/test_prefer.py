"""`burnish prefer`: output, refused settings, and resuming after a kill at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.cli.main import main
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.trainers import preference
from tests.cli.crashing_runs import killed_after

RECIPE = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, device: cpu}
preference:
  data: {task: sort_digits, options: {num: 40}}
  held_out: {task: sort_digits, options: {num: 10}}
  held_out_every: 2
  updates: 5
  batch_size: 8
  optimizer: {lr: 1.0e-2, warmup: 2, schedule: linear}
run: {directory: runs, save_every: 3, threads: 1}
"""


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in read_metrics(path)]


def assert_same_run(one: Path, other: Path, step: str = "step-000005") -> None:
    assert without_times(one / "metrics.jsonl") == without_times(other / "metrics.jsonl")
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (load_file(run / "checkpoints" / step / name) for run in (one, other))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_run_leaves_metrics_a_model_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefer", "tiny.yaml"]) == 0
    rows = read_metrics(Path("runs/tiny-0/metrics.jsonl"))
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4, 5]
    assert [r["step"] for r in rows if "validation/pairs/accuracy" in r] == [0, 2, 4, 5]
    assert rows[-1]["validation/pairs/loss"] < rows[0]["validation/pairs/loss"]
    assert rows[1]["preference/loss"] == pytest.approx(0.693147, abs=1e-5)
    told = {"accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected", "grad_norm", "lr"}
    assert {f"preference/{name}" for name in told} <= rows[-1].keys()
    said = capsys.readouterr().out.splitlines()
    before, after = (rows[i]["validation/pairs/accuracy"] for i in (0, -1))
    assert said[-3:] == [
        f"held-out pair accuracy: {before:.3f} -> {after:.3f}",
        f"final loss: {rows[-1]['preference/loss']:.4f}",
        "model: runs/tiny-0/checkpoints/step-000005",
    ]
    assert main(["prefer", "tiny.yaml"]) == 0
    assert "is complete: all 5 updates are done" in capsys.readouterr().out
    Path("runs/tiny-0/metrics.jsonl").unlink()
    assert main(["prefer", "tiny.yaml"]) == 0
    assert "final loss: not known (metrics.jsonl has no line of the last update)" in capsys.readouterr().out
    assert main(["sample", "runs/tiny-0/checkpoints/step-000005", "4321>", "--max-tokens", "8"]) == 0


def test_the_journal_has_every_pair_of_every_update_once() -> None:
    assert main(["prefer", "tiny.yaml"]) == 0
    lines = [line for file in sorted(Path("runs/tiny-0/journal").iterdir()) for line in file.read_text().splitlines()]
    used = [name for line in lines if '"used"' in line for name in _ids(line)]
    assert len(used) == len(set(used)) == 5 * 8  # one epoch


def _ids(line: str) -> list[str]:
    record = json.loads(line[line.index("{") : line.rindex("}") + 1])
    found: list[str] = record["ids"] if "ids" in record else record["data"]["ids"]
    return found


@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.parametrize("kill_after", [0, 4])
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(loss: str, kill_after: int) -> None:
    recipe = ["prefer", "tiny.yaml", f"preference.loss={loss}"]
    assert main([*recipe, "run.directory=whole"]) == 0
    with killed_after(kill_after):
        main([*recipe, "run.directory=broken"])
    assert main([*recipe, "run.directory=broken"]) == 0
    assert_same_run(Path("whole/tiny-0"), Path("broken/tiny-0"))


def test_a_run_killed_among_the_reference_s_log_probs_computes_only_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference, "PAIRS_PER_FILE", 16)
    assert main(["prefer", "tiny.yaml", "run.directory=whole"]) == 0
    plain, asked = preference.mean_logprobs, 0

    def counted(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise RuntimeError("killed")
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(preference, "mean_logprobs", counted)
        with pytest.raises(RuntimeError, match="killed"):
            main(["prefer", "tiny.yaml", "run.directory=broken"])
        assert main(["prefer", "tiny.yaml", "run.directory=broken"]) == 0
    assert asked == 3 + 2  # 40 pairs and 10 held-out ones are 3 + 1 chunks, of which two were there
    assert_same_run(Path("whole/tiny-0"), Path("broken/tiny-0"))
    names = sorted(path.name for path in Path("broken/tiny-0/reference").iterdir())
    assert names == [
        "held_out-00000000.safetensors", "train-00000000.safetensors",
        "train-00000016.safetensors", "train-00000032.safetensors",
    ]  # fmt: skip


def test_data_that_changed_since_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{k}1>", "chosen": f"1{k}", "rejected": f"{k}1"} for k in range(2, 9)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["preference.data=[{task: sort_digits, options: {num: 3}}, {path: d.jsonl}]", "preference.updates=1"]
    assert main(["prefer", "tiny.yaml", *own]) == 0
    rows[0]["rejected"] = "99"
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert main(["prefer", "tiny.yaml", *own]) == 2
    assert "the data (or the tokenizer) has changed since this run began" in capsys.readouterr().err


def test_whole_texts_without_a_prompt_column_are_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"chosen": f"{k}1>1{k}", "rejected": f"{k}1>{k}1"} for k in range(2, 9)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["preference.data=[{task: sort_digits, options: {num: 3}}, {path: d.jsonl}]", "preference.updates=1"]
    assert main(["prefer", "tiny.yaml", "--dry-run", *own]) == 0
    assert "data: 10 rows; 1 updates use each 0.8 times" in capsys.readouterr().out
    assert main(["prefer", "tiny.yaml", *own]) == 0


def test_a_dry_run_has_a_plan_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefer", "tiny.yaml", "--dry-run", "preference.updates=9"]) == 0
    said = capsys.readouterr().out
    assert "9 updates of 8 pairs (at most 32,768 tokens), 72 pairs in all" in said
    assert "computed once before training" in said
    assert "memory: " in said
    assert not Path("runs").exists()


def test_a_shrunk_recipe_says_what_was_changed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("big.yaml").write_text(
        "model: {path: no/such}\npreference: {loss: simpo, data: {path: no.jsonl}, updates: 900}\n"
    )
    assert main(["prefer", "big.yaml", "--shrink"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "shrunk: preference.updates: 900 -> 2" in said
    assert "shrunk: preference.data: no.jsonl -> sort_digits" in said
    assert said[-1] == "model: runs/big-shrunk-0/checkpoints/step-000002"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["preference.los=ipo"], "did you mean 'loss'"),
        (["preference.loss=grpo"], "preference.loss"),
        (["preference.loss.margin=1"], "margin"),
        (["preference.data.options.nun=3"], "option of the preferences of 'sort_digits'"),
        (["model.new.max_positions=4"], "no pairs left"),
        (["preference.loss=simpo", "preference.reference=live"], "uses no reference"),
        (["preference.loss=kto", "preference.batch_size=1"], "set batch_size to 2 or more"),
        (["preference.held_out=[]"], "no effect without preference.held_out"),
        (["preference.held_out_every=0", "run.keep_best=false"], "run.keep_best=false has no effect"),
        (["preference.data=[]"], "no data: give preference.data"),
    ],
)
def test_bad_input_is_explained_and_leaves_no_run(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prefer", "tiny.yaml", *overrides]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.slow  # half a minute: five processes, four of them killed
def test_sigkill_at_any_moment_changes_nothing() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    assert main(["prefer", "tiny.yaml", "run.directory=whole", "preference.updates=40"]) == 0
    command = [sys.executable, "-m", "burnish.cli.main", "prefer", "tiny.yaml", "run.directory=broken"]
    command.append("preference.updates=40")
    metrics = Path("broken/tiny-0/metrics.jsonl")
    for wanted in (1, 8, 17, 30):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < wanted):
            assert time.monotonic() < until
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=120).returncode == 0
    assert_same_run(Path("whole/tiny-0"), Path("broken/tiny-0"), "step-000040")
