"""What holds for every combination of ratio, clip and loss: ALGORITHMS.md 2.4 and 18."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView, loss_view
from burnish.algorithms.losses.policy_loss import NllLoss, PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch

Look = Callable[..., Any]
Ragged = Callable[[int], Batch]


def surrogate(ratio: str, clip: str, **options: Any) -> dict[str, Any]:
    return {"ratio": ratio, "clip": clip, "clip_options": options}


def weighted(ratio: str, clip: str, **options: Any) -> dict[str, Any]:
    return {**surrogate(ratio, clip, **options), "loss": "sg_logprob"}


PLAIN: dict[str, Any] = {"ratio": "none", "clip": "none", "loss": "logprob"}
BY_TOKEN: dict[str, dict[str, Any]] = {
    "no clip": surrogate("token", "none"),
    "ppo": surrogate("token", "ppo"),
    "dual": surrogate("token", "ppo", low=0.1, high=0.28, dual=3.0),
    "drift": surrogate("token", "ppo", drift=0.01),
    "gspo_token": surrogate("seq_token", "ppo", low=0.1, high=0.1),
    "cispo": weighted("token", "is_weight"),
    "cispo, both sides": weighted("token", "is_weight", low=0.5, cap=5.0),
    "sapo": surrogate("token", "soft"),
    "dppo_tv": weighted("token", "dppo_tv"),
    "dppo_kl": weighted("token", "dppo_kl"),
    "vespo": weighted("token", "gamma"),
    "topr": weighted("token", "taper"),
    "rec": {**PLAIN, "loss": "rec", "loss_options": {"keep": "one_side"}},
    "logprob": PLAIN,
}
BY_SEQUENCE: dict[str, dict[str, Any]] = {
    "gspo": surrogate("sequence", "ppo", low=0.1, high=0.1),
    "gmpo": surrogate("sequence", "log_geo"),
}
OTHERS: dict[str, dict[str, Any]] = {
    "sequence product": surrogate("seq_prod", "none"),
    "truncated sequence product": weighted("seq_prod", "is_weight", cap=2.0),
    "topr, sequences": weighted("seq_prod", "taper"),
    "opmd": {**PLAIN, "loss": "opmd"},
    "with terms": {"kl_coef": 0.1, "kl_is_corrected": True, "entropy_coef": 0.2},
}
BY_BATCH: dict[str, dict[str, Any]] = {
    "clip_cov": {**surrogate("token", "clip_cov", share=0.2, low_cov=0.0, high_cov=50.0), "scope": "batch"},
    "kl_cov": {**surrogate("token", "kl_cov", share=0.2), "scope": "batch"},
    "top entropy": {"entropy_top": 0.3, "scope": "batch"},
}
SPLITTABLE = {**BY_TOKEN, **BY_SEQUENCE, **OTHERS}
EVERYTHING = {**SPLITTABLE, **BY_BATCH}


def fixed(batch: Batch, mode: str = "seq-mean-token-mean") -> Batch:
    """With the weights of the whole mini-batch, and a few tokens imitated."""
    imitated = torch.where(batch.loss_mask & (batch.sequence_ids == 3), 0.01, 0.0).double()
    return batch.with_token(weight=aggregation_weights(batch, mode, 4), nll_weight=imitated)


def total(parts: list[Batch], look: Look, theta: Tensor, record: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """The loss of all parts over the same leaves, and the metric sums."""
    loss, sums = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for part in parts:
        value, metrics = PolicyLoss(**record)(look(part, None, theta).view)
        loss = loss + value
        for name, amount in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(amount)
    return loss, sums


def same(one: list[Batch], other: list[Batch], look: Look, theta: Tensor, record: dict[str, Any]) -> None:
    """Equal loss, gradient of every token, and metrics."""
    (loss, sums), (loss2, sums2) = (total(parts, look, theta, record) for parts in (one, other))
    torch.testing.assert_close(loss, loss2, rtol=1e-12, atol=1e-12)
    gradient, gradient2 = (torch.autograd.grad(x, theta)[0] for x in (loss, loss2))
    torch.testing.assert_close(gradient, gradient2, rtol=1e-12, atol=1e-12)
    assert gradient.count_nonzero() > 3
    assert sums == pytest.approx(sums2, rel=1e-12, abs=1e-12)


SPLITS = [[[0, 1], [2, 3, 4], [5, 6]], [[6, 0, 3], [2], [5, 4, 1]], [[i] for i in range(7)]]


@pytest.mark.parametrize("name", SPLITTABLE)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_loss_gradient_and_metrics_add_over_any_split(ragged: Ragged, look: Look, name: str, mode: str) -> None:
    batch = fixed(ragged(0), mode)
    theta = batch.token["new"].clone().requires_grad_()
    for split in SPLITS:
        same([batch], [batch.select(torch.tensor(part)) for part in split], look, theta, SPLITTABLE[name])


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_order_of_sequences_does_not_matter(ragged: Ragged, look: Look, name: str) -> None:
    batch = fixed(ragged(1))
    theta = batch.token["new"].clone().requires_grad_()
    for order in ([6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 2, 5, 1, 4]):
        same([batch], [batch.select(torch.tensor(order))], look, theta, EVERYTHING[name])


@pytest.mark.parametrize("name", EVERYTHING)
def test_tokens_out_of_the_loss_are_never_read(ragged: Ragged, look: Look, name: str) -> None:
    """They hold NaN, and a sequence that is wholly out of the loss may as well not be there."""
    batch = fixed(ragged(2))
    theta = batch.token["new"].clone().requires_grad_()
    assert bool(theta.isnan().any())
    same([batch], [batch.select(torch.tensor([0, 1, 3, 4, 5, 6]))], look, theta, EVERYTHING[name])


def on_policy(batch: Batch) -> Batch:
    return batch.with_token(new=batch.token["old_logp"])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("name", BY_TOKEN)
def test_on_policy_every_loss_is_plain_policy_gradient(ragged: Ragged, look: Look, name: str, mode: str) -> None:
    batch = on_policy(ragged(0))
    per_token = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = look(batch.with_token(advantages=per_token), mode)
    assert seen.run(**BY_TOKEN[name])[1] == pytest.approx(seen.run(**PLAIN)[1], abs=1e-12)


@pytest.mark.parametrize("name", BY_SEQUENCE)
def test_on_policy_sequence_losses_are_plain_policy_gradient(ragged: Ragged, look: Look, name: str) -> None:
    seen = look(on_policy(ragged(0)), "seq-mean-token-mean")
    assert seen.run(**BY_SEQUENCE[name])[1] == pytest.approx(seen.run(**PLAIN)[1], abs=1e-12)


@pytest.mark.parametrize(
    "name",
    ["no clip", "ppo", "dual", "drift", "gspo", "gmpo", "sapo", "sequence product", "with terms", "clip_cov", "kl_cov"],
)
def test_gradients_are_those_of_finite_differences(ragged: Ragged, look: Look, name: str) -> None:
    """Of the losses without a stop-gradient in their value."""
    batch = fixed(ragged(3))
    new = torch.where(
        batch.loss_mask, batch.token["old_logp"] + 0.3 * torch.sin(batch.tokens.double()), batch.token["new"]
    )
    batch = batch.with_token(new=new)
    record = PolicyLoss(**EVERYTHING[name])

    def loss(logp: Tensor, entropy: Tensor) -> Tensor:
        return record(loss_view(batch, logp, entropy))[0]

    leaves = [batch.token[k][batch.loss_mask].clone().requires_grad_() for k in ("new", "entropy")]
    assert torch.autograd.gradcheck(loss, leaves, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EVERYTHING)
def test_a_view_without_a_token_adds_exactly_nothing(name: str, dtype: torch.dtype) -> None:
    empty = torch.zeros(0, dtype=dtype, requires_grad=True)
    columns = {k: empty.detach() for k in ("weight", "advantages", "old_logp", "ref_logp", "nll_weight")}
    columns["position"] = torch.zeros(0, dtype=torch.int64)
    view = LossView(torch.tensor([0, 0, 0]), columns, {"key": torch.tensor([1, 2])}, empty, empty)
    for record in (NllLoss(), PolicyLoss(**EVERYTHING[name])):
        loss, sums = record(view)
        assert loss.item() == 0
        assert all(float(v) == 0 for v in sums.values())
        loss.backward()


@pytest.mark.parametrize("name", EVERYTHING)
def test_float32_log_probs_give_float32_losses_near_the_exact_ones(ragged: Ragged, look: Look, name: str) -> None:
    batch = fixed(ragged(4))
    mask = batch.loss_mask
    logp, entropy = (batch.token[k][mask].float().requires_grad_() for k in ("new", "entropy"))
    loss, _ = PolicyLoss(**EVERYTHING[name])(loss_view(batch, logp, entropy))
    assert loss.dtype == torch.float32
    exact, _ = PolicyLoss(**EVERYTHING[name])(look(batch, None).view)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-4, abs=1e-5)
