"""Vision-SR1's two answers: with the picture, and from the description alone."""

from __future__ import annotations

import numpy as np
import pytest

from burnish.config.errors import UserError
from burnish.data.images import ImageInput
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.describe import DescribeThenAnswer
from tests.environments.games.transcripts import now

PROMPT = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": ImageInput(np.zeros((16, 16, 3), np.uint8))},
            {"type": "text", "text": "How many?"},
        ],
    }
]
GOOD = "<description>three {red} cars</description><think>so</think>\\boxed{3}"


def played(*answers: str, **options: object) -> list[Observation | End]:
    game = DescribeThenAnswer(verifier="number", **options)  # type: ignore[arg-type]
    seen: list[Observation | End] = [now(game.start(Episode("x", 0, PROMPT, "3")))]
    return [*seen, *(now(game.step(Answer(text, text))) for text in answers)]


def test_a_description_earns_what_can_be_answered_from_it() -> None:
    first, second, end = played(GOOD, "<think>..</think>\\boxed{3}")
    assert first == Observation()
    assert isinstance(second, Observation)
    assert second.new_conversation
    assert second.reward == pytest.approx(1.0)
    assert second.messages is not None
    text = second.messages[0]["content"]
    assert "How many?" in text
    assert "three {red} cars" in text
    assert end == End(1.0, success=True, metrics={"from_description": 1.0})
    assert played(GOOD, "4")[-1] == End(0.0, success=True, metrics={"from_description": 0.0})


def test_accuracy_and_form_are_weighed() -> None:
    wrong = played(GOOD.replace("3}", "4}"), "3", format_weight=0.3)
    assert wrong[1].reward == pytest.approx(0.3)
    assert wrong[2].success is False  # type: ignore[union-attr]
    informal = played("<description>three cars</description> 3")[1]
    assert informal.reward == pytest.approx(0.9)


def test_an_answer_without_a_description_ends_the_episode() -> None:
    for text in ("3", "<description> </description>3"):
        end = played(text)[-1]
        assert isinstance(end, End)
        assert end.reward == pytest.approx(0.9)
        assert end.success


def test_a_prompt_without_its_marks_is_an_error() -> None:
    with pytest.raises(UserError, match=r"prompt has no \{description\}"):
        DescribeThenAnswer(prompt="{question}")
    with pytest.raises(UserError, match="format_weight=2"):
        DescribeThenAnswer(format_weight=2)
