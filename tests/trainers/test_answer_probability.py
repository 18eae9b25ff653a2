"""Information-gain rewards of turns (ALGORITHMS-2026.md N5.7): the numbers, what is asked of the model, and a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from burnish.algorithms.spec import Algorithm
from burnish.config.errors import UserError
from burnish.core.batch import Batch, Ragged
from burnish.run.metrics import read_metrics
from burnish.trainers.answer_probability import answer_of, answer_probability
from tests.algorithms.advantages.test_turns_and_gigpo import batch_of, close
from tests.algorithms.functions_with_defaults import information_gain
from tests.trainers.test_options_over_steps import CORRECTED
from tests.trainers.tiny import TINY, run_of

THREE_TURNS = [[("a", 2, 0.0), ("b", 1, 0.0), ("c", 3, 1.0)], [("a", 2, 0.5)]]


def test_a_turn_earns_what_it_adds_to_the_probability_of_the_answer() -> None:
    batch = batch_of(THREE_TURNS)  # type: ignore[arg-type]
    column = Ragged(torch.tensor([0.1, 0.3, 0.25, 0.7], dtype=torch.float64), torch.tensor([0, 3, 4]))
    batch = replace(batch, ragged={**batch.ragged, "answer_probability": column})
    rewards = information_gain(batch, 1)
    # tokens: prompt 2, turn 2, seen 2, turn 1, seen 2, turn 3; the last turn has the outcome, and one turn alone gains nothing
    assert rewards.nonzero().squeeze(1).tolist() == [3, 6]
    close(rewards[[3, 6]].tolist(), [0.2, -0.05])
    close(information_gain(batch, 1, weight=2.0)[[3, 6]].tolist(), [0.4, -0.1])


def test_the_answer_is_asked_for_in_the_context_of_each_turn() -> None:
    batch, seen = batch_of(THREE_TURNS), list[Batch]()  # type: ignore[arg-type]

    def logprobs(asked: Batch) -> Tensor:
        seen.append(asked)
        return -0.1 * torch.arange(asked.num_tokens, dtype=torch.float64)

    column = answer_probability(batch, [[50, 51], [60]], [40], logprobs).ragged["answer_probability"]
    (asked,) = seen
    texts = [asked.tokens[a:b].tolist() for a, b in zip(asked.offsets, asked.offsets[1:], strict=False)]
    behind = [40, 50, 51]
    contexts = [list(range(n)) for n in (2, 6, 9)]  # the prompt; with a turn and what was seen; with two
    assert texts == [*([*context, *behind] for context in contexts), [0, 1, 40, 60]]
    assert asked.tokens[asked.action_mask].tolist() == [50, 51] * 3 + [60]
    assert column.offsets.tolist() == [0, 3, 4]
    ends = asked.offsets[1:].tolist()
    expected = [math.exp(-0.1 * (end - 1.5)) for end in ends[:3]] + [math.exp(-0.1 * (ends[3] - 1))]
    close(column.values.tolist(), expected)


def test_what_cannot_work_is_refused() -> None:
    assert (answer_of(["7", "seven"], "r"), answer_of(7, "r")) == ("7", "7")
    for nothing in (None, "", [], {"a": 1}, True):
        with pytest.raises(UserError, match=r"row r has .*: give every row an answer"):
            answer_of(nothing, "r")
    with pytest.raises(ValidationError, match=r"needs an advantage that gives turns a credit of their own .*not grpo"):
        Algorithm.model_validate({"shaping": ["information_gain"]})
    with pytest.raises(ValidationError, match=r"remove algorithm.replay"):
        Algorithm.model_validate({"shaping": ["information_gain"], "advantage": "rebn", "replay": {}})


def test_a_run_with_information_gain_learns_from_other_advantages(tmp_path: Path) -> None:
    first, second = (
        read_metrics(run_of(tmp_path / name, TINY, [*CORRECTED, "training.steps=1", *more]) / "metrics.jsonl")[-1]
        for name, more in (("with", []), ("without", ["algorithm.shaping=[]"]))
    )  # fmt: skip
    assert first["reward/mean"] == second["reward/mean"]  # the same games
    assert first["actor/grad_norm"] != pytest.approx(second["actor/grad_norm"], rel=1e-6)
