"""Groups of tokens of two tokenizers: the worked numbers of ALGORITHMS-2026.md N6.6, and value and gradient through the heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.models.kernels import logprob
from burnish.models.kernels.aligned_groups import (
    AlignedGroups,
    GroupComparison,
    SharedVocabulary,
    group_loss,
    head_aligned,
    merged_log_mass,
    merged_positions,
    sorted_distance,
)
from burnish.models.kernels.divergence import head_comparison
from burnish.models.kernels.logprob import Distribution, Divergence


def numbers(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def vocabulary(shared: int, own: int, other: int) -> SharedVocabulary:
    """The first tokens are shared."""
    ids = torch.arange(shared)
    return SharedVocabulary(ids, ids, torch.arange(shared, shared + own), torch.arange(shared, shared + other))


@pytest.mark.parametrize(("merge", "expected"), [("observed", [0.42, 0.21, 0.07]), ("bayesian", [0.12, 0.42, 0.06])])
def test_the_distribution_of_a_group(merge: str, expected: list[float]) -> None:
    p = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]], dtype=torch.float64)
    group, logp = torch.tensor([0, 0]), p[[0, 1], [0, 1]].log()
    at = merged_positions(group, 1, merge)
    found = p[at] * merged_log_mass(logp, group, at, merge).exp()[:, None]
    torch.testing.assert_close(found, numbers(*expected), atol=1e-5, rtol=0)


def test_earlier_tokens_of_the_bayesian_form_have_a_least_probability() -> None:
    group, logp = torch.tensor([-1, 0, 0, 0, 1]), torch.tensor([-1.0, -30.0, -2.0, -3.0, -4.0])
    at = merged_positions(group, 2, "bayesian")
    assert at.tolist() == [3, 4]
    mass = merged_log_mass(logp, group, at, "bayesian")
    assert mass.tolist() == pytest.approx([-2 + torch.tensor(1e-8).log().item(), 0])
    first = merged_positions(group, 2, "observed")
    assert first.tolist() == [1, 4]
    assert merged_log_mass(logp, group, first, "observed").tolist() == pytest.approx([-5, 0])


def test_worked_numbers() -> None:
    assert float(sorted_distance(numbers(0.3, 0.5, 0.2), numbers(0.05, 0.6, 0.25, 0.1))) == pytest.approx(0.3)
    s, q = numbers(0.5, 0.2, 0.1, 0.15, 0.05).log(), numbers(0.4, 0.3, 0.1, 0.12, 0.08).log()
    both = vocabulary(3, 2, 2)
    weights = [(None, None, 0.02869), (1, 0, 0.007817), (0, 1, 0.06), (0.5, None, 0.033908), (1, 1, 0.067817)]
    for matched, unmatched, expected in weights:
        comparison = GroupComparison(both, matched_weight=matched, unmatched_weight=unmatched)
        assert float(group_loss(s, q, comparison)) == pytest.approx(expected, abs=1e-5)
    plain = GroupComparison(both, compare="sorted")
    assert float(group_loss(s, q, plain)) == pytest.approx(0.1 + 0.1 + 0.03 + 0 + 0.03)
    uneven = GroupComparison(vocabulary(1, 2, 3), compare="sorted")
    found = group_loss(numbers(0.5, 0.3, 0.2).log(), numbers(0.6, 0.25, 0.1, 0.05).log(), uneven)
    assert float(found) == pytest.approx(0.3)


STUDENT_GROUP = torch.tensor([0, 1, 1, -1, 2, 2, 2, 3])
TEACHER_GROUP = torch.tensor([0, 0, 1, 2, 3, 3])


@pytest.mark.parametrize("compare", ["hybrid", "sorted"])
@pytest.mark.parametrize("merge", ["observed", "bayesian"])
def test_the_head_gives_value_and_gradient_of_the_plain_formula(
    merge: str, compare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of two groups, at a temperature, between vocabularies of different size."""
    monkeypatch.setitem(logprob.CHUNK_ELEMENTS, "cpu", 22)
    torch.manual_seed(1)
    hidden, weight = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (8, 9))
    states, head = torch.randn(6, 4, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)
    targets, others = torch.arange(8), torch.arange(6) + 3
    comparison = GroupComparison(vocabulary(6, 3, 5), 0.3, merge, compare)
    groups = AlignedGroups(states, head, others, TEACHER_GROUP, STUDENT_GROUP, 4, comparison)
    outputs = head_aligned(hidden, weight, targets, groups, 0.7)
    factors = torch.randn(3, 8, dtype=torch.float64)
    found = torch.autograd.grad((factors * torch.stack(outputs)).sum(), [hidden, weight])

    log_s, log_q = (hidden @ weight.t() / 0.7).log_softmax(-1), (states @ head.t() / 0.7).log_softmax(-1)
    logp = log_s.gather(1, targets[:, None])[:, 0]

    def merged(log_p: Tensor, tokens: Tensor, group: Tensor) -> Tensor:
        rows = []
        for g in range(4):
            inside = (group == g).nonzero().squeeze(1).tolist()
            at, rest = (inside[0], inside[1:]) if merge == "observed" else (inside[-1], inside[:-1])
            rows.append(log_p[at] + sum(log_p[i, tokens[i]] for i in rest))
        return torch.stack(rows)

    losses = group_loss(merged(log_s, targets, STUDENT_GROUP), merged(log_q, others, TEACHER_GROUP), comparison)
    column = torch.zeros(8, dtype=torch.float64).index_copy(0, torch.tensor([0, 2, 6, 7]), losses)
    plain = torch.stack([logp, -(log_s.exp() * log_s).sum(-1), column])
    torch.testing.assert_close(torch.stack(outputs), plain)
    torch.testing.assert_close(found, torch.autograd.grad((factors * plain).sum(), [hidden, weight]))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_with_the_same_tokenizer_it_is_the_plain_divergence(alpha: float) -> None:
    torch.manual_seed(2)
    hidden, weight, states, head = (torch.randn(n, 5, dtype=torch.float64) for n in (4, 7, 4, 7))
    targets, ids = torch.arange(4), torch.arange(4)
    groups = AlignedGroups(states, head, targets, ids, ids, 4, GroupComparison(vocabulary(7, 0, 0), alpha))
    plain = Distribution(states, head, divergence=Divergence(alpha))
    torch.testing.assert_close(
        head_aligned(hidden, weight, targets, groups), head_comparison(hidden, weight, targets, plain)
    )


def test_without_groups_the_loss_is_zero() -> None:
    hidden, weight = (torch.randn(n, 5, requires_grad=True) for n in (3, 7))
    nothing = torch.zeros(0, dtype=torch.long)
    groups = AlignedGroups(
        hidden[:0], weight, nothing, nothing, torch.full((3,), -1), 0, GroupComparison(vocabulary(7, 0, 0))
    )
    found = head_aligned(hidden, weight, torch.arange(3), groups)[2]
    found.sum().backward()
    assert found.tolist() == [0, 0, 0]
    assert weight.grad is not None
    assert float(weight.grad.abs().max()) == 0
