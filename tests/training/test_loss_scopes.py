"""Losses of every scope: the same gradient for any split into micro-batches and over any number of ranks.

The oracle is one view of the whole mini-batch under one autograd graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView, loss_view
from burnish.algorithms.losses.policy_loss import Loss, PolicyLoss
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.models.decoder import Decoder
from burnish.training.forward import MicroBatch, Packing, forward, groups_fit_budget, micro_batches_of, token_positions
from burnish.training.learner import DIFFERENTIABLE_OUTPUTS, Learner, loss_derivatives
from burnish.training.packing import PrefixTree, whole_tree_units

MakeModel = Callable[..., Decoder]
MakeBatch = Callable[..., Batch]
TEMPERATURE = 0.8
SHAPES = [(7, 2, 4), (3, 1, 3), (7, 3, 5), (3, 1, 1), (3, 2, 2), (9, 1, 4)]
RANDOM_SHAPES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=6)
TERMS: dict[str, Any] = {"kl_estimator": "k3", "kl_coef": 0.3, "entropy_coef": 0.05}


@dataclass(frozen=True)
class GroupContrast:
    """-sum of (group's weight) log softmax over the group's sequence log-probs: every sequence moves every other."""

    needs = frozenset[str]()
    scope = "group"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        assert view.logp is not None
        scores, groups = view.mean(view.logp), view.sequence["group_ids"]
        weights = view.sum(view.column("weight"))
        same = groups[:, None] == groups
        logits = scores.expand(len(scores), -1).masked_fill(~same, -torch.inf)
        loss = -(weights * view.sequence["advantages"] * (scores - logits.logsumexp(1))).sum()
        return loss, {"score": view.spread(scores).detach().sum()}


@dataclass(frozen=True)
class BatchNormalised:
    """Log-probs and entropies multiplied and divided by their deviation over the batch: all tokens move all others."""

    needs = frozenset({"entropy"})
    scope = "batch"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        assert view.logp is not None
        assert view.entropy is not None
        product = view.logp * view.entropy
        scaled = product / (view.logp.square().mean() + view.entropy.mean())
        return (view.column("weight") * view.column("advantages") * scaled).sum(), {"product": product.detach().sum()}


LOSSES: dict[str, Loss] = {
    "token": PolicyLoss(clip_options={"low": 0.1, "high": 0.2}, **TERMS),
    "sequence": PolicyLoss(ratio="sequence", scope="sequence", **TERMS),
    "group": GroupContrast(),
    "batch": BatchNormalised(),
    "bce": PolicyLoss(loss="bce", scope="group", **TERMS),
    "kl_cov": PolicyLoss(clip="kl_cov", clip_options={"share": 0.3}, scope="batch", **TERMS),
    "clip_cov": PolicyLoss(
        clip="clip_cov", clip_options={"share": 0.3, "low_cov": 0.0, "low": 0.5}, scope="batch", **TERMS
    ),
    "top_entropy": PolicyLoss(scope="batch", entropy_top=0.4, **TERMS),
}
WIDE = [name for name, loss in LOSSES.items() if loss.scope in ("group", "batch")]


def learner(model: Decoder, budget: int, **options: Any) -> Learner:
    config = Optimizer(**({"lr": 0.01, "clip_norm": 1e9, "eps": 1e-3} | options))
    return Learner(copy.deepcopy(model), config, 10, budget, TEMPERATURE)


def oracle(model: Decoder, batch: Batch, loss: Loss) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Value, metrics and gradients with everything in one graph."""
    model = copy.deepcopy(model)
    wanted = batch.loss_mask.nonzero().squeeze(1)
    outputs = forward(model, MicroBatch(batch, wanted, wanted), loss.needs & DIFFERENTIABLE_OUTPUTS, TEMPERATURE)
    value, sums = loss(loss_view(batch, **outputs))
    value.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return value.item(), {n: float(s) / wanted.numel() for n, s in sums.items()}, gradients


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-10) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=RANDOM_SHAPES, budget=st.integers(1, 48), seed=st.integers(0, 99))
def test_gradient_loss_and_metrics_are_the_same_for_any_token_budget(
    name: str, shapes: list[tuple[int, int, int]], budget: int, seed: int, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = make_model(), make_batch(shapes, seed)
    value, metrics, expected = oracle(model, batch, LOSSES[name])
    it = learner(model, budget)
    update = it.update(batch, LOSSES[name])
    assert update.skipped is None
    assert update.stats["loss"] == pytest.approx(value, abs=1e-10)
    assert {n: update.stats[n] for n in metrics} == pytest.approx(metrics, abs=1e-10)
    assert_same(it.optimizer.gradients(), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_the_updated_weights_are_the_same_for_any_token_budget(
    name: str, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    batch, runs = make_batch(SHAPES), []
    for budget in (1, 9, 64):
        it = learner(make_model(), budget)
        for _ in range(3):
            it.update(batch, LOSSES[name])
        runs.append(dict(it.model.named_parameters()))
    assert any(not torch.equal(p, runs[0][n]) for n, p in make_model().named_parameters())
    for other in runs[1:]:
        assert_same(other, runs[0])


# --- ranks: each has some of the sequences, weights are those of the whole mini-batch, gradients are summed ------------


def over_ranks(model: Decoder, batch: Batch, loss: Loss, ranks: list[Tensor], budget: int) -> dict[str, Tensor]:
    parts = [(learner(model, budget), batch.select(r), token_positions(batch, r)) for r in ranks if r.numel()]
    if loss.scope in ("group", "batch"):
        needs = loss.needs & DIFFERENTIABLE_OUTPUTS
        found = [it.outputs(part, needs, "loss_mask") for it, part, _ in parts]
        whole = {name: torch.zeros(batch.num_tokens, dtype=torch.float64) for name in found[0]}
        for columns, (_, _, positions) in zip(found, parts, strict=True):
            for name, column in columns.items():
                whole[name][positions] = column.double()
        _, _, slopes = loss_derivatives(batch, loss, whole)
        for it, part, positions in parts:
            it.backward(part, {name: slope[positions] for name, slope in slopes.items()})
    else:
        for it, part, _ in parts:
            if part.loss_mask.any():
                it._accumulate(part, loss)
    return total([it.optimizer.gradients() for it, _, _ in parts], model)


def total(gradients: list[dict[str, Tensor]], model: Decoder) -> dict[str, Tensor]:
    zero = torch.zeros(())
    return {n: p.detach() * 0 + sum((g.get(n, zero) for g in gradients), zero) for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=RANDOM_SHAPES, num_ranks=st.integers(1, 5), budget=st.integers(1, 20), seed=st.integers(0, 99))
def test_gradients_of_any_number_of_ranks_add_up_to_the_same(
    name: str,
    shapes: list[tuple[int, int, int]],
    num_ranks: int,
    budget: int,
    seed: int,
    make_model: MakeModel,
    make_batch: MakeBatch,
) -> None:
    model, batch = make_model(), make_batch(shapes, seed)
    order = torch.randperm(len(shapes), generator=torch.Generator().manual_seed(seed))
    ranks = [order[k::num_ranks] for k in range(num_ranks)]
    assert_same(over_ranks(model, batch, LOSSES[name], ranks, budget), oracle(model, batch, LOSSES[name])[2])


def test_ranks_that_hold_whole_groups_need_not_speak_for_a_loss_of_group_scope(
    make_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = make_model(), make_batch(SHAPES)
    gradients = []
    for group in (3, 7, 9):
        it = learner(model, 6)
        it._accumulate(batch.select((batch.sequence["group_ids"] == group).nonzero().squeeze(1)), GroupContrast())
        gradients.append(it.optimizer.gradients())
    assert_same(total(gradients, model), oracle(model, batch, GroupContrast())[2])


# --- what two passes see and cost ------------------------------------------------------------------------------------------


def test_a_loss_of_group_or_batch_scope_sees_the_mini_batch_once_and_in_order(
    make_model: MakeModel, make_batch: MakeBatch
) -> None:
    batch, seen = make_batch(SHAPES), list[LossView]()

    class Watching(BatchNormalised):
        def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
            seen.append(view)
            return super().__call__(view)

    it = learner(make_model(), 5)
    expected = it.outputs(batch, frozenset({"entropy"}))
    update = it.update(batch, Watching())
    (view,) = seen
    assert view.num_sequences == 6
    torch.testing.assert_close(view.logp, expected["logp"][batch.loss_mask], atol=1e-12, rtol=0)
    torch.testing.assert_close(view.entropy, expected["entropy"][batch.loss_mask], atol=1e-12, rtol=0)
    torch.testing.assert_close(update.logp, torch.where(batch.loss_mask, expected["logp"], 0.0), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("coef", "with_entropy"), [(0.0, False), (0.1, True)])
def test_an_entropy_without_a_derivative_is_not_computed_in_the_second_pass(
    coef: float, with_entropy: bool, make_model: MakeModel, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, calls = learner(make_model(), 7), []
    plain = it.model.token_logprobs

    def watched(*args: Any, **options: Any) -> Any:
        calls.append((torch.is_grad_enabled(), args[-1]))
        return plain(*args, **options)

    monkeypatch.setattr(it.model, "token_logprobs", watched)
    it.update(make_batch(SHAPES), PolicyLoss(scope="batch", entropy_coef=coef))
    half = len(calls) // 2
    assert calls[:half] == [(False, True)] * half
    assert calls[half:] == [(True, with_entropy)] * half


@pytest.mark.parametrize("name", WIDE)
def test_a_derivative_that_is_not_finite_makes_no_step_in_two_passes_either(
    name: str, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    it, batch = learner(make_model(), 7), make_batch(SHAPES)
    before = copy.deepcopy(it.model.state_dict())
    update = it.update(batch.with_token(weight=batch.token["weight"] * torch.inf), LOSSES[name])
    assert update.skipped is not None
    assert "not finite" in update.skipped
    assert it.updates == 0
    assert_same(it.model.state_dict(), before, atol=0)


# --- half types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["token", "kl_cov"])
def test_gradients_of_a_half_type_add_up_over_micro_batches_in_float32(
    name: str, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = make_model(dtype=torch.bfloat16), make_batch([(k, 2, 5) for k in range(12)])
    it = learner(model, 7)
    it._accumulate(batch, LOSSES[name])
    one_by_one = []
    for k in range(12):
        part = torch.tensor([k])
        alone = learner(model, 7)
        if LOSSES[name].scope == "token":
            alone._accumulate(batch.select(part), LOSSES[name])
        else:
            slopes = loss_derivatives(batch, LOSSES[name], it.outputs(batch, frozenset({"entropy"}), "loss_mask"))[2]
            alone.backward(batch.select(part), {n: s[token_positions(batch, part)] for n, s in slopes.items()})
        one_by_one.append(alone.optimizer.gradients())
    narrow = 0
    for parameter, gradient in it.optimizer.gradients().items():
        terms = [g[parameter] for g in one_by_one]
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, torch.stack(terms).sum(0), atol=1e-7, rtol=1e-6)
        rounded = terms[0].bfloat16()
        for term in terms[1:]:
            rounded += term.bfloat16()
        narrow += int((rounded.float() - gradient).abs().gt(1e-5).sum())
    assert narrow > 100  # what sums in bfloat16 would have got wrong
    assert all(p.grad is None for p in it.model.parameters())


def test_a_half_type_is_clipped_and_stepped_with_the_float32_sums(make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(dtype=torch.bfloat16), make_batch([(k, 2, 5) for k in range(12)])
    free, clipped = learner(model, 7), learner(model, 7, clip_norm=0.01)
    norm = free.update(batch, LOSSES["token"]).stats["grad_norm"]
    gradients = free.optimizer.gradients()
    assert norm == pytest.approx(torch.cat([g.flatten() for g in gradients.values()]).norm().item(), rel=1e-6)
    clipped.update(batch, LOSSES["token"])
    for name, gradient in clipped.optimizer.gradients().items():
        torch.testing.assert_close(gradient, gradients[name] * (0.01 / norm), rtol=1e-4, atol=1e-9)
        moment = clipped.optimizer.state[name]["exp_avg"]
        torch.testing.assert_close(moment, 0.1 * gradient, rtol=1e-5, atol=1e-9)


# --- losses that sum over groups: one pass if every group fits into a micro-batch, else two, with the same numbers --------


class Additive(GroupContrast):
    """Its terms hold the sequences of one group each."""

    scope = "groups"


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=RANDOM_SHAPES, budget=st.integers(1, 48), seed=st.integers(0, 99))
def test_group_losses_are_the_same_for_any_token_budget(
    shapes: list[tuple[int, int, int]], budget: int, seed: int, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = make_model(), make_batch(shapes, seed)
    value, metrics, expected = oracle(model, batch, Additive())
    it = learner(model, budget)
    update = it.update(batch, Additive())
    assert update.stats["loss"] == pytest.approx(value, abs=1e-10)
    assert {n: update.stats[n] for n in metrics} == pytest.approx(metrics, abs=1e-10)
    assert_same(it.optimizer.gradients(), expected)


def test_ranks_that_hold_whole_groups_add_up_to_the_same(make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(), make_batch(SHAPES)
    gradients = []
    for group in (3, 7, 9):
        it = learner(model, 20)
        it._accumulate(batch.select((batch.sequence["group_ids"] == group).nonzero().squeeze(1)), Additive())
        gradients.append(it.optimizer.gradients())
    assert_same(total(gradients, model), oracle(model, batch, Additive())[2])


@pytest.mark.parametrize(("budget", "is_seen_whole"), [(64, True), (17, True), (9, False), (1, False)])
def test_a_group_is_divided_only_where_it_has_no_room(
    budget: int,
    is_seen_whole: bool,
    make_model: MakeModel,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The largest group has 14 tokens; a second pass over all of them is made only where it does not fit."""
    model, batch, seen = make_model(), make_batch(SHAPES), []
    forward = Decoder.token_logprobs

    def counted(self: Decoder, tokens: torch.Tensor, *args: object, **more: object) -> object:
        seen.append(tokens.numel())
        return forward(self, tokens, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "token_logprobs", counted)
    it = learner(model, budget)
    assert groups_fit_budget(batch, it.packing, "loss_mask") == is_seen_whole
    it.update(batch, Additive())
    assert sum(seen) == batch.num_tokens * (1 if is_seen_whole else 2)


def test_a_group_with_a_sequence_out_of_the_loss_is_not_shown_without_it(
    make_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = make_model(), make_batch(SHAPES)
    batch = batch.with_token(loss_mask=batch.loss_mask & (batch.sequence_ids != 2))
    it = learner(model, 64)
    assert not groups_fit_budget(batch, it.packing, "loss_mask")
    it.update(batch, Additive())
    assert_same(it.optimizer.gradients(), oracle(model, batch, Additive())[2])


def test_micro_batches_of_whole_groups_hold_whole_groups(make_batch: MakeBatch) -> None:
    batch = make_batch(SHAPES)
    found = micro_batches_of(batch, Packing(17), "action_mask", whole_groups=True)
    groups = [set(piece.batch.sequence["group_ids"].tolist()) for piece in found]
    assert len(found) == 2
    assert sorted(group for part in groups for group in part) == [3, 7, 9]
    assert sum(piece.positions.numel() for piece in found) == int(batch.action_mask.sum())


def test_what_a_group_shares_is_counted_once() -> None:
    trees = [PrefixTree([0, 1], [0, 5]), PrefixTree([2], [0])]
    (one, two) = whole_tree_units([7, 9, 4], trees, attention_cost=0.0)
    assert (one.members, one.num_tokens, one.cost) == ([0, 1], 5 + 2 + 4, 11.0)
    assert (two.members, two.num_tokens) == ([2], 4)
