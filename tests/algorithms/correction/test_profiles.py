"""Where the gap is: by position, by probability, and the worst tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.correction import profile_by_position, profile_by_probability, worst_tokens
from burnish.config.errors import UserError
from burnish.core.batch import Batch

Build = Callable[..., Batch]


def test_positions_count_what_the_model_wrote(sampled: Batch) -> None:
    found = profile_by_position(sampled)
    assert found.edges.tolist() == [0, 1, 3, 7]
    assert found.count.tolist() == [4, 7, 2]
    # gaps: .05 .05 .1 0 | 0 .1 | .05 0 1.1 | 0 0 .1 .1
    assert found.mean.tolist() == pytest.approx([0.1 / 4, (0.05 + 0.1 + 0.1 + 0 + 1.1 + 0 + 0.1) / 7, 0.1 / 2])
    assert found.max.tolist() == pytest.approx([0.05, 1.1, 0.1])


def test_a_tools_answer_is_no_position(build: Build) -> None:
    batch = build([[-1.0, -1.0, -1.0]], [[-1.5, -9.0, -1.25]], [[True, False, True]])
    found = profile_by_position(batch)
    assert found.count.tolist() == [1, 1]
    assert found.mean.tolist() == [0.5, 0.25]


def test_probabilities_are_in_decades(build: Build) -> None:
    probabilities = [1.0, 0.5, 0.11, 0.05, 1.1e-5, 1e-7 * 1.01, 1e-9, 0.0]
    behaviour = [math.log(p) if p > 0 else -math.inf for p in probabilities]
    old = [b - 0.25 if math.isfinite(b) else -1.0 for b in behaviour]
    found = profile_by_probability(build([old], [behaviour]))
    assert found.edges.tolist() == pytest.approx([0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1])
    assert found.count.tolist() == [2, 0, 1, 0, 1, 0, 0, 1, 3]
    assert found.mean.tolist()[1:] == pytest.approx([0, 0.25, 0, 0.25, 0, 0, 0.25, 0.25])
    assert found.max.tolist()[0] == pytest.approx(299), "a token the engine gave no probability"


def test_the_worst_tokens_are_found_where_they_are(sampled: Batch) -> None:
    found = worst_tokens(sampled, 2)
    assert found.sequence.tolist()[0] == 2
    assert found.position.tolist()[0] == 3  # the prompt's token is position 0
    assert found.old_logp.tolist()[0] == -1.5
    assert found.behaviour_logp.tolist()[0] == -2.6
    assert len(found.sequence) == 2
    assert worst_tokens(sampled, 100).sequence.shape == (13,)


def test_the_worst_tokens_show_what_was_reported(build: Build) -> None:
    found = worst_tokens(build([[-1.0, -2.0], [-3.0]], [[-1.0, -math.inf], [-3.5]]))
    assert found.sequence.tolist() == [0, 1, 0]
    assert found.position.tolist() == [1, 0, 0]
    assert found.behaviour_logp.tolist() == [-math.inf, -3.5, -1.0]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_every_written_token_is_in_one_bucket(ragged: Build, seed: int) -> None:
    batch = ragged(seed)
    mask = batch.action_mask
    gaps = (batch.token["old_logp"] - batch.token["behaviour_logp"]).abs()[mask]
    for found in (profile_by_position(batch), profile_by_probability(batch)):
        assert int(found.count.sum()) == int(mask.sum())
        assert float((found.mean * found.count).sum()) == pytest.approx(float(gaps.sum()))
        assert float(found.max.max()) == pytest.approx(float(gaps.max()))
        assert found.edges.shape[0] == found.count.shape[0] + 1
    worst = worst_tokens(batch, 3)
    shown = (worst.old_logp - worst.behaviour_logp).abs()
    assert shown.tolist() == pytest.approx(gaps.sort(descending=True).values[:3].tolist())


def test_a_missing_log_prob_is_refused(build: Build) -> None:
    batch = build([[-1.0, -2.0]], [[math.nan, -2.0]])
    for function in (profile_by_position, profile_by_probability, worst_tokens):
        with pytest.raises(UserError, match="the engine's log-probs are nan"):
            function(batch)


def test_a_batch_without_a_written_token_has_empty_profiles(build: Build) -> None:
    batch = build([[-1.0]], [[-1.0]], [[False]])
    assert int(profile_by_position(batch).count.sum()) == 0
    assert int(profile_by_probability(batch).count.sum()) == 0
    assert worst_tokens(batch).sequence.shape == torch.Size([0])
