"""`burnish eval`: the table, the file, the exits."""

import json
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.config.schema import Model, NewModel
from burnish.models.policy import load_policy
from burnish.run.checkpoints import Checkpoints
from burnish.run.contents import Snapshot
from burnish.run.staging import leave

FAILING = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    raise RuntimeError('broken judge')\n"
YES = "def yes(data_source, solution_str, ground_truth, extra_info=None):\n    return float(ground_truth == 'yes')\n"


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
    assert "completions  eval-tiny-sort_digits.jsonl" in shown.out
    assert "max_tokens cut from 256 to 24: 32 positions, 8 of them prompt" in shown.err
    rows = [json.loads(line) for line in Path("eval-tiny-sort_digits.jsonl").read_text().splitlines()]
    assert [r["id"] for r in rows] == [f"sort_digits/test/{i}" for i in range(6)]
    assert all(r["completion"].strip() != r["answer"] for r in rows)


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
    assert "  none       0.000" in shown
    assert "  some       1.000" in shown
    assert "pass@2       0.667" in shown
    assert Path("o.parquet").read_bytes()[:4] == b"PAR1"


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
        Checkpoints(run / "checkpoints", 5).write(step, Snapshot(copy.contents(leave)), score)
    assert main(["eval", "runs/mine", "task:sort_digits", "--limit", "3", "--out", "o.jsonl"]) == 0
    assert "runs/mine is a run: taking step-000001 (its best, 0.500)" in capsys.readouterr().err
    assert max(json.loads(line)["length"] for line in Path("o.jsonl").read_text().splitlines()) <= 7


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
        (["mine.jsonl", "--reward", "exact"], "mine.jsonl:2: no column 'answer'"),
        (["mine.jsonl", "--reward", "exact", "--out", "mine.jsonl"], "mine.jsonl exists; give --force"),
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
