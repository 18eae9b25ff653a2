"""A loss that adds up over groups: one pass where every group fits into a micro-batch, two where one does not; the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.core.batch import Batch
from burnish.models.decoder import Decoder
from burnish.training.forward import Packing, groups_fit, micro_batches_of
from burnish.training.packing import whole_units
from tests.training.test_scopes import RANDOM_SHAPES, SHAPES, GroupContrast, assert_same, learner, oracle, total

MakeModel = Callable[..., Decoder]
MakeBatch = Callable[..., Batch]


class Additive(GroupContrast):
    """Its terms hold the sequences of one group each."""

    scope = "groups"


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=RANDOM_SHAPES, budget=st.integers(1, 48), seed=st.integers(0, 99))
def test_gradient_loss_and_metrics_are_the_same_for_any_token_budget(
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
    budget: int, is_seen_whole: bool, make_model: MakeModel, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest group has 14 tokens; a second pass over all of them is made only where it does not fit."""
    model, batch, seen = make_model(), make_batch(SHAPES), []
    forward = Decoder.token_logprobs

    def counted(self: Decoder, tokens: torch.Tensor, *args: object, **more: object) -> object:
        seen.append(tokens.numel())
        return forward(self, tokens, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "token_logprobs", counted)
    it = learner(model, budget)
    assert groups_fit(batch, it.packing, "loss_mask") == is_seen_whole
    it.update(batch, Additive())
    assert sum(seen) == batch.num_tokens * (1 if is_seen_whole else 2)


def test_a_group_with_a_sequence_out_of_the_loss_is_not_shown_without_it(
    make_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = make_model(), make_batch(SHAPES)
    batch = batch.with_token(loss_mask=batch.loss_mask & (batch.sequence_ids != 2))
    it = learner(model, 64)
    assert not groups_fit(batch, it.packing, "loss_mask")
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
    (one, two) = whole_units([7, 9, 4], [1, 1, 2], [5, 5, 0], attention_cost=0.0)
    assert (one.members, one.num_tokens, one.cost) == ([0, 1], 5 + 2 + 4, 11.0)
    assert (two.members, two.num_tokens) == ([2], 4)
