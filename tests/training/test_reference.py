"""References: which weights each kind holds at each moment, and that the ones that move come back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.config.errors import UserError
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.models.decoder import Decoder
from burnish.run.checkpoint.contents import write_contents
from burnish.run.checkpoint.saving import leave
from burnish.training.learner import Learner
from burnish.training.reference import EmaReference, Reference, make_reference

MakeModel = Callable[..., Decoder]
MakeBatch = Callable[..., Batch]
SHAPES = [(7, 2, 4), (3, 1, 3), (7, 3, 5), (3, 1, 1), (3, 2, 2), (9, 1, 4)]
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "ema": {"eta": 0.25},
    "hard_sync": {"every": 2},
    "iterate": {"every": 2},
}
MOVING = ["ema", "hard_sync", "iterate"]


class Vector(nn.Module):
    """A model that is one parameter."""

    def __init__(self, values: list[float], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=dtype))


def learner(model: Decoder) -> Learner:
    return Learner(model, Optimizer(lr=0.01), 10, 9, 0.8)


def reference(name: str, model: nn.Module, **options: Any) -> Reference:
    return make_reference(name, model, token_budget=9, temperature=0.8, **(KINDS[name] | options))


def train(it: Learner, ref: Reference, batch: Batch, steps: range) -> list[bool]:
    """Steps of two updates each, as the trainer makes them."""
    changed = []
    for step in steps:
        for _ in range(2):
            it.update(batch, NllLoss())
            ref.after_update(it.model)
        changed.append(ref.after_step(it.model, step))
    return changed


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_starts_as_the_policy(name: str, make_model: MakeModel, make_batch: MakeBatch) -> None:
    it, batch = learner(make_model()), make_batch(SHAPES)
    torch.testing.assert_close(reference(name, it.model).logprobs(batch), it.logprobs(batch), atol=1e-12, rtol=0)


def test_a_frozen_one_does_not_follow(make_model: MakeModel, make_batch: MakeBatch) -> None:
    it, batch = learner(make_model()), make_batch(SHAPES)
    ref = reference("frozen", it.model)
    before = ref.logprobs(batch)
    assert train(it, ref, batch, range(1, 4)) == [False] * 3
    assert torch.equal(ref.logprobs(batch), before)
    assert not torch.allclose(it.logprobs(batch), before)
    assert not any(p.requires_grad for p in ref.model.parameters())


def shadow(ref: Reference) -> Tensor:
    assert isinstance(ref, EmaReference)
    return ref.shadow["w"]


def test_the_average_is_the_worked_number() -> None:
    ref = reference("ema", Vector([1, -2]), eta=0.01)
    ref.after_update(Vector([2, 0]))
    torch.testing.assert_close(shadow(ref), torch.tensor([1.01, -1.98]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eta_one_copies_and_eta_zero_stands_still_exactly(dtype: torch.dtype) -> None:
    start, theta = Vector([0.1, -7.3, 1e4], dtype), Vector([0.3, 1e-4, -0.7], dtype)
    copied, still = reference("ema", start, eta=1.0), reference("ema", start, eta=0.0)
    for ref in (copied, still):
        ref.after_update(theta)
    assert torch.equal(shadow(copied), theta.w.detach().float())
    assert torch.equal(shadow(still), start.w.detach().float())


def test_the_average_is_over_updates_not_steps(make_model: MakeModel, make_batch: MakeBatch) -> None:
    it, batch = learner(make_model()), make_batch(SHAPES)
    ref = reference("ema", it.model)
    expected = {n: p.detach().clone() for n, p in it.model.named_parameters()}
    for _ in range(4):
        it.update(batch, NllLoss())
        ref.after_update(it.model)
        expected = {n: 0.75 * expected[n] + 0.25 * p.detach() for n, p in it.model.named_parameters()}
    assert not ref.after_step(it.model, 1)
    held = make_model()
    held.load_state_dict(expected)
    torch.testing.assert_close(ref.logprobs(batch), learner(held).logprobs(batch), atol=1e-12, rtol=0)


def test_the_average_of_a_half_type_moves_by_less_than_the_type_can_add(
    make_model: MakeModel, make_batch: MakeBatch
) -> None:
    start, batch = make_model(dtype=torch.bfloat16), make_batch(SHAPES)
    theta = make_model(seed=1, dtype=torch.bfloat16)
    ref = reference("ema", start, eta=0.001)
    before = ref.logprobs(batch)
    for _ in range(1000):
        ref.after_update(theta)
    assert isinstance(ref, EmaReference)
    share = 1 - 0.999**1000
    for name, parameter in start.named_parameters():
        exact = torch.lerp(parameter.detach().float(), dict(theta.named_parameters())[name].detach().float(), share)
        torch.testing.assert_close(ref.shadow[name], exact, atol=1e-4, rtol=1e-4)
    assert {p.dtype for p in ref.model.parameters()} == {torch.bfloat16}
    assert not torch.equal(ref.logprobs(batch), before)
    rounded = make_model(dtype=torch.bfloat16)
    rounded.load_state_dict(ref.shadow)
    assert torch.equal(ref.logprobs(batch), learner(rounded).logprobs(batch))


@pytest.mark.parametrize("name", ["hard_sync", "iterate"])
def test_a_copy_is_made_after_every_so_many_steps_and_not_between(
    name: str, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    it, batch = learner(make_model()), make_batch(SHAPES)
    ref = reference(name, it.model, every=3)
    held = it.logprobs(batch)
    for step in range(1, 8):
        changed = train(it, ref, batch, range(step, step + 1))
        assert changed == [step % 3 == 0]
        if changed == [True]:
            held = it.logprobs(batch)
        torch.testing.assert_close(ref.logprobs(batch), held, atol=1e-12, rtol=0)
    assert ref.restarts == (name == "iterate")


def test_an_iteration_is_one_step_unless_said_otherwise() -> None:
    policy = Vector([1.0])
    ref = make_reference("iterate", policy, 9, 1.0)
    assert [ref.after_step(policy, k) for k in (1, 2)] == [True, True]
    assert ref.model is policy  # no copy: it is asked before the step's first update
    assert make_reference("iterate", policy, 9, 1.0, every=2).model is not policy


# --- checkpoints -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_stops_goes_on_with_the_same_reference_bit_for_bit(
    name: str, dtype: torch.dtype, tmp_path: Path, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    batch, it = make_batch(SHAPES), learner(make_model(dtype=dtype))
    ref = reference(name, it.model)
    train(it, ref, batch, range(1, 4))
    write_contents(tmp_path, [*it.contents(leave), *ref.contents(leave)])
    policy = {n: t.clone() for n, t in it.model.state_dict().items()}

    again = learner(make_model(dtype=dtype))
    other = reference(name, again.model)  # from the run's start, as a new process makes it
    again.model.load_state_dict(policy)
    again.load(tmp_path)
    other.load(tmp_path)
    assert torch.equal(other.logprobs(batch), ref.logprobs(batch))
    assert train(again, other, batch, range(4, 6)) == train(it, ref, batch, range(4, 6))
    assert torch.equal(other.logprobs(batch), ref.logprobs(batch))
    assert (tmp_path / "reference.safetensors").exists() == (name in MOVING)


def test_the_saved_average_is_float32(tmp_path: Path, make_model: MakeModel) -> None:
    write_contents(tmp_path, reference("ema", make_model(dtype=torch.bfloat16)).contents(leave))
    assert {t.dtype for t in load_file(tmp_path / "reference.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("name", MOVING)
def test_a_missing_or_wrong_file_is_named(name: str, tmp_path: Path, make_model: MakeModel) -> None:
    ref, path = reference(name, make_model()), tmp_path / "reference.safetensors"
    start = {n: p.clone() for n, p in ref.model.named_parameters()}
    with pytest.raises(UserError, match=r"reference\.safetensors is not there"):
        ref.load(tmp_path)
    path.write_bytes(b"no tensors here")
    with pytest.raises(UserError, match=r"reference\.safetensors cannot be read"):
        ref.load(tmp_path)
    stored = {n: torch.zeros_like(p) for n, p in start.items()}
    for damaged, complaint in (
        ({n: t for n, t in stored.items() if n != "norm.weight"}, r"missing \['norm.weight'\]"),
        (stored | {"extra": torch.zeros(1)}, r"unexpected \['extra'\]"),
        (stored | {"norm.weight": torch.zeros(7, dtype=torch.float64)}, r"norm.weight is \(7,\)"),
        (stored | {"norm.weight": torch.zeros(8)}, r"norm.weight is \(8,\) in torch.float32"),
    ):
        save_file(damaged, path)
        with pytest.raises(UserError, match=rf"reference\.safetensors does not fit the model: .*{complaint}"):
            ref.load(tmp_path)
    assert all(torch.equal(p, start[n]) for n, p in ref.model.named_parameters())
