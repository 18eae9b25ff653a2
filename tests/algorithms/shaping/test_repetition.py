"""Repeated n-grams and what they cost (ALGORITHMS.md 10.6, 10.8)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.shaping.shapers import ngram_hashes, repeated_ngram_share, repeated_ngram_tokens
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import repetition, repetition_dense

texts = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=5)


def written(rows: list[list[int]], reward: float = 0.0) -> Batch:
    """Each row behind a prompt token that is part of nothing."""
    offsets = offsets_from_lengths(torch.tensor([len(row) + 1 for row in rows]))
    mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
    mask[offsets[:-1]] = False
    return Batch(
        torch.tensor([token for row in rows for token in [5, *row]]),
        offsets,
        {"action_mask": mask, "loss_mask": mask},
        {
            "reward": torch.full((len(rows),), reward, dtype=torch.float64),
            "group_ids": torch.zeros(len(rows), dtype=torch.int64),
        },
    )


def close(found: torch.Tensor, expected: list[float]) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


# --- sparse ------------------------------------------------------------------------------------------------------------

WORKED = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2, 1, 2, 3], [1]]


def test_the_share_of_repeats_of_the_worked_texts() -> None:
    close(repetition(written(WORKED), 1, ngram=2), [0, -0.75, -0.5, 0])
    close(repetition(written(WORKED, reward=1.0), 1, ngram=2, penalty=-0.2), [1, 0.85, 0.9, 1])


@given(texts, st.integers(1, 6))
def test_the_share_is_that_of_a_python_set(rows: list[list[int]], ngram: int) -> None:
    expected = []
    for row in rows:
        grams = [tuple(row[i : i + ngram]) for i in range(len(row) - ngram + 1)]
        expected.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    close(repeated_ngram_share(written(rows), ngram), expected)


def test_hashes_of_long_windows_are_equal_exactly_where_the_windows_are() -> None:
    tokens = torch.randint(0, 2, (3000,), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([tokens, tokens[:500]])
    for ngram in (9, 40, 64):
        grams = [tuple(w) for w in tokens.unfold(0, ngram, 1).tolist()]
        hashes = ngram_hashes(tokens, ngram).tolist()
        assert len(hashes) == len(grams)
        assert len(set(zip(grams, hashes, strict=True))) == len(set(hashes)) == len(set(grams))


def test_texts_that_break_polynomial_hashes_are_told_apart() -> None:
    bits = torch.tensor([bin(i).count("1") % 2 for i in range(2048)])  # Thue and Morse
    both = torch.cat([bits, 1 - bits])
    first, last = ngram_hashes(both, 2048)[[0, -1]].tolist()
    assert first != last


def test_tool_results_inside_a_text_take_no_place_in_its_windows() -> None:
    batch = written([[1, 2, 9, 1, 2, 9, 9, 1, 2]])
    tool = torch.tensor([False, False, False, True, False, False, True, True, False, False])
    seen = batch.with_token(action_mask=batch.action_mask & ~tool)
    close(repeated_ngram_share(seen, 2), repeated_ngram_share(written([[1, 2, 1, 2, 1, 2]]), 2).tolist())


def test_windows_and_repeats_go_over_all_sequences_of_a_trajectory_and_no_further() -> None:
    batch = written([[1, 2], [1, 2], [2, 1]])
    close(repeated_ngram_share(batch, 2), [0, 0, 0])
    joined = batch.with_sequence(trajectory_ids=torch.tensor([4, 4, 1]))
    close(repeated_ngram_share(joined, 2), [1 / 3, 1 / 3, 0])  # as one sequence 1, 2, 1, 2


def test_a_batch_with_nothing_written_has_no_repeats() -> None:
    close(repeated_ngram_share(written([[], []]), 3), [0, 0])
    assert repetition_dense(written([[], []]), 1, ngram=3).tolist() == [0, 0]


# --- dense -------------------------------------------------------------------------------------------------------------


def test_every_token_of_an_n_gram_seen_before_is_marked() -> None:
    found = repeated_ngram_tokens(written([[1, 2, 3, 1, 2, 3, 4]]), 2)
    close(-0.05 * found.double(), [0, 0, 0, 0, -0.05, -0.05, -0.05, 0])


@given(texts, st.integers(1, 5))
def test_marked_tokens_are_those_a_plain_loop_marks(rows: list[list[int]], ngram: int) -> None:
    expected: list[bool] = []
    for row in rows:
        seen: set[tuple[int, ...]] = set()
        marks = [False] * len(row)
        for i in range(len(row) - ngram + 1):
            gram = tuple(row[i : i + ngram])
            if gram in seen:
                marks[i : i + ngram] = [True] * ngram
            seen.add(gram)
        expected += [False, *marks]
    assert repeated_ngram_tokens(written(rows), ngram).tolist() == expected


@given(texts, st.integers(1, 3), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_the_plain_return_of_the_dense_rewards_is_the_discounted_return_of_the_penalties(
    rows: list[list[int]], ngram: int, gamma: float
) -> None:
    batch = written(rows)
    rewards = repetition_dense(batch, 1, ngram=ngram, gamma=gamma)
    penalties = -0.05 * repeated_ngram_tokens(batch, ngram).double()
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        plain = discounted = 0.0
        for t in range(end - 1, start, -1):
            plain += float(rewards[t])
            discounted = float(penalties[t]) + gamma * discounted
            assert plain == pytest.approx(discounted, abs=1e-9)
        assert float(rewards[start]) == 0  # the prompt


def test_the_dense_penalty_and_its_discount_act() -> None:
    batch = written([[1, 2, 3, 1, 2, 3, 4]])
    # the returns of -0.05 at three tokens, halved a step, are -0.0109375 -0.021875 -0.04375 -0.0875 -0.075 -0.05 0
    close(
        repetition_dense(batch, 1, ngram=2, gamma=0.5),
        [0, 0.0109375, 0.021875, 0.04375, -0.0125, -0.025, -0.05, 0],
    )
    close(repetition_dense(batch, 1, ngram=2, gamma=1.0, penalty=-0.1), [0, 0, 0, 0, -0.1, -0.1, -0.1, 0])
