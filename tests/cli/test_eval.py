"""`burnish eval`: tables, files and exit statuses."""

import json
import os
import re
import signal
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.cli.main import main
from burnish.config.model import Model, NewModel
from burnish.evaluation.completions import read_completions
from burnish.evaluation.statistics import best_at_k
from burnish.models.policy import load_policy
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import Snapshot

FAILING = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    raise RuntimeError('broken judge')\n"
YES = "def yes(data_source, solution_str, ground_truth, extra_info=None):\n    return ground_truth == 'yes'\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=32)
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    load_policy(Model(new=new, device="cpu"), None, "0123456789>", seed=1).save(path)
    return path


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_task_gives_a_table_and_a_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(model), "task:sort_digits", "--limit", "6", "reward.workers=1"]) == 0
    shown = capsys.readouterr()
    assert "prompts      6\n" in shown.out
    assert "accuracy     0.000  (95% interval 0.000 to 0.390)" in shown.out  # Wilson, 0 of 6
    assert "completions  eval-tiny/sort_digits.jsonl" in shown.out
    assert re.search(
        r"seconds      start-up [\d.]+ s, generation [\d.]+ s \(\d+ tokens, [\d,]+ a second\), scoring [\d.]+ s more",
        shown.out,
    )
    assert "max_tokens cut from 256 to 24: 32 positions, 8 of them prompt" in shown.err
    rows = [json.loads(line) for line in Path("eval-tiny/sort_digits.jsonl").read_text().splitlines()]
    assert [r["id"] for r in rows] == [f"sort_digits/test/{i}" for i in range(6)]
    assert all(r["completion"].strip() != r["answer"] for r in rows)
    assert sorted(p.name for p in Path("eval-tiny").iterdir()) == ["sort_digits.json", "sort_digits.jsonl"]
    result = json.loads(Path("eval-tiny/sort_digits.json").read_text())
    assert (result["accuracy"], result["n"], result["num_prompts"]) == (0.0, 1, 6)
    assert result["ci"][1] == pytest.approx(0.390, abs=1e-3)
    assert result["settings"]["sampling.temperature"] == 0.0
    assert set(result["seconds"]) == {"start_up", "generation", "scoring"}


def test_files_sources_and_pass_at_k(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("y.py").write_text(YES)
    rows = [{"q": f"{i}>", "a": "yes" if i else "no", "data_source": "some" if i else "none"} for i in range(3)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["eval", str(model), "d.jsonl", "--reward", "y.py:yes", "--prompt-key", "q", "--answer-key", "a"]
    status = main([*command, "--n", "2", "--temperature", "1", "--max-tokens", "4", "--out", "o.parquet"])
    shown = capsys.readouterr().out
    assert status == 0
    assert "prompts      3 x 2 samples" in shown
    assert "mean@2       0.667" in shown
    assert "by data_source\n  none       0.000" in shown
    assert "  some       1.000" in shown
    assert "pass@2       0.667" in shown
    assert Path("o.parquet").read_bytes()[:4] == b"PAR1"


def test_numbers_of_a_function_are_graded_unless_a_value_is_said_to_be_right(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("g.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return float(ground_truth)\n"
    )
    rows = [{"question": f"{i}>", "answer": str(i)} for i in (1, 8, 10)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["eval", str(model), "d.jsonl", "--reward", "g.py:f", "--max-tokens", "2", "reward.workers=1"]
    assert main([*command, "--out", "a"]) == 0
    shown = capsys.readouterr().out
    assert "accuracy     - (the rewards are graded: --correct-at VALUE" in shown
    assert "mean reward  6.333" in shown
    assert main([*command, "--correct-at", "8", "--out", "b"]) == 0
    assert "accuracy     0.667" in capsys.readouterr().out
    assert main(["eval", "--compare", "a", "b"]) == 2
    assert "--correct-at" in capsys.readouterr().err
    assert main(["eval", str(model), "task:sort_digits", "--correct-at", "1"]) == 2
    assert "give --reward too" in capsys.readouterr().err


def test_a_part_of_the_reward_may_choose_and_parquet_is_shown_again(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.py").write_text(
        "def even(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2 == 0\n"
        "def short(data_source, solution_str, ground_truth, extra_info=None):\n    return -0.1 * len(solution_str)\n"
    )
    Path("d.jsonl").write_text("".join(json.dumps({"question": f"{i}>", "answer": "1"}) + "\n" for i in range(6)))
    command = ["eval", str(model), "d.jsonl", "--reward", "p.py:even", "--reward", "p.py:short", "--best-by", "short"]
    command += ["--n", "4", "--temperature", "1", "--max-tokens", "6", "--out", "o.parquet", "reward.workers=1"]
    assert main(command) == 0
    first = capsys.readouterr().out
    rows = read_completions(Path("o.parquet"))
    shortest = []
    for i in range(6):
        group = [row for row in rows if row["id"] == f"d.jsonl/{i}"]
        shortest.append(best_at_k([row["parts"]["short"] for row in group], [row["accuracy"] for row in group], 4))
    assert f"best@4       {sum(shortest) / 6:.3f}" in first
    assert "by short" in first
    assert main(command) == 0
    assert [line for line in first.splitlines() if "seconds" not in line] == capsys.readouterr().out.splitlines()


def test_the_seed_and_the_temperature_change_the_completions(model: Path) -> None:
    def completions(name: str, *options: str) -> list[str]:
        command = ["eval", str(model), "task:sort_digits", "--limit", "4", "--out", name, "reward.workers=1"]
        assert main([*command, *options]) == 0
        return [json.loads(line)["completion"] for line in Path(name).read_text().splitlines()]

    greedy = completions("greedy.jsonl")
    sampled = completions("sampled.jsonl", "--temperature", "1")
    assert sampled == completions("again.jsonl", "--temperature", "1")
    assert greedy != sampled


def test_a_run_is_measured_at_its_best_checkpoint(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("runs/mine")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 5\nrollout: {max_tokens: 7, stop: []}\nreward: {parts: [{name: task}]}\n")
    copy = load_policy(Model(device="cpu"), model, None, 0)
    for step, score in ((1, 0.5), (2, 0.1)):
        Checkpoints(run / "checkpoints", 5).write(step, Snapshot(copy.contents(keep_in_place)), score)
    assert main(["eval", "runs/mine", "task:sort_digits", "--limit", "3", "--out", "o.jsonl"]) == 0
    assert "runs/mine is a run: taking step-000001 (its best: score 0.500)" in capsys.readouterr().err
    assert max(json.loads(line)["length"] for line in Path("o.jsonl").read_text().splitlines()) <= 7


def test_overlap_with_training_data_is_printed_and_saved_also_for_a_finished_evaluation(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("d.jsonl").write_text("".join(json.dumps({"question": f"{i}>", "answer": "1"}) + "\n" for i in range(4)))
    Path("train.jsonl").write_text('{"question": "2>", "answer": "1"}\n')
    command = [
        "eval",
        str(model),
        "d.jsonl",
        "--reward",
        "exact",
        "--max-tokens",
        "2",
        "--out",
        "o",
        "reward.workers=1",
    ]
    assert main([*command, "--contamination"]) == 2
    assert "is no run that names its training data" in capsys.readouterr().err
    assert main(command) == 0
    assert "overlap" not in capsys.readouterr().out
    assert main([*command, "--contamination", "train.jsonl"]) == 0
    shown = capsys.readouterr()
    assert "nothing is sampled again" in shown.err
    assert "overlap        1 of 4 questions overlap with the training data (1 rows): 1 the same" in shown.out
    result = json.loads(Path("o/d.json").read_text())
    assert result["contamination"]["exact"] == ["d.jsonl/2"]
    assert result["contamination"]["clean"]["num_questions"] == 3
    assert (result["num_prompts"], "settings" in result) == (4, True)
    assert main(["eval", "--compare", "o", "o", "--contamination", "train.jsonl"]) == 2
    assert "contamination has no effect" in capsys.readouterr().err


def test_rows_of_a_benchmark_that_cannot_be_used_are_counted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": "1>", "answer": "3"}, {"question": "2>", "answer": "None"}]
    Path("gsm_plus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=128)
    wide = Path("wide")
    wide.mkdir()
    load_policy(Model(new=new, device="cpu"), None, string.printable, seed=1).save(wide)
    command = ["eval", str(wide), "gsm_plus", "--data-dir", ".", "--max-tokens", "2", "--out", "o", "reward.workers=1"]
    assert main(command) == 0
    assert "gsm_plus: 1 rows are not asked: 1 no answer" in capsys.readouterr().err
    assert json.loads(Path("o/gsm_plus.json").read_text())["left_out"] == {"no answer": 1}


def test_scorers_that_all_fail_are_an_exit_and_not_a_zero(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.py").write_text(FAILING)
    Path("d.jsonl").write_text('{"question": "1>", "answer": "1"}\n')
    assert main(["eval", str(model), "d.jsonl", "--reward", "bad.py:compute_score"]) == 1
    shown = capsys.readouterr()
    assert "accuracy     -" in shown.out
    assert "failed       1 samples, not counted" in shown.out
    assert "1 of 1 samples could not be scored" in shown.err
    assert "broken judge" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["task:sort_digits", "--n", "4"], "n=4 samples at temperature 0 are all alike"),
        (["task:sort_digitz"], "did you mean 'sort_digits'"),
        (["missing.jsonl", "--reward", "exact"], "no such file: "),
        (["mine.jsonl"], "how are answers to mine.jsonl to be judged"),
        (["mine.jsonl", "--reward", "exakt"], "did you mean 'exact'"),
        (
            ["mine.jsonl", "--reward", "exact"],
            "mine.jsonl:2: the row has no answer, and reward.parts[0] (exact) compares with one",
        ),
        (["mine.jsonl", "--reward", "exact", "--out", "mine.jsonl"], "is the data itself"),
        (["task:sort_digits", "--out", "mine.jsonl"], "mine.jsonl exists; give --force"),
        (["gsm8l"], "did you mean 'gsm8k'"),
        (["gsm8k", "--data-dir", "."], "has no file of gsm8k"),
        (["task:sort_digits", "task:addition", "--out", "x.jsonl"], "there are 2 data sets"),
        (["task:sort_digits", "--best-by", "task"], "--best-by selects among several samples"),
        (
            ["task:sort_digits", "--n", "2", "--temperature", "1", "--best-by", "x"],
            "the reward has no such part (it has: task)",
        ),
        ([], "needs a model directory and what to measure it on"),
        (["task:sort_digits", "--out", "x.txt"], "written as .jsonl or .parquet"),
        (["task:sort_digits", "--device", "toaster"], "is not a device"),
        (["task:sort_digits", "data.max_prompt_tokens=2"], "more than data.max_prompt_tokens=2"),
    ],
)
def test_bad_input_is_explained_and_leaves_nothing(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.jsonl").write_text('{"question": "1>", "answer": "1"}\n{"question": "1>"}\n')
    assert main(["eval", str(model), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in Path.cwd().iterdir()] == ["mine.jsonl"]


# --- benchmarks, several at once ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can read and write any plain text."""
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=512)
    path = tmp_path_factory.mktemp("models") / "speaker"
    path.mkdir()
    load_policy(Model(new=new, device="cpu"), None, string.printable, seed=1).save(path)
    return path


def data_folder() -> Path:
    folder = Path("data")
    folder.mkdir()
    rows = [{"question": f"What is {i} + {i}?", "answer": f"so\n#### {2 * i}"} for i in range(4)]
    (folder / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = [
        {"problem": f"What is {i} squared?", "answer": float(i * i), "difficulty": float(i % 2)} for i in range(3)
    ]
    (folder / "amc_rllm.json").write_text(json.dumps(problems))
    return folder


def test_benchmarks_by_name_share_one_model_and_one_table(speaker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", str(speaker), "gsm8k", "amc", "--data-dir", str(data_folder()), "--max-tokens", "6"]
    assert main([*command, "--n", "2", "--temperature", "1", "reward.workers=1"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("native decoder") == 1
    head, first, second, last = shown.out.splitlines()[-4:]
    assert head.split() == [
        "prompts",
        "n",
        "mean@n",
        "95%",
        "interval",
        "pass@n",
        "maj@n",
        "truncated",
        "in",
        "format",
        "length",
    ]
    assert first.split()[:3] == ["gsm8k", "4", "2"]
    assert second.split()[:3] == ["amc", "3", "2"]
    assert last == "results      eval-speaker/results.json"
    results = json.loads(Path("eval-speaker/results.json").read_text())["results"]
    assert list(results) == ["gsm8k", "amc"]
    assert list(results["gsm8k"]["metrics"]) == ["mean@2", "pass@1", "pass@2", "maj@2"]
    rows = [json.loads(line) for line in Path("eval-speaker/gsm8k.jsonl").read_text().splitlines()]
    assert [(r["id"], r["sample"]) for r in rows] == [(f"gsm8k/{i}", k) for i in range(4) for k in range(2)]
    assert "Please reason step by step" in rows[0]["prompt"]
    assert (rows[1]["answer"], rows[7]["answer"]) == ("0", "6")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_all_completions_run_at_once_in_the_stored_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = NewModel(hidden_size=128, num_layers=1, num_heads=2, mlp_size=192, max_positions=64)
    load_policy(Model(new=new, device="cpu", dtype="bfloat16"), None, "0123456789>", seed=1).save(tmp_path)
    command = [
        "eval",
        str(tmp_path),
        "task:sort_digits",
        "--limit",
        "300",
        "--n",
        "2",
        "--temperature",
        "1",
        "--max-tokens",
        "8",
    ]
    assert main([*command, "--out", "o.jsonl", "reward.workers=1"]) == 0
    said = capsys.readouterr().err
    assert "640 of 640 rows at the longest request" in said  # 600, in whole tiles
    assert re.search(r"parameters, bfloat16; ready after .* \(kernels .*, 13 graphs", said)
    assert len(completions("o.jsonl")) == 600


# --- going on --------------------------------------------------------------------------------------------------------


SLOW = """
import os, time
def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(float(os.environ.get("SLOW_REWARD_S", "0")))
    return float(len(solution_str) % 2)
"""


def completions(path: str) -> list[dict[str, Any]]:
    keys = ("id", "sample", "completion", "accuracy", "length")
    return [{k: row[k] for k in keys} for row in map(json.loads, Path(path).read_text().splitlines())]


def test_a_killed_evaluation_goes_on_and_ends_as_if_it_had_not_been(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"{i}>", "answer": "1"} for i in range(8)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("s.py").write_text(SLOW)
    command = [
        "eval",
        str(model),
        "d.jsonl",
        "--reward",
        "s.py:slow",
        "--n",
        "4",
        "--temperature",
        "1",
        "--max-tokens",
        "8",
    ]
    journal = Path("killed/d.partial.jsonl")
    process = subprocess.Popen(
        [sys.executable, "-m", "burnish.cli.main", *command, "--out", "killed", "reward.workers=1"],
        env={**os.environ, "SLOW_REWARD_S": "0.2"},
    )
    try:
        deadline = time.monotonic() + 100
        while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline, "no completion was kept in time"
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    kept = journal.read_bytes().count(b"\n") - 1
    assert 3 <= kept < 32
    Path("s.py").write_text(SLOW + "# changed\n")
    assert main([*command, "--out", "killed"]) == 2
    assert "reward.content of s.py:slow" in capsys.readouterr().err
    Path("s.py").write_text(SLOW)
    assert main([*command, "--out", "killed", "--temperature", "0.5"]) == 2
    assert "sampling.temperature: 1.0 there, 0.5 now" in capsys.readouterr().err
    assert main([*command, "--out", "killed", "reward.workers=4"]) == 0
    assert f"8 prompts, 4 samples of each; {kept} are there already" in capsys.readouterr().err
    assert json.loads(Path("killed/d.json").read_text())["resumed"] == kept
    assert not journal.exists()
    assert main([*command, "--out", "whole"]) == 0
    assert completions("killed/d.jsonl") == completions("whole/d.jsonl")


def test_a_finished_evaluation_is_shown_again_and_not_made_again(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(model), "task:sort_digits", "--limit", "3", "--out", "o.jsonl", "reward.workers=1"]
    assert main(command) == 0
    first = capsys.readouterr().out
    before = Path("o.jsonl").stat().st_mtime_ns
    assert main([*command, "--max-rows", "2"]) == 0
    shown = capsys.readouterr()
    assert "o.jsonl is complete; nothing is sampled again" in shown.err
    assert shown.out.splitlines()[:3] == first.splitlines()[:3]
    assert Path("o.jsonl").stat().st_mtime_ns == before
    assert main([*command, "--limit", "4"]) == 2
    assert "limit: 3 there, 4 now" in capsys.readouterr().err
    assert main([*command, "--limit", "4", "--force"]) == 0
    assert len(completions("o.jsonl")) == 4


# --- comparing -------------------------------------------------------------------------------------------------------


def test_two_results_are_compared_question_by_question(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"{i % 10}{i // 10}>", "answer": "1"} for i in range(30)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, rule in (("a", "len(solution_str) % 2"), ("b", "len(solution_str) > 3")):
        Path(f"{name}.py").write_text(
            f"def f(data_source, solution_str, ground_truth, extra_info=None):\n    return bool({rule})\n"
        )
        command = ["eval", str(model), "d.jsonl", "--reward", f"{name}.py:f", "--temperature", "1", "--out", name]
        assert main([*command, "--max-tokens", "8", "reward.workers=1"]) == 0
    capsys.readouterr()
    assert main(["eval", "--compare", "a", "b"]) == 0
    shown = capsys.readouterr()
    a, b = ({r["id"]: r["accuracy"] for r in completions(f"{name}/d.jsonl")} for name in "ab")
    cells = {(x, y): sum(a[q] == x and b[q] == y for q in a) for x in (0, 1) for y in (0, 1)}
    assert cells[1, 0] > 0
    assert cells[0, 1] > 0
    for name, cell in (("both right", (1, 1)), ("only A", (1, 0)), ("only B", (0, 1)), ("neither", (0, 0))):
        assert f"{name:<11}  {cells[cell]}\n" in shown.out
    assert f"B - A        {(cells[0, 1] - cells[1, 0]) / 30:+.3f}  (95% interval" in shown.out
    assert "McNemar's exact test" in shown.out
    assert "measured differently: reward.parts" in shown.err
    changed = [json.loads(line) for line in Path("compare-a-b/d.jsonl").read_text().splitlines()]
    assert {r["id"] for r in changed} == {q for q in a if a[q] != b[q]}
    found = json.loads(Path("compare-a-b/results.json").read_text())["comparison"]["d"]
    assert (found["only_a"], found["only_b"], found["num_changed"]) == (cells[1, 0], cells[0, 1], len(changed))
    assert main(["eval", "--compare", "a/d.jsonl", "b/d.json", "--out", "c.jsonl"]) == 0
    assert Path("c.jsonl").read_bytes() == Path("compare-a-b/d.jsonl").read_bytes()
    assert main(["eval", "--compare", "a/d.jsonl", "b/d.jsonl"]) == 0
    assert Path("compare-a-d-b-d/d.jsonl").read_bytes() == Path("c.jsonl").read_bytes()
    assert main(["eval", "--compare", "a", "b"]) == 2
    assert "exists; give --force" in capsys.readouterr().err
    assert main(["eval", "--compare", "a", "b", "--n", "3"]) == 2
    assert "sampling.n has no effect" in capsys.readouterr().err
