"""The learner against an autograd oracle on the whole batch: gradients, steps, skipped steps, checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.policy_loss import Loss, NllLoss, PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.errors import UserError
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from burnish.training.learner import Learner

VOCAB = 11
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
TEMPERATURE = 0.8
SEQUENCES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=6)
LOSSES: dict[str, Loss] = {
    "nll": NllLoss(),
    "everything": PolicyLoss(
        clip_options={"low": 0.1, "high": 0.2, "dual": 1.5}, kl_estimator="k3", kl_coef=0.3, entropy_coef=0.05
    ),
}


def make_model() -> Decoder:
    """Grouped-query attention, a norm on queries and keys, biases: every kind of parameter the decoder has."""
    arch = Architecture("qwen3", VOCAB, 8, 2, 2, 1, 4, 12, 64, qkv_bias=True, qk_norm=True)
    model = Decoder(arch).double()
    initialise(model, seed=0, std=0.4)
    return model


MODEL = make_model()


def make_batch(shapes: list[tuple[int, int]], mode: str = "token-mean", seed: int = 0) -> Batch:
    """Random tokens behind prompts, some written ones out of the loss; old and reference log-probs are made up."""
    generator = torch.Generator().manual_seed(seed)

    def rand(n: int) -> Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    mask = torch.tensor([i >= prompt for prompt, rest in shapes for i in range(prompt + rest)])
    n = mask.numel()
    dropped = rand(n) < 0.2
    dropped[mask.nonzero()[0]] = False
    batch = Batch(
        tokens=torch.randint(VOCAB, (n,), generator=generator),
        offsets=offsets_from_lengths(torch.tensor([a + b for a, b in shapes])),
        token={"action_mask": mask, "loss_mask": mask & ~dropped, "old_logp": -4 * rand(n), "ref_logp": -4 * rand(n)},
        sequence={"advantages": 2 * rand(len(shapes)) - 1},
    )
    return batch.with_token(weight=aggregation_weights(batch, mode, 6))


BATCH = make_batch([(2, 4), (1, 3), (3, 5), (1, 1), (2, 2)])


def learner(budget: int = 64, temperature: float = TEMPERATURE, total: int = 10, **options: Any) -> Learner:
    config = Optimizer(**({"lr": 0.01, "clip_norm": 1e9} | options))
    return Learner(copy.deepcopy(MODEL), config, total, budget, temperature)


# --- the oracle: a plain forward, all logits in memory, one backward ---------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """[L, D] by position; angles in float32, as the model's table has them."""
    half = x.shape[1] // 2
    frequency = 1.0 / 10000.0 ** (torch.arange(half).float() * 2 / x.shape[1])
    angle = torch.arange(x.shape[0]).float()[:, None] * frequency
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], 1)


def plain_logits(w: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """[L, vocab] of one sequence: two layers, two query heads on one key/value head of width 4."""
    x = w["embedding.weight"][tokens]
    future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for i in range(2):
        p = {k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        heads = rms(x, p["attention_norm.weight"]) @ p["qkv.weight"].T + p["qkv.bias"]
        q1, q2, k, v = heads.split(4, 1)
        k = rotated(rms(k, p["k_norm.weight"]))
        mixed = []
        for q in (q1, q2):
            scores = rotated(rms(q, p["q_norm.weight"])) @ k.T / 2.0
            mixed.append(scores.masked_fill(future, -torch.inf).softmax(1) @ v)
        x = x + torch.cat(mixed, 1) @ p["out.weight"].T
        gate, up = (rms(x, p["mlp_norm.weight"]) @ p["gate_up.weight"].T).split(12, 1)
        x = x + (gate * torch.sigmoid(gate) * up) @ p["down.weight"].T
    return rms(x, w["norm.weight"]) @ w["head.weight"].T


def plain_logprobs(model: Decoder, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """[N] log-probs and entropies of every token given its past; 0 for the first of each sequence."""
    w = dict(model.named_parameters())
    logp, entropy = [], []
    bounds = batch.offsets.tolist()
    for a, b in pairwise(bounds):
        tokens = batch.tokens[a:b]
        table = (plain_logits(w, tokens) / temperature).log_softmax(1)[:-1]
        zero = table.new_zeros(1)
        logp.append(torch.cat([zero, table[torch.arange(b - a - 1), tokens[1:]]]))
        entropy.append(torch.cat([zero, -(table.exp() * table).sum(1)]))
    return torch.cat(logp), torch.cat(entropy)


def plain_loss(name: str, batch: Batch, logp: Tensor, entropy: Tensor) -> Tensor:
    """The per-token formulas written out, summed with weights that are 0 outside the loss."""
    weight = batch.token["weight"]
    if name == "nll":
        return -(weight * logp).sum()
    ratio = (logp - batch.token["old_logp"]).exp()
    a = batch.sequence["advantages"][batch.sequence_ids]
    policy = torch.maximum(-a * ratio, -a * ratio.clamp(0.9, 1.2))
    policy = torch.where(a < 0, torch.minimum(policy, -a * 1.5), policy)
    d = logp - batch.token["ref_logp"]
    k3 = torch.exp(-d) + d - 1
    k3 = torch.where(k3 > 10, torch.full_like(k3, 10.0), k3)
    return (weight * (policy + 0.3 * k3 - 0.05 * entropy)).sum()


def oracle(name: str, batch: Batch, temperature: float = TEMPERATURE) -> tuple[float, dict[str, Tensor]]:
    model = copy.deepcopy(MODEL)
    logp, entropy = plain_logprobs(model, batch, temperature)
    loss = plain_loss(name, batch, logp, entropy)
    loss.backward()
    return loss.item(), gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        worst = float((got[name] - expected[name]).abs().max())
        assert worst <= atol, f"{name} differs by {worst}"


# --- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8, deadline=None)
@given(shapes=SEQUENCES, budget=st.integers(1, 48), seed=st.integers(0, 99))
def test_the_gradient_is_the_same_for_any_micro_batch_split(
    name: str, mode: str, shapes: list[tuple[int, int]], budget: int, seed: int
) -> None:
    batch = make_batch(shapes, mode, seed)
    loss, expected = oracle(name, batch)
    it = learner(budget)
    update = it.update(batch, LOSSES[name])
    assert update.skipped is None
    assert update.stats["loss"] == pytest.approx(loss, abs=1e-10)
    assert_same(gradients(it.model), expected, atol=1e-10)


@pytest.mark.parametrize("budget", [1, 7, 12, 64])
def test_metrics_are_means_over_the_tokens_in_the_loss_for_any_split(budget: int) -> None:
    stats = learner(budget).update(BATCH, LOSSES["everything"]).stats
    with torch.no_grad():
        logp, entropy = (x[BATCH.loss_mask] for x in plain_logprobs(MODEL, BATCH, TEMPERATURE))
    assert stats["entropy"] == pytest.approx(entropy.mean().item(), abs=1e-12)
    assert stats["ppo_kl"] == pytest.approx((BATCH.token["old_logp"][BATCH.loss_mask] - logp).mean().item(), abs=1e-12)


def test_without_old_log_probs_the_gradient_is_that_of_plain_policy_gradient() -> None:
    columns = {k: v for k, v in BATCH.token.items() if k != "old_logp"}
    batch = Batch(BATCH.tokens, BATCH.offsets, columns, BATCH.sequence)
    it, plain = learner(9), learner()
    it.update(batch, PolicyLoss())
    plain.update(batch, PolicyLoss(ratio="none", clip="none", loss="logprob"))
    assert_same(gradients(it.model), gradients(plain.model), atol=1e-12)


# --- log-probs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("budget", [1, 9, 64])
def test_log_probs_are_of_logits_over_the_temperature_and_zero_where_nothing_was_written(
    temperature: float, budget: int
) -> None:
    got = learner(budget, temperature).logprobs(BATCH)
    expected = torch.where(BATCH.action_mask, plain_logprobs(MODEL, BATCH, temperature)[0].detach(), 0.0)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    assert not got.requires_grad


def test_an_update_returns_the_log_probs_it_saw_before_the_step() -> None:
    it = learner(9)
    expected = torch.where(BATCH.loss_mask, it.logprobs(BATCH), 0.0)
    update = it.update(BATCH, NllLoss())
    torch.testing.assert_close(update.logp, expected, atol=1e-12, rtol=0)
    assert not torch.allclose(it.logprobs(BATCH), expected)


@pytest.mark.parametrize("scope", ["token", "batch"])
def test_an_update_returns_the_entropies_it_saw_where_its_loss_asks_for_them(scope: str) -> None:
    it = learner(9)
    expected = torch.where(BATCH.loss_mask, it.outputs(BATCH, frozenset({"entropy"}))["entropy"], 0.0)
    found = it.update(BATCH, PolicyLoss(scope=scope)).entropy
    assert found is not None
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert it.update(BATCH, NllLoss()).entropy is None


@pytest.mark.parametrize("budget", [1, 9, 64])
def test_outputs_add_entropies_and_squared_probabilities_where_they_are_asked_for(budget: int) -> None:
    it = learner(budget)
    w = dict(it.model.named_parameters())
    tables = [
        (plain_logits(w, BATCH.tokens[a:b]) / TEMPERATURE).softmax(1) for a, b in pairwise(BATCH.offsets.tolist())
    ]
    squares = torch.cat([torch.cat([t.new_zeros(1), (t[:-1] ** 2).sum(1)]) for t in tables])
    logp, entropy = plain_logprobs(it.model, BATCH, TEMPERATURE)
    expected = {"logp": logp, "entropy": entropy, "sum_p2": squares}
    for needs in ({"sum_p2"}, {"entropy"}, {"entropy", "sum_p2"}, set[str]()):
        got = it.outputs(BATCH, frozenset(needs))
        assert got.keys() == {"logp"} | needs
        for name, column in got.items():
            right = torch.where(BATCH.action_mask, expected[name].detach(), 0.0)
            torch.testing.assert_close(column, right, atol=1e-12, rtol=0)
            assert not column.requires_grad


def test_outputs_of_a_batch_in_which_nothing_was_written_are_zero() -> None:
    silent = BATCH.with_token(action_mask=torch.zeros_like(BATCH.action_mask))
    got = learner().outputs(silent, frozenset({"sum_p2"}))
    assert got.keys() == {"logp", "sum_p2"}
    assert not any(column.any() for column in got.values())


# --- steps -------------------------------------------------------------------------------------------------------------


def adamw(
    p: Tensor, grads: list[Tensor], rates: list[float], betas: tuple[float, float], eps: float, wd: float
) -> Tensor:
    """Loshchilov and Hutter (1711.05101), written out."""
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, (g, lr) in enumerate(zip(grads, rates, strict=True), start=1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        p = p - lr * wd * p - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return p


def test_steps_are_adamw_with_decay_on_matrices_only_under_the_schedule() -> None:
    options: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "schedule": "linear", "warmup": 2}
    it = learner(lr=0.02, final=0.5, total=5, **options)
    start = weights(it.model)
    seen: list[dict[str, Tensor]] = []
    rates = []
    for _ in range(4):
        rates.append(it.update(BATCH, LOSSES["everything"]).stats["lr"])
        seen.append({k: v.clone() for k, v in gradients(it.model).items()})
    assert rates == pytest.approx([0.01, 0.02, 0.02, 0.015])
    assert it.updates == 4
    expected = {
        n: adamw(p, [g[n] for g in seen], rates, (0.8, 0.9), 1e-3, 0.1 if p.dim() >= 2 else 0.0)
        for n, p in start.items()
    }
    assert_same(weights(it.model), expected, atol=1e-12)


def test_a_reset_forgets_the_moments_and_goes_on_with_the_schedule() -> None:
    options: dict[str, Any] = {"schedule": "linear", "warmup": 2, "weight_decay": 0.1}
    it = learner(9, **options)
    for _ in range(3):
        it.update(BATCH, LOSSES["everything"])
    fresh = Learner(copy.deepcopy(it.model), it.config, it.total_updates, it.packing.token_budget, it.temperature)
    kept = copy.deepcopy(it)
    it.reset_optimizer()
    fresh.updates = 3
    with mock.patch.object(it.optimizer, "step", wraps=it.optimizer.step) as step:
        stats = [one.update(BATCH, LOSSES["everything"]).stats for one in (it, fresh, kept)]
    assert step.call_args.args[1] == 3  # by which rounding draws: it does not begin anew
    assert stats[0] == stats[1]
    assert stats[0]["lr"] == stats[2]["lr"]
    assert_same(weights(it.model), weights(fresh.model))
    assert_same(it.optimizer.tensors(), fresh.optimizer.tensors())
    assert not torch.equal(weights(kept.model)["head.weight"], weights(it.model)["head.weight"])


def test_weight_decay_alone_shrinks_matrices_and_leaves_vectors() -> None:
    it = learner(weight_decay=0.5)
    start = weights(it.model)
    it.update(BATCH.with_sequence(advantages=torch.zeros(5, dtype=torch.float64)), PolicyLoss())
    assert {p.dim() for p in start.values()} == {1, 2}
    expected = {n: p * (1 - 0.01 * 0.5) if p.dim() == 2 else p for n, p in start.items()}
    assert_same(weights(it.model), expected, atol=1e-14)


def test_the_gradient_norm_is_clipped_over_all_parameters_together() -> None:
    _, full = oracle("everything", BATCH)
    norm = math.sqrt(sum(float((g**2).sum()) for g in full.values()))
    it = learner(7, clip_norm=norm / 4)
    update = it.update(BATCH, LOSSES["everything"])
    assert update.stats["grad_norm"] == pytest.approx(norm, rel=1e-10)
    assert_same(gradients(it.model), {n: g / 4 for n, g in full.items()}, atol=1e-6 * norm)
    loose = learner(7, clip_norm=norm * 1.01)
    loose.update(BATCH, LOSSES["everything"])
    assert_same(gradients(loose.model), full, atol=1e-10)


# --- no step -----------------------------------------------------------------------------------------------------------


def everything_that_changes(it: Learner) -> Iterator[Tensor]:
    yield from weights(it.model).values()
    for state in it.optimizer.state.values():
        yield from (value.clone() for value in state.values())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_and_says_so(poison: float) -> None:
    it = learner(9)
    it.update(BATCH, NllLoss())
    before = list(everything_that_changes(it))
    bad = BATCH.with_sequence(advantages=torch.tensor([1, poison, 1, 1, 1], dtype=torch.float64))
    update = it.update(bad, PolicyLoss())
    assert update.skipped is not None
    assert "not finite" in update.skipped
    assert it.updates == 1
    after = list(everything_that_changes(it))
    assert len(after) == len(before)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    fresh = learner(9)
    fresh.update(BATCH, NllLoss())
    assert it.update(BATCH, NllLoss()).skipped is None
    fresh.update(BATCH, NllLoss())
    assert_same(weights(it.model), weights(fresh.model))


def test_an_empty_loss_mask_makes_no_step_and_says_so() -> None:
    it = learner(weight_decay=0.5)
    start = weights(it.model)
    empty = BATCH.with_token(loss_mask=torch.zeros_like(BATCH.loss_mask))
    update = it.update(empty, NllLoss())
    assert update.skipped == "no token is left in the loss"
    assert update.logp.shape == (BATCH.num_tokens,)
    assert it.updates == 0
    assert_same(weights(it.model), start)


def test_a_micro_batch_without_a_token_in_the_loss_is_no_trouble() -> None:
    only_first = BATCH.with_token(loss_mask=BATCH.loss_mask & (BATCH.sequence_ids == 0))
    batch = only_first.with_token(weight=aggregation_weights(only_first, "token-mean"))
    it = learner(1)
    assert it.update(batch, NllLoss()).skipped is None
    assert_same(gradients(it.model), oracle("nll", batch)[1], atol=1e-10)


def test_a_loss_is_asked_for_entropies_only_when_it_needs_them() -> None:
    seen: list[LossView] = []

    class Watching:
        scope = "token"

        def __init__(self, *needs: str) -> None:
            self.needs = frozenset(needs)

        def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
            assert view.logp is not None
            seen.append(view)
            return view.logp.sum(), {}

    learner().update(BATCH, Watching())
    learner().update(BATCH, Watching("entropy"))
    assert [view.entropy is None for view in seen] == [True, False]


# --- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_saved_learner_goes_on_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "cosine", "warmup": 1, "weight_decay": 0.1}
    it = learner(9, **options)
    for _ in range(2):
        it.update(BATCH, LOSSES["everything"])
    write_contents(tmp_path, it.contents(keep_in_place))
    other = Learner(copy.deepcopy(it.model), it.config, it.total_updates, it.packing.token_budget, it.temperature)
    other.load(tmp_path)
    assert other.updates == 2
    for _ in range(2):
        mine, theirs = (one.update(BATCH, LOSSES["everything"]) for one in (it, other))
        assert mine.stats == theirs.stats
    assert_same(weights(other.model), weights(it.model))
    assert_same(other.optimizer.tensors(), it.optimizer.tensors())


def test_a_learner_that_never_stepped_can_be_saved_and_loaded(tmp_path: Path) -> None:
    write_contents(tmp_path, learner().contents(keep_in_place))
    it = learner()
    it.load(tmp_path)
    it.update(BATCH, NllLoss())
    fresh = learner()
    fresh.update(BATCH, NllLoss())
    assert_same(weights(it.model), weights(fresh.model))


def test_optimizer_state_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    it = learner()
    it.update(BATCH, NllLoss())
    write_contents(tmp_path, it.contents(keep_in_place))
    smaller = Decoder(Architecture("llama", VOCAB, 8, 1, 2, 1, 4, 12, 64)).double()
    with pytest.raises(UserError, match=r"parameters this model does not have.*layers\.1|q_norm|qkv\.bias"):
        Learner(smaller, Optimizer(), 10, 64).load(tmp_path)


@pytest.mark.parametrize("contents", [None, b"not safetensors"])
def test_missing_or_damaged_optimizer_state_is_named(tmp_path: Path, contents: bytes | None) -> None:
    if contents is not None:
        (tmp_path / "optimizer.safetensors").write_bytes(contents)
    with pytest.raises(UserError, match=r"optimizer\.safetensors"):
        learner().load(tmp_path)


def test_without_columns_an_update_tells_the_same_numbers_alone() -> None:
    whole, numbers = (learner().update(BATCH, LOSSES["everything"], columns=columns) for columns in (True, False))
    assert whole.logp is not None
    assert (numbers.logp, numbers.entropy, numbers.skipped) == (None, None, None)
    assert numbers.stats == whole.stats
