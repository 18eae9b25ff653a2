"""Choosing prompts and samples, merging and stages (ALGORITHMS.md 12.1 to 12.3, 12.7, 13)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.curriculum.prompt_selection import (
    agreement,
    guessable,
    limr,
    limr_scores,
    long2short_pairs,
    merge_weights,
    resolve_stages,
    shortest_correct,
)
from burnish.config.errors import UserError

NAN = float("nan")
CURVES = [[0.2, 0.5, 0.7, 0.9], [0.0, 0.0, 0.1, 0.1], [1.0, 1.0, 1.0, 1.0]]


def rows(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- prompts -----------------------------------------------------------------------------------------------------------


def test_the_worked_learning_impact() -> None:
    torch.testing.assert_close(limr_scores(rows(CURVES)), rows([[0.881463, -0.113493, 0.0]])[0], atol=1e-5, rtol=0)
    assert limr(rows(CURVES)).tolist() == [True, False, False]
    assert limr(rows(CURVES), threshold=0.0).tolist() == [True, False, True]


def test_a_missing_epoch_takes_the_next_ones_value() -> None:
    gaps = [[NAN, NAN, 0.7, 0.9], *CURVES[1:]]
    filled = [[0.7, 0.7, 0.7, 0.9], *CURVES[1:]]
    assert torch.equal(limr_scores(rows(gaps)), limr_scores(rows(filled)))


def test_a_prompt_that_is_still_missing_leaves_the_average_too() -> None:
    scores = limr_scores(rows([*CURVES, [1.0, 0.0, 0.0, NAN]]))
    assert torch.equal(scores[:3], limr_scores(rows(CURVES)))
    assert scores[3] == -torch.inf


def test_nothing_is_kept_when_everything_was_solved_throughout_or_nothing_is_whole() -> None:
    assert limr_scores(torch.ones(3, 4)).tolist() == [-torch.inf] * 3
    assert limr_scores(torch.full((3, 4), NAN)).tolist() == [-torch.inf] * 3


def test_labels_need_some_agreement_and_perhaps_not_all() -> None:
    agreed = torch.tensor([0, 3, 8, 1])
    assert agreement(agreed).nonzero().squeeze(1).tolist() == [1, 2, 3]
    assert agreement(agreed, at_most=7).nonzero().squeeze(1).tolist() == [1, 3]
    assert agreement(agreed, at_least=3).nonzero().squeeze(1).tolist() == [1, 2]


def test_one_right_guess_without_reasoning_makes_a_prompt_guessable() -> None:
    assert guessable(torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0], [0] * 8])).tolist() == [True, False]


# --- samples -----------------------------------------------------------------------------------------------------------


def test_the_shortest_right_sample_of_each_group() -> None:
    lengths = torch.tensor([50, 30, 40, 20, 7, 9, 9, 8])
    correct = torch.tensor([1, 1, 1, 0, 0, 1, 1, 0])
    groups = torch.tensor([6, 6, 6, 6, 2, 4, 4, 2])
    assert shortest_correct(lengths, correct, groups).tolist() == [-1, 5, 1]  # groups 2, 4, 6


def test_the_worked_pairs_of_long2short() -> None:
    lengths, correct = torch.tensor([100, 140, 150, 300, 60]), torch.tensor([1, 1, 1, 0, 0])
    chosen, rejected = long2short_pairs(lengths, correct, torch.zeros(5, dtype=torch.int64))
    assert (chosen.tolist(), rejected.tolist()) == ([0, 0], [2, 3])
    assert long2short_pairs(lengths, correct, torch.zeros(5, dtype=torch.int64), ratio=1.4)[1].tolist() == [1, 2, 3]


def test_the_chosen_sample_is_never_rejected_too() -> None:
    lengths, correct, groups = torch.tensor([0, 4]), torch.tensor([1, 1]), torch.tensor([2, 2])
    assert [t.tolist() for t in long2short_pairs(lengths, correct, groups)] == [[0], [1]]


def test_a_group_without_a_right_sample_gives_no_pair() -> None:
    chosen, rejected = long2short_pairs(torch.tensor([5, 9]), torch.tensor([0, 0]), torch.tensor([3, 3]))
    assert chosen.numel() == rejected.numel() == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), min_size=1, max_size=20))
def test_pairs_are_those_a_plain_loop_finds(samples: list[tuple[int, int, bool]]) -> None:
    expected = []
    for g in sorted({group for group, _, _ in samples}):
        own = [(i, length, right) for i, (group, length, right) in enumerate(samples) if group == g]
        right = [(length, i) for i, length, ok in own if ok]
        if right:
            shortest, best = min(right)
            expected += [
                (best, i)
                for i, length, ok in own
                if i != best and (length >= 1.5 * shortest if ok else length > shortest)
            ]
    groups, lengths, correct = (torch.tensor(column) for column in zip(*samples, strict=True))
    chosen, rejected = long2short_pairs(lengths, correct, groups)
    assert sorted(zip(chosen.tolist(), rejected.tolist(), strict=True)) == sorted(expected)


# --- weights and stages ------------------------------------------------------------------------------------------------


def test_merging_is_the_weighted_mean_in_the_type_of_the_first() -> None:
    long, short = {"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([3.0, -1.0])}
    assert merge_weights(long, short)["w"].tolist() == [2.0, 1.0]
    assert merge_weights(long, short, weight=1.0)["w"].tolist() == [1.0, 3.0]
    assert merge_weights(long, short, weight=0.25)["w"].tolist() == [2.5, 0.0]
    half = merge_weights({"w": torch.tensor([1.0]).bfloat16()}, {"w": torch.tensor([4.0]).bfloat16()}, weight=0.1)
    assert half["w"].dtype == torch.bfloat16
    assert half["w"].item() == 3.703125  # 3.7 rounded once; in bfloat16 arithmetic it is 3.6875


def test_models_that_differ_are_not_merged() -> None:
    with pytest.raises(UserError, match="only one has 'b'"):
        merge_weights({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(UserError, match=r"shape of 'a': \(1,\) and \(2,\)"):
        merge_weights({"a": torch.ones(1)}, {"a": torch.ones(2)})


def test_the_four_stages_of_r1_resolve() -> None:
    stages = [("cold", "base"), ("reasoning", "cold"), ("sft", "base"), ("all", "sft")]
    assert resolve_stages(stages) == [None, 0, None, 2]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([("a", "b"), ("b", "base")], r"stages\[0\] \(a\): it starts from 'b', which has not run by then"),
        ([("a", "a")], "which has not run by then"),
        ([("cold", "base"), ("rl", "clod")], r"no stage is called; did you mean 'cold'\?"),
        ([("a", "base"), ("a", "base")], r"stages\[1\]: the name 'a' is taken"),
        ([("base", "base")], "the name 'base' is taken"),
    ],
)
def test_a_stage_that_cannot_start_is_named(stages: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_stages(stages)
