"""Keys of the model: their meaning, and combinations that are refused."""

from __future__ import annotations

import pytest

from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.model import ALL_PROJECTIONS, Lora
from burnish.config.schema import TrainConfig

BASE = ["model.path=somewhere", "data.train.task=sort_digits"]


def test_a_section_given_in_part_keeps_its_defaults() -> None:
    config = load(TrainConfig, None, [*BASE, "model.lora.rank=8", "model.lora.targets=[v_proj, q_proj]"]).config
    lora = config.model.lora
    assert lora == Lora(rank=8, alpha=32, targets=["v_proj", "q_proj"], rslora=False)
    assert lora.projections == ("q_proj", "v_proj")
    assert load(TrainConfig, None, BASE).config.model.lora is None


def test_the_scale_is_alpha_over_the_rank_or_over_its_root() -> None:
    assert Lora(rank=16, alpha=24).scale == 1.5
    assert Lora(rank=16, alpha=24, rslora=True).scale == 6.0
    assert Lora().projections == ALL_PROJECTIONS


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.lora.rank=0"], "model.lora.rank: got 0"),
        (["model.image_pixels=[9, 4]"], "model.image_pixels=[9, 4] should be the fewest and the most pixels"),
        (["model.image_pixels=9"], "model.image_pixels"),
        (["model.vision=melted"], "model.vision"),
        (["model.lora.targets=[q_proy]"], "q_proy"),
        (["model.lora.targets=[]"], "model.lora.targets"),
        (["model.lora.targets=[q_proj, q_proj]"], "targets names a projection twice: q_proj, q_proj"),
        (["model.lora={}", "model.adapter=x"], "its own rank and targets: remove model.lora"),
        (["model.lora={}", "model.path=null", "model.new={}"], "model.lora adapts a trained model"),
        (["model.adapter=x", "model.path=null", "model.new={}"], "model.adapter adapts a trained model"),
        (["model.lora={}", "model.backend=transformers"], "model.lora needs the native decoder"),
        (["model.lora.dropout=0.1"], "dropout"),
        (["model.lora.base=int4"], "model.lora.base: got 'int4'"),
        (["model.lora.base=nf4", "model.backend=transformers"], "model.lora needs the native decoder"),
        (["model.lora.base=nf4", "rollout.mismatch=noise"], "mismatch=noise changes floating-point weights"),
        (["model.lora.base=nf4-double", "rollout.mismatch=quantised"], "set model.lora.base=dtype"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        load(TrainConfig, None, [*BASE, *overrides])
    assert words in str(error.value)


def test_an_adapter_needs_no_path_beside_it() -> None:
    config = load(TrainConfig, None, ["data.train.task=sort_digits", "model.adapter=x"]).config
    assert (config.model.path, config.model.adapter) == (None, "x")


@pytest.mark.parametrize("mismatch", ["stale", "never_loaded", "temperature"])
def test_faults_that_are_not_made_of_all_weights_go_with_4_bits(mismatch: str) -> None:
    load(TrainConfig, None, [*BASE, "model.lora.base=nf4", f"rollout.mismatch={mismatch}"])
