from __future__ import annotations

import pytest

from burnish.config.errors import UserError
from burnish.rewards.plugin import columns, load_scorer, required_columns, score_batch, score_single
from burnish.rewards.types import Result, ScoreRequest

FUNCTIONS = """
def single(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return float(solution_str == ground_truth) + bonus

async def later(data_source, solution_str, ground_truth, extra_info=None):
    import asyncio
    await asyncio.sleep(0)
    return {"score": 0.25, "acc": True, "length": len(solution_str), "pred": solution_str}

def batch(completions, answer, level, **kwargs):
    return [len(c) + a + l for c, a, l in zip(completions, answer, level)]

def strict(prompts, completions, data_source):
    return [1.0] * len(completions)

def kwargs_only(**kwargs):
    return 1.0

def other(text, gold):
    return 1.0

number = 3
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda name, **options: load_scorer(f"mine.py:{name}", tmp_path, options, "reward.parts[0]")


def request(completion: str = "ab", **fields) -> ScoreRequest:
    return ScoreRequest(
        **{"id": "r", "prompt": "p", "completion": completion, "data_source": "s", "answer": 1, "extra": {}} | fields
    )


def test_both_conventions_are_recognised_by_their_parameters(load):
    assert load("single").is_batch is False
    assert load("later").is_batch is False
    assert load("batch").is_batch is True
    assert load("strict").is_batch is True


@pytest.mark.parametrize("name", ["other", "kwargs_only"])
def test_any_other_signature_is_answered_with_the_two_that_work(load, name):
    with pytest.raises(UserError) as error:
        load(name)
    assert "compute_score(data_source, solution_str, ground_truth, extra_info)" in str(error.value)
    assert "f(prompts, completions, **columns)" in str(error.value)


def test_options_are_checked_against_the_signature(load):
    assert load("single", bonus=1.0)
    with pytest.raises(UserError, match="did you mean 'bonus'"):
        load("single", bonsu=1.0)
    with pytest.raises(UserError, match="filled in by the program"):
        load("single", solution_str="x")
    with pytest.raises(UserError, match="not a function"):
        load("number")


def test_single_results_are_a_number_or_a_dict(load):
    assert score_single(load("single").function, request("a", answer="a"), {"bonus": 0.5}) == Result(1.5)
    assert score_single(load("later").function, request("abc"), {}) == Result(0.25, 1.0, {"length": 3.0})


@pytest.mark.parametrize("returned", [None, "1", float("nan"), float("inf"), {"acc": 1.0}, {"score": None}, [1.0]])
def test_what_is_not_a_finite_score_raises(returned):
    with pytest.raises(ValueError, match=r"must be|no 'score'"):
        score_single(lambda **_: returned, request(), {})


def test_batch_functions_get_the_columns_they_name(load):
    rows = [request("ab", answer=1, extra={"level": 10}), request("c", answer=2, extra={"level": 20, "other": 1})]
    assert score_batch(load("batch").function, rows, {}) == [Result(13.0), Result(23.0)]
    assert set(columns(load("strict").function, rows)) == {"prompts", "completions", "data_source"}
    table = columns(load("batch").function, rows)
    assert table["other"] == [None, 1]
    assert table["ground_truth"] == [1, 2]
    assert required_columns(load("batch").function, {}) == ["level"]
    assert required_columns(load("batch").function, {"level": 1}) == []


def test_completions_of_chat_prompts_are_messages_as_in_trl():
    chat = request("hi", prompt=[{"role": "user", "content": "hello"}])
    table = columns(lambda prompts, completions: None, [chat, request("x")])
    assert table["completions"] == [[{"role": "assistant", "content": "hi"}], "x"]


def test_a_list_of_the_wrong_length_raises_and_none_means_not_applicable():
    with pytest.raises(ValueError, match="a list of 2 scores"):
        score_batch(lambda completions: [1.0], [request(), request()], {})
    assert score_batch(lambda completions: [None, 1], [request(), request()], {}) == [Result(None), Result(1.0)]
