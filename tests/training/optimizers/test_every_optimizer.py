"""Properties of every optimizer in every precision: resuming, offload, resets, announced memory."""

from __future__ import annotations

import pytest
import torch

from burnish.config.errors import UserError
from burnish.training.optimizers import base_optimizer as optimizer_module
from tests.training.optimizers.toy_regression import VARIANTS, feed, make, regression, same, saved, stepped, weights

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of these sizes are updated in several parts, and visit the device in several batches."""
    monkeypatch.setattr(optimizer_module, "MAX_PART_SIZE", 2048)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(variant: str) -> None:
    dtype, options = VARIANTS[variant]
    unbroken = stepped(make(dtype, options), range(6))
    first = stepped(make(dtype, options), range(3))
    second = make(dtype, options, seed=1)
    for name, parameter in second.parameters.items():
        parameter.data.copy_(first.parameters[name].data)
    second.restore(saved(first))
    stepped(second, range(3, 6))
    assert same(weights(second), weights(unbroken))
    assert same(saved(second), saved(unbroken))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_state_in_host_memory_gives_the_same_bits(variant: str, device: str) -> None:
    dtype, options = VARIANTS[variant]
    here = stepped(make(dtype, options, device=device), range(5))
    there = stepped(make(dtype, {**options, "offload": True}, device=device), range(3))
    resumed = make(dtype, {**options, "offload": True}, device=device)
    for name, parameter in resumed.parameters.items():
        parameter.data.copy_(there.parameters[name].data)
    resumed.restore(saved(there))
    for optimizer in (there, resumed):
        stepped(optimizer, range(3, 5))
        assert same(weights(optimizer), weights(here))
        assert same(saved(optimizer), saved(here))
    assert there.host is not None
    resting = [t for key, t in there.tensors().items() if not key.startswith("step/")]
    assert {t.device.type for t in resting} == {"cpu"}
    assert len({t.untyped_storage().data_ptr() for t in resting}) == 1, "one block, locked once"


@pytest.mark.parametrize("variant", ["adamw-float32", "adamw-master", "muon-float32", "muon-master"])
def test_parts_are_a_matter_of_memory_alone(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of optimizers that round at random too, but there each part draws its own numbers."""
    dtype, options = VARIANTS[variant]
    cut = stepped(make(dtype, options), range(3))
    monkeypatch.setattr(optimizer_module, "MAX_PART_SIZE", 1 << 23)
    assert same(saved(stepped(make(dtype, options), range(3))), saved(cut))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_state_takes_the_memory_it_said_it_would(variant: str) -> None:
    dtype, options = VARIANTS[variant]
    optimizer = make(dtype, options)
    announced = optimizer.state_bytes()
    assert optimizer.state == {}
    stepped(optimizer, range(1))
    assert announced == sum(t.numel() * t.element_size() for t in optimizer.tensors().values())
    has_master = {name for name in optimizer.tensors() if name.startswith("master/")}
    assert len(has_master) == (3 if dtype == torch.bfloat16 and "precision" not in options else 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_reset_forgets_all_but_the_master_weights(variant: str) -> None:
    dtype, options = VARIANTS[variant]
    optimizer = stepped(make(dtype, options), range(3))
    fresh = make(dtype, options, seed=1)
    for name, parameter in fresh.parameters.items():
        parameter.data.copy_(optimizer.parameters[name].data)
    fresh.restore({k: t if k.startswith("master/") else torch.zeros_like(t) for k, t in saved(optimizer).items()})
    optimizer.reset()
    assert same(saved(stepped(optimizer, range(2))), saved(stepped(fresh, range(2))))
    assert same(weights(optimizer), weights(fresh))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_parameter_without_a_gradient_stays_as_it_is(variant: str) -> None:
    dtype, options = VARIANTS[variant]
    optimizer = make(dtype, options)
    before = weights(optimizer)
    feed(optimizer, 0)
    optimizer.sums.pop("embedding.weight", None)
    optimizer.parameters["embedding.weight"].grad = None
    optimizer.step(0.01, 0)
    after = weights(optimizer)
    assert torch.equal(after["embedding.weight"], before["embedding.weight"])
    assert "exp_avg/embedding.weight" not in optimizer.tensors()
    assert not torch.equal(after["layers.0.down.weight"], before["layers.0.down.weight"])


@pytest.mark.parametrize(("name", "lr"), [("adamw", 0.01), ("adam8bit", 0.01), ("muon", 0.02)])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"precision": "stochastic"})],
    ids=["float32", "master", "stochastic"],
)
def test_a_toy_is_learnt(name: str, lr: float, dtype: torch.dtype, options: dict[str, str]) -> None:
    losses = regression(name, lr, 150, dtype, **options)
    assert 0.7 < losses[0] < 1.3
    assert max(losses[-10:]) < 0.05


@pytest.mark.parametrize("offload", [False, True])
def test_an_optimizer_restored_to_before_its_first_update_begins_anew(offload: bool) -> None:
    dtype, options = VARIANTS["adamw-float32"]
    optimizer = stepped(make(dtype, {**options, "offload": offload}), range(3))
    optimizer.restore({})
    fresh = make(dtype, options)
    assert same(saved(stepped(optimizer, range(2))), saved(stepped(fresh, range(2))))


def test_state_of_another_optimizer_is_refused_with_both_named() -> None:
    state = saved(stepped(make(*VARIANTS["adamw-master"]), range(1)))
    with pytest.raises(UserError) as error:
        make(*VARIANTS["adam8bit-stochastic"]).restore(state)
    for words in (
        "saved by another optimizer",
        "master [40, 128] float32",
        "adam8bit with precision stochastic",
        "root",
    ):
        assert words in str(error.value)


def test_the_norm_over_ranks_is_the_root_of_the_mean_of_squares_times_pieces() -> None:
    """Two ranks that hold the same plain parameters: nothing is counted twice."""
    optimizer = make(torch.float32, {})
    feed(optimizer, 0)
    expected = torch.cat([g.flatten().double() for g in optimizer.gradients().values()]).norm()
    seen = []
    optimizer.reduce = lambda squares: (seen.append(float(squares)), squares)[1]
    norm = optimizer.clip(float(expected) / 2)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    assert seen == pytest.approx([float(expected) ** 2])
    clipped = torch.cat([g.flatten().double() for g in optimizer.gradients().values()]).norm()
    assert float(clipped) == pytest.approx(float(expected) / 2, rel=1e-5)
