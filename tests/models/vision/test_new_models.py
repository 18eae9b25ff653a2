"""`model.new` with a vision tower: its tokens, its files, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.config.model import Model, NewModel
from burnish.data.images import ImageInput
from burnish.data.row import Row
from burnish.data.tasks.registry import make_task
from burnish.data.template import render
from burnish.models.policy import PolicyModel, load_policy

NEW = NewModel(family="qwen3_vl", hidden_size=32, num_layers=2, num_heads=2, mlp_size=48, max_positions=64)


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    return load_policy(Model(new=NEW, device="cpu"), None, make_task("count_shapes", {}, 0).alphabet, seed=0)


def test_a_prompt_has_one_token_for_every_16_pixels_and_the_marks_around_them(policy: PolicyModel) -> None:
    rendered = render(
        make_task("count_shapes", {"side": 48, "asked": ["colour"]}, 0).row("train", 0), policy.tokenizer, Template()
    )
    assert rendered.tokens[:11] == [2, *[4] * 9, 3]
    assert rendered.pictures[0].start == 1
    assert rendered.pictures[0].picture.grid == (1, 3, 3)
    assert policy.tokenizer.decode(rendered.tokens[11:]).endswith("?")


def test_a_character_outside_the_alphabet_is_still_an_error(policy: PolicyModel) -> None:
    with pytest.raises(UserError, match="the character '<' in"):
        render(Row("x", [{"role": "user", "content": "<|image_pad|>"}], "x", None), policy.tokenizer, Template())


def test_a_saved_model_is_read_back_and_transformers_loads_all_of_it(policy: PolicyModel, tmp_path: Path) -> None:
    policy.save(tmp_path)
    again = load_policy(Model(path=str(tmp_path), device="cpu"), tmp_path, None, seed=1)
    row = make_task("count_shapes", {}, 0).row("train", 0)
    first, second = (render(row, each.tokenizer, Template()) for each in (policy, again))
    assert first.tokens == second.tokens
    assert first.pictures[0].picture.key == second.pictures[0].picture.key
    for name, tensor in policy.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name
    other = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in policy.module.parameters())


def test_a_width_that_the_tower_cannot_halve_is_an_error() -> None:
    with pytest.raises(UserError, match="hidden_size 40 should be a multiple of 8 times num_heads 2"):
        load_policy(Model(new=NEW.model_copy(update={"hidden_size": 40}), device="cpu"), None, "ab", seed=0)


def test_keys_of_vision_have_no_effect_on_a_new_model_without_a_tower() -> None:
    for key in ({"vision": "frozen"}, {"image_pixels": (256, 1024)}):
        with pytest.raises(UserError, match="reads text only"):
            load_policy(Model(new=NewModel(), device="cpu", **key), None, "ab", seed=0)  # type: ignore[arg-type]


def test_limits_of_pixels_resize_the_images_of_a_new_model() -> None:
    small = load_policy(Model(new=NEW, device="cpu", image_pixels=(1024, 1024)), None, "a", seed=0)
    image = ImageInput(make_task("read_chart", {}, 0).row("train", 0).prompt[0]["content"][0]["image"].load())  # type: ignore[index]
    row = Row("x", [{"role": "user", "content": [{"type": "image", "image": image}]}], "x", None)
    assert render(row, small.tokenizer, Template()).pictures[0].picture.grid == (1, 2, 2)
