"""ECHO's term in an update: exact numbers, a policy loss that does not notice it, and one gradient for any split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.observations import OBSERVATION_WEIGHT, with_observation_weights
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.observations import OBSERVED
from burnish.core.segments import offsets_from_lengths
from burnish.models.decoder import Decoder
from burnish.trainers.minibatches import build_policy_loss, with_loss_weights
from burnish.training.learner import Learner
from tests.algorithms.conftest import NEW, OLD
from tests.training.test_loss_scopes import assert_same, oracle, over_ranks
from tests.training.test_micro_batch_split import gradients_of, largest

MakeModel = Callable[..., Decoder]
MakeBatch = Callable[..., Batch]
PPO: dict[str, Any] = {"aggregation": "token-mean"}
ECHO: dict[str, Any] = {**PPO, "auxiliary": {"observations": {}}}


class Table(nn.Module):
    """A policy whose log-probs are its parameters, by token."""

    def __init__(self, logp: list[float]) -> None:
        super().__init__()
        self.logp = nn.Parameter(torch.tensor(logp, dtype=torch.float64))

    def token_logprobs(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float = 1.0, *others: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        found = self.logp[tokens[wanted]]
        return found, torch.zeros_like(found)


def joined(rows: list[list[Any]]) -> list[Any]:
    return [x for row in rows for x in row]


def told(observed: list[float]) -> tuple[Batch, Table]:
    """F1 with an observation in the middle of its first row, behind two tokens of the answer."""
    rows = [[0.0, *row] for row in NEW]
    old = [[0.0, *row] for row in OLD]
    masks = [[False] + [True] * len(row) for row in NEW]
    marks = [[0] * len(row) for row in rows]
    rows[0][3:3], old[0][3:3] = observed, [float("nan")] * len(observed)
    masks[0][3:3], marks[0][3:3] = [False] * len(observed), [1] * len(observed)
    mask, lengths = torch.tensor(joined(masks)), torch.tensor([len(row) for row in rows])
    batch = Batch(
        tokens=torch.arange(mask.numel()),
        offsets=offsets_from_lengths(lengths),
        token={
            "action_mask": mask,
            "loss_mask": mask.clone(),
            "old_logp": torch.tensor(joined(old), dtype=torch.float64),
            OBSERVED: torch.tensor(joined(marks), dtype=torch.int8),
        },
        sequence={
            "advantages": torch.tensor([1.0, -1.0, -0.8, 0.6], dtype=torch.float64),
            "group_ids": torch.tensor([0, 0, 1, 1]),
            "trajectory_ids": torch.arange(4),
        },
    )
    return batch, Table(joined(rows))


def updated(batch: Batch, model: nn.Module, tree: dict[str, Any], budget: int = 100) -> tuple[dict[str, float], Tensor]:
    """What an update reports, and its gradient."""
    algorithm = Algorithm.model_validate(tree)
    it, seen = Learner(model, Optimizer(lr=1e-9, clip_norm=1e9), 10, budget), dict[str, Tensor]()
    step = it.optimizer.step
    it.optimizer.step = lambda lr, number: (seen.update(it.optimizer.gradients()), step(lr, number))
    update = it.update(with_loss_weights(batch, algorithm, 6), build_policy_loss(algorithm, None))
    assert update.logp is not None
    assert not update.logp[~batch.loss_mask].any(), "columns of an update are of the policy loss"
    return update.stats, seen["logp"]


def test_the_worked_example() -> None:
    batch, model = told([-0.5, -2.0, -1.0])
    plain, slope = updated(batch, model, PPO)
    assert plain["loss"] == pytest.approx(0.061405, abs=1e-5)
    for budget in (100, 8, 1):
        stats, gradient = updated(batch, told([-0.5, -2.0, -1.0])[1], ECHO, budget)
        assert stats["loss"] == pytest.approx(0.178071, abs=1e-5)
        assert stats["observation_nll"] == pytest.approx(3.5 / 3)
        assert stats["observation_share"] == pytest.approx(3 / 16)
        assert stats["observation_loss"] == pytest.approx(0.35 / 3)
        observed = batch.token[OBSERVED] > 0
        assert gradient[observed].tolist() == pytest.approx([-0.1 / 3] * 3)
        assert torch.equal(gradient[~observed], slope[~observed]), "the policy's part is the same bit for bit"
        unchanged = plain.keys() - {"loss", "grad_norm"}
        assert all(stats[name] == pytest.approx(plain[name], abs=0) for name in unchanged)
    user = {**PPO, "auxiliary": {"observations": {"tool": 0.0, "user": 0.5}}}
    assert updated(batch, told([-0.5, -2.0, -1.0])[1], user)[0]["loss"] == plain["loss"], "nothing is of that role"


def test_weights_count_selected_tokens_alone() -> None:
    batch, _ = told([-0.5, -2.0, -1.0])
    marks = batch.token[OBSERVED].clone()
    marks[3:6] = torch.tensor([1, 2, 3])
    mini = with_observation_weights(batch.with_token(**{OBSERVED: marks}), {"tool": 0.1, "user": 0.4, "system": 0.0})
    assert mini.token[OBSERVATION_WEIGHT][2:7].tolist() == pytest.approx([0, 0.05, 0.2, 0, 0])
    assert float(mini.token[OBSERVATION_WEIGHT].sum()) == pytest.approx(0.25)


SHAPES = [(7, 4, 5), (3, 3, 4), (7, 3, 6), (3, 1, 1), (3, 4, 3), (9, 2, 5), (9, 2, 2), (7, 5, 3)]
SCOPES: dict[str, dict[str, Any]] = {
    "token": {
        "clip": {"name": "dppo_tv", "low": 0.01, "high": 0.01},
        "loss": "sg_logprob",
        "aggregation": "token-mean",
    },
    "sequence": {"ratio": "sequence"},
    "group": {"ratio": "none", "clip": "none", "advantage": "none", "loss": "bce"},
    "batch": {"clip": {"name": "kl_cov", "share": 0.3}},
}


@pytest.mark.parametrize("name", SCOPES)
def test_the_gradient_is_that_of_both_parts_for_any_micro_batches(
    name: str, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = make_model(), make_batch(SHAPES, seed=3)
    batch = batch.with_token(loss_mask=batch.loss_mask & (batch.sequence_ids != 5))
    first = batch.positions == 0
    marks = torch.where(batch.action_mask | first, 0, torch.arange(batch.num_tokens) % 2 + 1).to(torch.int8)
    batch = batch.with_token(**{OBSERVED: marks})

    def made(weights: dict[str, float] | None) -> tuple[Batch, Any]:
        tree = {**SCOPES[name], "auxiliary": {} if weights is None else {"observations": weights}}
        algorithm = Algorithm.model_validate(tree)
        return with_loss_weights(batch, algorithm, 6), build_policy_loss(algorithm, None)

    mini, loss = made({"tool": 0.3, "user": 0.1})
    weight = mini.token[OBSERVATION_WEIGHT]
    assert set((weight[weight > 0] * (weight > 0).sum()).round(decimals=9).tolist()) == {0.3, 0.1}
    only = Batch(mini.tokens, mini.offsets, {"loss_mask": weight > 0, "weight": weight}, mini.sequence)
    only = Batch(only.tokens, only.offsets, only.token, {k: v for k, v in only.sequence.items() if k != "weight"})
    policy, observed = oracle(model, *made(None)), oracle(model, only, NllLoss())
    assert largest(observed[2]) > 1e-3
    for budget in (1000, 14, 1):
        both = gradients_of(model, mini, loss, budget)
        assert_same(both, {key: policy[2][key] + observed[2][key] for key in both})
    if name == "token":
        ranks = [torch.arange(8)[k::3] for k in range(3)]
        assert_same(over_ranks(model, mini, loss, ranks, 14), both)
    update = Learner(make_model(), Optimizer(), 10, 14, 0.8).update(mini, loss)
    assert update.stats["loss"] == pytest.approx(policy[0] + observed[0], abs=1e-10)
    assert update.stats["observation_loss"] == pytest.approx(observed[0], abs=1e-10)
    none = mini.with_token(**{OBSERVATION_WEIGHT: torch.zeros_like(weight)})
    zero, plain = (gradients_of(model, *one, 14) for one in ((none, loss), made(None)))
    assert all(torch.equal(zero[key], plain[key]) for key in plain), "with lam = 0 nothing changes, bit for bit"
