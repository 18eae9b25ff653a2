"""`burnish data prepare`: reproducible output with counts, checksums and the overlap with test sets."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from burnish.cli import main as cli
from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.curation.decontamination import find_overlap
from burnish.data.curation.output_files import manifest_path
from burnish.data.curation.prepare import PrepareOptions, prepare
from burnish.data.math_datasets import BOXED_INSTRUCTION
from burnish.data.row_formats import read_rows

SHARED = Path(__file__).parents[2] / "../shared/data"
LONG = "Ann buys three red apples and four green pears at the market on Monday and eats two"


def write_jsonl(path: Path, records: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def gsm8k(*questions: str) -> list[dict[str, str]]:
    return [{"question": question, "answer": f"#### {n}"} for n, question in enumerate(questions)]


def test_a_prepared_file_is_read_back_with_prompts_answers_and_verifier(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "train.jsonl", [*gsm8k("one?", "two?"), {"question": "three?", "answer": "none"}])
    manifest, is_new = prepare(PrepareOptions("gsm8k", source), tmp_path / "out/train.parquet")
    rows = read_rows(Source(path=str(tmp_path / "out/train.parquet")))
    assert is_new
    assert [row.prompt for row in rows] == [
        [{"role": "user", "content": q + BOXED_INSTRUCTION}] for q in ("one?", "two?")
    ]
    assert [(row.answer, row.data_source, row.extra["verifier"]) for row in rows] == [
        ("0", "gsm8k", "number"),
        ("1", "gsm8k", "number"),
    ]
    assert (manifest["rows_read"], manifest["left_out"]) == (3, {"no number behind ####": 1})
    assert "parts: number" in manifest["recipe"]


def test_preparing_again_does_nothing_until_something_changes(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "train.jsonl", gsm8k("one?", "two?")), tmp_path / "train.parquet"
    wanted = PrepareOptions("gsm8k", source)
    manifest, _ = prepare(wanted, out)
    first = out.read_bytes()
    assert manifest["output"]["sha256"] == hashlib.sha256(first).hexdigest()
    assert prepare(wanted, out) == (manifest, False)
    out.write_bytes(b"spoilt")
    assert prepare(wanted, out)[1]
    assert out.read_bytes() == first
    assert prepare(wanted, tmp_path / "again.parquet")[1]
    assert (tmp_path / "again.parquet").read_bytes() == first
    write_jsonl(tmp_path / "train.jsonl", gsm8k("one?", "two?", "three?"))
    assert prepare(wanted, out)[0]["output"]["rows"] == 3


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "train.jsonl", gsm8k("one?")), tmp_path / "precious.parquet"
    out.write_bytes(b"precious")
    with pytest.raises(UserError, match="was not written by this command; give --force"):
        prepare(PrepareOptions("gsm8k", source), out)
    assert out.read_bytes() == b"precious"
    assert prepare(PrepareOptions("gsm8k", source), out, force=True)[1]


def test_overlap_with_a_test_set_is_counted_and_left_out_only_when_asked(tmp_path: Path) -> None:
    near = LONG.replace("Monday", "Sunday") + " of them before lunch"  # 14 words up to `on` are the same
    train = write_jsonl(tmp_path / "a/rows.jsonl", gsm8k("How  many, apples?", near, "Something else entirely?"))
    test = write_jsonl(tmp_path / "b/held.jsonl", gsm8k("how many apples", LONG))
    out = tmp_path / "out.parquet"
    manifest, _ = prepare(PrepareOptions("gsm8k", train, against=(test,)), out)
    report = manifest["overlap"][0]
    assert (report["exact"], report["13_words"], report["left_out"]) == (1, 1, 0)
    assert (report["with"], manifest["output"]["rows"]) == ("held.jsonl", 3)
    assert report["first"][1]["shared"] == "ann buys three red apples and four green pears at the market on"
    exact, _ = prepare(PrepareOptions("gsm8k", train, against=(test,), drop="exact"), out)
    assert (exact["output"]["rows"], exact["left_out"]) == (2, {"overlaps held.jsonl": 1})
    both, _ = prepare(PrepareOptions("gsm8k", train, against=(test,), drop="any"), out)
    assert both["output"]["rows"] == 1
    short, _ = prepare(PrepareOptions("gsm8k", train, against=(test,), ngram=15), out)
    assert short["overlap"][0]["15_words"] == 0


def test_a_test_file_beside_the_source_is_compared_with_and_never_with_itself(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "gsm8k_train.jsonl", gsm8k("one?", "two?"))
    test = write_jsonl(tmp_path / "gsm8k_test.jsonl", gsm8k("two?"))
    manifest, _ = prepare(PrepareOptions("gsm8k", train), tmp_path / "out.parquet")
    assert [(o["with"], o["exact"]) for o in manifest["overlap"]] == [("gsm8k_test.jsonl", 1)]
    assert prepare(PrepareOptions("gsm8k", test), tmp_path / "test.parquet")[0]["overlap"] == []


def test_a_test_set_of_another_shape_is_named_with_it(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "t.jsonl", [{"problem": "What is 1+1?", "answer": "2", "type": "Algebra"}])
    test = write_jsonl(tmp_path / "x/h.jsonl", [{"Problem": "what is 1 + 1", "Answer": 2}])
    manifest, _ = prepare(PrepareOptions("math", train, against=(f"aime24:{test}",)), tmp_path / "out.parquet")
    assert manifest["overlap"][0]["exact"] == 1


def save_to_disk(folder: Path, records: list[dict[str, str]]) -> None:
    """As `datasets.Dataset.save_to_disk` does: an Arrow stream in parts, and a state that lists them."""
    folder.mkdir(parents=True)
    names = []
    for number, record in enumerate(records):
        table = pyarrow.Table.from_pylist([record])
        names.append(f"data-{number:05d}-of-{len(records):05d}.arrow")
        with (
            pyarrow.OSFile(str(folder / names[-1]), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_data_set_is_read_by_split_and_compared_with_its_test_split(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "saved/train", gsm8k("one?", "two?", "three?"))
    save_to_disk(tmp_path / "saved/test", gsm8k("Two?"))
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    saved, out = str(tmp_path / "saved"), tmp_path / "out.parquet"
    manifest, _ = prepare(PrepareOptions("gsm8k", saved, split="train"), out)
    assert (manifest["output"]["rows"], manifest["overlap"][0]["exact"]) == (3, 1)
    assert [row.answer for row in read_rows(Source(path=str(out)))] == ["0", "1", "2"]
    assert prepare(PrepareOptions("gsm8k", saved, split="test"), out)[0]["overlap"] == []
    with pytest.raises(UserError, match="has the splits train, test; choose one with --split"):
        prepare(PrepareOptions("gsm8k", saved), out)
    alone, _ = prepare(PrepareOptions("gsm8k", f"{saved}/train"), tmp_path / "alone.parquet")
    assert alone["output"]["rows"] == 3


def test_a_snapshot_of_a_hub_repository_is_read_by_split_and_configuration(tmp_path: Path) -> None:
    for config in ("main", "socratic"):
        for split, questions in (("train", ("one?", "two?")), ("test", ("three?",))):
            (tmp_path / "snap" / config).mkdir(parents=True, exist_ok=True)
            table = pyarrow.Table.from_pylist(gsm8k(*questions))
            pyarrow.parquet.write_table(table, tmp_path / "snap" / config / f"{split}-00000-of-00001.parquet")
    (tmp_path / "snap/README.md").write_text("a card")
    (tmp_path / "snap/info.json").write_text("{}")
    snap, out = str(tmp_path / "snap"), tmp_path / "out.parquet"
    with pytest.raises(UserError, match=r"split test in several folders \(main, socratic\); choose one with --config"):
        prepare(PrepareOptions("gsm8k", snap, split="train"), out)
    manifest, _ = prepare(PrepareOptions("gsm8k", snap, split="train", config="main"), out)
    assert (manifest["output"]["rows"], manifest["overlap"][0]["test_rows"]) == (2, 1)
    with pytest.raises(UserError, match=r"unknown split .* 'dev'"):
        prepare(PrepareOptions("gsm8k", snap, split="dev", config="main"), out)


def test_the_parts_of_one_file_are_compared_with_its_test_part(tmp_path: Path) -> None:
    tasks = [
        {"task_id": n, "prompt": text, "test_list": ["assert f()"]}
        for n, text in ((11, "Add."), (601, "add"), (602, "Sort."))
    ]
    (tmp_path / "mbpp.json").write_text(json.dumps(tasks))
    manifest, _ = prepare(PrepareOptions("mbpp", str(tmp_path / "mbpp.json"), split="train"), tmp_path / "out.parquet")
    assert (manifest["output"]["rows"], manifest["left_out"]) == (2, {"of another split": 1})
    assert [(o["with"], o["exact"]) for o in manifest["overlap"]] == [("mbpp.json", 1)]


def test_overlap_goes_by_words_not_by_how_they_are_written() -> None:
    matches = find_overlap(["Café, at  NOON", "a b c d"], ["x y", "café at noon!", "z a b c"], ngram=3)
    assert [(m.train, m.test, m.words) for m in matches] == [(0, 1, None), (1, 2, "a b c")]


def test_the_command_prints_counts_checksum_and_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_jsonl(tmp_path / "t.jsonl", gsm8k("one?", "two?", "one?")), tmp_path / "t.parquet"
    arguments = ["data", "prepare", "gsm8k", source, str(out)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    manifest = json.loads(manifest_path(out).read_text())
    for words in ("3 rows", "1 questions occur more than once", manifest["output"]["sha256"], "parts: number"):
        assert words in printed
    assert cli.main(arguments) == 0
    assert "is up to date: 3 rows, nothing to do" in capsys.readouterr().out
    for wrong, words in (
        (["data", "prepare", "gsm9k", source, str(out)], "did you mean 'gsm8k'"),
        ([*arguments, "--split", "train"], "each file of gsm8k is one split"),
        ([*arguments[:-1], str(tmp_path / "t.csv")], "should be a .parquet file"),
        ([*arguments, "--ngram", "1"], "expected 2 words or more"),
    ):
        assert cli.main(wrong) == 2
        assert words in capsys.readouterr().err


REAL = [
    # (shape, file, split, rows, left out)
    ("gsm8k", "gsm8k_train.jsonl", None, 7473, 0),
    ("gsm8k", "gsm8k_test.jsonl", None, 1319, 0),
    ("math", "math_train_rllm.json", None, 7470, 4),
    ("math500", "math500.jsonl", None, 500, 0),
    ("aime24", "aime2024_orz.json", None, 30, 0),
    ("amc", "amc_rllm.json", None, 83, 0),
    ("deepscaler", "deepscaler_sub_1209.parquet", None, 1208, 1),
    ("mbpp", "mbpp_sanitized.json", "test", 257, 170),
    ("mbpp", "mbpp_sanitized.json", "train", 120, 307),
    ("humaneval", "HumanEval.jsonl.gz", None, 164, 0),
    ("ifeval", "ifeval.jsonl", None, 541, 0),
    ("nq", "nq_open_validation.jsonl", None, 3610, 0),
    ("hotpotqa", "hotpotqa_dev_simplified.json", None, 7405, 0),
    ("countdown", "countdown_rg_400.jsonl", None, 400, 0),
    ("game24", "game24.csv", None, 1362, 0),
]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published data sets are not here")
@pytest.mark.parametrize(("name", "file", "split", "rows", "left_out"), REAL)
def test_the_published_files_are_prepared(
    name: str, file: str, split: str | None, rows: int, left_out: int, tmp_path: Path
) -> None:
    manifest, _ = prepare(PrepareOptions(name, str(SHARED / file), split), tmp_path / "out.parquet")
    assert (manifest["output"]["rows"], sum(manifest["left_out"].values())) == (rows, left_out)
    read = read_rows(Source(path=str(tmp_path / "out.parquet")))
    assert len(read) == rows
    assert all(row.extra["verifier"] == manifest["verifier"] for row in read)
    assert all(overlap["exact"] == 0 for overlap in manifest["overlap"])
