from __future__ import annotations

import random
from dataclasses import replace

import pytest

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.rewards.score_types import PartResult, Score, ScoreRequest
from burnish.rewards.scoring import MAX_REQUESTS_PER_CALL, Rewards

PLUGIN = """
import os
import time

def half(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.5, "acc": 1.0, "length": len(solution_str)}

def jitter(data_source, solution_str, ground_truth, extra_info):
    time.sleep(extra_info["sleep"])
    while not os.path.exists(extra_info.get("until", "/")):
        time.sleep(0.01)
    return len(solution_str)

def sizes(prompts, completions, **columns):
    return [float(len(completions))] * len(completions)

def sized(data_source, solution_str, ground_truth, extra_info):
    return {"score": extra_info["size"], "also": 1.0}

def rated(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str)

def right(data_source, solution_str, ground_truth, extra_info):
    return solution_str == ground_truth

def right_in_numpy(completions, answer):
    import numpy
    return numpy.array(completions) == numpy.array(answer)

def only_code(completions, kind):
    return [1.0 if k == "code" else None for k in kind]
"""


def request(id: str, completion: str = "1", source: str = "s", answer: object = "1", **extra: object) -> ScoreRequest:
    return ScoreRequest(id, "p", completion, source, answer, extra)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    return tmp_path


def test_the_reward_is_the_weighted_sum_and_parts_are_raw():
    parts = [{"name": "format", "weight": 0.5, "options": {"pattern": r"\d+"}}, {"name": "number", "weight": 2.0}]
    with Rewards(Reward(parts=parts)) as rewards:
        scores = rewards.score([request("right"), request("wrong", "2"), request("shape", "is 1")])
    assert scores == [
        Score("right", 2.5, 1.0, {"format": 1.0, "number": 1.0}),
        Score("wrong", 0.5, 0.0, {"format": 1.0, "number": 0.0}),
        Score("shape", 2.0, 1.0, {"format": 0.0, "number": 1.0}),
    ]


def test_parts_are_chosen_by_data_source(folder):
    parts = [
        {"name": "exact", "sources": ["a"]},
        {"name": "mine.py:half", "sources": ["b"]},
        {"name": "number", "weight": 0.1},
    ]
    with Rewards(Reward(parts=parts), base=folder) as rewards:
        one, two = rewards.score([request("1", "1", "a"), request("2", "x", "b")])
        assert one == Score("1", 1.1, 1.0, {"exact": 1.0, "number": 1.0})
        assert two == Score("2", 0.5, 1.0, {"half": 0.5, "half/length": 1.0, "number": 0.0})
    with Rewards(Reward(parts=parts[:2]), base=folder) as rewards:
        with pytest.raises(UserError, match=r"data_source 'c' of row '3' .*exact: a; half: b"):
            rewards.submit([request("1", "1", "a"), request("3", "1", "c")])
        assert rewards.pending == 0


def test_a_row_of_style_model_is_scored_by_the_model_and_not_by_rules():
    parts = [
        {"name": "number"},
        {"name": "model", "options": {"path": "scorer"}, "weight": 2.0},
        {"name": "exact", "sources": ["both"]},
    ]
    judged = [
        replace(request("chat", answer=None), style="model"),
        replace(request("both", source="both"), style="model"),
    ]
    with Rewards(Reward(parts=parts)) as rewards:
        rewards.attach_scorers({1: lambda requests: [PartResult(0.25) for _ in requests]})
        rewards.check([Row("chat", "p", "s", None, style="model"), Row("sum", "p", "s", "1", style="rule")])
        scores = rewards.score([*judged, replace(request("sum"), style="rule")])
    assert [score.parts for score in scores] == [
        {"model": 0.25},
        {"model": 0.25, "exact": 1.0},
        {"number": 1.0, "model": 0.25},
    ]
    with Rewards(Reward(parts=parts[:1])) as rewards, pytest.raises(UserError, match=r"reward_model\.style is 'model'"):
        rewards.check([Row("chat", "p", "s", None, style="model")])


def test_a_format_part_alone_says_nothing_about_accuracy():
    with Rewards(Reward(parts=["format"], workers=1)) as rewards:
        assert rewards.score([request("1")])[0].accuracy is None


@pytest.mark.parametrize(
    ("part", "accuracies"),
    [
        ({"name": "mine.py:rated"}, [None, None, None]),
        ({"name": "mine.py:rated", "correct_at": 8}, [0.0, 0.0, 1.0]),
        ({"name": "mine.py:right"}, [1.0, 0.0, 0.0]),
        ({"name": "mine.py:right_in_numpy"}, [1.0, 0.0, 0.0]),
        ({"name": "number"}, [1.0, 0.0, 0.0]),
    ],
    ids=["graded", "graded with a threshold", "True and False", "numpy's bools", "built in"],
)
def test_only_a_verdict_is_an_accuracy(folder, part, accuracies):
    with Rewards(Reward.model_validate({"parts": [part], "workers": 1}), base=folder) as rewards:
        scores = rewards.score([request(str(k), text) for k, text in enumerate(("1", "0", "9.5"))])
    assert [s.accuracy for s in scores] == accuracies


def test_of_several_parts_the_first_with_a_verdict_says_what_is_correct(folder):
    parts = [{"name": "mine.py:rated"}, {"name": "number", "weight": 0.5}]
    with Rewards(Reward.model_validate({"parts": parts, "workers": 1}), base=folder) as rewards:
        scores = rewards.score([request("1", "1"), request("2", "9.5")])
    assert [(s.reward, s.accuracy) for s in scores] == [(1.5, 1.0), (9.5, 0.0)]


def test_long_completions_are_cut_to_their_end():
    with Rewards(Reward(parts=["exact"], max_answer_chars=3, workers=1)) as rewards:
        assert [s.reward for s in rewards.score([request("1", "xx123", answer="123"), request("2", "1231")])] == [
            1.0,
            0.0,
        ]


def test_scores_keep_their_order_and_do_not_depend_on_the_number_of_workers(folder):
    rng = random.Random(0)
    asked = [request(str(i), "x" * rng.randrange(9), sleep=rng.choice([0.0, 0.01])) for i in range(60)]
    results = []
    for workers in (1, 3):
        with Rewards(Reward(parts=["mine.py:jitter", "exact"], workers=workers), base=folder) as rewards:
            results.append(rewards.score(asked))
    assert results[0] == results[1]
    assert [s.id for s in results[0]] == [r.id for r in asked]
    assert [s.reward for s in results[0]] == [float(len(r.completion)) for r in asked]


def test_a_batch_function_sees_chunks_of_one_submission(folder):
    with Rewards(Reward(parts=["mine.py:sizes"], workers=2), base=folder) as rewards:
        scores = rewards.score([request(str(i)) for i in range(MAX_REQUESTS_PER_CALL + 5)])
    assert [s.reward for s in scores] == [64.0] * MAX_REQUESTS_PER_CALL + [5.0] * 5


def test_none_from_a_batch_function_leaves_the_part_out(folder):
    with Rewards(Reward(parts=["mine.py:only_code", "exact"], workers=1), base=folder) as rewards:
        code, text = rewards.score([request("1", kind="code"), request("2", kind="text")])
        assert (code.reward, text.reward) == (2.0, 1.0)
        assert text.parts == {"exact": 1.0}
        with pytest.raises(UserError, match="needs a column 'kind', which row '3'"):
            rewards.submit([request("3")])
    with Rewards(Reward(parts=["mine.py:only_code"], workers=1), base=folder) as rewards:
        (nothing,) = rewards.score([request("2", kind="text")])
        assert nothing.reward is None
        assert "no reward part gave a value" in (nothing.error or "")


def test_a_row_without_an_answer_is_refused_before_sampling_and_fails_alone_after():
    row = Row("rows.jsonl/4", "p", "s", None, {"difficulty": 2, "solution": "7", "verifier": "exact"})
    said = r"row 'rows.jsonl/4' .*: the row has no answer, and .* compares with one; .*answer_key=solution"
    judge = {"name": "judge", "options": {"url": "http://localhost:1/v1", "model": "m"}}
    for part in ("exact", "row", judge):
        with Rewards(Reward(parts=[part], workers=1)) as rewards, pytest.raises(UserError, match=said):
            rewards.check([row])
    with Rewards(Reward(parts=["exact"], workers=1)) as rewards:
        missing, right = rewards.score([request("1", "None", answer=None), request("2", "7", answer="7")])
    assert missing.reward is None
    assert "on row '1'" in (missing.error or "")
    assert "answer_key" in (missing.error or "")
    assert right.reward == 1.0
    with Rewards(Reward(parts=["format"], workers=1)) as rewards:
        rewards.check([row])


def test_rewards_that_cannot_be_computed_with_fail_with_the_reason(folder):
    parts = [{"name": "mine.py:sized", "weight": 0.5}, {"name": "mine.py:sized", "weight": 2.0}]
    with Rewards(Reward(parts=parts, workers=1), base=folder) as rewards:
        scores = rewards.score([request(str(k), size=s) for k, s in enumerate((4e8, 1e307, -2e9, 5e8, float("inf")))])
    assert [score.reward for score in scores] == [1e9, None, None, None, None]
    said = "1e+307 is not a usable reward: it must be finite and at most 1e+09 in magnitude; scale it down"
    assert scores[1].error == "\n".join(f"reward part {part!r} of row '1': {said}" for part in ("sized", "sized_2"))
    assert "the weighted sum of row '3': 1.25e+09 is not a usable reward" in (scores[3].error or "")
    assert "must be finite, got inf" in (scores[4].error or "")


def test_poll_returns_what_is_done_and_score_leaves_the_rest_to_it(folder):
    with Rewards(Reward(parts=["mine.py:jitter"], workers=2), base=folder) as rewards:
        assert rewards.poll(None) == []
        rewards.score([request("warm", sleep=0.0)])
        rewards.submit([request("slow", sleep=0.0, until=str(folder / "go"))])
        assert rewards.pending == 1
        assert rewards.poll(0.0) == []
        assert [s.id for s in rewards.score([request("quick", sleep=0.0)])] == ["quick"]
        assert rewards.poll(0.05) == []
        (folder / "go").touch()
        assert [s.id for s in rewards.poll(None)] == ["slow"]
        assert rewards.pending == 0
        assert rewards.counters == {"answer_timeout": 0, "scorer_failed": 0, "scorer_retried": 0, "worker_restarts": 0}


def test_a_queue_apart_and_poll_get_their_own_scores(folder):
    with Rewards(Reward(parts=["mine.py:jitter"], workers=2), base=folder) as rewards:
        assert rewards.may_be_slow
        apart = rewards.apart()
        rewards.submit([request("slow", sleep=0.0, until=str(folder / "go")), request("quick", sleep=0.0)])
        apart.submit([request("other", sleep=0.0), request("late", sleep=0.0, until=str(folder / "go"))])
        assert (rewards.pending, apart.pending) == (2, 2)
        assert [s.id for s in apart.poll(None)] == ["other"]
        assert [s.id for s in rewards.poll(None)] == ["quick"]
        (folder / "go").touch()
        assert [s.id for s in rewards.poll(None)] == ["slow"]
        assert rewards.poll(None) == []
        assert (rewards.pending, apart.pending) == (0, 1)
        assert [s.id for s in apart.poll(None)] == ["late"]
        assert apart.pending == 0
    with Rewards(Reward(parts=["number"])) as rewards:
        assert not rewards.may_be_slow


def test_a_model_scores_the_requests_of_each_queue_in_a_batch_of_their_own():
    batches = []

    def scorer(requests):
        batches.append([one.id for one in requests])
        return [PartResult(0.25) for _ in requests]

    with Rewards(Reward(parts=[{"name": "model", "options": {"path": "scorer"}}])) as rewards:
        rewards.attach_scorers({0: scorer})
        apart = rewards.apart()
        rewards.submit([request("a")])
        rewards.submit([request("b")])
        apart.submit([request("c")])
        apart.submit([request("d")])
        assert {s.id for s in apart.poll(None)} == {"c", "d"}
        assert {s.id for s in rewards.poll(None)} == {"a", "b"}
    assert batches == [["a", "b"], ["c", "d"]]


def test_the_same_function_twice_gets_two_labels():
    parts = [{"name": "format", "options": {"pattern": p}} for p in (r"\d+", r"\w+")]
    with Rewards(Reward(parts=parts, workers=1)) as rewards:
        assert rewards.score([request("1", "x")])[0].parts == {"format": 0.0, "format_2": 1.0}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "reward.parts is empty"),
        (["exakt"], "did you mean 'exact'"),
        ([{"name": "exact", "sources": []}], "sources is empty"),
        ([{"name": "format", "options": {"patern": "x"}}], "did you mean 'pattern'"),
        (["nowhere.py:f"], "no such file"),
    ],
)
def test_mistakes_are_found_at_construction(parts, message, tmp_path):
    with pytest.raises(UserError, match=message):
        Rewards(Reward(parts=parts), base=tmp_path)


def test_rows_of_a_generated_task_are_scored_by_its_checker():
    with Rewards(Reward(parts=["task"], workers=1)) as rewards:
        row = ScoreRequest("1", "507508>", "005578", "sort_digits", "005578", {"task": "sort_digits"})
        wrong = ScoreRequest("2", "507508>", "507508", "sort_digits", "005578", {"task": "sort_digits"})
        assert [s.reward for s in rewards.score([row, wrong])] == [1.0, 0.0]
        with pytest.raises(UserError, match="'task' scores only rows of generated tasks"):
            rewards.submit([request("3")])
