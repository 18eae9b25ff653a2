"""Every choice of ratio, clip, loss and aggregation, and every term beside them: one gradient, however the batch is split.

`CHOICES` holds an algorithm for every name in the tables, `TERMS` what is laid over one. The batch is far from the old
policy and the reference, some of its tokens are out of the loss, one sequence altogether. The oracle is one view of the
whole mini-batch under one autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor, nn

from burnish.algorithms.losses.loss_functions import LOSSES
from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.model_losses import ValueLoss
from burnish.algorithms.losses.policy_loss import Loss, NllLoss, PolicyLoss
from burnish.algorithms.losses.ratios_and_clips import CLIPS, RATIOS
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.algorithms.terms.spec import Aggregation
from burnish.core.batch import Batch
from burnish.models.decoder import Decoder
from burnish.models.heads import ValueModel
from burnish.trainers.minibatches import build_policy_loss, with_loss_weights
from tests.training.test_loss_scopes import assert_same, learner, oracle, over_ranks

MakeModel = Callable[..., Decoder]
MakeBatch = Callable[..., Batch]
SHAPES = [(7, 2, 5), (3, 1, 4), (7, 3, 6), (3, 1, 1), (3, 2, 3), (9, 1, 5), (9, 2, 2), (7, 2, 3)]
"""(group, prompt length, written length): groups of three, three and two, one of a single token, in no order."""
PAIRED = [(k // 2, 1 + k % 3, 4 + k % 2) for k in range(8)]
EVERYTHING, SOME, ONE = 1000, 14, 1
"""Token budgets: one micro-batch, a few, one for every sequence."""

BARE: dict[str, Any] = {"ratio": "none", "clip": "none"}
WEIGHTS: dict[str, Any] = {"loss": "sg_logprob"}
PAIRS: dict[str, Any] = {**BARE, "advantage": "none"}
FROZEN: dict[str, Any] = {"kl": {"reference": "frozen"}}
COVARIANCE = {"name": "clip_cov", "share": 0.1, "low_cov": 0.0, "low": 0.5, "high": 0.5}
MODES: tuple[str, ...] = get_args(Aggregation.model_fields["name"].annotation)

CHOICES: dict[str, dict[str, Any]] = {
    "ratio token": {"clip": "none"},
    "ratio sequence": {"clip": "none", "ratio": "sequence"},
    "ratio seq_token": {"clip": "none", "ratio": "seq_token"},
    "ratio seq_prod": {"clip": "none", "ratio": "seq_prod"},
    "ratio none": {**BARE, "loss": "logprob"},
    "clip none": {"clip": "none"},
    "clip ppo": {"clip": {"name": "ppo", "dual": 1.5, "drift": 0.1}},
    "clip log_geo": {"clip": "log_geo", "ratio": "sequence"},
    "clip is_weight": {"clip": {"name": "is_weight", "low": 0.3}, "ratio": "sequence", **WEIGHTS},
    "clip soft": {"clip": "soft"},
    "clip clip_cov": {"clip": COVARIANCE},
    "clip kl_cov": {"clip": {"name": "kl_cov", "share": 0.3}},
    "clip dppo_tv": {"clip": {"name": "dppo_tv", "low": 0.01, "high": 0.01, "cap": 2.0}, **WEIGHTS},
    "clip dppo_kl": {"clip": {"name": "dppo_kl", "cap": 2.0}, **WEIGHTS},
    "clip gamma": {"clip": "gamma", **WEIGHTS},
    "clip taper": {"clip": "taper", "ratio": "seq_prod", **WEIGHTS},
    "clip second_moment": {"clip": {"name": "second_moment", "denominator": "kept", "tau": 0.2}},
    "loss surrogate": {},
    "loss sg_logprob": {"clip": "is_weight", **WEIGHTS},
    "loss logprob": {**BARE, "loss": "logprob"},
    "loss omd_sq": {**BARE, "loss": "omd_sq"},
    "loss sppo_sq": {**BARE, "advantage": "win_rate", "loss": "sppo_sq"},
    "loss dro": {**BARE, "loss": "dro"},
    "loss bce": {**PAIRS, "loss": {"name": "bce", "normalise": "grpo"}},
    "loss mixed_offpolicy": {**BARE, "loss": {"name": "mixed_offpolicy", "weight": "author"}},
    "loss nll": {**PAIRS, "loss": "nll"},
    "loss divergence": {**PAIRS, **FROZEN, "loss": {"name": "divergence", "support": "sampled", "cap": 2.0}},
    "loss teacher_surrogate": {**PAIRS, **FROZEN, "loss": "teacher_surrogate"},
    "loss rec": {**BARE, "loss": {"name": "rec", "keep": "ring", "weight": "ratio", "square": 0.1}},
    "loss opmd": {**BARE, "loss": "opmd"},
    "loss astar_sq": {**BARE, **FROZEN, "advantage": "offline_value", "loss": {"name": "astar_sq", "beta": 0.1}},
    "loss dpo": {**PAIRS, **FROZEN, "loss": {"name": "dpo", "smoothing": 0.1}},
    "loss ipo": {**PAIRS, **FROZEN, "loss": "ipo"},
    "loss simpo": {**PAIRS, "loss": "simpo"},
    "loss orpo": {**PAIRS, "loss": "orpo"},
    "loss kto": {**PAIRS, **FROZEN, "loss": "kto"},
    **{f"aggregation {mode}": {"aggregation": mode} for mode in MODES},
}
PAIR_LOSSES = ("dpo", "ipo", "simpo", "orpo")

KL = {"reference": "frozen", "loss": {"coef": 0.3}}
CORRECTED = {"reference": "frozen", "loss": {"coef": 0.3, "is_corrected": True}}
ALL = {"kl": CORRECTED, "entropy": {"coef": 0.05}, "auxiliary": {"positive_nll": 0.2}}
TOP = {"coef": 0.05, "top_share": 0.4}
TERMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kl": ({}, {"kl": KL}),
    "kl, corrected": ({"kl": KL}, {"kl": CORRECTED}),
    "entropy": ({}, {"entropy": {"coef": 0.05}}),
    "top entropies": ({}, {"entropy": {"top_share": 0.4}}),
    "right answers": ({}, {"auxiliary": {"positive_nll": 0.2}}),
    "all": ({}, ALL),
    "all, of a sequence": ({"ratio": "sequence"}, ALL),
    "all, of a group": ({**PAIRS, "loss": "bce"}, ALL),
    "all, of a batch": ({"clip": {"name": "kl_cov", "share": 0.3}}, {**ALL, "entropy": TOP}),
}
"""An algorithm, and what is laid over it."""
ALGORITHMS = {**CHOICES, **{name: {**base, **term} for name, (base, term) in TERMS.items()}}


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> Decoder:
    return make_model()


Make = Callable[[dict[str, Any]], tuple[Batch, PolicyLoss]]


@pytest.fixture(scope="module")
def make(make_batch: MakeBatch) -> Make:
    """The mini-batch of an algorithm with the weights of its loss, and the loss."""

    def build(tree: dict[str, Any]) -> tuple[Batch, PolicyLoss]:
        algorithm = Algorithm.model_validate(tree)
        paired = algorithm.loss.name in PAIR_LOSSES
        batch = make_batch(PAIRED if paired else SHAPES, seed=3)
        batch = batch.with_token(loss_mask=batch.loss_mask & (paired | (batch.sequence_ids != 5)))
        number, generator = torch.arange(batch.num_sequences), torch.Generator().manual_seed(1)
        batch = batch.with_sequence(
            chosen=number % 2 == 0, desirable=number % 3 == 0, mismatched=number % 4 == 1, demonstration=number % 3 == 1
        )
        author = -2 * torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64)
        batch = batch.with_token(author_logp=author, behaviour_logp=author)
        return with_loss_weights(batch, algorithm, horizon=6), build_policy_loss(algorithm, None)

    return build


def gradients_of(model: nn.Module, batch: Batch, loss: Loss, budget: int, also: Any = None) -> dict[str, Tensor]:
    """What the optimizer was handed for one step."""
    it, seen = learner(cast(Decoder, model), budget), dict[str, Tensor]()
    step = it.optimizer.step
    it.optimizer.step = lambda lr, number: (seen.update(it.optimizer.gradients()), step(lr, number))
    update = it.update(batch, loss, also=also)
    assert update.skipped is None
    return seen


def largest(gradients: dict[str, Tensor]) -> float:
    return max(float(g.abs().max()) for g in gradients.values())


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return largest({name: one[name] - other[name] for name in one})


def test_every_name_in_the_tables_is_here() -> None:
    losses = [name for name in LOSSES if name != "gold"]  # its groups: test_aligned_answers.py
    wanted = {"ratio": [*RATIOS], "clip": [*CLIPS], "loss": losses, "aggregation": [*MODES]}
    for slot, names in wanted.items():
        for name in names:
            assert getattr(Algorithm.model_validate(CHOICES[f"{slot} {name}"]), slot).name == name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_the_same_for_any_micro_batches_on_any_number_of_ranks(
    name: str, make: Make, model: Decoder
) -> None:
    batch, loss = make(ALGORITHMS[name])
    _, _, expected = oracle(model, batch, loss)
    assert largest(expected) > 1e-3
    for budget in (EVERYTHING, SOME, ONE):
        assert_same(gradients_of(model, batch, loss, budget), expected)
    order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(4))
    for num_ranks, budget in ((2, EVERYTHING), (3, SOME)):
        ranks = [order[k::num_ranks] for k in range(num_ranks)]
        assert_same(over_ranks(model, batch, loss, ranks, budget), expected)


# --- the tests above could fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TERMS)
def test_a_term_changes_the_gradient(name: str, make: Make, model: Decoder) -> None:
    with_it, without = oracle(model, *make(ALGORITHMS[name])), oracle(model, *make(TERMS[name][0]))
    assert distance(with_it[2], without[2]) > 1e-4


class OneByOne:
    """A loss that claims to see enough in any micro-batch."""

    scope = "token"

    def __init__(self, loss: PolicyLoss) -> None:
        self.loss, self.needs = loss, loss.needs

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(view)


@pytest.mark.parametrize("name", ["clip clip_cov", "clip kl_cov", "loss bce", "top entropies"])
def test_the_batch_tells_a_loss_that_must_see_more_than_a_micro_batch(name: str, make: Make, model: Decoder) -> None:
    batch, loss = make(ALGORITHMS[name])
    assert distance(gradients_of(model, batch, OneByOne(loss), ONE), oracle(model, batch, loss)[2]) > 1e-4


@pytest.mark.parametrize("mode", [m for m in MODES if m != "token-sum"])
def test_the_batch_tells_weights_that_are_made_after_the_split(mode: str, make: Make, model: Decoder) -> None:
    tree = {"aggregation": mode}
    batch, loss = make(tree)
    late = Batch.merge(
        [with_loss_weights(batch.select(torch.tensor([k])), Algorithm.model_validate(tree), 6) for k in range(8)]
    )
    assert distance(oracle(model, late, loss)[2], oracle(model, batch, loss)[2]) > 1e-3


# --- beside the policy's loss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all", "all, of a group", "all, of a batch"])
@pytest.mark.parametrize("budget", [EVERYTHING, SOME, ONE])
def test_a_second_batch_adds_its_gradient_whatever_the_split(
    name: str, budget: int, make: Make, model: Decoder, make_batch: MakeBatch
) -> None:
    batch, loss = make(ALGORITHMS[name])
    shown = make_batch([(k, 2, 3 + k % 3) for k in range(5)], seed=8)
    shown = shown.with_token(weight=0.3 * aggregation_weights(shown, "token-mean"))
    (one, _, first), (two, _, second) = oracle(model, batch, loss), oracle(model, shown, NllLoss())
    assert largest(second) > 1e-3
    both = gradients_of(model, batch, loss, budget, also=(shown, NllLoss()))
    assert_same(both, {name: first[name] + second[name] for name in first})
    update = learner(model, budget).update(batch, loss, also=(shown, NllLoss()))
    assert update.stats["loss"] == pytest.approx(one + two, abs=1e-10)
    assert update.stats["second_loss"] == pytest.approx(two, abs=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_a_critic_is_the_same_for_any_micro_batches(mode: str, make: Make, model: Decoder) -> None:
    (batch, _), critic, loss = make({"aggregation": mode}), ValueModel(model), ValueLoss(0.2)
    torch.nn.init.normal_(critic.head, generator=torch.Generator().manual_seed(0))
    expected = gradients_of(critic, batch, loss, EVERYTHING)
    assert largest(expected) > 1e-3
    for budget in (SOME, ONE):
        assert_same(gradients_of(critic, batch, loss, budget), expected)
