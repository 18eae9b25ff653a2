"""Right or wrong as classification: the worked numbers of ALGORITHMS.md 6.3, a plain oracle, and the edges of groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_functions import balanced_weights, relative_scores
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import bce

Z = torch.tensor([0.3, 0.4, 0.1, 1.0], dtype=torch.float64)
LENGTHS = torch.tensor([4, 2, 3, 4])
ONE = torch.zeros(4, dtype=torch.int64)
ALL = torch.ones(4, dtype=torch.bool)


def number(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, number(expected), atol=atol, rtol=0)


def judged(batch: Batch, accuracy: list[float], groups: list[int] | None = None) -> Batch:
    batch = batch.with_sequence(accuracy=number(accuracy))
    return batch if groups is None else batch.with_sequence(group_ids=torch.tensor(groups))


def test_scores_are_relative_to_the_other_samples() -> None:
    close(relative_scores(Z, ONE, 1, ALL, "rloo"), [-0.2, -0.066667, -0.466667, 0.733333])


def test_loss_and_gradient(f1_group: Batch, evaluate: Any) -> None:
    result = evaluate(bce, f1_group)
    assert result.value == pytest.approx(0.584387, abs=1e-6)
    slopes = torch.repeat_interleave(number([-0.182815, 0.161576, 0.128931, -0.107692]), LENGTHS)
    torch.testing.assert_close(result.gradient, slopes, atol=1e-6, rtol=0)
    assert result.metrics["bce_accuracy"] == pytest.approx(3 / 4)  # the first sample is right and scored below 0


def test_the_rarer_class_weighs_more(f1_group: Batch, evaluate: Any) -> None:
    close(balanced_weights(number([1, 0, 0, 0]), ONE, 1, ALL), [2, 0.666667, 0.666667, 0.666667])
    assert evaluate(bce, judged(f1_group, [1, 0, 0, 0])).value == pytest.approx(0.77786, abs=1e-6)


def test_a_group_of_one_class_has_weights_of_one(f1_group: Batch, evaluate: Any) -> None:
    for label in (0.0, 1.0):
        close(balanced_weights(number([label] * 4), ONE, 1, ALL), [1, 1, 1, 1])
        same = judged(f1_group, [label] * 4)
        assert evaluate(bce, same).value == evaluate(bce, same, class_weights=False).value


def oracle(psi: list[float], labels: list[float], groups: list[int], normalise: str, weighted: bool) -> float:
    """The definition, one sample at a time."""
    total = 0.0
    for i, (p, y) in enumerate(zip(psi, labels, strict=True)):
        mine = [j for j in range(len(psi)) if groups[j] == groups[i]]
        others = [psi[j] for j in mine if j != i]
        if normalise == "naive" or not others:
            s = p
        elif normalise == "rloo":
            s = p - sum(others) / len(others)
        else:
            values = [psi[j] for j in mine]
            mean = sum(values) / len(values)
            s = (p - mean) / (math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) + 1e-6)
        same = [j for j in mine if labels[j] == y]
        w = len(mine) / (2 * len(same)) if weighted and len(same) < len(mine) else 1.0
        probability = 1 / (1 + math.exp(-s))
        total -= w * math.log(probability if y == 1 else 1 - probability)
    return total / len(psi)


@pytest.mark.parametrize("normalise", ["rloo", "grpo", "naive"])
@pytest.mark.parametrize("class_weights", [True, False])
@pytest.mark.parametrize("groups", [[0, 0, 0, 0], [7, -2, 7, 7], [3, 1, 1, 3], [5, 6, 7, 8]])
def test_every_option_against_the_definition(
    f1_group: Batch, evaluate: Any, normalise: str, class_weights: bool, groups: list[int]
) -> None:
    labels = [1.0, 0, 0, 1]
    options = {"beta": 2.0, "normalise": normalise, "class_weights": class_weights}
    got = evaluate(bce, judged(f1_group, labels, groups), **options).value
    assert got == pytest.approx(oracle((2 * Z).tolist(), labels, groups, normalise, class_weights), abs=1e-9)


def test_scores_per_token_are_mean_log_probs(f1_group: Batch, evaluate: Any) -> None:
    new = f1_group.token["new"][f1_group.loss_mask]
    means = [float(part.mean()) for part in new.split(LENGTHS.tolist())]
    got = evaluate(bce, f1_group, beta=3.0, per_token=True).value
    assert got == pytest.approx(oracle([3 * m for m in means], [1.0, 0, 0, 1], [0] * 4, "rloo", True), abs=1e-9)


def test_the_gradient_goes_through_the_siblings(f1_group: Batch, evaluate: Any) -> None:
    # Without a sample's own term its derivative is what the others' scores say about it: move one label to see it.
    one = evaluate(bce, judged(f1_group, [1, 0, 0, 1]), class_weights=False).gradient
    other = evaluate(bce, judged(f1_group, [1, 0, 0, 0]), class_weights=False).gradient
    assert (one[:4] - other[:4]).abs().min() > 1e-3


@pytest.mark.parametrize("normalise", ["rloo", "grpo", "naive"])
def test_the_first_update_on_a_batch_has_even_odds_and_a_sane_gradient(
    f1_group: Batch, evaluate: Any, normalise: str
) -> None:
    result = evaluate(bce, f1_group.with_token(old_logp=f1_group.token["new"]), normalise=normalise)
    assert result.value == pytest.approx(math.log(2), abs=1e-12)
    scale = {"naive": 1 / 8, "grpo": 1 / 8, "rloo": 1 / 6}[normalise]  # rloo = G/(G-1) times centring
    expected = torch.repeat_interleave(scale * number([-1, 1, 1, -1]), LENGTHS)
    torch.testing.assert_close(result.gradient, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("normalise", ["rloo", "grpo"])
def test_a_group_of_one_keeps_its_raw_score(normalise: str) -> None:
    groups = torch.tensor([0, 0, 1, 0])
    assert float(relative_scores(Z, groups, 2, ALL, normalise)[2]) == pytest.approx(0.1, abs=1e-12)


@pytest.mark.parametrize("normalise", ["rloo", "grpo", "naive"])
def test_a_sequence_out_of_the_loss_counts_nowhere(f1_group: Batch, evaluate: Any, normalise: str) -> None:
    out = f1_group.with_token(loss_mask=f1_group.loss_mask & (f1_group.sequence_ids != 2))
    out = judged(out, [1, 0, float("nan"), 1])  # nobody needs to have judged it
    left = judged(f1_group, [1, 0, 0, 1]).select(torch.tensor([0, 1, 3]))
    one, other = evaluate(bce, out, normalise=normalise), evaluate(bce, left, normalise=normalise)
    assert one.value == pytest.approx(other.value, abs=1e-12)
    torch.testing.assert_close(one.gradient, other.gradient, atol=1e-12, rtol=0)
    assert one.metrics == pytest.approx(other.metrics)


def test_a_group_is_its_living_members() -> None:
    alive = torch.tensor([True, True, False, True])
    close(balanced_weights(number([1, 0, 1, 0]), ONE, 1, alive), [1.5, 0.75, 1.5, 0.75])
    psi = number([-0.5, -0.5, 0.0, -0.5]).requires_grad_()  # those left are all alike: centred, not divided
    scores = relative_scores(psi, ONE, 1, alive, "grpo")
    close(scores[alive].detach(), [0, 0, 0], atol=1e-12)
    (gradient,) = torch.autograd.grad(scores[0], psi)
    close(gradient, [2 / 3, -1 / 3, 0, -1 / 3], atol=1e-12)


@pytest.mark.parametrize("odd", [float("nan"), 0.5, -1.0])
def test_accuracy_must_be_right_or_wrong(f1_group: Batch, evaluate: Any, odd: float) -> None:
    with pytest.raises(UserError, match=r"1 of 4 have another value .*use a reward that says right or wrong"):
        evaluate(bce, judged(f1_group, [1, odd, 0, 1]))


def test_an_unknown_normalisation_is_refused(f1_group: Batch, evaluate: Any) -> None:
    with pytest.raises(ValueError, match="expected rloo, grpo or naive"):
        evaluate(bce, f1_group, normalise="std")


def test_far_scores_stay_finite(f1_group: Batch, evaluate: Any) -> None:
    far = f1_group.with_token(new=f1_group.token["old_logp"] - 1e4 * (f1_group.sequence_ids + 1))
    result = evaluate(bce, far)
    assert math.isfinite(result.value)
    assert bool(result.gradient.isfinite().all())
