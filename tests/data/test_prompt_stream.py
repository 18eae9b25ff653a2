from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.data import Data, Source
from burnish.config.errors import UserError
from burnish.core.random_keys import permutation
from burnish.data.prompt_stream import PromptStream, validation_prompts
from burnish.models.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_characters("0123456789>+=ab")


def write(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder / "ten.jsonl", [str(i) for i in range(10)])
    write(folder / "three.jsonl", ["a", "b", "ab"])
    write(folder / "long.jsonl", ["1", "22222", "3", "44444", "5"])
    (folder / "mine.py").write_text(
        "import itertools\n"
        "def twice(size, seed, epoch):\n"
        "    return [i for i in range(size) for _ in range(2)] if size else itertools.count(100, 2)\n"
        "def nothing(size, seed, epoch):\n    return []\n"
        "def outside(size, seed, epoch):\n    return [size]\n"
        "def words(size, seed, epoch):\n    return ['a']\n"
        "number = 3\n"
    )
    return folder


def stream(folder: Path, *sources: dict[str, Any], seed: int = 0, split: str = "train", **data: Any) -> PromptStream:
    return PromptStream([Source(**s) for s in sources], TOKENIZER, Data(**data), seed, split, folder)


def seen(draws: list[Any]) -> list[tuple[str, int]]:
    return [(d.prompt.row.id, d.visit) for d in draws]


MIXED: tuple[dict[str, Any], ...] = (
    {"path": "ten.jsonl", "weight": 2.0},
    {"path": "three.jsonl"},
    {"task": "sort_digits"},
    {"path": "long.jsonl", "weight": 0.5},
)


def test_a_prompt_knows_whether_a_chat_template_wrote_it(folder: Path) -> None:
    inner = Tokenizer.from_characters("0123456789>+=ab")._inner
    inner.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    for tokenizer, kind, expected in ((TOKENIZER, "auto", False), (Tokenizer(inner), "auto", True), (Tokenizer(inner), "plain", False)):  # fmt: skip
        data = Data.model_validate({"template": {"kind": kind}})
        (draw,) = PromptStream([Source(path="ten.jsonl")], tokenizer, data, 0, "train", folder).draw(1)
        assert (draw.prompt.is_chat, draw.prompt.text.endswith(">")) == (expected, expected)


@pytest.mark.parametrize("sampler", ["shuffle", "sequential", "mine.py:twice"])
@settings(max_examples=15, deadline=None)
@given(before=st.integers(0, 60), size=st.integers(1, 7), seed=st.integers(0, 3))
def test_a_restored_stream_continues_exactly_as_the_unbroken_one(
    folder: Path, sampler: str, before: int, size: int, seed: int
) -> None:
    options = {"seed": seed, "sampler": sampler, "max_prompt_tokens": 4}
    sources = (*MIXED[:2], {"task": "sort_digits", "options": {"min_digits": 2, "max_digits": 5}}, MIXED[3])
    unbroken = stream(folder, *sources, **options)
    unbroken.draw(before)
    saved = json.loads(json.dumps(unbroken.state()))
    restored = stream(folder, *sources, **options)
    restored.draw(size)  # its earlier state must not matter
    restored.restore(saved)
    for _ in range(5):
        assert restored.draw(size) == unbroken.draw(size)
    assert restored.state() == unbroken.state()
    assert restored.report() == unbroken.report()


def test_draws_do_not_depend_on_how_many_are_taken_at_once(folder: Path) -> None:
    one, many = stream(folder, *MIXED), stream(folder, *MIXED)
    assert [one.draw(1)[0] for _ in range(40)] == many.draw(40)


def test_each_epoch_is_a_new_permutation_and_a_visit_is_an_epoch(folder: Path) -> None:
    draws = stream(folder, {"path": "ten.jsonl"}, seed=3).draw(30)
    epochs = [draws[i : i + 10] for i in (0, 10, 20)]
    for epoch, part in enumerate(epochs):
        expected = permutation(10, 3, "ten.jsonl", epoch)
        assert seen(part) == [(f"ten.jsonl/{i}", epoch) for i in expected]
    assert len({tuple(d.prompt.text for d in part) for part in epochs}) == 3


def test_the_order_follows_the_seed_and_sequential_follows_the_file(folder: Path) -> None:
    source = {"path": "ten.jsonl"}
    assert seen(stream(folder, source, seed=1).draw(20)) == seen(stream(folder, source, seed=1).draw(20))
    assert seen(stream(folder, source, seed=1).draw(20)) != seen(stream(folder, source, seed=2).draw(20))
    texts = [d.prompt.text for d in stream(folder, source, sampler="sequential").draw(12)]
    assert texts == [*"0123456789", "0", "1"]


def test_no_draw_is_repeated_with_the_same_visit(folder: Path) -> None:
    for sampler in ("shuffle", "sequential", "mine.py:twice"):
        keys = seen(stream(folder, *MIXED, sampler=sampler).draw(300))
        assert len(set(keys)) == 300


def test_sources_are_drawn_by_weight(folder: Path) -> None:
    draws = stream(folder, {"path": "ten.jsonl", "weight": 3}, {"path": "three.jsonl", "weight": 1}).draw(4000)
    share = Counter(d.prompt.row.data_source for d in draws)["ten.jsonl"] / 4000
    assert abs(share - 0.75) < 0.03  # 4.4 deviations


def test_a_task_never_repeats_and_takes_its_split_and_name(folder: Path) -> None:
    draws = stream(folder, {"task": "sort_digits"}).draw(20)
    assert seen(draws) == [(f"sort_digits/train/{i}", 0) for i in range(20)]
    held_out = stream(folder, {"task": "sort_digits", "split": "test", "name": "x"}).draw(2)
    assert seen(held_out) == [("x/test/0", 0), ("x/test/1", 0)]
    assert held_out[0].prompt.row.data_source == "x"
    assert held_out[0].prompt.row.extra["task"] == "sort_digits"


def test_a_limited_task_comes_round_again(folder: Path) -> None:
    draws = stream(folder, {"task": "addition", "limit": 3}).draw(6)
    assert Counter(seen(draws)) == Counter((f"addition/train/{i}", visit) for i in range(3) for visit in range(2))


def test_a_prompt_carries_its_tokens(folder: Path) -> None:
    prompt = stream(folder, {"path": "three.jsonl"}, sampler="sequential").draw(3)[2].prompt
    assert (prompt.text, prompt.tokens) == ("ab", TOKENIZER.encode("ab"))


def test_prompts_without_a_value_are_left_out_and_the_others_carry_theirs(folder: Path) -> None:
    two = {"path": "ten.jsonl"}, {"task": "sort_digits", "limit": 5, "weight": 3.0}
    drawn_from = stream(folder, *two)
    everything = drawn_from.prompts()
    assert len(everything) == 15
    assert all(prompt.numbers == {} for prompt in everything)
    values = {prompt.row.id: k / 10 for k, prompt in enumerate(everything[:10]) if k % 3 == 0}  # none of the task's
    drawn_from.use_values(values)
    for draw in drawn_from.draw(20):
        assert draw.prompt.numbers == {"prompt_value": values[draw.prompt.row.id]}
    again = stream(folder, *two)
    again.use_values(values)
    again.restore(drawn_from.state())
    assert seen(again.draw(9)) == seen(drawn_from.draw(9))
    assert again.recall("ten.jsonl", 3, 0).prompt.value == 0.3
    with pytest.raises(UserError, match="endless generated task"):
        stream(folder, {"task": "sort_digits"}).check_is_finite()


def test_overlong_prompts_are_left_out_counted_and_named(folder: Path) -> None:
    made = stream(folder, {"path": "long.jsonl"}, max_prompt_tokens=4)
    assert made.report() == "2 over-long prompts left out: long.jsonl/1, long.jsonl/3"
    assert {d.prompt.text for d in made.draw(30)} == {"1", "3", "5"}
    assert made.report() == "2 over-long prompts left out: long.jsonl/1, long.jsonl/3"
    assert stream(folder, {"path": "long.jsonl"}, max_prompt_tokens=5).report() is None


def test_overlong_prompts_of_a_task_are_counted_as_they_are_met(folder: Path) -> None:
    made = stream(folder, {"task": "sort_digits"}, max_prompt_tokens=6)
    assert made.report() is None
    draws = made.draw(20)
    assert all(len(d.prompt.tokens) <= 6 for d in draws)
    num_left_out = int(draws[-1].prompt.row.id.rpartition("/")[2]) + 1 - 20
    assert num_left_out > 5
    assert str(made.report()).startswith(f"{num_left_out} over-long prompts left out: sort_digits/train/")
    assert str(made.report()).endswith(", ...")


def test_a_source_with_nothing_but_overlong_prompts_is_an_error(folder: Path) -> None:
    with pytest.raises(UserError, match=r"ten\.jsonl: all 10 prompts are longer"):
        stream(folder, {"path": "ten.jsonl"}, template={"text": "{prompt}00000"}, max_prompt_tokens=4)
    with pytest.raises(UserError, match="sort_digits: 1000 in a row"):
        stream(folder, {"task": "sort_digits"}, max_prompt_tokens=4).draw(1)


def test_overlong_prompts_may_stop_the_run(folder: Path) -> None:
    with pytest.raises(UserError, match=r"row long\.jsonl/1: its prompt has 5 tokens.*max_prompt_tokens=4"):
        stream(folder, {"path": "long.jsonl"}, max_prompt_tokens=4, overlong_prompts="error")


def test_a_plugin_sampler_decides_the_order(folder: Path) -> None:
    draws = stream(folder, {"path": "three.jsonl"}, sampler="mine.py:twice").draw(8)
    indices = [(int(name.rpartition("/")[2]), visit) for name, visit in seen(draws)]
    assert indices == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 2), (0, 3)]
    endless = stream(folder, {"task": "addition"}, sampler="mine.py:twice").draw(2)
    assert seen(endless) == [("addition/train/100", 0), ("addition/train/102", 0)]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("shufle", "did you mean 'shuffle'"),
        ("mine.py:nothing", "returned no index"),
        ("mine.py:outside", r"returned index 3 for three\.jsonl; expected whole numbers in 0\.\.2"),
        ("mine.py:words", "returned index 'a'"),
        ("mine.py:number", "is not a function"),
    ],
)
def test_a_wrong_sampler_is_an_error(folder: Path, sampler: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        stream(folder, {"path": "three.jsonl"}, sampler=sampler).draw(1)


def test_two_sources_of_one_name_and_changed_data_are_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give each its own `name`"):
        stream(folder, {"path": "ten.jsonl"}, {"path": str(folder / "ten.jsonl")})
    state = stream(folder, {"path": "ten.jsonl"}).state()
    with pytest.raises(UserError, match=r"drew from ten\.jsonl, the config now names three\.jsonl"):
        stream(folder, {"path": "three.jsonl"}).restore(state)
    write(tmp_path / "ten.jsonl", ["1"])
    with pytest.raises(UserError, match=r"had 10 rows when the run was saved, and has 1 now"):
        stream(tmp_path, {"path": "ten.jsonl"}).restore(state)


@pytest.mark.parametrize("column", ["prompt", "answer", "note"])
def test_data_of_the_same_length_that_says_something_else_is_an_error(tmp_path: Path, column: str) -> None:
    rows = [{"prompt": f"{k}>", "answer": f"{k}", "note": k} for k in range(4)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = json.loads(json.dumps(stream(tmp_path, {"path": "data.jsonl"}).state()))
    stream(tmp_path, {"path": "data.jsonl"}).restore(state)
    rows[2][column] = "9"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"the rows of data\.jsonl have changed since the run was saved"):
        stream(tmp_path, {"path": "data.jsonl"}).restore(state)


def ids(folder: Path, sources: list[dict[str, Any]], limit: int | None, **data: Any) -> list[str]:
    made = validation_prompts([Source(**s) for s in sources], TOKENIZER, Data(**data), 0, limit, folder)
    return [p.row.id for p in made]


def test_validation_prompts_are_in_order_and_held_out(folder: Path) -> None:
    assert ids(folder, [{"path": "ten.jsonl"}], None) == [f"ten.jsonl/{i}" for i in range(10)]
    assert ids(folder, [{"task": "sort_digits"}], 3) == [f"sort_digits/test/{i}" for i in range(3)]
    assert ids(folder, [{"task": "sort_digits", "limit": 2}], None) == [f"sort_digits/test/{i}" for i in range(2)]


def test_a_validation_limit_is_shared_equally_and_small_sources_leave_their_rest(folder: Path) -> None:
    sources: list[dict[str, Any]] = [{"path": "ten.jsonl"}, {"path": "three.jsonl"}, {"task": "addition"}]
    for limit, expected in ((9, (3, 3, 3)), (5, (2, 2, 1)), (15, (6, 3, 6)), (40, (10, 3, 27))):
        found = Counter(i.partition("/")[0] for i in ids(folder, sources, limit))
        assert (found["ten.jsonl"], found["three.jsonl"], found["addition"]) == expected


def test_validation_says_what_it_left_out_and_refuses_the_endless(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(ids(folder, [{"path": "long.jsonl"}], None, max_prompt_tokens=4)) == 3
    assert "2 over-long prompts left out: long.jsonl/1, long.jsonl/3" in caplog.text
    with pytest.raises(UserError, match=r"weight=2\.0 has no effect on validation"):
        ids(folder, [{"path": "ten.jsonl", "weight": 2.0}], None)
    with pytest.raises(UserError, match="endless generated task"):
        ids(folder, [{"task": "addition"}], None)
    for source in ({"path": "ten.jsonl"}, {"task": "sort_digits"}):
        with pytest.raises(UserError, match="prompts are longer"):
            ids(folder, [source], 2, template={"text": "{prompt}00000"}, max_prompt_tokens=4)
