"""Samples in the page: everything that was written can be read back, one byte a value is close enough, and large runs are thinned evenly."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.report.embedded_samples import (
    choose_groups,
    choose_tables,
    collect_groups,
    compress_base64,
    embed_samples,
    evenly_spaced,
)
from burnish.report.sample_blocks import (
    PageSample,
    SampleGroup,
    log_prob_codes,
    mask_codes,
    read_groups,
    signed_codes,
    token_block,
    width_codes,
)
from burnish.run.samples import write_samples


def row(index: int, text: str, **changes: Any) -> dict[str, Any]:
    same = {"data_source": "digits", "prompt": f"sort {index // 2}", "answer": "12", "parts": {"task": 1.0}}
    pieces = {"completion": text, "pieces": list(text), "logp": [-0.5] * len(text), "length": len(text)}
    numbers = {"reward": 1.0, "accuracy": 1.0, "advantage": 0.5, "truncated": False, "finish": "stop"}
    return {"group": f"g{index // 2}", "sample": index % 2} | same | pieces | numbers | changes


def unpack(letters: str) -> bytes:
    return zlib.decompress(base64.b64decode(letters))


def texts_of(folder: Path) -> list[dict[str, Any]]:
    groups, _ = collect_groups(folder)
    return [json.loads(unpack(texts)) for texts, _ in embed_samples(groups).blocks]


def test_index_and_texts_say_what_the_tables_say(tmp_path: Path) -> None:
    write_samples(tmp_path, 3, "train", [row(0, "ab"), row(1, "c", reward=None, error="Traceback"), row(2, "d")])
    write_samples(tmp_path, 3, "validation-greedy", [row(0, "é", finish="length", advantage=None)])
    groups, left_out = collect_groups(tmp_path)
    found = embed_samples(groups)
    assert left_out == ""
    assert found.index["kinds"] == ["train", "validation-greedy"]
    assert found.index["groups"]["first"] == [0, 2, 3]
    assert found.index["groups"]["step"] == [3, 3, 3]
    assert found.index["groups"]["kind"] == [0, 0, 1]
    assert found.index["samples"]["reward"] == [1.0, None, 1.0, 1.0]
    assert found.index["samples"]["advantage"] == [0.5, 0.5, 0.5, None]
    assert [found.index["finishes"][k] for k in found.index["samples"]["finish"]] == ["stop", "stop", "stop", "length"]
    (texts,) = texts_of(tmp_path)
    assert texts["text"] == ["ab", "c", "d", "é"]
    assert texts["prompt"] == ["sort 0", "sort 1", "sort 0"]
    assert texts["error"] == [None, "Traceback", None, None]
    assert texts["whole"] == [None] * 4


def test_a_completion_that_differs_from_its_pieces_is_kept_beside_them(tmp_path: Path) -> None:
    write_samples(
        tmp_path, 1, "train", [row(0, "whole", pieces=["who"], logp=[-1.0]), row(1, "no tokens", pieces=None)]
    )
    (texts,) = texts_of(tmp_path)
    assert texts["text"] == ["who", "no tokens"]
    assert texts["whole"] == ["whole", None]


def test_turns_say_who_said_what(tmp_path: Path) -> None:
    said = [{"who": "model", "text": "5", "state": "3-9", "reward": 0.5}, {"who": "environment", "text": "6-9?"}]
    rows = [row(0, "56-9?", turns=json.dumps(said)), row(1, "b"), row(2, "c", turns="not JSON")]
    write_samples(tmp_path, 1, "train", rows)
    (texts,) = texts_of(tmp_path)
    first = [["model", "5", "3-9", 0.5], ["environment", "6-9?", None, None]]
    assert texts["turns"] == [first, None, [["", "not JSON", None, None]]]


def test_branches_events_roles_and_last_words_reach_the_page(tmp_path: Path) -> None:
    said = [
        {"who": "model", "text": "5", "reward": 0.0},
        {"who": "environment", "text": "6", "branch": 2, "after": None},
    ]
    events = [{"kind": "step_failed", "what": "step", "message": "boom", "traceback": "line 1"}]
    whole = {"turns": json.dumps(said), "role": "x", "last_words": "lost", "events": json.dumps(events)}
    write_samples(tmp_path, 1, "train", [row(0, "56", **whole), row(1, "b"), row(2, "c", events="not JSON")])
    (texts,) = texts_of(tmp_path)
    assert texts["turns"] == [[["model", "5", None, 0.0], ["environment", "6", None, None, 2, None]], None, None]
    assert texts["events"] == [[["step_failed", "step", "boom", "line 1"]], [], [["", "", "not JSON", ""]]]
    assert (texts["role"], texts["lastWords"]) == (["x", None, None], ["lost", None, None])


def test_non_finite_numbers_are_null(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "train", [row(0, "a", reward=float("nan"), parts={"x": float("inf")})])
    groups, _ = collect_groups(tmp_path)
    assert embed_samples(groups).index["samples"]["reward"] == [None]
    assert texts_of(tmp_path)[0]["parts"] == [{"x": None}]


def test_a_table_made_before_a_column_existed_is_shown(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = write_samples(tmp_path, 1, "train", [row(0, "ab", truncated=True)])
    pq.write_table(pq.read_table(path).drop_columns(["finish", "gap", "advantages"]), path)
    groups, _ = collect_groups(tmp_path)
    assert embed_samples(groups).index["finishes"] == ["cut"]


def test_token_blocks_hold_each_samples_columns_in_turn() -> None:
    values = {"logp": [0.0, -1.0, -50.0], "gap": [0.0, np.nan, -1.0], "entropy": [0.0, 1.0, np.nan]}
    some = PageSample({}, np.array([1, 300, 2]), {name: np.array(column) for name, column in values.items()})
    other = PageSample({}, np.array([4]), {"advantages": np.array([2.0]), "mask": np.array([1.0])})
    data = token_block([some, other, PageSample({}, np.array([], dtype=int))])
    sizes = np.frombuffer(data[:72], "<u4").reshape(3, 6)
    assert sizes.tolist() == [[4, 3, 0, 3, 3, 0], [1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]]
    assert list(data[72:]) == [1, 255, 45, 2, 4, 0, 82, 254, 224, 128, 0, 37, 0, 82, 255, 1]


def test_a_mask_says_in_the_loss_not_or_unknown() -> None:
    assert mask_codes(np.array([0.0, 1.0, 0.5, np.nan])).tolist() == [0, 1, 1, 255]


def test_bytes_of_pieces_of_any_size_are_said_exactly() -> None:
    sizes = [0, 1, 254, 255, 256, 509, 510, 70000]
    read, total = [], 0
    for byte in width_codes(np.array(sizes)).tolist():
        total += byte
        if byte < 255:
            read.append(total)
            total = 0
    assert read == sizes


def test_log_probs_are_read_back_to_a_hundredth_of_a_probability() -> None:
    exact = -np.concatenate([[0.0], np.geomspace(1e-4, 25, 500)])
    read = -30 * (log_prob_codes(exact) / 254.0) ** 3
    assert np.abs(np.exp(read) - np.exp(exact)).max() < 0.01
    assert log_prob_codes(np.array([np.nan, -np.inf, -1000.0, 0.5])).tolist() == [255, 255, 254, 0]


def test_signed_values_are_read_back_within_seven_percent() -> None:
    size = np.geomspace(1e-5, 100, 700)
    for exact in (size, -size):
        code = signed_codes(exact).astype(int) - 128
        read = np.sign(code) * 1e-5 * 10 ** ((np.abs(code) - 1) * 7 / 126)
        assert np.abs(read / exact - 1).max() < 0.07
    assert signed_codes(np.array([0.0, 4e-6, -4e-6, np.nan, 1e9, -1e9])).tolist() == [128, 128, 128, 0, 255, 1]


def group(name: str, *sizes: int) -> SampleGroup:
    row = dict.fromkeys(("prompt", "turns", "last_words", "events"))
    return SampleGroup(1, "train", name, [PageSample(row, np.array([], dtype=int), {}, "x" * size) for size in sizes])


def test_groups_stay_whole_and_under_the_limit() -> None:
    groups = [group(str(i), 50, 50) for i in range(10)]
    assert [g.name for g in choose_groups(groups, 400)] == ["0", "3", "6", "9"]
    assert choose_groups(groups, 1000) == groups
    assert [len(g.samples) for g in choose_groups(groups, 60)] == [1]
    assert choose_groups([], 100) == []


def test_tables_are_thinned_evenly_in_each_kind_with_both_ends() -> None:
    tables = [(Path(f"{kind}{k}"), kind, 1, 10) for k in range(20) for kind in ("a", "b")]
    assert len(choose_tables(tables, 1000)) == 40
    taken = choose_tables(tables, 200)
    assert sum(path.name[0] == "a" for path in taken) == sum(path.name[0] == "b" for path in taken)
    assert 12 <= len(taken) <= 20
    assert {"a0", "a19", "b0", "b19"} <= {path.name for path in taken}
    assert len(choose_tables(tables, 0)) == 4


def test_an_even_choice_has_both_ends() -> None:
    assert evenly_spaced([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 4) == [0, 3, 6, 9]
    assert evenly_spaced([0, 1], 5) == [0, 1]
    assert evenly_spaced([0, 1, 2], 1) == [2]


def test_a_run_that_is_too_large_says_what_was_left_out(tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        write_samples(tmp_path, step, "train", [row(i, "word " * 40) for i in range(8)])
    groups, left_out = collect_groups(tmp_path, limit=3000)
    assert {g.step for g in groups} >= {10, 50}
    assert 0 < sum(len(g.samples) for g in groups) < 40
    assert "of 40 samples" in left_out


def test_long_texts_are_several_blocks_and_compress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.report.embedded_samples.BLOCK_CHARS", 100)
    write_samples(tmp_path, 1, "train", [row(i, "again " * 30) for i in range(6)])
    found = embed_samples(read_groups(tmp_path / "train-000001.parquet"))
    assert found.index["groups"]["block"] == [0, 1, 2]
    assert len(found.blocks) == 3
    assert len(compress_base64(b"again " * 1000)) < 100
