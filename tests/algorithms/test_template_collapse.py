"""How much answers depend on their prompts: the worked example of ALGORITHMS-2026.md N6.2, and batches made for it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from burnish.algorithms.template_collapse import (
    collapse_metrics,
    cross_batch,
    distinct_prompts,
    first_answers,
    prompt_dependence,
)
from burnish.core.batch import Batch
from burnish.core.segments import ids_from_offsets
from tests.algorithms.branches import branched, episodes, without_turns

SCORES = torch.tensor([[-2, -6], [-3, -5], [-7, -2], [-4, -3]], dtype=torch.float64)
OWN = torch.tensor([0, 0, 1, 1])


def test_information_and_entropies_of_the_worked_example() -> None:
    found = prompt_dependence(SCORES, OWN)
    assert found["mutual_information"] == pytest.approx(0.576883, abs=1e-6)
    assert (found["entropy_given_prompt"], found["entropy"]) == pytest.approx((2.5, 3.076883), abs=1e-6)
    assert found["z"] == pytest.approx(1.43279, abs=1e-5)
    assert found["retrieval"] == 1
    per_token = prompt_dependence(SCORES / torch.tensor([2.0, 3, 2, 2])[:, None], OWN)
    assert per_token["mutual_information"] == pytest.approx(0.419581, abs=1e-6)
    assert per_token["entropy_given_prompt"] == pytest.approx(1.125)


def game(rows: list[tuple[list[int], list[int]]], groups: list[int], rewards: list[float]) -> Batch:
    """One sequence per row: a prompt, an answer, an observation 9 and a second answer 8."""
    tokens = [[*prompt, *answer, 9, 8] for prompt, answer in rows]
    mask = [flag for prompt, answer in rows for flag in [*[False] * len(prompt), *[True] * len(answer), False, True]]
    lengths = torch.tensor([0, *map(len, tokens)])
    return Batch(
        torch.tensor([token for row in tokens for token in row]),
        lengths.cumsum(0),
        {"action_mask": torch.tensor(mask), "loss_mask": torch.tensor(mask)},
        {
            "group_ids": torch.tensor(groups),
            "trajectory_ids": torch.arange(len(rows)),
            "reward": torch.tensor(rewards, dtype=torch.float64),
        },
    )


ROWS = [([1, 2], [5, 5]), ([1, 2], [6]), ([3], [7, 7, 7]), ([3], [6]), ([1, 2], [5, 5])]


def test_every_prompt_meets_the_first_answer_to_every_prompt() -> None:
    batch = game(ROWS, [0, 0, 1, 1, 2], [0.0] * 5)
    answers = first_answers(batch)
    chosen = distinct_prompts(batch, answers, 8)
    assert chosen == [0, 2]  # the last group has the prompt of the first
    crossed = cross_batch(batch, answers, chosen)
    parts = [crossed.tokens[a:b].tolist() for a, b in zip(crossed.offsets, crossed.offsets[1:], strict=False)]
    assert parts == [[1, 2, 5, 5], [1, 2, 7, 7, 7], [3, 5, 5], [3, 7, 7, 7]]
    assert crossed.tokens[crossed.action_mask].tolist() == [5, 5, 7, 7, 7] * 2
    assert crossed.sequence["group_ids"].tolist() == [0, 0, 1, 1]


def knows_its_prompt(crossed: Batch) -> Tensor:
    """A policy that writes 5 after 1, 2 and 7 after 3, each with probability 1/2, and anything else with 1/8."""
    first = crossed.tokens[crossed.offsets[:-1]][ids_from_offsets(crossed.offsets)]
    fits = ((first == 1) & (crossed.tokens == 5)) | ((first == 3) & (crossed.tokens == 7))
    return torch.where(fits, math.log(1 / 2), math.log(1 / 8))


def ignores_its_prompt(crossed: Batch) -> Tensor:
    return torch.full((crossed.num_tokens,), math.log(1 / 4))


def test_a_template_has_the_entropy_and_not_the_information() -> None:
    batch = game(ROWS, [0, 0, 1, 1, 2], [1.0, 0.0, 1.0, 1.0, 3.0])
    found, template = (collapse_metrics(batch, policy) for policy in (knows_its_prompt, ignores_its_prompt))
    # Per token: log 1/2 against the mean of 1/2 and 1/8.
    assert found["collapse/mutual_information"] == pytest.approx(math.log(8 / 5), abs=1e-9)
    assert found["collapse/entropy_given_prompt"] == pytest.approx(math.log(2))
    assert (found["collapse/retrieval"], found["collapse/retrieval_chance"]) == (1.0, 0.5)
    matched = [2 * math.log(1 / 2), 3 * math.log(1 / 2)]
    marginal = [math.log((2**-n + 8**-n) / 2) for n in (2, 3)]
    expected = sum(m - q for m, q in zip(matched, marginal, strict=True)) / 2
    assert found["collapse/mutual_information_seq"] == pytest.approx(expected)
    assert template["collapse/mutual_information"] == pytest.approx(0, abs=1e-12)
    assert template["collapse/entropy_given_prompt"] == pytest.approx(math.log(4))
    # Groups of spread sqrt(1/2), 0 and one of one; 5, 5 answers the groups 0 and 2, and 6 the groups 0 and 1.
    assert found["collapse/reward_std"] == pytest.approx(math.sqrt(0.5) / 3)
    assert found["collapse/repeated_answers"] == 4 / 5


def test_branches_change_nothing_of_the_diagnosis() -> None:
    whole, cut = (without_turns(batch) for batch in (episodes(5), branched(episodes(5), 5)))
    one, other = (
        collapse_metrics(batch.with_sequence(demonstration=batch.sequence["demonstration"] & False), knows_its_prompt)
        for batch in (whole, cut)
    )
    assert one == pytest.approx(other)
    assert one["collapse/retrieval_chance"] < 1


def test_without_two_prompts_there_is_no_information_to_measure() -> None:
    alone = game(ROWS[:2], [0, 0], [0.5, 0.5])
    assert collapse_metrics(alone, ignores_its_prompt) == {
        "collapse/reward_std": 0.0,
        "collapse/repeated_answers": 0.0,
    }
