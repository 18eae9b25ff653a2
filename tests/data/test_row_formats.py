from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.files import find_files, read_records
from burnish.data.row_formats import read_rows, read_supervised_rows, source_name

SHARED = Path(__file__).parents[2] / "../shared/data"
RECORDS = [{"question": "1+1?", "answer": "2"}, {"question": 'a\u2028b, "c"\nd', "answer": "é"}]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path


def write_all(folder: Path) -> list[Path]:
    (folder / "d.json").write_text(json.dumps(RECORDS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), folder / "d.parquet")
    (folder / "d.csv").write_text('question,answer\n1+1?,2\n"a\u2028b, ""c""\nd",é\n', encoding="utf-8")
    lines = write_jsonl(folder / "d.jsonl", RECORDS)
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    table = pyarrow.Table.from_pylist(RECORDS)
    with pyarrow.OSFile(str(folder / "s.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pyarrow.OSFile(str(folder / "f.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    others = ("d.json", "d.parquet", "d.csv", "z.jsonl.gz", "s.arrow", "f.arrow")
    return [lines, *(folder / name for name in others)]


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.arrow"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"neither")
    with pytest.raises(UserError, match=f"{name}: not a readable"):
        list(read_records(str(tmp_path / name)))


def test_all_formats_give_the_same_records(tmp_path: Path) -> None:
    for path in write_all(tmp_path):
        assert [record for _, record in read_records(str(path))] == RECORDS, path


def test_a_line_separator_inside_a_value_is_not_the_end_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("question,answer\na\u2028b,c\n", encoding="utf-8")
    assert [record for _, record in read_records(str(tmp_path / "d.csv"))] == [{"question": "a\u2028b", "answer": "c"}]


def test_a_glob_reads_files_in_sorted_order_relative_to_the_base(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"part-{name}.jsonl", [{"question": name, "answer": name}])
    rows = read_rows(Source(path="part-*.jsonl"), tmp_path)
    assert [(r.id, r.prompt) for r in rows] == [(f"part-*.jsonl/{i}", c) for i, c in enumerate("abc")]


def test_json_with_an_object_a_line_is_read_as_lines(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.json", RECORDS)
    assert [where for where, _ in read_records(str(path))] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": \n', r"a\.jsonl:3: not valid JSON"),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1: expected an object with named columns, got list"),
        ("a.json", '[{"a": 1}, 3]', r"a\.json, item 2: expected an object"),
        ("a.json", "[{]", r"a\.json: not valid JSON"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "[" * 200_000, r"a\.jsonl:2: not valid JSON: values are nested too deeply"),
        ("a.json", "[" * 200_000, r"a\.json: not valid JSON: values are nested too deeply"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", r"a\.csv:3: more fields than the header has columns \(2\)"),
        ("a.csv", "a,b\n1,2\n1\n", r"a\.csv:3: no value for b"),
        ("a.csv", 'a,b\n1,"2\n', r"a\.csv:2: not valid csv"),
        ("a.parquet", "no", r"a\.parquet: not a readable parquet file"),
        ("a.txt", "x", r"cannot read \.txt; expected \.jsonl"),
    ],
)
def test_a_bad_file_names_the_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        list(read_records(str(tmp_path / name)))


def test_a_parquet_file_damaged_anywhere_is_one_line(tmp_path: Path) -> None:
    rows = pyarrow.Table.from_pylist([{"prompt": f"{i} " * 50, "answer": i} for i in range(3000)])
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet", row_group_size=500)
    whole = (tmp_path / "a.parquet").read_bytes()
    refused: list[str] = []
    for at in range(0, len(whole), len(whole) // 24):
        (tmp_path / "a.parquet").write_bytes(whole[:at] + b"\xff" * 64 + whole[at + 64 :])
        try:
            list(read_records(str(tmp_path / "a.parquet")))
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 3
    for said in refused:
        assert re.search(r"a\.parquet(, after row \d+)?: not a readable parquet file: [^\n]+$", said)


def test_text_that_is_not_utf8_and_missing_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(UserError, match="not UTF-8"):
        list(read_records(str(tmp_path / "train.jsonl")))
    with pytest.raises(UserError, match=r"did you mean 'train\.jsonl'"):
        find_files("trian.jsonl", tmp_path)
    with pytest.raises(UserError, match="no file matches"):
        find_files("*.parquet", tmp_path)
    with pytest.raises(UserError, match="is a directory"):
        find_files(str(tmp_path))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no rows"):
        read_rows(Source(path="empty.jsonl"), tmp_path)


def one(tmp_path: Path, record: Any, **source: Any) -> Any:
    write_jsonl(tmp_path / "d.jsonl", [{"question": "ok", "answer": "ok", "prompt": "ok"}, record])
    return read_rows(Source(path="d.jsonl", **source), tmp_path)[1]


def test_the_verl_shape(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    row = one(
        tmp_path,
        {
            "prompt": [{**messages[0], "tool_calls": None}],
            "data_source": "sums",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": 7},
        },
    )
    assert (row.id, row.prompt, row.data_source, row.answer) == ("d.jsonl/1", messages, "sums", "2")
    assert row.extra == {"ability": "math", "index": 7}


def test_the_trl_shape(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "t.jsonl", [{"prompt": "1+1?", "solution": "2", "level": 3}])
    (row,) = read_rows(Source(path="t.jsonl", answer_key="solution", name="mine"), tmp_path)
    assert (row.id, row.prompt, row.data_source, row.answer) == ("mine/0", "1+1?", "mine", "2")
    assert row.extra == {"solution": "2", "level": 3}
    assert one(tmp_path, {"prompt": "1+1?", "level": 3}).answer is None


def test_the_plain_shape(tmp_path: Path) -> None:
    row = one(tmp_path, {"question": "1+1?", "answer": 2, "level": 3})
    assert (row.prompt, row.data_source, row.answer, row.extra) == ("1+1?", "d.jsonl", 2, {"level": 3})


def test_a_conversation_is_a_prompt_up_to_its_last_user_turn(tmp_path: Path) -> None:
    turns = [("system", "add"), ("human", "1+1?"), ("gpt", "2"), ("human", "2+2?"), ("gpt", "4")]
    row = one(tmp_path, {"conversations": [{"from": who, "value": text} for who, text in turns], "level": 3})
    assert isinstance(row.prompt, list)
    assert [message["content"] for message in row.prompt] == ["add", "1+1?", "2", "2+2?"]
    assert (row.answer, row.extra) == ("4", {"level": 3})
    asked = {"role": "user", "content": "2+2?"}
    assert one(tmp_path, {"context_messages": [asked], "answer": "four"}).answer == "four"  # OpenRLHF
    assert one(tmp_path, {"messages": [asked], "system": "add"}).answer is None
    with pytest.raises(UserError, match=r"d.jsonl:2: messages has only turns of the assistant"):
        one(tmp_path, {"messages": [{"role": "assistant", "content": "4"}]})


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [*RECORDS, {"bad": 1}])
    assert len(read_rows(Source(path="d.jsonl", limit=2), tmp_path)) == 2


MESSAGE = {"role": "user", "content": "x"}
SYSTEM = {"role": "system", "content": "be kind"}
SAID = {"role": "assistant", "content": "y"}
BLOCKS = [{"type": "text", "text": "1+1", "image": None}, {"type": "text", "text": "?"}]


@pytest.mark.parametrize(
    ("record", "source", "prompt", "answer", "extra"),
    [
        ({"problem": "1+1?", "answer": "2"}, {}, "1+1?", "2", {}),
        ({"query": "1+1?", "level": 1}, {}, "1+1?", None, {"level": 1}),
        ({"question": "1+1?", "answer": None}, {}, "1+1?", None, {}),
        ({"problem": "1+1?", "solution": "two: 2"}, {"answer_key": "solution"}, "1+1?", "two: 2", {}),
        ({"instruction": "Add.", "input": "1, 1"}, {}, "Add.\n1, 1", None, {"input": "1, 1"}),
        ({"input": "1+1?", "label": "2"}, {"answer_key": "label"}, "1+1?", "2", {}),
        ({"text": "1+1?"}, {"prompt_key": "text"}, "1+1?", None, {}),
        ({"prompt": [{"role": "user", "content": BLOCKS}]}, {}, [{"role": "user", "content": "1+1?"}], None, {}),
        ({"question": "x", "system": "be kind"}, {}, [SYSTEM, MESSAGE], None, {"system": "be kind"}),
        ({"prompt": "x", "images": [], "tools": None}, {}, "x", None, {"tools": None}),
    ],
)
def test_rows_of_other_systems_are_read(
    tmp_path: Path, record: Any, source: Any, prompt: Any, answer: Any, extra: Any
) -> None:
    write_jsonl(tmp_path / "d.jsonl", [record])
    (row,) = read_rows(Source(path="d.jsonl", **source), tmp_path)
    assert (row.prompt, row.answer, row.extra) == (prompt, answer, extra)
    assert row.place == f"{tmp_path / 'd.jsonl'}:1"


def test_an_answer_key_that_no_column_has_is_an_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x", "solution": "y"}])
    with pytest.raises(UserError, match=r"d\.jsonl:1: no column 'solutoin'; did you mean 'solution'"):
        read_rows(Source(path="d.jsonl", answer_key="solutoin"), tmp_path)


def test_a_row_that_a_model_scores_may_have_no_answer(tmp_path: Path) -> None:
    row = one(tmp_path, {"prompt": [MESSAGE], "reward_model": {"style": "model", "ground_truth": None}})
    assert (row.style, row.answer) == ("model", None)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"qestion": "x", "answer": "y"}, "no column 'question'; did you mean 'qestion'"),
        ({"problem": "x", "query": "y"}, "'problem' and 'query' could each be the prompt; name one with prompt_key"),
        ({"prompt": [MESSAGE], "system": 3}, "column 'system' should be text"),
        ({"prompt": [SYSTEM, MESSAGE], "system": "s"}, "are both system messages"),
        (
            {"prompt": "<image> x", "images": [{"bytes": "iVBO"}, {"bytes": "iVBO"}]},
            "prompt has 1 image marks .* and column 'images' has 2 images",
        ),
        ({"prompt": "<image> x", "images": None}, "prompt has 1 image marks .* and column 'images' has 0 images"),
        ({"prompt": "<image> x", "images": ["a.png"]}, r"images\[0\]: no such file: .*a\.png"),
        (
            {"prompt": "<image> x", "image": "https://a.org/b.png"},
            r"image\[0\]: burnish does not fetch 'https://a\.org",
        ),
        (
            {"prompt": "<image> x", "images": [{"image": "a.png", "max_pixels": 9}]},
            "'max_pixels' of an image is not used",
        ),
        ({"prompt": "<video> x", "videos": ["a.mp4"]}, r"videos\[0\]: no such file: .*a\.mp4"),
        ({"prompt": "<audio> x", "audios": ["a.wav"]}, "column 'audios' has a value"),
        ({"prompt": "x", "chat_template_kwargs": {"enable_thinking": False}}, "set template.kwargs"),
        ({"prompt": "x", "enable_thinking": False}, "column 'enable_thinking' has chat template arguments"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]},
            r"prompt\[0\]\.content\[0\] is a block of type 'image' without content",
        ),
        ({"prompt": [{"from": "robot", "value": "x"}]}, r"prompt\[0\]\.from is 'robot'; expected one of human"),
        ({"question": "  ", "answer": "y"}, "question is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": 3}, "prompt should be text or a list of messages, got int 3"),
        ({"prompt": None}, "prompt should be text"),
        ({"prompt": []}, "should be a list of messages"),
        ({"prompt": [{**MESSAGE, "content": " "}]}, "no message has any content"),
        ({"prompt": ["x"]}, r"prompt\[0\] should be an object with role and content"),
        ({"prompt": [MESSAGE, {"role": "user"}]}, r"prompt\[1\]\.content should be text"),
        (
            {"prompt": [MESSAGE], "reward_model": {"style": "rule"}},
            "reward_model should be an object with ground_truth",
        ),
        ({"prompt": [MESSAGE], "reward_model": {"ground_truth": "1"}, "extra_info": [1]}, "extra_info should be"),
        ({"prompt": "x", "data_source": 3}, "data_source should be text"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"d\.jsonl:2: .*{message}"):
        one(tmp_path, record)


@pytest.mark.parametrize(
    "record",
    [{"prompt": "a\ud800"}, {"prompt": [{"role": "user", "content": "\udfff"}]}, {"question": "\ud83d", "answer": "1"}],
)
def test_half_of_a_surrogate_pair_names_file_and_line(tmp_path: Path, record: dict[str, Any]) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "a whole \U0001f600"}) + "\n" + json.dumps(record))
    with pytest.raises(UserError, match=r"d\.jsonl:2: .* has half of a surrogate pair \('.u\w{4}'\) at character"):
        read_rows(Source(path=str(path)))


def test_a_bad_parquet_row_names_file_and_row(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"prompt": "x"}, {"prompt": "y"}, {"prompt": " "}])
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"d\.parquet, row 3: prompt is empty"):
        read_rows(Source(path="d.parquet"), tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "x"}, "no column 'completion'"),
        ({"prompt": "x", "completion": ""}, "completion is empty"),
        ({"messages": [MESSAGE]}, "no assistant turn"),
        ({"messages": "x"}, "messages should be a list of messages"),
        ({"prompt": "x", "response": "a", "output": "b"}, "'response' and 'output' could each be the completion"),
        ({"text": " "}, "text should be a non-empty text"),
        ({"messages": [MESSAGE, SAID], "tools": [{"name": "f"}]}, "column 'tools' asks for tools or an agent"),
        (
            {"messages": [MESSAGE, {**SAID, "weight": 0}]},
            r"messages\[1\]\.weight excludes this turn from training",
        ),
        ({"prompt": "x", "completion": "y", "audio": "a.wav"}, "column 'audio' has a value"),
    ],
)
def test_a_bad_supervised_row_names_file_and_line(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b"}, record])
    with pytest.raises(UserError, match=rf"d\.jsonl:2: .*{message}"):
        read_supervised_rows(Source(path="d.jsonl"), tmp_path)


@pytest.mark.parametrize(
    ("record", "prompt", "completion", "messages", "text"),
    [
        ({"question": "x", "response": "y"}, "x", "y", None, None),
        ({"problem": "x", "answer": "y"}, "x", "y", None, None),
        ({"instruction": "x", "input": "", "output": "y"}, "x", "y", None, None),
        ({"prompt": "x", "completion": "y", "answer": "z"}, "x", "y", None, None),
        ({"text": "whole"}, [], None, None, "whole"),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "system": "be kind"},
            [],
            None,
            [SYSTEM, MESSAGE, SAID],
            None,
        ),
    ],
)
def test_supervised_rows_of_other_systems_are_read(
    tmp_path: Path, record: Any, prompt: Any, completion: Any, messages: Any, text: Any
) -> None:
    write_jsonl(tmp_path / "d.jsonl", [record])
    ((_, row),) = read_supervised_rows(Source(path="d.jsonl"), tmp_path)
    assert (row.prompt, row.completion, row.messages, row.text) == (prompt, completion, messages, text)


def test_a_plugin_gives_rows_and_its_options_are_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def squares(num):\n    return ({'question': f'{i}^2', 'answer': str(i * i)} for i in range(num))\n"
        "def broken():\n    return [{'question': 'x', 'answer': 'y'}, 3]\n"
    )
    rows = read_rows(Source(plugin="mine.py:squares", options={"num": 3}), tmp_path)
    assert [(r.id, r.answer) for r in rows] == [("squares/0", "0"), ("squares/1", "1"), ("squares/2", "4")]
    with pytest.raises(UserError, match="did you mean 'num'"):
        read_rows(Source(plugin="mine.py:squares", options={"nun": 3}), tmp_path)
    with pytest.raises(UserError, match=r"mine\.py:broken, row 2: expected a dictionary"):
        read_rows(Source(plugin="mine.py:broken"), tmp_path)


def test_source_names() -> None:
    assert source_name(Source(path="data/a.jsonl")) == "a.jsonl"
    assert source_name(Source(task="addition")) == "addition"
    assert source_name(Source(plugin="x/y.py:f")) == "f"
    assert source_name(Source(path="a.jsonl", name="n")) == "n"


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("gsm8k_test.jsonl", {}, 1319),
        ("deepscaler_sub_1209.parquet", {}, 1209),
        ("game24.csv", {"prompt_key": "Puzzles", "answer_key": "Rank"}, 1362),
        ("countdown_rg_400.jsonl", {"answer_key": "solution"}, 400),
    ],
)
def test_real_files(name: str, options: dict[str, Any], count: int) -> None:
    if not (SHARED / name).is_file():
        pytest.skip(f"{name} is not on this machine")
    rows = read_rows(Source(path=str(SHARED / name), **options))
    assert len(rows) == len({r.id for r in rows}) == count
