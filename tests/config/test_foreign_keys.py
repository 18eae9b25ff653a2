"""verl's rollout-correction keys are translated with the same meaning; invalid combinations are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.schema import TrainConfig

MINIMAL = ["model.new.num_layers=1", "data.train.task=sort_digits"]


def correction(*overrides: str) -> dict[str, Any]:
    config = load(TrainConfig, None, [*MINIMAL, *(f"algorithm.{o}" for o in overrides)]).config
    return config.algorithm.correction.model_dump()


SEED = {
    "name": "seed",
    "apply": False,
    "threshold": 3.0,
    "lower": None,
    "level": "token",
    "mode": "truncate",
    "veto": 1e-4,
    "target": "weight",
}
NONE = {"weights": None, "threshold": 2.0, "batch_normalise": False, "reject": {}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["rollout_is=true", "rollout_is_threshold=3.0"], {**SEED, "apply": True, "threshold": 3.0}),
        (["rollout_is=false", "rollout_is_threshold=3.0"], {**SEED, "threshold": 3.0}),
        (["rollout_is_threshold=3.0"], {**SEED, "threshold": 3.0}),
        (["rollout_is=true"], {"name": "none"}),
        (["rollout_is=true", "rollout_is_threshold=null"], {"name": "none"}),
        (
            [
                "rollout_is=true",
                "rollout_is_threshold=5",
                "rollout_is_threshold_lower=0.5",
                "rollout_is_level=sequence",
                "rollout_is_mode=mask",
                "rollout_is_veto_threshold=null",
            ],
            {**SEED, "apply": True, "threshold": 5, "lower": 0.5, "level": "sequence", "mode": "mask", "veto": None},
        ),
        (["rollout_is=token"], {"name": "decoupled", **NONE, "weights": "token"}),
        (
            ["rollout_is=sequence", "rollout_is_threshold='0.5_5.0'", "rollout_is_batch_normalize=true"],
            {"name": "decoupled", **NONE, "weights": "sequence", "threshold": (0.5, 5.0), "batch_normalise": True},
        ),
        (
            ["rollout_rs='seq_mean_k3,token_k2'", "rollout_rs_threshold=0.01"],
            {"name": "decoupled", **NONE, "reject": {"seq_mean_k3": 0.01, "token_k2": 0.01}},
        ),
        (["bypass_mode=true"], {"name": "bypass", **NONE, "loss": "ppo_clip"}),
        (
            ["rollout_correction={rollout_is: token, rollout_is_threshold: 4.0}"],
            {"name": "decoupled", **NONE, "weights": "token", "threshold": 4.0},
        ),
    ],
)
def test_the_keys_mean_what_they_mean_in_verl(given: list[str], expected: dict[str, Any]) -> None:
    assert correction(*given) == expected


def test_a_note_says_what_they_became(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        correction("rollout_is=token", "rollout_rs=seq_sum_k1", "rollout_rs_threshold='0.5_2.0'")
    assert "is read as algorithm.correction" in caplog.text
    assert "its code bounds the inverse ratio" in caplog.text


def test_no_note_without_them(caplog: pytest.LogCaptureFixture) -> None:
    correction("correction=decoupled_token_is")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=2"], "set algorithm.rollout_is_threshold"),
        (["algorithm.rollout_is=true", "algorithm.rollout_rs=token_k3"], "use one form"),
        (["algorithm.rollout_is=token", "algorithm.rollout_is_level=token"], "use one form"),
        (["algorithm.rollout_is=token", "algorithm.correction=decoupled_seq_is"], "are both given"),
        (["algorithm.rollout_rs=token_k3"], "needs algorithm.rollout_rs_threshold"),
        (["algorithm.loss_type=reinforce"], "set algorithm.bypass_mode=true"),
        (["algorithm.bypass_mode=true", "algorithm.rollout_is=token"], "counts the gap twice"),
        (["algorithm.rollout_correction={rollout_iss: token}"], "rollout_iss is not a key"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        load(TrainConfig, None, [*MINIMAL, *overrides])
    assert words in str(error.value)
