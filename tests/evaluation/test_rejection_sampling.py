"""`burnish data reject`: right, readable completions become demonstrations that `burnish sft` learns from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main
from burnish.config.data import Source, Template
from burnish.data.preference_pairs import EncodingOptions, load_pairs
from burnish.data.row_formats import read_supervised_rows
from burnish.evaluation.rejection_sampling import (
    PairingOptions,
    RejectionOptions,
    ScoredSample,
    has_code,
    is_broken,
    longest_paragraph,
    pairs_of,
    rejection_reason,
    repeated_share,
    script_purity,
)
from burnish.models.tokenizer import Tokenizer
from tests.trainers.tiny import TINY, WARM, run_of

ROWS = [
    {"prompt": [{"role": "user", "content": "one and one?"}], "answer": "2"},
    {"prompt": [{"role": "user", "content": "two and two?"}], "answer": "4"},
]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def line(index: int, sample: int, text: str, accuracy: float | None, length: int, **more: Any) -> dict[str, Any]:
    base = {"id": f"rows.jsonl/{index}", "sample": sample, "completion": text, "accuracy": accuracy, "length": length}
    return {**base, "prompt": f"<|user|>{ROWS[index]['prompt'][0]['content']}", "answer": ROWS[index]["answer"], **more}


def reject(*words: object) -> int:
    return main(["data", "reject", *map(str, words)])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Kimi's worked example in the first prompt: lengths 50, 30, 40, 20, of which the last is wrong."""
    lines = [
        line(0, 0, "it is fifty: 2", 1.0, 50),
        line(0, 1, "it is thirty: 2", 1.0, 30),
        line(0, 2, "it is forty: 2", 1.0, 40),
        line(0, 3, "it is: 3", 0.0, 20),
        line(0, 4, "it  is thirty: 2", 1.0, 30),
        line(1, 0, "never ending 4", 1.0, 10, truncated=True),
        line(1, 1, "unscored", None, 10),
    ]
    return write(tmp_path / "completions.jsonl", lines), write(tmp_path / "rows.jsonl", ROWS)


def test_the_shortest_right_completion_of_each_prompt_is_written_as_messages(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    completions, rows = files
    assert reject(completions, tmp_path / "sft.jsonl", "--prompts", rows) == 0
    (found,) = read(tmp_path / "sft.jsonl")
    said = [{"role": "user", "content": "one and one?"}, {"role": "assistant", "content": "it is thirty: 2"}]
    assert found == {"messages": said, "id": "rows.jsonl/0", "tokens": 30}
    printed = capsys.readouterr().out
    for reason in ("1: cut off", "1: wrong", "1: not judged", "1: repeated", "2: more than 1 of its prompt"):
        assert reason in printed
    manifest = json.loads((tmp_path / "sft.jsonl.manifest.json").read_text())
    assert manifest["right"] == {"completions": 5, "prompts": 2, "mean_tokens": 32.0}
    assert manifest["written"] == {"completions": 1, "prompts": 1, "mean_tokens": 30.0}
    (row,) = read_supervised_rows(Source(path=str(tmp_path / "sft.jsonl")))
    assert row[1].messages == said


def test_several_of_a_prompt_may_stay_and_a_random_choice_follows_its_seed(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    completions, rows = files
    assert reject(completions, tmp_path / "two.jsonl", "--prompts", rows, "--most", 2) == 0
    assert [record["tokens"] for record in read(tmp_path / "two.jsonl")] == [30, 40]
    picked = set()
    for seed in range(12):
        for name in ("once", "twice"):
            out = tmp_path / f"{name}{seed}.jsonl"
            assert reject(completions, out, "--prompts", rows, "--pick", "random", "--seed", seed) == 0
        assert (tmp_path / f"once{seed}.jsonl").read_bytes() == (tmp_path / f"twice{seed}.jsonl").read_bytes()
        picked |= {record["tokens"] for record in read(tmp_path / f"once{seed}.jsonl")}
    assert picked == {30, 40, 50}


def test_prompts_that_a_chat_template_wrote_are_not_taken_for_questions(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    completions, rows = files
    assert reject(completions, tmp_path / "out.jsonl") == 2
    assert "written by a chat template" in capsys.readouterr().err
    write(rows, ROWS[::-1])
    assert reject(completions, tmp_path / "out.jsonl", "--prompts", rows) == 2
    assert "of another file" in capsys.readouterr().err


def test_an_assistant_in_the_prompt_is_not_learnt(tmp_path: Path) -> None:
    prompt = [*ROWS[0]["prompt"], {"role": "assistant", "content": "which one?"}, {"role": "user", "content": "both"}]
    rows = write(tmp_path / "rows.jsonl", [{**ROWS[0], "prompt": prompt}])
    completions = write(tmp_path / "completions.jsonl", [line(0, 0, "2", 1.0, 1)])
    assert reject(completions, tmp_path / "sft.jsonl", "--prompts", rows) == 0
    assert read(tmp_path / "sft.jsonl") == [{"prompt": prompt, "completion": "2", "id": "rows.jsonl/0", "tokens": 1}]


def test_what_is_not_good_to_read_is_left_out() -> None:
    looping = "and so it goes on and on and on " * 20
    cases = [
        ("The answer is 2, since 1 + 1 is 2.", {}, None),
        ("The answer 是 two, 因为 一加一 is 2.", {}, "mixed scripts"),
        ("一加一等于二", {}, None),
        ("一加一等于二", {"language": "en"}, "not in en"),
        ("Die Antwort ist 2, und das ist nicht schwer.", {"language": "en"}, "not in en"),
        ("Die Antwort ist 2, und das ist nicht schwer.", {"language": "de"}, None),
        (r"所以 $\text{the answer is in the box}$ 是 \boxed{2}", {"language": "zh"}, None),
        ("答えは二です", {}, None),
        (r"Let \(\alpha\) be $\pi$; then π is 3.", {"purity": 0.8}, None),
        (looping, {}, "repeats itself"),
        (looping, {"max_repeat": 1.0}, None),
        ("half a char\ufffd", {}, "empty, or with broken characters"),
        ("   ", {}, "empty, or with broken characters"),
        ("one\n\ntwo three four", {"max_paragraph": 2}, "a paragraph of more than 2 words"),
        ("```python\nprint(2)\n```", {"no_code": True}, "code"),
        ("```python\nprint(2)\n```", {}, None),
    ]
    for text, options, reason in cases:
        sample = ScoredSample("here:1", "rows/0", "?", text, 1.0, 5, True, None)
        assert rejection_reason(sample, RejectionOptions(**options)) == reason, text


def test_shares_are_exact() -> None:
    assert script_purity("one two три") == pytest.approx(2 / 3)
    assert script_purity("한국어 漢字") == 1.0
    assert script_purity("1 + 1 = 2") == 1.0
    assert repeated_share("a b c d a b c d", 4) == pytest.approx(1 / 5)
    assert repeated_share("a b", 4) == 0.0
    assert longest_paragraph("a b\n \nc d e\nf") == 4
    assert (has_code("`x`"), is_broken("a\tb\n"), is_broken("a\x07")) == (False, False, True)


def test_the_samples_of_a_run_teach_the_next_model(tmp_path: Path) -> None:
    """A task without an end, whose right answers a run kept; `burnish sft` reads what came of them."""
    text = (TINY + WARM).replace("limit: 12, ", "")
    run = run_of(tmp_path / "run", text, ["training.steps=3", "run.samples_every=1", "warm_start.updates=40"])
    assert reject(run, tmp_path / "sft.jsonl", "--most", 4) == 0
    found = read(tmp_path / "sft.jsonl")
    assert found
    assert all(record["completion"].strip() == "".join(sorted(record["prompt"].rstrip(">"))) for record in found)
    assert len({(record["id"], record["completion"]) for record in found}) == len(found)
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(
        f"model: {{path: {run}/checkpoints/step-000003}}\nsft: {{data: [{{path: sft.jsonl}}], updates: 1, batch_size: 2}}\n"
    )
    assert main(["sft", str(recipe), f"run.directory={tmp_path}", "run.name=short"]) == 0
    assert reject(run, tmp_path / "other.jsonl", "--prompts", recipe) == 2


# `burnish data pairs`: Kimi's long2short preferences, which `burnish prefer` reads.


def sample(number: int, length: int, accuracy: float, text: str | None = None, whole: bool = True) -> ScoredSample:
    return ScoredSample(f"c.jsonl:{number}", "f/0", "1>", text or f"{number}", accuracy, length, whole, None)


def test_the_worked_example_gives_its_pairs() -> None:
    lengths, right = [100, 140, 150, 300, 60], [1.0, 1.0, 1.0, 0.0, 0.0]
    samples = [sample(i, n, r) for i, (n, r) in enumerate(zip(lengths, right, strict=True))]
    found = [(chosen.completion, rejected.completion) for chosen, rejected in pairs_of(samples, PairingOptions())]
    assert found == [("0", "3"), ("0", "2")], "the longest rejected first"
    assert len(pairs_of(samples, PairingOptions(most=1))) == 1
    assert len(pairs_of(samples, PairingOptions(ratio=1.4))) == 3


def test_what_was_cut_off_is_never_chosen_and_equal_texts_are_no_pair() -> None:
    samples = [sample(0, 10, 1.0, whole=False), sample(1, 20, 1.0), sample(2, 40, 1.0, text="1"), sample(3, 50, 0.0)]
    assert [(c.where, r.where) for c, r in pairs_of(samples, PairingOptions())] == [("c.jsonl:1", "c.jsonl:3")]
    assert pairs_of([sample(0, 10, 0.0)], PairingOptions()) == []


def test_pairs_wrong_ones_are_right_and_wrong_ones_of_any_length() -> None:
    rights = [sample(k, 10 + k, 1.0) for k in range(4)]
    wrongs = [sample(k, 5 * (k - 4) ** 2, 0.0) for k in range(4, 7)]
    cut_off, twin = sample(7, 30, 1.0, whole=False), sample(8, 10, 1.0, text="0")
    wrong_ones = PairingOptions(reject="wrong")
    found = pairs_of([*rights, *wrongs, cut_off, twin], wrong_ones)
    assert (
        len(found) == len({chosen.where for chosen, _ in found}) == len({rejected.where for _, rejected in found}) == 3
    )
    assert {chosen.where for chosen, _ in found} <= {one.where for one in rights}
    assert {rejected.where for _, rejected in found} == {one.where for one in wrongs}
    assert len({rejected.length > chosen.length for chosen, rejected in found}) == 2, (
        "a short answer may be the wrong one"
    )
    assert pairs_of(list(reversed([*rights, *wrongs])), wrong_ones) == found, "the order of the file does not matter"
    orders = {tuple(pairs_of([*rights, *wrongs], PairingOptions(reject="wrong", seed=seed))) for seed in range(8)}
    assert len(orders) > 1
    assert len(pairs_of([*rights, *wrongs], PairingOptions(reject="wrong", most=2))) == 2


def test_a_source_without_pairs_says_why_no_prompt_gave_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rows.jsonl", ROWS)
    write(
        tmp_path / "c.jsonl", [line(0, 0, "wrong", 0.0, 9), line(0, 1, "?", None, 9), line(1, 0, "right alone", 1.0, 9)]
    )
    command = ["data", "pairs", str(tmp_path / "c.jsonl"), str(tmp_path / "pairs.jsonl")]
    assert main([*command, "--prompts", str(tmp_path / "rows.jsonl")]) == 2
    said = capsys.readouterr().err
    assert "1 completions that were not judged" in said
    assert "1 prompts without a right completion that ended; 1 prompts without a completion to reject" in said


def test_pairs_are_read_as_preferences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "21>", "answer": "12"}\n')
    texts = [("12", 1.0, 3), ("1122", 0.0, 5), ("21", 0.0, 3), ("12", None, 9)]
    lines = [
        {
            "id": "rows.jsonl/0",
            "sample": k,
            "prompt": "21>",
            "completion": t,
            "accuracy": a,
            "length": n,
            "answer": "12",
        }
        for k, (t, a, n) in enumerate(texts)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "pairs.jsonl"
    command = ["data", "pairs", str(tmp_path / "c.jsonl"), str(out), "--prompts", str(tmp_path / "rows.jsonl")]
    assert main(command) == 0
    assert "1 of 1 have a pair" in capsys.readouterr().out
    reading = EncodingOptions(Tokenizer.from_characters("0123456789>"), Template(), 16)
    (pair,), _ = load_pairs([Source(path=str(out))], reading)
    said = [
        reading.tokenizer.decode([t for t, m in zip(e.tokens, e.mask, strict=True) if m])
        for e in (pair.chosen, pair.rejected)
    ]
    assert said == ["12", "1122"]
    assert main([*command, "--ratio", "0.5"]) == 2
