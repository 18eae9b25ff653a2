"""Losses, gradients, AdamW steps and saved state of models that Tinker's client trains, against plain float64 computations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.config.model import Lora
from burnish.models.decoder import Decoder, initialise
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.run.checkpoint.snapshot import write_contents
from burnish.serve.tinker.losses import LOSSES, sequence_loss
from burnish.serve.tinker.requests import AdamOptions, BadRequest, Datum
from burnish.serve.tinker.training_model import TrainingModel, share_base
from tests.serve.conftest import architecture, byte_tokenizer

LORA = Lora(rank=4, alpha=32)
Plain = Callable[..., Tensor]


def minimum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a < b, a, b)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    return minimum(torch.where(x > low, x, torch.full_like(x, low)), torch.full_like(x, high))


def plain_gspo(logp: Tensor, q: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    log_ratio = (logp.detach() - q)[mask != 0].mean()
    ratio = torch.exp(log_ratio + logp - logp.detach())
    return -minimum(ratio * a, clamp(ratio, 0.9, 1.05) * a).sum()


PLAIN: dict[str, tuple[Plain, dict[str, float]]] = {
    "cross_entropy": (lambda logp, q, a, w: (-logp * w).sum(), {}),
    "importance_sampling": (lambda logp, q, a, w: -(torch.exp(logp - q) * a).sum(), {}),
    "ppo": (
        lambda logp, q, a, w: -minimum(torch.exp(logp - q) * a, clamp(torch.exp(logp - q), 0.9, 1.05) * a).sum(),
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    ),
    "cispo": (lambda logp, q, a, w: -(clamp(torch.exp(logp - q), 0.8, 1.2).detach() * logp * a).sum(), {}),
    "dro": (lambda logp, q, a, w: -(logp * a - 0.5 * 0.05 * (logp - q) ** 2).sum(), {"beta": 0.05}),
    "gspo": (plain_gspo, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_documented_formula(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, a, start = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(3))
    q, start = -q.abs(), -q.abs() + 0.2 * start
    weights = (torch.rand(40, generator=generator) > 0.4).double()
    plain, options = PLAIN[name]
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    inputs = {"logprobs": q, "advantages": a, "sequence_ratio_mask": weights}
    if name == "cross_entropy":
        inputs = {"weights": weights}
    found = sequence_loss(LOSSES[name], ours, inputs, options)
    expected = plain(theirs, q, a, weights)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert float(theirs.grad.abs().sum()) > 0


def test_a_weight_of_zero_leaves_a_token_out_of_dro() -> None:
    logp, q, a = (
        torch.tensor(values, requires_grad=k == 0) for k, values in enumerate(([-1.0, -2.0], [0.0, -1.5], [0.5, 1.0]))
    )
    inputs = {"logprobs": q, "advantages": a, "weights": torch.tensor([0.0, 1.0])}
    sequence_loss(LOSSES["dro"], logp, inputs, {"beta": 0.1}).backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, -1.0 + 0.1 * -0.5])


# --- models --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def base(tokenizer: Tokenizer) -> PolicyModel:
    model = Decoder(architecture(tokenizer.vocab_size, 256))
    initialise(model, seed=1, std=0.2)
    return PolicyModel(model.double().requires_grad_(False), tokenizer, None, "")


def data(rows: int, vocab: int = 256, width: int | None = None) -> list[Datum]:
    """Sequences of several lengths; targets are any tokens, as the API allows."""
    random = np.random.default_rng(5)
    found = []
    for _ in range(rows):
        size = int(random.integers(3, 20))
        shape = (size,) if width is None else (size, width)
        inputs = {"target_tokens": random.integers(0, vocab, shape), "weights": random.random(shape, np.float32)}
        found.append(Datum(random.integers(0, vocab, size), inputs))
    return found


def as_policy_data(rows: int) -> list[Datum]:
    random = np.random.default_rng(6)
    made = []
    for datum in data(rows):
        size = len(datum.tokens)
        inputs = {"logprobs": -5 + 0.1 * random.random(size), "advantages": random.normal(size=size)}
        made.append(Datum(datum.tokens, {"target_tokens": datum.inputs["target_tokens"], **inputs}))
    return made


def plain_loss(model: TrainingModel, rows: list[Datum]) -> tuple[Tensor, list[Tensor]]:
    """Cross entropy of each sequence by itself, through whole logits."""
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for datum in rows:
        hidden = model.module.hidden(torch.tensor(datum.tokens), torch.tensor([0, len(datum.tokens)]))
        logp = (hidden @ model.module.head_weight.t()).log_softmax(-1)
        targets = torch.tensor(datum.inputs["target_tokens"])
        chosen = logp.gather(1, targets if targets.dim() == 2 else targets[:, None]).reshape(targets.shape)
        logprobs.append(chosen.detach())
        total = total - (chosen * torch.tensor(datum.inputs["weights"]).double()).sum()
    return total, logprobs


@pytest.mark.parametrize("lora", [LORA, None])
@pytest.mark.parametrize("width", [None, 3])
def test_gradients_add_up_over_requests_and_micro_batches(
    base: PolicyModel, lora: Lora | None, width: int | None
) -> None:
    model = TrainingModel(base, lora, seed=3, token_budget=30)
    with torch.no_grad():
        for name, parameter in model.parameters.items():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    rows = data(7, width=width)
    outputs = [model.forward_backward(part, "cross_entropy", {}) for part in (rows[:4], rows[4:])]
    found = {name: gradient.clone() for name, gradient in model.optimizer.gradients().items()}
    model.optimizer.zero_grad()
    expected, logprobs = plain_loss(model, rows)
    expected.backward()
    assert found.keys() == model.parameters.keys()
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-8, atol=1e-10)
    assert sum(out.metrics["loss:sum"] for out in outputs) == pytest.approx(float(expected.detach()), rel=1e-12)
    for ours, theirs in zip([one for out in outputs for one in out.logprobs], logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


@pytest.mark.parametrize("budget", [60, 1000])
def test_prompts_in_common_are_computed_once_with_the_same_gradient(base: PolicyModel, budget: int) -> None:
    model = TrainingModel(base, LORA, seed=3, token_budget=budget)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    answers, prompts = data(8), np.random.default_rng(0).integers(0, 256, (2, 30))
    rows = []
    for k, datum in enumerate(answers):
        inputs = {name: np.concatenate([np.zeros(30, array.dtype), array]) for name, array in datum.inputs.items()}
        rows.append(Datum(np.concatenate([prompts[k % 2], datum.tokens]), inputs))
    computed = []
    forward = model.module.forward
    model.module.forward = lambda tokens, *rest: computed.append(len(tokens)) or forward(tokens, *rest)  # type: ignore
    found = model.forward_backward(rows, "cross_entropy", {})
    model.module.forward = forward  # type: ignore
    assert sum(computed) < sum(len(row.tokens) for row in rows) - 60
    gradients = {name: gradient.clone() for name, gradient in model.optimizer.gradients().items()}
    model.optimizer.zero_grad()
    expected, logprobs = plain_loss(model, rows)
    expected.backward()
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-10)
    for ours, theirs in zip(found.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


def test_a_forward_pass_leaves_no_gradient_and_a_refused_request_keeps_it(base: PolicyModel) -> None:
    model = TrainingModel(base, LORA, seed=3, token_budget=64)
    alone = model.forward_backward(data(2), "cross_entropy", {}, forward_only=True)
    assert not model.optimizer.gradients()
    with pytest.raises(BadRequest, match="without a gradient"):
        model.optim_step(AdamOptions())
    together = model.forward_backward(data(2), "cross_entropy", {})
    np.testing.assert_array_equal(alone.logprobs[0], together.logprobs[0])
    before = {name: gradient.clone() for name, gradient in model.optimizer.gradients().items()}
    bad = data(2)
    bad[1].inputs["weights"] = bad[1].inputs["weights"][:-1]
    for rows, loss, options, text in (
        (bad, "cross_entropy", {}, r"data\[1\]: weights has the shape"),
        (data(1), "cros_entropy", {}, "did you mean"),
        (data(1), "ppo", {}, "has no logprobs, which ppo needs"),
        (as_policy_data(1), "dro", {}, "no beta"),
        (as_policy_data(1), "ppo", {"clip": 0.2}, "no option 'clip'"),
        (data(1, vocab=100_000), "cross_entropy", {}, "the input has token"),
        (data(1), "stable_reinforce", {}, "not served here"),
    ):
        with pytest.raises(BadRequest, match=text):
            model.forward_backward(rows, loss, options)
    after = model.optimizer.gradients()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], gradient) for name, gradient in after.items())


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_is_that_of_torchs_adamw(base: PolicyModel, clip: float) -> None:
    model = TrainingModel(base, None, seed=0, token_budget=64)
    copies = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.parameters.items()}
    options = {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-12, "weight_decay": 0.1}
    theirs = torch.optim.AdamW(copies.values(), **options)
    adam = AdamOptions(learning_rate=1e-3, beta1=0.8, beta2=0.95, eps=1e-12, weight_decay=0.1, grad_clip_norm=clip)
    for step in range(3):
        model.forward_backward(data(3 + step), "cross_entropy", {})
        for name, gradient in model.optimizer.gradients().items():
            copies[name].grad = gradient.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(copies.values(), clip)
        metrics = model.optim_step(adam)
        theirs.step()
        assert metrics["unclipped_grad_l2:mean"] > 0.5
        assert not model.optimizer.gradients()
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=1e-9, atol=1e-12)


def test_a_gradient_that_is_not_finite_is_dropped_and_named(base: PolicyModel) -> None:
    model = TrainingModel(base, LORA, seed=0, token_budget=64)
    before = model.snapshot()
    rows = data(1)
    rows[0].inputs["weights"][0] = np.inf
    model.forward_backward(rows, "cross_entropy", {})
    with pytest.raises(BadRequest, match="not finite"):
        model.optim_step(AdamOptions())
    assert not model.optimizer.gradients()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.parameters.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [LORA, None])
def test_training_goes_on_bit_equal_from_a_saved_state(
    base: PolicyModel, lora: Lora | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = PolicyModel(share_base(base.module).to(dtype), base.tokenizer, None, "")
    adam = AdamOptions(learning_rate=1e-2)

    def train(model: TrainingModel, steps: int) -> None:
        for step in range(steps):
            model.forward_backward(data(2 + step), "cross_entropy", {})
            model.optim_step(adam)

    first = TrainingModel(plain, lora, seed=0, token_budget=64)
    train(first, 2)
    write_contents(tmp_path, first.contents(with_optimizer=True))
    second = TrainingModel(plain, lora, seed=9, token_budget=64)
    second.forward_backward(data(1), "cross_entropy", {})  # a gradient that the load drops
    second.load(tmp_path, with_optimizer=True)
    assert second.num_steps == 2
    saved, restored = first.optimizer.tensors(), second.optimizer.tensors()
    assert saved.keys() == restored.keys()
    assert all(torch.equal(tensor, restored[name]) for name, tensor in saved.items())
    train(second, 1)
    (tmp_path / "optimizer.json").rename(tmp_path / "gone.json")
    changed = second.snapshot()
    with pytest.raises(FileNotFoundError):
        second.load(tmp_path, with_optimizer=True)
    assert all(torch.equal(tensor, changed[name]) for name, tensor in second.snapshot().items()), "nothing is loaded"
    (tmp_path / "gone.json").rename(tmp_path / "optimizer.json")
    second.load(tmp_path, with_optimizer=True)
    third = TrainingModel(plain, lora, seed=9, token_budget=64)
    third.load(tmp_path, with_optimizer=False)
    assert third.num_steps == 0
    assert not third.optimizer.tensors()
    train(first, 2)
    train(second, 2)
    train(third, 2)
    ours, theirs, fresh = first.snapshot(), second.snapshot(), third.snapshot()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(not torch.equal(ours[name], fresh[name]) for name in ours)


def test_two_adapters_train_on_the_same_base_tensors(base: PolicyModel) -> None:
    before = {name: tensor.clone() for name, tensor in base.module.named_parameters()}
    models = [TrainingModel(base, Lora(rank=rank, alpha=32), seed=rank, token_budget=64) for rank in (2, 5)]
    for model in models:
        assert model.module.layers[0].down.weight.data_ptr() == base.module.layers[0].down.weight.data_ptr()
        model.forward_backward(data(2), "cross_entropy", {})
        model.optim_step(AdamOptions(learning_rate=0.1))
    outputs = [model.forward_backward(data(2), "cross_entropy", {}, forward_only=True) for model in models]
    assert not np.allclose(outputs[0].logprobs[0], outputs[1].logprobs[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in base.module.named_parameters())
