"""`burnish eval --strategy`: what it prints and stores, how it resumes, and what it refuses."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main
from burnish.config.model import Model, NewModel
from burnish.evaluation.completions import read_completions
from burnish.models.policy import load_policy

BROKEN = (
    "def score(data_source, solution_str, ground_truth, extra_info=None):\n    raise RuntimeError('broken verifier')\n"
)
LENGTH = (
    "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str) % 5)\n"
)


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


def command(model: Path, *more: str) -> list[str]:
    return ["eval", str(model), "task:sort_digits", "--limit", "5", "--temperature", "1", "reward.workers=1", *more]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "search": {**row["search"], "wall_s": None}} for row in rows]


def test_the_result_has_the_cost_of_the_whole_search(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(model, "--n", "8", "--out", "plain.jsonl")) == 0
    pool = read_completions(Path("plain.jsonl"))
    capsys.readouterr()
    assert main(command(model, "--strategy", "majority", "strategy.n=8", "--out", "m.parquet", "--keep-trees")) == 0
    shown = capsys.readouterr().out
    rows, result = read_completions(Path("m.parquet")), json.loads(Path("m.json").read_text())
    total = sum(row["length"] for row in pool)
    assert result["tokens"] == result["search"]["total_tokens"] == total
    assert (
        f"tokens       {total / 5:,.1f} a question, 8.0 times one answer ({total / 40:,.1f}); {total:,} in all" in shown
    )
    assert "strategy     majority\n" in shown
    assert result["search"]["oracle"] is False
    # Eight samples of a question share one prefill of its prompt.
    assert result["cache_hit_rate"] == pytest.approx(7 / 8)
    contexts = sum(row["search"]["context_tokens"] for row in rows)
    assert f"cache        87.5% of {contexts:,} context tokens were not prefilled again" in shown
    for row in rows:
        votes = row["search"]["votes"]
        mine = [one for one in pool if one["id"] == row["id"]]
        counts = {answer: sum(one["answered"] == answer for one in mine) for answer in votes}
        assert votes == counts
        assert sum(counts.values()) == sum(one["answered"] is not None for one in mine)
        first = next(one for one in mine if votes.get(one["answered"]) == max(votes.values()))
        assert (row["completion"], row["accuracy"]) == (first["completion"], first["accuracy"])
        assert row["search"]["requests"] == 8
        tree = row["search"]["tree"]
        assert [node["text"] for node in tree[1:]] == [one["completion"] for one in mine]
        assert sum(node["chosen"] for node in tree) == 2


def test_an_interrupted_search_goes_on_and_ends_as_if_it_had_not_been(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("v.py").write_text(LENGTH)
    best = ("--strategy", "best_of_n", "strategy.n=4", "strategy.verifier.name=v.py:score", "--n", "2")
    assert main(command(model, *best, "--out", "whole.jsonl")) == 0
    assert "requests     4.0 a search," in capsys.readouterr().out
    whole = without_times(read_completions(Path("whole.jsonl")))
    assert [(row["id"], row["sample"]) for row in whole] == [
        (f"sort_digits/test/{i}", k) for i in range(5) for k in (0, 1)
    ]
    # What a kill leaves: the settings, some rows, and a torn line.
    settings = json.loads(Path("whole.json").read_text())["settings"]
    lines = Path("whole.jsonl").read_text().splitlines()
    kept = [json.dumps({"settings": settings}), *lines[3:7]]
    Path("cut.partial.jsonl").write_text("\n".join(kept) + "\n" + lines[0][:40])
    assert main(command(model, *best, "--out", "cut.jsonl", "strategy.n=5")) == 2
    assert "strategy.n: 4 there, 5 now" in capsys.readouterr().err
    Path("v.py").write_text(LENGTH + "# changed\n")
    assert main(command(model, *best, "--out", "cut.jsonl")) == 2
    assert "verifier.content of v.py:score" in capsys.readouterr().err
    Path("v.py").write_text(LENGTH)
    assert main(command(model, *best, "--out", "cut.jsonl")) == 0
    assert "4 are there already" in capsys.readouterr().err
    assert without_times(read_completions(Path("cut.jsonl"))) == whole
    assert json.loads(Path("cut.json").read_text())["resumed"] == 4
    assert main(["eval", "--compare", "whole.jsonl", "cut.jsonl"]) == 0
    assert "B - A        +0.000" in capsys.readouterr().out


def test_a_search_whose_verifier_failed_is_a_failure_and_no_wrong_answer(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("v.py").write_text(BROKEN)
    verified = ("--strategy", "best_of_n", "strategy.n=4", "strategy.verifier.name=v.py:score", "--out", "o.jsonl")
    assert main(command(model, *verified)) == 1
    shown = capsys.readouterr()
    assert "accuracy     -" in shown.out
    assert "failed       5 searches, not counted" in shown.out
    assert "verifier     4.0 calls of - tokens a question; 20 in all failed" in shown.out
    assert "the verifier failed for every candidate" in shown.err
    assert {row["accuracy"] for row in read_completions(Path("o.jsonl"))} == {None}


def test_an_oracle_is_labelled_wherever_its_result_is(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oracle = ("--strategy", "best_of_n", "strategy.n=4", "strategy.verifier=oracle", "--out", "o")
    assert main(command(model, *oracle)) == 0
    shown = capsys.readouterr().out
    assert next(line for line in shown.splitlines() if line.startswith("accuracy")).endswith("(oracle)")
    assert "strategy     best_of_n by oracle (oracle: it chose by the expected answers" in shown
    assert {row["search"]["verifier"] for row in read_completions(Path("o/sort_digits.jsonl"))} == {"oracle"}
    assert json.loads(Path("o/sort_digits.json").read_text())["search"]["oracle"] is True
    assert main(command(model, "--out", "p")) == 0
    assert main(["eval", "--compare", "p", "o"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines if line.endswith("(oracle)")] == ["B"]


def test_a_budget_and_a_seed_change_the_search(model: Path) -> None:
    def rows(name: str, *more: str) -> list[dict[str, Any]]:
        strategy = ("--strategy", "majority", "strategy.n=4", "--out", name)
        assert main(command(model, *strategy, *more)) == 0
        return without_times(read_completions(Path(name)))

    free, tight = rows("a.jsonl"), rows("b.jsonl", "--budget", "30")
    assert free != tight
    assert all(row["search"]["tokens"] <= 30 for row in tight)
    assert rows("c.jsonl", "--seed", "1") != free


def test_the_table_has_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--strategies"]) == 0
    shown = [
        " ".join(line.split()) for line in capsys.readouterr().out.splitlines()
    ]  # the longest name sets the columns
    assert "majority - argmax_a #{i: answer(y_i) = a}; ties by the first sample" in shown
    assert any(line.startswith("best_of_n yes argmax_i v(x, y_i)") for line in shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "majorty"], "did you mean 'majority'"),
        (["--strategy", "majority", "--temperature", "0"], "strategy majority compares several answers, and at temperature 0"),
        (["--strategy", "majority", "strategy.verifier=oracle"], "strategy.verifier"),
        (["--budget", "9"], "budget belongs to a strategy, and none is set: give --strategy NAME"),
        (["--keep-trees"], "keep_trees belongs to a strategy"),
        (["--strategy", "majority", "--best-by", "task"], "--best-by selects among samples, and strategy majority has chosen"),
        (["--strategy", "best_of_n", "strategy.verifier=orakle"], "did you mean 'oracle'"),
        (["--strategy", "majority", "reward.parts=format"], "strategy majority votes on equal answers, and no answer"),
        (["--strategy", "best_of_n", "strategy.verifier=exact"], "unknown verifier 'exact'"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_reason(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(model, *arguments)) == 2
    assert message in capsys.readouterr().err
    assert list(Path.cwd().iterdir()) == []


def test_errors_of_a_verifier_name_its_option(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("v.py").write_text("def score(apple):\n    return 1.0\n")
    best = ("--strategy", "best_of_n", "strategy.n=2", "strategy.verifier.name=v.py:score", "--out", "o.jsonl")
    assert main(command(model, *best)) == 2
    shown = capsys.readouterr().err
    assert "strategy.verifier (v.py:score): the parameters of 'v.py:score' (apple) match no known convention" in shown
    assert "reward.parts" not in shown
    Path("w.py").write_text("def score(prompts, completions, colour, **kwargs):\n    return [1.0] * len(prompts)\n")
    assert main(command(model, *best, "strategy.verifier.name=w.py:score")) == 2
    shown = capsys.readouterr().err
    assert "strategy.verifier (w.py:score) needs a column 'colour'" in shown
    assert "reward.parts" not in shown


def test_the_verifiers_of_all_data_sets_are_checked_before_anything_is_sampled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=512)
    Path("wide").mkdir()
    load_policy(Model(new=new, device="cpu"), None, string.printable, seed=1).save(Path("wide"))
    # The question of countdown states all that its check needs; that of sort_digits does not.
    datasets = ["task:countdown", "task:sort_digits", "--limit", "2", "--temperature", "1", "reward.workers=1"]
    stated = ["--strategy", "best_of_n", "strategy.n=2", "strategy.verifier=task", "--out", "o"]
    assert main(["eval", "wide", *datasets, "--max-tokens", "4", *stated]) == 2
    shown = capsys.readouterr()
    assert "verifier task checks what the question states" in shown.err
    assert "ready after" not in shown.err
    assert "countdown" not in shown.out
    assert not Path("o").exists()


def test_a_strategy_plays_no_episodes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(model), "task:guess_number", "--strategy", "majority", "--temperature", "1"]) == 2
    assert (
        "strategy majority answers a question in one turn, and environment guess_number plays"
        in capsys.readouterr().err
    )
