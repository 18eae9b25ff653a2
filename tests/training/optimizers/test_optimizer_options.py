"""Every key of an optimizer changes the result; offload changes only where state is stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.config.model import Optimizer as Config
from burnish.core.batch import Batch
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from burnish.training.learner import Learner

MakeBatch = Callable[..., Batch]

MOVES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "name": ({}, [{"name": "adam8bit"}, {"name": "muon"}]),
    "lr": ({}, [{"lr": 0.02}]),
    "betas": ({}, [{"betas": (0.8, 0.999)}, {"betas": (0.9, 0.9)}]),
    "eps": ({}, [{"eps": 1e-3}]),
    "weight_decay": ({}, [{"weight_decay": 0.1}]),
    "clip_norm": ({"betas": (0.0, 0.0), "eps": 1e-2}, [{"clip_norm": 0.01}]),
    "schedule": ({}, [{"schedule": "linear"}, {"schedule": "cosine"}, {"schedule": "wsd"}]),
    "warmup": ({}, [{"warmup": 2}, {"warmup": 0.75}]),
    "decay": ({"schedule": "wsd"}, [{"decay": 0.75}]),
    "final": ({"schedule": "wsd"}, [{"final": 0.5}]),
    "precision": ({}, [{"precision": "stochastic"}]),
    "groups": (
        {},
        [{"groups": [{"match": "head", "lr_scale": 0.5}]}, {"groups": [{"match": "norm", "weight_decay": 0.1}]}],
    ),
}
"""A base and what to lay over it, for each key; any two must end differently."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    """In bfloat16, with one matrix that is large enough for moments of a byte."""
    decoder = Decoder(Architecture("llama", 11, 16, 1, 2, 1, 8, 128, 64))
    initialise(decoder, 0, std=0.3)
    return decoder.bfloat16()


def trained(model: Decoder, batch: Batch, options: dict[str, Any], updates: int = 4) -> Learner:
    learner = Learner(copy.deepcopy(model), Config(**({"lr": 0.01} | options)), 4, 64)
    for _ in range(updates):
        assert learner.update(batch, NllLoss()).skipped is None
    return learner


def weights(learner: Learner) -> dict[str, list[float]]:
    return {name: p.detach().float().flatten().tolist() for name, p in learner.model.named_parameters()}


@pytest.fixture(scope="module")
def batch(make_batch: MakeBatch) -> Batch:
    return make_batch([(0, 2, 6), (0, 3, 5), (1, 2, 7)])


def test_every_key_is_in_the_table() -> None:
    assert MOVES.keys() | {"offload"} == set(Config.model_fields)


@pytest.mark.parametrize("key", MOVES)
def test_a_key_changes_what_is_learnt(key: str, model: Decoder, batch: Batch) -> None:
    base, moves = MOVES[key]
    found = [weights(trained(model, batch, base | move)) for move in ({}, *moves)]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])


def test_offload_changes_where_the_state_lies(model: Decoder, batch: Batch) -> None:
    here, there = (trained(model, batch, {"offload": offload}) for offload in (False, True))
    assert weights(here) == weights(there)
    assert here.optimizer.host is None
    assert there.optimizer.host is not None


@pytest.mark.parametrize(
    "options",
    [
        {"name": "muon", "offload": True, "schedule": "wsd"},
        {"name": "adam8bit", "precision": "stochastic", "warmup": 0.5},
        {"precision": "stochastic", "groups": [{"match": "embed", "lr_scale": 0.1}]},
    ],
)
def test_a_learner_saved_in_the_middle_ends_the_same(
    options: dict[str, Any], model: Decoder, batch: Batch, tmp_path: Path
) -> None:
    unbroken = trained(model, batch, options)
    first = trained(model, batch, options, updates=2)
    write_contents(tmp_path, first.contents(keep_in_place))
    second = Learner(copy.deepcopy(first.model), first.config, 4, 64)
    second.load(tmp_path)
    for _ in range(2):
        second.update(batch, NllLoss())
    assert weights(second) == weights(unbroken)

    def bits(learner: Learner) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in learner.optimizer.tensors().items()}

    assert all(torch.equal(t, bits(unbroken)[name]) for name, t in bits(second).items())
