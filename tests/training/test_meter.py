"""The learner's meter: the phase that time is attributed to, FLOPs of the batches, gradient norms per block, peak FLOP/s."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from burnish.algorithms.losses.policy_loss import NllLoss, PolicyLoss
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.models.decoder import Decoder
from burnish.models.flops import ForwardCounts, backward_flops, forward_flops, packed_counts, recomputed_flops
from burnish.models.heads import ValueModel
from burnish.training import meter as module
from burnish.training.learner import Learner, parameter_block
from burnish.training.meter import Meter, MeterReading, model_flops, peak_flops, peak_half_flops

SHAPES = [(0, 4, 3), (0, 4, 6), (1, 2, 5)]
CPU = torch.device("cpu")


class Clock:
    """Time that moves when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "perf_counter", made)
    return made


def busy(meter: Meter, clock: Clock) -> None:
    """Other 1 s, forward 2, communication inside it 4, other 8, and 16 outside any phase."""
    with meter("other"):
        clock.now += 1
        with meter("forward"):
            clock.now += 2
            with meter("communication"):
                clock.now += 4
        clock.now += 8
    clock.now += 16


def test_a_moment_belongs_to_the_innermost_part(clock: Clock) -> None:
    meter = Meter(CPU, None)
    busy(meter, clock)
    busy(meter, clock)
    expected = {"forward": 4.0, "backward": 0.0, "optimizer": 0.0, "communication": 8.0, "other": 18.0}
    reading = meter.read()
    assert reading.seconds == expected
    assert reading.total_s == 30
    assert (reading.needed, reading.executed) == (None, None)
    assert meter.read().total_s == 0


def test_a_part_ends_where_its_work_fails(clock: Clock) -> None:
    meter = Meter(CPU, None)
    with contextlib.suppress(ZeroDivisionError), meter("backward"):
        clock.now += 1
        clock.now /= 0
    clock.now += 1
    busy(meter, clock)
    assert meter.read().seconds["backward"] == 1


def test_a_meter_that_is_never_read_does_not_grow(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MARKS", 10)
    meter = Meter(CPU, None)
    for _ in range(20):
        busy(meter, clock)
        meter.count_pass(torch.tensor([0, 2]), 1, None, with_gradient=True)
    assert len(meter._marks) <= 20
    assert len(meter._passes) <= 4
    reading = meter.read()
    assert (reading.total_s, reading.tokens) == (20 * 15, 40)


def learner_of(model: nn.Module, **options: Any) -> Learner:
    return Learner(model, Optimizer(lr=1e-3), 10, **({"token_budget": 1000} | options))


def test_an_update_counts_what_its_batch_costs(
    make_model: Callable[..., Decoder], make_batch: Callable[..., Batch]
) -> None:
    model, batch = make_model(), make_batch(SHAPES)
    wanted = int(batch.loss_mask.sum())
    readings = []
    for budget in (1000, 9, 1):
        learner = learner_of(model, token_budget=budget, share_prefixes=False)
        learner.update(batch, PolicyLoss())
        readings.append(learner.meter.read())
    counts = packed_counts(batch.lengths.tolist(), wanted)
    once = forward_flops(model.arch, counts) + backward_flops(model.arch, counts)
    for reading in readings:
        assert reading.tokens == batch.num_tokens
        assert reading.needed == once.total
        assert reading.executed == (once + recomputed_flops(model.arch, counts)).total
        assert all(reading.seconds[part] > 0 for part in ("forward", "backward", "optimizer", "other"))


def test_log_probs_cost_a_forward_and_are_no_training_tokens(
    make_model: Callable[..., Decoder], make_batch: Callable[..., Batch]
) -> None:
    model, batch = make_model(), make_batch(SHAPES)
    learner = learner_of(model, share_prefixes=False)
    learner.logprobs(batch)
    reading = learner.meter.read()
    counts = packed_counts(batch.lengths.tolist(), int(batch.action_mask.sum()))
    assert reading.needed == reading.executed == forward_flops(model.arch, counts).total
    assert reading.tokens == 0
    assert reading.seconds["forward"] > 0


def test_a_shared_prompt_is_counted_once_and_its_tokens_as_often_as_they_are_given(
    make_model: Callable[..., Decoder], make_batch: Callable[..., Batch]
) -> None:
    model, batch = make_model(), make_batch([(0, 12, 3), (0, 12, 6)])
    tokens = batch.tokens.clone()
    tokens[15:27] = tokens[:12]
    tokens[27] = (tokens[12] + 1) % 11
    batch = Batch(tokens, batch.offsets, batch.token, batch.sequence)
    learner = learner_of(model)
    learner.update(batch, PolicyLoss())
    reading = learner.meter.read()
    counts = packed_counts([15, 18], int(batch.loss_mask.sum()), shared=[0, 12])
    assert reading.needed == (forward_flops(model.arch, counts) + backward_flops(model.arch, counts)).total
    assert reading.tokens == 33


def test_a_critic_is_counted_with_its_own_head(make_model: Callable[..., Decoder]) -> None:
    model = make_model()
    critic = model_flops(ValueModel(model))
    assert critic is not None
    counts = ForwardCounts(7, 20, 5)
    assert critic.of(counts, with_gradient=False)[0] == forward_flops(model.arch, counts, 1).total
    assert model_flops(nn.Linear(2, 2)) is None


def test_readings_of_two_learners_add_up() -> None:
    one = MeterReading(
        {"forward": 1.0, "backward": 2.0, "optimizer": 3.0, "communication": 0.0, "other": 0.5}, 10, 100, 120
    )
    both = one + one
    assert (both.seconds["backward"], both.tokens, both.needed, both.executed) == (4.0, 20, 200, 240)
    assert (one + MeterReading(needed=None, executed=None)).needed is None


# --- gradient norms ------------------------------------------------------------------------------------------------------


def test_the_norms_of_the_blocks_make_up_the_whole(
    make_model: Callable[..., Decoder], make_batch: Callable[..., Batch]
) -> None:
    batch = make_batch(SHAPES)
    stats = learner_of(make_model(), grad_norms=True).update(batch, NllLoss()).stats
    blocks = {name: value for name, value in stats.items() if name.startswith("grad_norm_")}
    assert list(blocks) == ["grad_norm_embedding", "grad_norm_head", "grad_norm_layer_00", "grad_norm_rest"]
    assert sum(value**2 for value in blocks.values()) == pytest.approx(stats["grad_norm"] ** 2, rel=1e-12)
    assert not any(name.startswith("grad_norm_") for name in learner_of(make_model()).update(batch, NllLoss()).stats)


def test_blocks_have_their_names_in_every_kind_of_model() -> None:
    names = {
        "embedding.weight": "embedding",
        "layers.3.qkv.weight": "layer_03",
        "layers.12.attention_norm.weight": "layer_12",
        "norm.weight": "rest",
        "head.weight": "head",
        "backbone.layers.0.down.weight": "layer_00",
        "inner.model.embed_tokens.weight": "embedding",
        "inner.model.layers.7.self_attn.q_proj.weight": "layer_07",
        "inner.lm_head.weight": "head",
        "inner.transformer.h.5.attn.c_attn.weight": "layer_05",
        "inner.transformer.wte.weight": "embedding",
    }
    assert {name: parameter_block(name) for name in names} == names


# --- peaks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_a_gpu_is_found_by_the_words_of_its_name(name: str, tflops: float) -> None:
    assert peak_half_flops(name) == tflops * 1e12


def test_what_is_not_in_the_table_has_no_peak() -> None:
    assert peak_half_flops("NVIDIA H2000 Wonder") is None
    assert peak_flops(CPU, torch.bfloat16) is None
