"""The records of slot `correction`: presets, bounds, what is refused, and the functions behind them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from burnish.algorithms.correction.corrections import coupled_correction, decoupled_correction
from burnish.algorithms.correction.spec import (
    CORRECTION_PRESETS,
    CorrectionSlot,
    CoupledCorrection,
    parse_verl_rejections,
)
from burnish.algorithms.correction.weights_and_rejection import CorrectionResult
from burnish.core.batch import Batch

SLOT: TypeAdapter[Any] = TypeAdapter(CorrectionSlot)
GEOMETRIC, K3 = {"seq_mean_k1": (0.999, 1.001)}, {"seq_mean_k3": 0.01}
TABLE: dict[str, tuple[str | None, Any, dict[str, Any], str | None]] = {
    "disabled": (None, 2.0, {}, None),
    "decoupled_token_is": ("token", 2.0, {}, None),
    "decoupled_seq_is": ("sequence", 2.0, {}, None),
    "decoupled_token_icepop": ("token", (0.5, 5.0), {}, None),
    "decoupled_seq_is_rs": ("sequence", 2.0, {"seq_sum_k1": (0.5, 2.0)}, None),
    "decoupled_geo_rs": (None, 2.0, GEOMETRIC, None),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, GEOMETRIC, None),
    "decoupled_geo_rs_token_tis": ("token", 2.0, GEOMETRIC, None),
    "decoupled_k3_rs": (None, 2.0, K3, None),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, K3, None),
    "decoupled_k3_rs_token_tis": ("token", 2.0, K3, None),
    "bypass_ppo_clip": (None, 2.0, {}, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, 2.0, GEOMETRIC, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, 2.0, K3, "ppo_clip"),
    "bypass_pg_is": ("sequence", 2.0, {}, "reinforce"),
    "bypass_pg_token_icepop": ("token", (0.5, 5.0), {}, "reinforce"),
    "bypass_pg_geo_rs": (None, 2.0, GEOMETRIC, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, GEOMETRIC, "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, GEOMETRIC, "reinforce"),
}


def parse(value: Any) -> Any:
    return SLOT.validate_python(value)


# --- presets -----------------------------------------------------------------------------------------------------------


def test_the_presets_are_those_of_the_table() -> None:
    assert set(CORRECTION_PRESETS) == set(TABLE)
    for name, (weights, threshold, reject, loss) in TABLE.items():
        record = parse(name)
        assert (record.weights, record.threshold, record.reject) == (weights, threshold, reject)
        assert record.name == ("decoupled" if loss is None else "bypass")
        assert getattr(record, "loss", None) == loss
        assert not record.batch_normalise


def test_a_preset_can_be_changed() -> None:
    record = parse({"name": "decoupled_seq_is_rs", "threshold": 3.0, "batch_normalise": True})
    assert (record.weights, record.threshold, record.batch_normalise) == ("sequence", 3.0, True)
    assert record.reject == {"seq_sum_k1": (0.5, 2.0)}
    assert parse({"name": "seed", "level": "geometric"}) == CoupledCorrection(level="geometric")


def test_a_preset_comes_back_from_what_is_saved() -> None:
    for name in CORRECTION_PRESETS:
        assert parse(parse(name).model_dump(mode="json")) == parse(name)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValidationError, match="did you mean 'decoupled_token_is'"):
        parse("decoupled_token_iss")


@pytest.mark.parametrize("name", [n for n in TABLE if TABLE[n][3] is None])
def test_the_options_of_a_record_reach_its_function(sampled: Batch, name: str) -> None:
    record = parse(name)
    found = decoupled_correction(sampled, **record.model_dump(exclude={"name"}))
    assert isinstance(found, CorrectionResult)
    assert (found.weights is None) == (record.weights is None)
    assert ("rollout_corr/rollout_rs_masked_fraction" in found.metrics) == bool(record.reject)


def test_the_options_of_the_first_form_reach_its_function(sampled: Batch) -> None:
    record = CoupledCorrection(level="sequence", mode="mask", threshold=1.5, lower=0.9, target="mask")
    found = coupled_correction(sampled, **record.model_dump(exclude={"name"}))
    assert found.keep[sampled.action_mask].tolist() == [True] * 6 + [False] * 3 + [True] * 4


# --- bounds ------------------------------------------------------------------------------------------------------------


def test_bounds_are_read_as_verl_writes_them() -> None:
    record = parse({"name": "decoupled", "weights": "token", "threshold": "0.5_5.0", "reject": {"token_k1": "0.9_1.2"}})
    assert record.threshold == (0.5, 5.0)
    assert record.reject == {"token_k1": (0.9, 1.2)}
    assert parse({"name": "decoupled", "weights": "token", "threshold": "3"}).threshold == 3.0
    assert parse({"name": "decoupled", "weights": "token", "threshold": [0.5, 2]}).threshold == (0.5, 2.0)


def test_thresholds_of_several_rejections() -> None:
    both = parse_verl_rejections("seq_mean_k1, seq_max_k3", "0.999_1.001,0.5")
    assert parse({"name": "decoupled", "reject": both}).reject == {"seq_mean_k1": (0.999, 1.001), "seq_max_k3": 0.5}
    assert parse({"name": "decoupled", "reject": parse_verl_rejections("token_k2,seq_sum_k2", 0.5)}).reject == {
        "token_k2": 0.5,
        "seq_sum_k2": 0.5,
    }
    with pytest.raises(ValueError, match="take one threshold each or one for all, not 3"):
        parse_verl_rejections("token_k2,seq_sum_k2", "1,2,3")
    with pytest.raises(ValueError, match="token_k2 is given twice"):
        parse_verl_rejections("token_k2,token_k2", "1")


# --- refused -----------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"name": "bypass", "weights": "token"}, "counts the gap twice"),
    ({"name": "bypass_ppo_clip_k3_rs", "weights": "sequence"}, "counts the gap twice"),
    ({"name": "decoupled", "threshold": 3.0}, "there are none: set correction.weights"),
    ({"name": "bypass", "loss": "reinforce", "batch_normalise": True}, "there are none: set correction.weights"),
    ({"name": "decoupled", "weights": "geometric"}, "'token' or 'sequence'"),
    ({"name": "decoupled", "weights": "token", "threshold": (5.0, 0.5)}, "keeps no weight"),
    ({"name": "decoupled", "weights": "token", "threshold": 0.55}, "keeps no weight"),
    ({"name": "decoupled", "weights": "token", "threshold": 0}, "greater than 0"),
    ({"name": "decoupled", "reject": {"seq_max_k1": 2.0}}, "seq_max_k1"),
    ({"name": "decoupled", "reject": {"seq_mean_k3": "0.5_2.0"}}, "has one bound"),
    ({"name": "decoupled", "reject": {"token_k1": (2.0, 0.5)}}, "keeps nothing"),
    ({"name": "decoupled", "reject": {"token_k1": 0.5}}, "keeps nothing"),
    ({"name": "decoupled", "reject": {"token_k2": -0.5}}, "greater than 0"),
    ({"name": "decoupled", "veto": 1e-4}, "Extra inputs are not permitted"),
    ({"name": "seed", "threshold": 0.5}, "keeps no weight"),
    ({"name": "seed", "threshold": 2.0, "lower": 3.0}, "keeps no weight"),
    ({"name": "seed", "veto": 0}, "greater than 0"),
]


@pytest.mark.parametrize(("value", "reason"), REFUSED)
def test_what_makes_no_sense_is_refused_with_the_reason(value: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        parse(value)


def test_a_mean_weight_needs_the_whole_mini_batch() -> None:
    plain = {"name": "bypass_pg_is"}
    assert parse(plain).span == parse(plain).scope == "sequence"
    assert parse({**plain, "batch_normalise": True}).span == "batch"
