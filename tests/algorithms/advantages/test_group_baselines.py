"""MaxRL, AsymRE and OPMD: the worked numbers of ALGORITHMS-2026.md N1.1 to N1.3, exact expectations, and the invariants of N9."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from burnish.algorithms.spec import Algorithm
from burnish.config.errors import UserError
from tests.algorithms.advantages.test_group_relative import close, with_rewards
from tests.algorithms.functions_with_defaults import asymre, grpo, max_rl, opmd, softmean

GROUPS = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2 + [4] * 4
REWARDS: list[float] = [1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0.2, 0.8, 0, 0, 0, 0]
BARE = {"ratio": "none", "clip": "none"}


def test_max_rl() -> None:
    expected = [1, -1, -1, 1, 3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, -0.6, 0.6, 0, 0, 0, 0]
    close(max_rl(with_rewards(REWARDS, GROUPS)), expected)
    close(max_rl(with_rewards([0.5, 1, 1, 1], [0, 1, 1, 1])), [0, 0, 0, 0])
    close(max_rl(with_rewards([0.5, 1, 1, 1], [0, 1, 1, 1]), singleton="raw"), [0.5, 0, 0, 0])
    with pytest.raises(UserError, match=r"reward -0\.5: use rewards of 0 or more"):
        max_rl(with_rewards([1, -0.5], [0, 0]))


@pytest.mark.parametrize(("size", "expected"), [(1, 0), (2, 0.21), (4, 0.4599), (8, 0.642352)])
def test_the_expected_gradient_of_max_rl_is_the_likelihoods_series_cut_below_the_group_size(
    size: int, expected: float
) -> None:
    """E[mean_i A_i score_i] over all outcomes of a group, by p = 0.3 and the score y - p of its logit."""
    p, total = 0.3, 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        chance = p ** sum(outcome) * (1 - p) ** (size - sum(outcome))
        advantages = max_rl(with_rewards(list(outcome), [0] * size)).tolist()
        total += chance * sum(a * (y - p) for a, y in zip(advantages, outcome, strict=True)) / size
    assert total == pytest.approx(expected, abs=1e-6)
    series = p * (1 - p) * sum((1 - p) ** (k - 1) for k in range(1, size))
    assert total == pytest.approx(series, abs=1e-12)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=2, max_size=8), st.sampled_from([0.5, 2.0, 8.0]))
def test_max_rl_is_scale_free_and_sums_to_zero(rewards: list[float], scale: float) -> None:
    batch = with_rewards(rewards, [0] * len(rewards))
    found = max_rl(batch)
    assert float(found.sum()) == pytest.approx(0, abs=1e-9)
    close(max_rl(with_rewards([scale * r for r in rewards], [0] * len(rewards))), found.tolist(), atol=1e-12)
    mean = sum(rewards) / len(rewards)
    if mean > 0:
        close(found, (grpo(batch, std="none") / mean).tolist(), atol=1e-12)


def test_asymre() -> None:
    rewards = [1, 0, 0, 1, 0.2, 0.8, 1, 1, 1, 1, 0.7]
    groups = [0] * 4 + [1] * 2 + [2] * 4 + [3]
    close(asymre(with_rewards(rewards, groups)), [0.6, -0.4, -0.4, 0.6, -0.2, 0.4, 0.1, 0.1, 0.1, 0.1, 0.7])
    with pytest.raises(ValidationError, match="less than 0"):
        Algorithm.model_validate({"advantage": {"name": "asymre", "delta": 0.0}})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, -0.5, -0.5, 0.5]),
        ({"baseline": "logavgexp"}, [0.379885, -0.620115, -0.620115, 0.379885]),
        ({"baseline": "logavgexp", "tau": 0.1}, [0.06931, -0.93069, -0.93069, 0.06931]),
    ],
)
def test_opmd(options: dict[str, Any], expected: list[float]) -> None:
    batch = with_rewards([1, 0, 0, 1, 0.7, 0.3, 0.3], [0, 0, 0, 0, 1, 2, 2])
    found = opmd(batch, **options)
    close(found, [*expected, 0.7, 0, 0], atol=1e-5)
    if options:
        several = torch.tensor([0, 1, 2, 3, 5, 6])
        close(found[several], softmean(batch, beta=1 / options.get("tau", 1.0))[several].tolist(), atol=1e-12)


def test_taus_of_opmd_that_do_nothing_or_differ_are_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"belongs to baseline logavgexp: for the step size set algorithm\.loss\.tau"
    ):
        Algorithm.model_validate({"advantage": {"name": "opmd", "tau": 2.0}})
    soft = {"name": "opmd", "baseline": "logavgexp", "tau": 2.0}
    with pytest.raises(ValidationError, match="they are one temperature, set both"):
        Algorithm.model_validate({**BARE, "advantage": soft, "loss": "opmd"})
    assert Algorithm.model_validate({**BARE, "advantage": soft, "loss": {"name": "opmd", "tau": 2.0}})
    with pytest.raises(ValidationError, match=r"advantage max_rl divides by their mean: use algorithm\.kl\.loss"):
        Algorithm.model_validate({"advantage": "max_rl", "kl": {"reward": {"coef": 0.1}, "reference": "frozen"}})


@pytest.mark.parametrize(
    ("shaper", "is_refused"),
    [
        ("signed", True),
        ({"name": "signed", "wrong": 0.0}, False),
        ("soft_overlong", True),
        ("repetition_dense", True),
        ("t1_penalty", True),
        ("cosine", True),
        ({"name": "cosine", "wrong": (0.0, 0.5), "exceeded": 0.0}, False),
        ("stop_properly", False),
        ({"name": "stop_properly", "coef": -1.0}, True),
        ("lcpo_exact", True),
        ("lcpo_max", False),
        ("plug.py:any", False),
    ],
)
def test_max_rl_refuses_shapers_that_make_rewards_negative(shaper: Any, is_refused: bool) -> None:
    given = {"advantage": "max_rl", "shaping": [shaper]}
    if not is_refused:
        assert Algorithm.model_validate(given).shaping
        return
    with pytest.raises(ValidationError, match="can make rewards negative, and advantage max_rl divides by their mean"):
        Algorithm.model_validate(given)


def test_replay_needs_a_ratio_or_a_baseline_below_the_mean() -> None:
    for advantage, loss in (("asymre", "logprob"), ("opmd", "opmd")):
        assert Algorithm.model_validate({**BARE, "advantage": advantage, "loss": loss, "replay": {}}).replay is not None
    with pytest.raises(ValidationError, match="loss logprob has no ratio"):
        Algorithm.model_validate({**BARE, "advantage": "grpo", "loss": "logprob", "replay": {}})
