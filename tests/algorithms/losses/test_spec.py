"""The records of ratio, clip and loss: which of them go together."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest
from pydantic import ValidationError

from burnish.algorithms.losses import spec
from burnish.algorithms.losses.spec import (
    Clip,
    CovarianceClip,
    LogprobLoss,
    NoClip,
    NoRatio,
    PpoClip,
    SurrogateLoss,
    WeightedLogprobLoss,
    policy_loss_conflict,
    scope_of,
)
from burnish.config.records import Plugin, Slot


def name_of(record: type[Slot]) -> str:
    return cast(str, record.model_fields["name"].default)


RATIO = {name_of(r): r() for r in spec.RATIO_RECORDS}
CLIP: dict[str, Any] = {name_of(r): r() for r in spec.CLIP_RECORDS}
LOSS = {name_of(r): r() for r in (SurrogateLoss, LogprobLoss, WeightedLogprobLoss)}


def test_which_combinations_there_are() -> None:
    fits = {
        (r, c, o) for r, c, o in product(RATIO, CLIP, LOSS) if policy_loss_conflict(RATIO[r], CLIP[c], LOSS[o]) is None
    }
    every = ("token", "sequence", "seq_token", "seq_prod")
    expected = {(r, c, "surrogate") for r in every for c in ("ppo", "none")}
    expected |= {("token", c, "surrogate") for c in ("soft", "clip_cov", "kl_cov", "second_moment")}
    expected |= {("sequence", "log_geo", "surrogate"), ("none", "none", "logprob")}
    expected |= {(r, "is_weight", "sg_logprob") for r in ("token", "sequence", "seq_prod")}
    expected |= {("token", c, "sg_logprob") for c in ("dppo_tv", "dppo_kl", "gamma", "taper")}
    expected |= {("seq_prod", "taper", "sg_logprob")}
    assert fits == expected


@pytest.mark.parametrize(
    ("ratio", "clip", "loss", "reason"),
    [
        ("token", "none", "logprob", "loss logprob uses no ratio"),
        ("none", "ppo", "surrogate", "ratio is none: set algorithm.ratio=token or algorithm.loss=logprob"),
        ("token", "is_weight", "surrogate", "makes loss sg_logprob, not surrogate: set algorithm.loss=sg_logprob"),
        ("token", "ppo", "sg_logprob", "algorithm.clip to one of is_weight, dppo_tv, dppo_kl"),
        ("token", "log_geo", "surrogate", "bounds ratio sequence, not token: set algorithm.ratio=sequence"),
    ],
)
def test_a_refusal_says_why_and_what_to_set(ratio: str, clip: str, loss: str, reason: str) -> None:
    refusal = policy_loss_conflict(RATIO[ratio], CLIP[clip], LOSS[loss])
    assert refusal is not None
    assert reason in refusal


def test_a_users_loss_has_neither_ratio_nor_clip() -> None:
    mine = Plugin(name="a.py:f")
    assert policy_loss_conflict(NoRatio(), NoClip(), mine) is None
    assert "a plug-in loss" in str(policy_loss_conflict(RATIO["token"], NoClip(), mine))


@pytest.mark.parametrize(
    ("ratio", "clip", "scope"),
    [
        ("token", PpoClip(), "token"),
        ("token", PpoClip(drift=0.5), "sequence"),
        ("sequence", PpoClip(), "sequence"),
        ("seq_token", PpoClip(), "sequence"),
        ("seq_prod", NoClip(), "sequence"),
        ("sequence", CLIP["log_geo"], "sequence"),
        ("token", CLIP["clip_cov"], "batch"),
        ("token", CLIP["kl_cov"], "batch"),
    ],
)
def test_the_scope_is_the_widest_of_the_slots(ratio: str, clip: Clip, scope: str) -> None:
    assert scope_of(RATIO[ratio], clip, LOSS["surrogate"]) == scope


@pytest.mark.parametrize(
    ("record", "options"),
    [
        (PpoClip, {"dual": 1.0}),
        (CovarianceClip, {"low_cov": 5.0}),
        (CovarianceClip, {"share": 0.0}),
        (spec.ImportanceWeightClip, {"low": 1.0}),
        (spec.ImportanceWeightClip, {"cap": 0.2}),
        (spec.SoftClip, {"tau_negative": 0.0}),
    ],
)
def test_options_that_make_no_sense_are_refused(record: type[Slot], options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        record(**options)
