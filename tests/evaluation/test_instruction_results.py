"""IFEval's four published numbers: by prompt and by instruction, strict and loose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from burnish.data.row import answer_text
from burnish.data.text_datasets import ifeval
from burnish.evaluation.instruction_results import instruction_estimates, instructions_of
from burnish.evaluation.result import result_json, result_text, summarise
from burnish.evaluation.statistics import clustered_interval, ratio_interval
from tests.evaluation.completion_rows import row

NO_COMMA, SUN, QUOTED = "punctuation:no_comma", "keywords:existence", "startend:quotation"


def answered(question: str, completion: str, ids: Sequence[str], sample: int = 0, **more: Any) -> dict[str, Any]:
    """A completion for a published prompt with these instructions."""
    arguments = [{"keywords": ["sun"], "num_words": None} if one == SUN else {} for one in ids]
    example = ifeval({"prompt": "p", "instruction_id_list": list(ids), "kwargs": arguments, "key": 1})
    return row(question, sample, 0.0, answer=answer_text(example.answer), completion=completion, **more)


ROWS = [
    answered("a", "The sun is here.", [NO_COMMA, SUN]),
    answered("b", "The sun, again.", [NO_COMMA, SUN]),  # one of two
    answered("c", 'Sure:\n"All of it"', [QUOTED]),  # followed without its first line
    answered("d", "no", [SUN]),
]


def test_the_four_numbers_are_those_of_the_published_definitions() -> None:
    found = summarise(ROWS).instructions
    assert found is not None
    means = {name: estimate.mean for name, estimate in instruction_estimates(found).items()}
    assert means == pytest.approx(
        {"prompt strict": 1 / 4, "prompt loose": 2 / 4, "instruction strict": 3 / 6, "instruction loose": 4 / 6}
    )
    assert found.num_instructions == 6
    plain = result_json(summarise(ROWS))["instructions"]
    assert (plain["instruction_loose"]["value"], plain["num_instructions"]) == (pytest.approx(4 / 6), 6)
    assert "instruction strict  0.500  (95% interval" in result_text(summarise(ROWS))


def test_samples_of_a_prompt_count_together_and_failed_and_late_ones_follow_nothing() -> None:
    late = answered("a", "The sun is here.", [NO_COMMA, SUN], sample=1, timed_out=True)
    failed = answered("a", "The sun is here.", [NO_COMMA, SUN], sample=2) | {"accuracy": None}
    found = summarise([ROWS[0], late, failed]).instructions
    assert found is not None
    assert (found.by_prompt["strict"].mean, found.by_instruction["strict"].mean) == (0.5, 0.5)
    assert found.num_instructions == 2


@pytest.mark.parametrize(
    "answer", [None, "7", "[1, 2]", "[", "[]", json.dumps([{"id": "other"}]), json.dumps({"id": SUN})]
)
def test_other_answers_are_no_instructions(answer: str | None) -> None:
    assert instructions_of(answer) is None
    assert summarise([row("q", 0, 1.0, answer=answer)]).instructions is None


def test_a_ratio_of_single_trials_is_the_mean_and_more_instructions_narrow_it() -> None:
    values = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert ratio_interval(values, [1.0] * 8) == pytest.approx(clustered_interval(values, 8))
    mixed = ratio_interval([2, 1, 2, 1, 2, 1], [3] * 6)
    assert mixed.mean == 0.5
    assert (
        mixed.low > ratio_interval([3, 0, 3, 0, 3, 0], [3] * 6).low
    )  # all or nothing: no more than one trial a question
    assert ratio_interval([3, 0, 3, 0, 3, 0], [3] * 6) == pytest.approx(clustered_interval([1, 0] * 3, 6))
    assert ratio_interval([3, 2], [3, 2]).high == 1.0
    assert 0 < ratio_interval([3, 2], [3, 2]).low < 1
