"""`burnish data filter`, `bucket`, `decontaminate` and `impact`: which rows are kept, which are dropped and why."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.cli.main import main
from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.curation.row_selection import ImpactOptions, impact_scores, pass_rate_histogram, reward_curves
from burnish.data.math_datasets import BOXED_INSTRUCTION
from burnish.data.row_formats import read_rows
from burnish.run.journal import Journal
from burnish.run.run import PromptVisit, read_visits
from burnish.run.samples import read_samples, read_table
from tests.trainers.tiny import TINY, WARM, run_of

SHARED = Path(__file__).parents[2] / "../shared/data"
LONG = "Ann buys three red apples and four green pears at the market on Monday and eats two"


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def completion(index: int, accuracies: list[float | None], name: str = "rows.jsonl") -> list[dict[str, Any]]:
    return [
        {"id": f"{name}/{index}", "sample": k, "completion": "x", "answer": str(index), "accuracy": a}
        for k, a in enumerate(accuracies)
    ]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Six rows: five were answered right 0, 1, 2, 3 and 4 times of four, the last was never sampled."""
    write(tmp_path / "rows.jsonl", [{"question": f"what is number {k}?", "answer": k, "level": k} for k in range(6)])
    lines = [line for k in range(5) for line in completion(k, [1.0] * k + [0.0] * (4 - k))]
    write(tmp_path / "scores.jsonl", [*lines, *completion(5, [None])])
    return tmp_path / "rows.jsonl"


def run_command(*words: object) -> int:
    return main(["data", *map(str, words)])


def test_rows_are_kept_by_their_pass_rate(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, scores = tmp_path / "out.jsonl", tmp_path / "scores.jsonl"
    assert run_command("filter", rows, out, "--scores", scores, "--pass-rate", 0.25, 0.9) == 0
    assert [row["answer"] for row in read(out)] == [1, 2, 3]
    printed = capsys.readouterr().out
    for line in ("1: pass rate below 0.25 (first: rows.jsonl:1)", "1: pass rate above 0.9 (first: rows.jsonl:5)"):
        assert line in printed
    assert "1: never sampled (first: rows.jsonl:6)" in printed
    assert run_command("filter", rows, out, "--scores", scores, "--pass-rate", 0.25, 0.9, "--keep-unseen") == 0
    assert [row["answer"] for row in read(out)] == [1, 2, 3, 5]


def test_rows_that_too_few_samples_agree_with_or_that_can_be_guessed_go(rows: Path, tmp_path: Path) -> None:
    out, scores = tmp_path / "out.parquet", tmp_path / "scores.jsonl"
    assert run_command("filter", rows, out, "--scores", scores, "--agree", 2) == 0
    assert [row.answer for row in read_rows(Source(path=str(out)))] == [2, 3, 4]
    guesses = write(
        tmp_path / "guesses.jsonl", [*completion(0, [0.0] * 8), *completion(3, [0.0, 0.0, 1.0] + [0.0] * 5)]
    )
    assert run_command("filter", rows, tmp_path / "other.jsonl", "--guesses", guesses) == 0
    assert [row["answer"] for row in read(tmp_path / "other.jsonl")] == [0, 1, 2, 4, 5]


def test_contradictions_repetitions_and_lengths_go(tmp_path: Path) -> None:
    asked = [
        ("What is two?", "2"),
        ("what is TWO", "2"),
        ("one and one", "2"),
        ("one  and one?", "3"),
        ("hm", "9" * 30),
    ]
    rows = write(tmp_path / "rows.jsonl", [{"question": q, "answer": a} for q, a in asked])

    def kept(*options: object) -> list[int]:
        out = tmp_path / "out.jsonl"
        assert run_command("filter", rows, out, *options) == 0
        return [asked.index((row["question"], row["answer"])) for row in read(out)]

    assert kept("--contradictions") == [0, 1, 4]
    assert kept("--duplicates") == [0, 2, 4]
    assert kept("--duplicates", "--contradictions") == [0, 4]
    assert kept("--words", 2, 9) == [0, 1, 2, 3]
    assert kept("--answer-chars", 29) == [0, 1, 2, 3]


def test_options_without_effect_and_scores_of_another_file_are_refused(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, scores = tmp_path / "out.jsonl", tmp_path / "scores.jsonl"

    def refused(*words: object) -> str:
        assert run_command("filter", *words) == 2
        assert not out.exists()
        return capsys.readouterr().err

    assert "nothing to filter by" in refused(rows, out)
    assert "need --scores" in refused(rows, out, "--pass-rate", 0, 1)
    assert "no effect without" in refused(rows, out, "--scores", scores)
    assert "expected 1 or more" in refused(rows, out, "--scores", scores, "--agree", 0)
    assert "expected shares" in refused(rows, out, "--scores", scores, "--pass-rate", 10, 90)
    assert "the first number should not be above the second" in refused(rows, out, "--words", 9, 2)
    write(tmp_path / "swapped.jsonl", read(rows)[::-1])
    assert "scores are of another file" in refused(tmp_path / "swapped.jsonl", out, "--scores", scores, "--agree", 1)
    write(tmp_path / "few.jsonl", read(rows)[:2])
    assert "another file" in refused(tmp_path / "few.jsonl", out, "--scores", scores, "--agree", 1)
    write(tmp_path / "unjudged.jsonl", completion(0, [None, None]))
    assert "no pass rate" in refused(rows, out, "--scores", tmp_path / "unjudged.jsonl", "--agree", 1)
    assert "no row is left" in refused(rows, out, "--words", 100, 200)
    out.write_text("mine")
    assert run_command("filter", rows, out, "--duplicates") == 2
    assert "give --force" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_the_same_command_again_leaves_its_output_alone(rows: Path, tmp_path: Path, capsys) -> None:
    command = ("filter", rows, tmp_path / "out.parquet", "--scores", tmp_path / "scores.jsonl", "--agree", 1)
    assert run_command(*command) == 0
    first = (tmp_path / "out.parquet").read_bytes()
    assert run_command(*command) == 0
    assert "is up to date: 4 rows, nothing to do" in capsys.readouterr().out
    (tmp_path / "out.parquet").write_bytes(b"spoilt")
    assert run_command(*command) == 0
    assert (tmp_path / "out.parquet").read_bytes() == first


def test_rates_fall_into_twelve_bins() -> None:
    assert pass_rate_histogram([0.0, 0.05, 0.1, 0.95, 0.999, 1.0, 1.0]) == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 2]


def test_buckets_are_a_column_that_the_curriculum_reads(rows: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "bucketed.jsonl"
    scores = tmp_path / "scores.jsonl"
    assert run_command("bucket", rows, out, "--scores", scores, "--buckets", 2) == 0
    found = [(row["answer"], row["difficulty"], row["bucket"]) for row in read(out)]
    assert found == [(0, 1.0, 1), (1, 0.75, 1), (2, 0.5, 0), (3, 0.25, 0), (4, 0.0, 0)]
    assert "curriculum: {name: easy_to_hard, column: difficulty, buckets: 2}" in capsys.readouterr().out
    assert run_command("bucket", out, tmp_path / "again.jsonl", "--scores", scores) == 2
    assert "the column 'difficulty' exists already" in capsys.readouterr().err


def test_a_run_says_how_hard_its_rows_were_and_the_next_one_goes_from_easy_to_hard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = run_of(tmp_path / "new", TINY, ["training.steps=1"])
    start = ["model.new=null", f"model.path={new / 'checkpoints' / 'step-000001'}", "reward.parts=exact"]
    first = run_of(tmp_path / "first", TINY, [*start, "data.train=[{path: rows.jsonl}]", "training.steps=3"])
    rows = tmp_path / "first" / "rows.jsonl"
    assert run_command("bucket", rows, tmp_path / "bucketed.jsonl", "--scores", first, "--buckets", 3) == 0
    bucket = {f"bucketed.jsonl/{index}": row["bucket"] for index, row in enumerate(read(tmp_path / "bucketed.jsonl"))}
    assert sorted(bucket.values()) == [0] * 4 + [1] * 4 + [2] * 4
    curriculum = "algorithm.curriculum={name: easy_to_hard, column: difficulty, buckets: 3, steps: 3}"
    data = f"data.train=[{{path: {tmp_path / 'bucketed.jsonl'}}}]"
    second = run_of(tmp_path / "second", TINY, [*start, data, curriculum, "training.steps=3", "run.samples_every=1"])
    for step in (1, 2, 3):
        drawn = read_table(second / "samples" / f"train-{step:06d}.parquet")
        assert {bucket[row["group"].rpartition("#")[0]] for row in drawn} == {step - 1}
    assert (
        run_command("filter", tmp_path / "bucketed.jsonl", tmp_path / "x.jsonl", "--scores", first, "--agree", 1) == 2
    )
    assert run_command("impact", first, tmp_path / "x.jsonl") == 2
    error = capsys.readouterr().err
    assert "not trained on a file called bucketed.jsonl" in error
    assert "no such file: rows.jsonl" in error
    assert "give its path with --data" in error


def test_rows_that_overlap_a_test_set_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = LONG.replace("Monday", "Sunday") + " of them before lunch"
    asked = ["How  many, apples?", near, "Something else entirely?", "boxed in"]
    prompts = [{"prompt": [{"role": "user", "content": q + BOXED_INSTRUCTION}], "answer": "1"} for q in asked]
    rows = write(tmp_path / "rows.jsonl", prompts)
    test = write(
        tmp_path / "held.jsonl",
        [{"problem": q + BOXED_INSTRUCTION, "answer": 1} for q in ("how many apples", LONG, "crawled in")],
    )
    out = tmp_path / "clean.jsonl"
    assert run_command("decontaminate", rows, out, "--against", test) == 0
    kept = [row["prompt"][0]["content"] for row in read(out)]
    assert kept == [q + BOXED_INSTRUCTION for q in asked[2:]], "what asks for the format is no overlap"
    printed = capsys.readouterr().out
    assert "2: overlaps held.jsonl" in printed
    assert "rows.jsonl:1 ~ held.jsonl:1: the whole question" in printed
    assert "rows.jsonl:2 ~ held.jsonl:2: ann buys three red apples and four green pears at the market on" in printed
    assert run_command("decontaminate", rows, out, "--against", test, "--ngram", 15) == 0
    assert len(read(out)) == 3
    told = [{"role": "user", "content": near}, {"role": "assistant", "content": "two"}]
    others = [{"messages": told}, {"prompt": "how many apples?", "chosen": "3", "rejected": "4"}, {"problem": "new"}]
    assert (
        run_command(
            "decontaminate", write(tmp_path / "others.jsonl", others), tmp_path / "kept.jsonl", "--against", test
        )
        == 0
    )
    assert read(tmp_path / "kept.jsonl") == [{"problem": "new"}]
    assert (
        run_command(
            "decontaminate", write(tmp_path / "odd.jsonl", [{"x": 1}]), tmp_path / "no.jsonl", "--against", test
        )
        == 2
    )
    assert "odd.jsonl:1: no question found (no question; has: x)" in capsys.readouterr().err
    assert run_command("decontaminate", rows, out) == 2
    assert "--against is missing" in capsys.readouterr().err


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published data sets are not on this machine")
def test_a_benchmark_is_found_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = read(SHARED / "gsm8k_test.jsonl")[:3] + read(SHARED / "gsm8k_train.jsonl")[:50]
    rows, out = write(tmp_path / "rows.jsonl", published), tmp_path / "clean.parquet"
    assert run_command("decontaminate", rows, out, "--against", "gsm8k", "--data-dir", SHARED) == 0
    assert len(read_rows(Source(path=str(out)))) == 49, "the three, and one that shares 13 words with a test question"
    assert "4: overlaps gsm8k" in capsys.readouterr().out


# --- impact ----------------------------------------------------------------------------------------------------------

EPOCHS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rows, four a step: three epochs and a step of a fourth, with every sample kept."""
    folder = tmp_path_factory.mktemp("learnt")
    return run_of(
        folder, TINY + WARM, ["training.steps=10", "run.samples_every=1", "rollout.n=6", "warm_start.updates=30"]
    )


def curves(*rows: list[float]) -> list[PromptVisit]:
    """Visits with ten samples each, whose means are these rows."""
    return [PromptVisit(f"f/{i}", k, 10, 10 * r, 10, 10 * r) for i, row in enumerate(rows) for k, r in enumerate(row)]


def test_the_worked_numbers_go_through() -> None:
    found, by = reward_curves(curves([0.2, 0.5, 0.7, 0.9], [0, 0, 0.1, 0.1], [1, 1, 1, 1]), ImpactOptions())
    scores, average = impact_scores(found)
    assert by == "accuracy"
    assert average == pytest.approx([0.4, 0.5, 0.6, 2 / 3])
    assert list(scores.values()) == pytest.approx([0.881463, -0.113493, 0], abs=1e-6)


def test_only_finished_epochs_count_and_a_gap_is_filled_from_the_next() -> None:
    visits = curves([0.0, 0.5, 1.0], [0.5, 0.5], [0.0, 1.0])
    found, _ = reward_curves(visits, ImpactOptions())
    assert found["f/0"] == [0.0, 0.5]
    gap = [PromptVisit("f/0", 0, 0, 0.0, 0, 0.0), *curves([0.3, 0.9])[1:], *curves([], [0.1, 0.3])]
    found, _ = reward_curves(gap, ImpactOptions())
    assert math.isnan(found["f/0"][0])
    assert impact_scores(found)[1] == pytest.approx([0.5, 0.6])


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(UserError, match="two epochs"):
        reward_curves(curves([0.1], [0.2]), ImpactOptions())
    with pytest.raises(UserError, match="--epochs 3: the run has finished 2, and a curve"):
        reward_curves(curves([0.1, 0.2]), ImpactOptions(epochs=3))
    large = [PromptVisit("f/0", k, 2, 5.0, 2, 1.0) for k in range(2)]
    with pytest.raises(UserError, match="use --by accuracy"):
        reward_curves(large, ImpactOptions(by="reward"))
    assert reward_curves(large, ImpactOptions())[0] == {"f/0": [0.5, 0.5]}
    unjudged = [PromptVisit("f/0", k, 2, 1.0, 0, 0.0) for k in range(2)]
    assert reward_curves(unjudged, ImpactOptions())[1] == "reward"


def test_a_journal_tells_what_every_sample_of_every_step_was_worth(run: Path) -> None:
    rows = [row for row in read_samples(run / "samples") if row["kind"] == "train"]
    wanted: dict[str, list[float]] = {}
    for row in rows:
        wanted.setdefault(row["group"], []).append(row["reward"])
    found = {f"{v.prompt_id}#{v.visit}": (v.scored, v.reward, v.judged, v.right) for v in read_visits(run)}
    assert found == {group: (6, sum(rewards), 6, sum(rewards)) for group, rewards in wanted.items()}
    assert len({sum(rewards) for rewards in wanted.values()}) > 2, "a run in which nothing moves would prove nothing"


def test_scores_of_a_run_agree_with_its_samples_and_the_rows_read_back(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_prompt: dict[str, list[list[float]]] = {}
    for row in read_samples(run / "samples"):
        name, _, visit = row["group"].rpartition("#")
        if int(visit) < EPOCHS:
            by_prompt.setdefault(name, [[] for _ in range(EPOCHS)])[int(visit)].append(row["accuracy"])
    rewards = np.array([[np.mean(epoch) for epoch in found] for found in by_prompt.values()])
    average = rewards.mean(0)
    scores = 1 - ((rewards - average) ** 2).sum(1) / ((1 - average) ** 2).sum()
    threshold = float(np.median(scores))
    out = tmp_path / "kept.jsonl"
    assert main(["data", "impact", str(run), str(out), "--threshold", str(threshold)]) == 0
    printed = capsys.readouterr().out
    assert f"mean accuracy of 12 prompts by epoch: {' '.join(f'{a:.3f}' for a in average)}" in printed
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    expected = sorted(scores[scores >= threshold])
    assert sorted(record["impact"] for record in kept) == pytest.approx(expected)
    assert 0 < len(kept) < 12
    read = read_rows(Source(path=str(out)))
    assert [row.answer for row in read] == ["".join(sorted(str(row.prompt).rstrip(">"))) for row in read]
    manifest = json.loads((tmp_path / "kept.jsonl.manifest.json").read_text())
    assert sum(manifest["left_out"].values()) == 12 - len(kept)
    assert manifest["asked"]["scores"][0]["file"] == "events.jsonl"
    before = out.stat().st_mtime_ns
    assert main(["data", "impact", str(run), str(out), "--threshold", str(threshold)]) == 0
    assert "is up to date" in capsys.readouterr().out
    assert out.stat().st_mtime_ns == before


def test_steps_that_a_resumed_run_made_again_count_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    journal = Journal(tmp_path / "journal")
    for step, right in ((1, 0.0), (2, 1.0)):
        journal.append("step", step=step, prompts=[PromptVisit("f/0", step, 4, right, 4, right).values()])
    journal.rewind(1)
    journal.append("step", step=2, prompts=[PromptVisit("f/0", 2, 4, 3.0, 4, 3.0).values()])
    with open(journal.path, "ab") as file:
        file.write(b'{"i": 4, "torn')
    assert [(v.visit, v.right) for v in read_visits(tmp_path)] == [(1, 0.0), (2, 3.0)]
    assert journal.path.read_bytes().endswith(b"torn"), "a run that is being written is only read"


def test_a_run_without_rewards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(UserError, match="no rewards of prompts"):
        read_visits(tmp_path)
