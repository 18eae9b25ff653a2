"""Engines with weights of their own: what does not go together with them is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.loading import load, load_small
from burnish.config.schema import TrainConfig

MINIMAL = ["model.new.num_layers=1", "data.train.task=sort_digits"]
SGLANG = ["rollout.engine=sglang", "rollout.sglang.urls=http://localhost:30000"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.engine=sglang"], "give the addresses of its servers in rollout.sglang.urls"),
        (SGLANG[1:], "rollout.sglang has no effect with rollout.engine=auto"),
        ([*SGLANG, "rollout.engine=native"], "rollout.sglang has no effect with rollout.engine=native"),
        ([*SGLANG, "rollout.exact=true"], "rollout.exact needs the native engine, and rollout.engine=sglang"),
        ([*SGLANG, "rollout.mismatch=noise"], "rollout.mismatch is made of the learner's own tensors"),
        ([*SGLANG, "rollout.cache_gib=1"], "of the native engine, and rollout.engine=sglang"),
        ([*SGLANG, "rollout.cache_dtype=fp8"], "of the native engine, and rollout.engine=sglang"),
        (["rollout.engine=sglang", "rollout.sglang.urls=[]"], "rollout.sglang.urls: got []"),
        (["rollout.engine=sglang", "rollout.sglang.urls=[http://a:1, http://a:1/]"], "names a server twice"),
        ([*SGLANG, "placement=ray"], "rollout.engine=sglang needs placement=local"),
    ],
)
def test_what_does_not_go_together_with_sglang_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        load(TrainConfig, None, [*MINIMAL, *overrides])
    assert words in str(error.value)


def test_one_address_or_several() -> None:
    for given, urls in (("http://a:1", ["http://a:1"]), ("[http://a:1, http://b:1]", ["http://a:1", "http://b:1"])):
        config = load(TrainConfig, None, [*MINIMAL, "rollout.engine=sglang", f"rollout.sglang.urls={given}"]).config
        assert config.rollout.sglang is not None
        assert config.rollout.sglang.urls == urls


def test_a_shrunk_recipe_needs_no_server(tmp_path: Path) -> None:
    text = "model: {path: a}\ndata: {train: {path: b.jsonl}}\nrollout: {engine: sglang, sglang: {urls: http://a:1}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    config = load_small(TrainConfig, tmp_path / "recipe.yaml", [])[0].config
    assert (config.rollout.engine, config.rollout.sglang) == ("auto", None)
