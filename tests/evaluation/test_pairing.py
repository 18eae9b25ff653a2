"""`burnish data pairs`: Kimi's long2short preferences, which `burnish prefer` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.config.data import Source, Template
from burnish.data.preference_pairs import Reading, load_pairs
from burnish.evaluation.rejection_sampling import Pairing, Sample, pairs_of
from burnish.models.tokenizer import Tokenizer


def sample(number: int, length: int, accuracy: float, text: str | None = None, whole: bool = True) -> Sample:
    return Sample(f"c.jsonl:{number}", "f/0", "1>", text or f"{number}", accuracy, length, whole, None)


def test_the_worked_example_gives_its_pairs() -> None:
    lengths, right = [100, 140, 150, 300, 60], [1.0, 1.0, 1.0, 0.0, 0.0]
    samples = [sample(i, n, r) for i, (n, r) in enumerate(zip(lengths, right, strict=True))]
    found = [(chosen.completion, rejected.completion) for chosen, rejected in pairs_of(samples, Pairing())]
    assert found == [("0", "3"), ("0", "2")], "the longest rejected first"
    assert len(pairs_of(samples, Pairing(most=1))) == 1
    assert len(pairs_of(samples, Pairing(ratio=1.4))) == 3


def test_what_was_cut_off_is_never_chosen_and_equal_texts_are_no_pair() -> None:
    samples = [sample(0, 10, 1.0, whole=False), sample(1, 20, 1.0), sample(2, 40, 1.0, text="1"), sample(3, 50, 0.0)]
    assert [(c.where, r.where) for c, r in pairs_of(samples, Pairing())] == [("c.jsonl:1", "c.jsonl:3")]
    assert pairs_of([sample(0, 10, 0.0)], Pairing()) == []


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
    reading = Reading(Tokenizer.from_characters("0123456789>"), Template(), 16)
    (pair,), _ = load_pairs([Source(path=str(out))], reading)
    said = [
        reading.tokenizer.decode([t for t, m in zip(e.tokens, e.mask, strict=True) if m])
        for e in (pair.chosen, pair.rejected)
    ]
    assert said == ["12", "1122"]
    assert main([*command, "--ratio", "0.5"]) == 2
