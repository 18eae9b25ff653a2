"""Sessions of agents that send images: calls find their place by the images too, and the trajectory has their pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from burnish.config.data import Template
from burnish.core.trajectory import Trajectory, pack
from burnish.data.images import ImageInput
from burnish.gateway.message_keys import CallRefused
from burnish.gateway.session_calls import CallPrompt
from burnish.gateway.session_renderer import SessionRenderer
from burnish.gateway.token_tree import SessionTree
from tests.seeing_tokenizer import scene, seeing_tokenizer

TOKENIZER = seeing_tokenizer()
PIL = pytest.importorskip("PIL.Image")


def seen(*seeds: int, text: str = "What is it?") -> dict[str, Any]:
    """A message of the user with images of one size."""
    parts = [{"type": "image_url", "image_url": {"url": ImageInput(scene(16, 16, seed)).data_url()}} for seed in seeds]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def new_tree() -> SessionTree:
    return SessionTree(SessionRenderer(TOKENIZER, Template(), "keep"))


def answered(tree: SessionTree, messages: list[Any], text: str, number: int) -> tuple[CallPrompt, dict[str, Any]]:
    prompt = tree.place(messages)
    tokens = [*TOKENIZER.encode(text), TOKENIZER.eos_ids[0]]
    return prompt, tree.record(prompt, tokens, [-0.5] * len(tokens), number, "stop", f"r{number}")


def first_pixels(prompt: CallPrompt) -> list[int]:
    """The first pixel of each image, after checking that placeholders and nothing else stand at its tokens."""
    assert TOKENIZER.image_processor is not None
    mark = TOKENIZER.image_processor.image_mark
    inside = {k for span in prompt.pictures for k in range(span.start, span.end)}
    assert inside == {k for k, token in enumerate(prompt.tokens) if token == mark}
    return [int(span.picture.pixels.flat[0]) for span in prompt.pictures]


def value(seed: int) -> int:
    return int(scene(16, 16, seed).flat[0])


def test_a_dialogue_keeps_its_images_and_other_images_are_other_calls() -> None:
    tree = new_tree()
    first, said = answered(tree, [seen(0)], "A cat.", 0)
    assert first_pixels(first) == [value(0)]
    second, _ = answered(tree, [seen(0), said, seen(1, 2, text="And these?")], "Dogs.", 1)
    assert second.kind == "continued"
    assert first_pixels(second) == [value(0), value(1), value(2)]
    other, _ = answered(tree, [seen(3)], "A cow.", 2)
    assert (other.kind, first_pixels(other)) == ("root", [value(3)])
    assert other.tokens == first.tokens, "the tokens alone do not tell the images apart"
    again, _ = answered(tree, [seen(0), said, seen(1, 2, text="And these?")], "Two dogs.", 3)
    assert again.kind == "retry"
    assert first_pixels(again) == first_pixels(second)


def test_the_trajectory_of_a_session_has_the_pixels() -> None:
    tree = new_tree()
    _, said = answered(tree, [seen(0)], "A cat.", 0)
    answered(tree, [seen(0), said, seen(1)], "A dog.", 1)
    answered(tree, [seen(2)], "A cow.", 2)
    exported = tree.export("all")
    trajectory = Trajectory("p", 0, 0, exported.nodes, "stop", "", 1.0, turns=exported.turns)
    spans = pack([trajectory]).picture_spans()
    found = [[int(span.picture.pixels.flat[0]) for span in own] for own in spans]
    assert found == [[value(0), value(1)], [value(2)]]
    for sequence, own in zip(trajectory.sequences, spans, strict=True):
        assert (sequence.tokens >= 0).all()
        for span in own:
            assert len(set(sequence.tokens[span.start : span.end].tolist())) == 1
    np.testing.assert_array_equal(spans[0][0].picture.pixels[0], scene(16, 16, 0))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "should be a data: URL"),
        ({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}, "should be a data: URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "base64"),
        ({"type": "input_audio"}, "reads text and images only"),
    ],
)
def test_what_is_no_image_is_refused(part: dict[str, Any], words: str) -> None:
    with pytest.raises(CallRefused, match=words):
        new_tree().place([{"role": "user", "content": [part]}])


def test_token_ids_cannot_stand_for_images() -> None:
    tree = new_tree()
    prompt, _ = answered(tree, [seen(0)], "A cat.", 0)
    with pytest.raises(CallRefused, match="placeholders of images"):
        tree.place_tokens(prompt.tokens)
    with pytest.raises(CallRefused, match="images are read in messages of users and tools"):
        tree.place([{**seen(0), "role": "system"}, seen(1)])
