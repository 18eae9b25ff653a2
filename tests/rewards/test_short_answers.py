"""Short answers (`qa`) and the verifier that asks the row which one to use (`row`)."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.rewards.scoring import Rewards
from burnish.rewards.types import ScoreRequest
from burnish.rewards.verifiers import check_verifier, qa, row


@pytest.mark.parametrize(
    ("completion", "answer", "em", "f1"),
    [
        ("So <answer>The Beatles!</answer>", ["beatles"], 1.0, 1.0),
        ("\\boxed{New York City}", ["New York", "NYC"], 0.0, 0.8),
        ("14 December 1972", ["14 December 1972 UTC", "December 1972"], 0.0, 6 / 7),
        ("<answer></answer>", ["x"], 0.0, 0.0),
        ("no idea", ["Paris"], 0.0, 0.0),
        ("<answer>!!!</answer>", ["!!!"], 1.0, 1.0),
        ("<answer>the</answer>", ["The The"], 0.0, 2 / 3),
        ("<answer>wrong</answer> or <answer>Right</answer>", "right", 1.0, 1.0),
    ],
)
def test_short_answers_are_compared_as_words(completion: str, answer: Any, em: float, f1: float) -> None:
    assert qa(completion, answer, {}) == em
    assert qa(completion, answer, {}, metric="f1") == pytest.approx(f1)


def test_an_empty_expected_answer_raises() -> None:
    with pytest.raises(ValueError, match="no expected answer"):
        qa("x", [" "], {})
    with pytest.raises(UserError, match="metric 'bleu' is unknown"):
        check_verifier("qa", {"metric": "bleu"}, "here")


def test_a_row_may_name_its_own_verifier() -> None:
    assert row("<answer>Paris.</answer>", ["paris"], {"verifier": "qa"}) == 1.0
    assert row("it is 7", "7", {"verifier": "number"}) == 1.0
    assert row("it is 8", "7", {"verifier": "number"}) == 0.0
    with pytest.raises(ValueError, match="'rows' is not one of"):
        row("x", "y", {"verifier": "rows"})


def test_rows_of_several_verifiers_are_scored_by_one_part() -> None:
    requests = [
        ScoreRequest("a/0", "q", "#### 7", "gsm8k", "7", {"verifier": "number"}),
        ScoreRequest("a/1", "q", "<answer>Paris</answer>", "nq", ["paris"], {"verifier": "qa"}),
        ScoreRequest("a/2", "q", "London", "nq", ["paris"], {"verifier": "qa"}),
    ]
    with Rewards(Reward.model_validate({"parts": ["row"], "workers": 1})) as rewards:
        assert [score.accuracy for score in rewards.score(requests)] == [1.0, 1.0, 0.0]
        with pytest.raises(UserError, match="needs a column 'verifier'"):
            rewards.check([Row("b/0", "q", "b", "7")])
