"""Judges that reason (RM-R1): questions in both orders, the reward of a verdict, and a judge that compares in both orders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main
from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.data.files import read_records
from burnish.data.pair_questions import PAIR_TEMPLATE, fill_pair_template, verdict_of
from burnish.data.row import Row
from burnish.data.tasks.registry import make_demonstrations, make_preferences, make_task
from burnish.rewards.pair_verdicts import rm_r1
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from tests.rewards.judge_server import Body, Endpoint, Reply, serving

A, B = "<answer>[[A]]</answer>", "<answer>[[B]]</answer>"


@pytest.mark.parametrize(
    ("completion", "for_a", "for_b"),
    [
        (f"reasons {A}", 1, -1),
        (f"reasons {B}", -1, 1),
        (A + "x" * (80 - len(A)), 1, -1),  # the tag begins with the 80th character from the end
        (A + "x" * (81 - len(A)), -1, -1),
        (f"{A} {B}", -1, -1),
        (f"{A}{'x' * 80}{B}", -1, 1),  # an earlier tag is not in the last 80 characters
        (f"{B} no, {B}", -1, 1),
        ("[[A]]", -1, -1),
        ("<answer>A</answer>", -1, -1),
        ("<answer>[[a]]</answer>", -1, -1),
        ("<think></think><answer>[[C]]</answer>", -1, -1),  # the form earns nothing
        ("", -1, -1),
    ],
)
def test_a_verdict_earns_one_or_minus_one(completion: str, for_a: int, for_b: int) -> None:
    for answer, value in (("A", for_a), ("B", for_b)):
        result = rm_r1(completion, answer, {})
        assert (result.value, result.accuracy) == (value, float(value == 1))
        assert result.parts["unread"] == float(for_a == for_b == -1)


def test_an_expected_verdict_other_than_a_or_b_is_an_error_of_the_row() -> None:
    with pytest.raises(ValueError, match="'chosen' is neither A nor B"):
        rm_r1(A, "chosen", {})


def write_pairs(path: Path) -> None:
    rows = [
        {"id": "x", "prompt": "2+2? {second}", "chosen": "4", "rejected": "5 {first}"},
        {"prompt": [{"role": "user", "content": "3+3?"}], "chosen": "6", "rejected": "6 "},
        {"chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}],
         "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "bad"}]},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_pair_is_asked_in_both_orders_and_no_position_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path / "pairs.jsonl")
    out = tmp_path / "questions.jsonl"
    assert main(["data", "questions", str(tmp_path / "pairs.jsonl"), str(out)]) == 0
    assert "2, each in both orders" in capsys.readouterr().out
    rows = [record for _, record in read_records(str(out), None)]
    assert [row["answer"] for row in rows] == ["A", "B", "A", "B"]
    assert [row["pair"] for row in rows][:2] == ["x", "x"]
    assert rows[0]["prompt"] == fill_pair_template(PAIR_TEMPLATE, "2+2? {second}", "4", "5 {first}")
    assert rows[1]["prompt"] == fill_pair_template(PAIR_TEMPLATE, "2+2? {second}", "5 {first}", "4")
    for tag in (A, B):  # a judge that always names one position earns nothing on average
        assert sum(rm_r1(tag, row["answer"], {}).value or 0 for row in rows) == 0
    (tmp_path / "t.txt").write_text("{first}")
    again = ["data", "questions", str(tmp_path / "pairs.jsonl"), str(out), "--template", str(tmp_path / "t.txt")]
    assert main(again) != 0
    assert "no {second}, so the judge would not see both answers" in capsys.readouterr().err


def judged(endpoint: Endpoint, **options: Any) -> Any:
    options = {"url": endpoint.url, "model": "m", "backoff_s": 0.01, "parser": "pair", **options}
    requests = [ScoreRequest(name, "6 x 7?", name, "s", "good", {}) for name in ("best", "bad")]
    with Rewards(Reward(parts=[{"name": "judge", "options": options}]), None) as rewards:
        return rewards.score(requests)


def prefers(order: list[str]) -> Any:
    def reply(body: Body, number: int) -> Reply:
        text = body["messages"][0]["content"]
        places = [text.index(f":\n{name}\n") if f":\n{name}\n" in text else None for name in order]
        first, second = (place for place in places if place is not None)
        return Reply("Because. " + (A if first < second else B))

    return reply


def test_a_pairwise_judge_asks_in_both_orders_and_a_preferred_position_gains_nothing() -> None:
    with serving(prefers(["best", "good", "bad"])) as endpoint:
        scores = judged(endpoint)
        assert [(s.reward, s.accuracy) for s in scores] == [(1.0, 1.0), (0.0, 0.0)]
        assert scores[0].parts["judge/consistent"] == 1.0
        asked = set(endpoint.questions)
        assert fill_pair_template(PAIR_TEMPLATE, "6 x 7?", "best", "good") in asked
        assert fill_pair_template(PAIR_TEMPLATE, "6 x 7?", "good", "best") in asked
    with serving(lambda body, number: Reply(A)) as endpoint:
        scores = judged(endpoint)
        assert [(s.reward, s.accuracy, s.parts["judge/consistent"]) for s in scores] == [(0.5, 0.0, 0.0)] * 2
    with serving(lambda body, number: Reply(A if ":\nbest\n" in body["messages"][0]["content"] else "?")) as endpoint:
        scores = judged(endpoint, parse_retries=0)
        assert [(s.reward, s.parts["judge/parse_fail"]) for s in scores] == [(0.5, 0.0), (0.0, 1.0)]


@pytest.mark.parametrize("options", [{"template": "{question} {first}"}, {"low": 1.0, "high": 5.0}])
def test_options_that_make_no_sense_with_a_pair_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"both answers|no effect with parser pair"):
        Rewards(
            Reward(
                parts=[{"name": "judge", "options": {"url": "http://h/v1", "model": "m", "parser": "pair", **options}}]
            ),
            None,
        )


def test_the_small_task_asks_each_pair_twice_and_its_pairs_are_those_of_the_reward_model() -> None:
    task = make_task("pair_verdict", {}, 3)
    for split in ("train", "test"):
        pairs = make_preferences("pair_verdict", {"num": 20}, 3, split)
        for index, pair in enumerate(pairs):
            first, second = task.row(split, 2 * index), task.row(split, 2 * index + 1)
            assert (first.answer, second.answer) == ("A", "B")
            assert first.prompt == f"{pair['prompt']}{pair['chosen']}:A {pair['rejected']}:B?"
            assert second.prompt == f"{pair['prompt']}{pair['rejected']}:A {pair['chosen']}:B?"
            assert pair["chosen"] == "".join(sorted(pair["prompt"][:-1])) != pair["rejected"]
            assert task.score(f"0{A}", first.answer, {}) == 1.0 == -task.score(f"0{A}", second.answer, {})
    shown = make_demonstrations("pair_verdict", {"num": 200, "flawed": 0.0}, 1)
    assert all(verdict_of(row["completion"]) is not None for row in shown)
    assert set("".join(row["prompt"] + row["completion"] for row in shown)) <= set(task.alphabet)
    halves = {"A": 0, "B": 0}
    for row in shown:
        solution = row["completion"].partition(":")[0]
        letter = verdict_of(row["completion"]) or ""
        halves[letter] += 1
        assert f"{solution}:{letter}" in row["prompt"]
    assert min(halves.values()) > 60


@pytest.mark.parametrize(
    ("part", "answer", "reason"), [("rm_r1", "C", "neither A nor B"), ("proof", "p ->", "cannot be read")]
)
def test_an_answer_that_cannot_be_used_is_found_before_anything_is_sampled(part: str, answer: str, reason: str) -> None:
    with Rewards(Reward(parts=[part], workers=1), None) as rewards, pytest.raises(UserError, match=reason):
        rewards.check([Row("r/0", "q", "r", answer, {})])
