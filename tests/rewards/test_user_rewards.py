from __future__ import annotations

import numpy as np
import pytest
import torch

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.rewards.score_types import PartResult, ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.rewards.user_rewards import (
    UserScorer,
    call_user_scorer,
    load_user_scorer,
    requested_columns,
    required_columns,
)

FUNCTIONS = """
def single(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return float(solution_str == ground_truth) + bonus

async def later(data_source, solution_str, ground_truth, extra_info=None):
    import asyncio
    await asyncio.sleep(0)
    return {"score": 0.25, "acc": True, "length": len(solution_str), "pred": solution_str}

def short(solution_str, ground_truth):
    return [solution_str, ground_truth]

def needy(solution_str, ground_truth, tokenizer):
    return 1.0

def verl_batch(solution_strs, ground_truths, data_sources=None, extra_infos=None):
    return [{"score": float(s == g), "n": i["n"]} for s, g, i in zip(solution_strs, ground_truths, extra_infos)]

def batch(completions, answer, level, **kwargs):
    return [len(c) + a + l for c, a, l in zip(completions, answer, level)]

def strict(prompts, completions, data_source):
    return [1.0] * len(completions)

def optional(completions, answer="nothing", truncated=None):
    return [float(len(one)) for one in answer] if answer != "nothing" else [-1.0] * len(completions)

def asked(completions, completion_ids, trainer_state, log_extra=None, log_metric=None):
    log_metric("mean", sum(map(len, completion_ids)) / len(completion_ids))
    log_extra("ids", completion_ids)
    log_extra("flag", [True] * len(completions))
    return [trainer_state.global_step + 100.0 * trainer_state.max_steps] + [None] * (len(completions) - 1)

def reward_func(queries, prompts, labels, **kwargs):
    return [len(q) + 10 * len(p) + 100 * int(l) for q, p, l in zip(queries, prompts, labels)]

def kwargs_only(**kwargs):
    return 1.0

def other(text, gold):
    return 1.0

number = 3
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda name, **options: load_user_scorer(f"mine.py:{name}", tmp_path, options, "reward.parts[0]")


def request(completion: str = "ab", **fields) -> ScoreRequest:
    return ScoreRequest(
        **{"id": "r", "prompt": "p", "completion": completion, "data_source": "s", "answer": 1, "extra": {}} | fields
    )


def of(function, tmp_path) -> UserScorer:
    """A function of this file as a scorer."""
    import burnish.rewards.user_rewards as plugin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "load_plugin", lambda *_: function)
        return load_user_scorer("mine.py:f", tmp_path, {}, "here")


def test_conventions_are_recognised_by_their_parameters(load):
    names = ("single", "later", "short", "verl_batch", "batch", "strict", "asked", "reward_func")
    told = {name: load(name).convention.name for name in names}
    assert told == {
        **dict.fromkeys(("single", "later", "short"), "verl"),
        "verl_batch": "verl, batched",
        **dict.fromkeys(("batch", "strict", "asked"), "TRL"),
        "reward_func": "OpenRLHF",
    }
    assert [load(name).is_batch for name in names] == [False] * 3 + [True] * 5


@pytest.mark.parametrize("name", ["other", "kwargs_only"])
def test_any_other_signature_is_answered_with_those_that_work(load, name):
    with pytest.raises(UserError) as error:
        load(name)
    for signature in (
        "data_source, solution_str, ",
        "data_sources, solution_strs, ",
        "f(prompts, completions, **columns)",
    ):
        assert signature in str(error.value)
    assert "reward_func(queries, prompts, labels)" in str(error.value)


def test_options_are_checked_against_the_signature(load):
    assert load("single", bonus=1.0)
    assert load("needy", tokenizer="x")
    for name, options, message in (
        ("single", {"bonsu": 1.0}, "did you mean 'bonus'"),
        ("single", {"solution_str": "x"}, "so it cannot be an option"),
        ("asked", {"trainer_state": 1}, "so it cannot be an option"),
        ("needy", {}, "has a required parameter 'tokenizer' that the verl convention does not pass"),
        ("number", {}, "not a function"),
    ):
        with pytest.raises(UserError, match=message):
            load(name, **options)


def test_single_results_are_a_number_or_a_dict(load):
    assert call_user_scorer(load("single"), [request("a", answer="a")], {"bonus": 0.5}) == [PartResult(1.5)]
    (said,) = call_user_scorer(load("later"), [request("abc")], {})
    assert said == PartResult(0.25, 1.0, {"length": 3.0}, extra={"pred": "abc"})


@pytest.mark.parametrize(
    "returned", [None, "1", float("nan"), float("inf"), {"acc": 1.0}, {"score": None}, {"score": 1, "acc": 5}, [1.0]]
)
def test_what_is_not_a_finite_score_raises(returned, tmp_path):
    with pytest.raises(ValueError, match=r"must be|no 'score'|from 0 to 1"):
        call_user_scorer(of(lambda solution_str: returned, tmp_path), [request()], {})
    with pytest.raises(ValueError, match=r"must be|no 'score'|from 0 to 1"):
        call_user_scorer(of(lambda solution_strs: [returned], tmp_path), [request()], {})


def test_batch_functions_get_the_columns_they_name(load):
    rows = [request("ab", answer=1, extra={"level": 10}), request("c", answer=2, extra={"level": 20, "other": 1})]
    assert call_user_scorer(load("batch"), rows, {}) == [PartResult(13.0), PartResult(23.0)]
    assert set(requested_columns(load("strict"), rows)) == {"data_source"}
    table = requested_columns(load("batch"), rows)
    assert table["other"] == [None, 1]
    assert table["ground_truth"] == [1, 2]
    assert required_columns(load("batch"), {}) == ["answer", "level"]
    assert required_columns(load("batch"), {"level": 1}) == ["answer"]
    assert [r.value for r in call_user_scorer(load("batch"), rows, {"level": [1, 1]})] == [4.0, 4.0]


OWN = {"ground_truth": "theirs", "answer": "a", "truncated": "t", "data_source": "d"}


def test_a_column_of_the_row_is_never_replaced_by_ours(load, tmp_path):
    rows = [request(answer=None, extra=OWN), request(answer="ours", extra={"ground_truth": None}, truncated=True)]
    table = requested_columns(load("batch"), rows)
    assert {name: table[name] for name in OWN} == {
        "ground_truth": ["theirs", "ours"],
        "answer": ["a", "ours"],
        "truncated": ["t", True],
        "data_source": ["d", "s"],
    }
    seen: list[tuple] = []
    verl = of(lambda solution_str, ground_truth, extra_info: seen.append((ground_truth, extra_info)) or 1.0, tmp_path)
    call_user_scorer(verl, rows, {})
    assert [truth for truth, _ in seen] == ["theirs", "ours"]
    assert [info["truncated"] for _, info in seen] == ["t", True]
    labels = of(lambda queries, labels: [float(len(label)) for label in labels], tmp_path)
    assert [r.value for r in call_user_scorer(labels, rows, {})] == [6.0, 4.0]


def test_keys_of_extra_info_are_no_columns(load, tmp_path):
    row = request(
        answer="7",
        extra={"answer": "first 3, then 4: 7", "ground_truth": "x", "n": 1},
        nested=("answer", "ground_truth", "n"),
    )
    table = requested_columns(load("batch"), [row])
    assert (table["answer"], table["ground_truth"], table["n"]) == (["7"], ["7"], [1])
    verl = of(
        lambda solution_str, ground_truth, extra_info: float(extra_info["answer"].endswith(ground_truth)), tmp_path
    )
    assert call_user_scorer(verl, [row], {}) == [PartResult(1.0)]


def test_a_column_that_no_row_has_is_left_to_its_default(load):
    assert [r.value for r in call_user_scorer(load("optional"), [request(answer=None)], {})] == [-1.0]
    assert [r.value for r in call_user_scorer(load("optional"), [request(answer="abc"), request(answer="d")], {})] == [
        3.0,
        1.0,
    ]


def test_verl_batches_have_the_names_in_the_plural(load):
    rows = [request("7", answer="7", extra={"n": 1}), request("8", answer="7", extra={"n": 2})]
    assert call_user_scorer(load("verl_batch"), rows, {}) == [
        PartResult(1.0, None, {"n": 1.0}),
        PartResult(0.0, None, {"n": 2.0}),
    ]


def test_trl_functions_get_tokens_progress_and_ways_to_log(load):
    rows = [
        request("x", tokens=np.array([5, 6, 7, 8]), written=np.array([False, True, False, True]), num_prompt=1, step=4),
        request("y", tokens=[5, 6], written=[False, True], num_prompt=1, step=4),
    ]
    first, second = call_user_scorer(load("asked"), rows, {}, max_steps=9)
    assert (first.value, second.value) == (903.0, None)
    assert (
        call_user_scorer(load("asked"), rows, {})[0].value == 101.0
    )  # an evaluation: progress is complete, and no division by zero
    assert first.parts == second.parts == {"mean": 2.0}
    assert [dict(one.extra) for one in (first, second)] == [
        {"ids": "[6, 7, 8]", "flag": True},
        {"ids": "[6]", "flag": True},
    ]
    assert load("asked").wants_tokens
    assert load("batch").wants_tokens
    assert not load("strict").wants_tokens


def test_completions_of_chat_prompts_are_messages_as_in_trl(tmp_path):
    seen: list = []
    chat = request("hi", prompt=[{"role": "user", "content": "hello"}])
    call_user_scorer(
        of(lambda prompts, completions: seen.extend(completions) or [1.0, 1.0], tmp_path), [chat, request("x")], {}
    )
    assert seen == [[{"role": "assistant", "content": "hi"}], "x"]


def test_a_list_of_the_wrong_length_raises_and_none_means_not_applicable(tmp_path):
    for returned in ([1.0], 1.0, "ab", torch.tensor(1.0)):
        with pytest.raises(ValueError, match="a list of 2 scores"):
            call_user_scorer(of(lambda completions, returned=returned: returned, tmp_path), [request(), request()], {})
    wanted = [PartResult(None), PartResult(1.0)]
    assert call_user_scorer(of(lambda completions: [None, 1], tmp_path), [request(), request()], {}) == wanted
    with pytest.raises(ValueError, match="a list of 1 values of 'c'"):
        call_user_scorer(of(lambda completions, log_extra: log_extra("c", [1, 2]), tmp_path), [request()], {})
    with pytest.raises(ValueError, match="takes a number"):
        call_user_scorer(of(lambda completions, log_metric: log_metric("c", "x"), tmp_path), [request()], {})


def test_truth_values_are_verdicts_and_numbers_are_not(tmp_path):
    kinds = [True, np.bool_(False), torch.tensor(True), 1.0, np.float32(1.0), 1, None]
    said = call_user_scorer(of(lambda completions: kinds, tmp_path), [request()] * len(kinds), {})
    assert [one.accuracy for one in said] == [1.0, 0.0, 1.0, None, None, None, None]
    assert call_user_scorer(of(lambda solution_str: {"score": True}, tmp_path), [request()], {}) == [
        PartResult(1.0, 1.0)
    ]
    assert call_user_scorer(of(lambda queries: np.array([True]), tmp_path), [request()], {}) == [PartResult(1.0, 1.0)]


def test_openrlhf_functions_return_a_tensor_or_a_dict_of_them(load, tmp_path):
    rows = [request("ab", answer="1"), request("c", answer="2", prompt=[{"role": "user", "content": "hello"}])]
    assert [r.value for r in call_user_scorer(load("reward_func"), rows, {})] == [3 + 10 + 100, 6 + 50 + 200]
    logs = {"len": torch.tensor([2, 1]), "all": 7, "text": ["a", "b"]}
    whole = {"rewards": torch.tensor([1.5, -2.0]), "scores": torch.tensor([1.0, -1.0]), "extra_logs": logs}
    assert call_user_scorer(of(lambda queries: whole, tmp_path), rows, {}) == [
        PartResult(1.5, 1.0, {"len": 2.0, "all": 7.0}, extra={"text": "a"}),
        PartResult(-2.0, 0.0, {"len": 1.0, "all": 7.0}, extra={"text": "b"}),
    ]
    with pytest.raises(ValueError, match="no 'rewards'; its keys: 'scores'"):
        call_user_scorer(of(lambda queries: {"scores": [1.0]}, tmp_path), [request()], {})
    with pytest.raises(ValueError, match="reward 0 must be a number"):
        call_user_scorer(of(lambda queries: torch.zeros(1, 3), tmp_path), [request()], {})


def test_rows_are_checked_against_what_a_function_takes(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    for name, extra, message in (
        ("batch", {"level": 1}, "needs a column 'answer', which row 'rows/0'"),
        ("batch", {"answer": 1, "level": 1, "completions": []}, "has a column 'completions', .* rename the column"),
        ("asked", {"trainer_state": 1}, "TRL convention passes something else under that name: rename"),
    ):
        part = Reward(parts=[f"mine.py:{name}"], workers=1)
        with Rewards(part, tmp_path) as rewards, pytest.raises(UserError, match=message):
            rewards.check([Row("rows/0", "p", "s", None, extra)])
    with Rewards(Reward(parts=["mine.py:single"], workers=1), tmp_path) as rewards:
        rewards.check([Row("rows/0", "p", "s", None, {"ground_truth": "x"})])
        assert not caplog.records
        rewards.check(Row(f"rows/{k}", "p", "s", None, {"solution": "x"}) for k in range(3))
    (warning,) = caplog.records
    assert (
        "row 'rows/0' has no expected answer, so ground_truth is None there (its columns: solution)"
        in warning.getMessage()
    )
