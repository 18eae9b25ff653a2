"""Images from environments and tools: between processes, in results of tools, and in the conventions of others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from burnish.environments import wire
from burnish.environments.adapters.gymnasium import GymEnvironment
from burnish.environments.adapters.trl import TrlEnvironment
from burnish.environments.base import Episode, Observation
from burnish.environments.image_values import joined_content
from burnish.environments.tools.base import ToolResult
from burnish.environments.tools.built_in import make_tool
from burnish.environments.tools.function_tool import FunctionTool
from burnish.environments.tools.tool_environment import ToolEnvironment
from burnish.environments.tools.tool_handles import LocalTool
from burnish.environments.wire import decode_value, encode_value
from tests.environments.adapters.episodes import USER_FILES, call, episode, play

PIXELS = np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3)


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def sent(value: Any) -> Any:
    return decode_value(json.loads(json.dumps(encode_value(value))))


def pixels_of(content: Any) -> list[np.ndarray]:
    """The images of a content."""
    return [block["image"] for block in content if block["type"] == "image"]


# --- between processes -----------------------------------------------------------------------------------------------


def test_images_arrive_with_every_pixel() -> None:
    seen: Observation = sent(Observation(messages=({"role": "user", "content": [image(PIXELS)]},)))
    assert seen.messages is not None
    np.testing.assert_array_equal(seen.messages[0]["content"][0]["image"].load(), PIXELS)
    result: ToolResult = sent(ToolResult("a", images=(PIXELS, PIXELS[::-1])))
    np.testing.assert_array_equal(result.images[1].load(), PIXELS[::-1])
    again = sent(sent(image(PIXELS)))
    np.testing.assert_array_equal(again["image"].load(), PIXELS)


def test_a_prompt_with_images_reaches_an_environment_in_a_worker() -> None:
    told: Episode = sent(Episode("e", 0, [{"role": "user", "content": [image(PIXELS), {"type": "text", "text": "?"}]}]))
    (found,) = told.images
    np.testing.assert_array_equal(found, PIXELS)


def test_encoded_files_are_sent_as_they_are() -> None:
    pil = pytest.importorskip("PIL.Image")
    import io

    stream = io.BytesIO()
    pil.fromarray(PIXELS).save(stream, format="PNG")
    found = sent([image(stream.getvalue()), image(pil.fromarray(PIXELS))])
    for block in found:
        np.testing.assert_array_equal(block["image"].load(), PIXELS)


def test_what_is_no_image_is_still_refused() -> None:
    with pytest.raises(wire.UnsendableValue, match="make a list of it"):
        encode_value(np.zeros((4, 4)))
    with pytest.raises(wire.UnsendableValue, match="limit of one reply"):
        encode_value(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), max_bytes=1000)
    with pytest.raises(wire.UnsendableValue, match=r"images is of type list; it must be a tuple of images"):
        encode_value(ToolResult("a", images=[1]))  # type: ignore[arg-type]


def test_a_reply_that_expands_to_more_than_its_shape_is_cut() -> None:
    encoded = encode_value(np.zeros((64, 64, 3), dtype=np.uint8))
    assert len(encoded["data"]) < 200
    assert decode_value(encoded | {"shape": [2, 2, 3]}).load().shape == (2, 2, 3)
    with pytest.raises(ValueError, match="limit"):
        decode_value(encoded | {"shape": [1 << 20, 1 << 20, 3]})


# --- tools -----------------------------------------------------------------------------------------------------------


def seeing(*pictures: Any) -> Episode:
    return episode(prompt=[{"role": "user", "content": [*map(image, pictures), {"type": "text", "text": "?"}]}])


def used(name: str, *calls: dict[str, Any], **options: Any) -> list[Any]:
    """The results of calls of a built-in tool in one episode."""

    async def run() -> list[Any]:
        tool = make_tool(name, options)
        await tool.start(seeing(PIXELS), {})
        return [await tool.call(arguments) for arguments in calls]

    return asyncio.run(run())


def test_a_crop_can_be_cropped_again() -> None:
    first, second = used("image_crop", {"box": [2, 1, 10, 7]}, {"box": "[0, 0, 4, 4]", "image": 2}, scale=None)
    np.testing.assert_array_equal(first.images[0], PIXELS[1:7, 2:10])
    np.testing.assert_array_equal(second.images[0], PIXELS[1:5, 2:6])
    assert (first.text, second.text) == ("Image 2:", "Image 3:")


def test_boxes_are_in_thousandths_unless_told_otherwise() -> None:
    (found,) = used("image_zoom", {"box": [500, 0, 1000, 500], "factor": 3})
    np.testing.assert_array_equal(found.images[0], PIXELS[0:4, 6:12].repeat(3, axis=0).repeat(3, axis=1))


def test_highlight_and_mask_change_only_what_they_should() -> None:
    box = {"box": [2, 2, 8, 7]}
    (found,) = used("image_highlight", box, scale=None)
    np.testing.assert_array_equal(found.images[0][3:6, 3:7], PIXELS[3:6, 3:7])
    assert (found.images[0][2, 2:8] == (255, 0, 0)).all()
    hidden, kept = used("image_mask", box, box | {"keep": True}, scale=None)
    assert (hidden.images[0][2:7, 2:8] == 255).all()
    np.testing.assert_array_equal(hidden.images[0][:2], PIXELS[:2])
    np.testing.assert_array_equal(kept.images[0][2:7, 2:8], PIXELS[2:7, 2:8])
    assert (kept.images[0][:2] == 255).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"box": [1, 2, 3]}, "four numbers"),
        ({"box": [5, 5, 5, 8]}, "0 x 3 pixels of the image of 12 x 8"),
        ({"box": [0, 0, 9, 9], "image": 2}, "no image 2; the images are 1 to 1"),
        ({"box": "all"}, "'box' must be an array"),
    ],
)
def test_a_wrong_box_is_told(arguments: dict[str, Any], words: str) -> None:
    (found,) = used("image_crop", arguments, scale=None)
    assert words in found.text
    assert found.images == ()


@pytest.mark.parametrize("in_template", [True, False])
def test_the_model_sees_the_images_of_results(in_template: bool) -> None:
    environment = ToolEnvironment(
        [LocalTool(lambda: make_tool("image_crop", {"scale": None}))], "hermes", tools_in_template=in_template
    )
    two = call("crop_image", box=[0, 0, 6, 6]) + call("crop_image", box=[0, 0, 4, 4])
    seen = play(environment, seeing(PIXELS), two, "Done.")
    assert isinstance(seen[1], Observation)
    contents = [message["content"] for message in seen[1].messages or ()]
    assert len(contents) == (2 if in_template else 1)
    assert [one.shape for content in contents for one in pixels_of(content)] == [(6, 6, 3), (4, 4, 3)]


def test_a_function_may_return_images() -> None:
    def look(where: str) -> Any:
        """Look.

        Args:
            where: The place.
        """
        return {"alone": PIXELS, "both": ["left", PIXELS], "parts": [image(PIXELS)], "words": ["a", 1]}[where]

    tool = FunctionTool(look)
    alone, both, parts, words = (asyncio.run(tool.call({"where": w})) for w in ("alone", "both", "parts", "words"))
    for found, text in ((alone, ""), (both, "left"), (parts, "")):
        assert isinstance(found, ToolResult)
        assert found.text == text
        assert found.images[0] is PIXELS
    assert words == '["a", 1]'


# --- the conventions of others ---------------------------------------------------------------------------------------


def test_gymnasium_observations_may_be_images() -> None:
    environment = GymEnvironment(target="seeing.py:Boards", base=USER_FILES, state=True, prompt="row_first")
    seen = play(environment, episode(prompt="Play."), "left", "right")
    first, second, end = seen
    assert isinstance(first, Observation)
    assert isinstance(second, Observation)
    (opening,) = first.messages or ()
    assert [block.get("text") for block in opening["content"]] == ["Play.", "\n\n", None]
    (message,) = second.messages or ()
    assert message["content"][0] == {"type": "text", "text": "turn 1"}
    assert pixels_of(message["content"])[0][0, 0, 0] == 1
    assert first.state != second.state
    assert not isinstance(end, Observation)


def test_trl_environments_may_give_images() -> None:
    environment = TrlEnvironment("seeing.py:Camera", base=USER_FILES)
    seen = play(environment, episode(prompt="Find it."), call("look", value=3))
    assert isinstance(seen[0], Observation)
    assert isinstance(seen[1], Observation)
    (opening,), (result,) = seen[0].messages or (), seen[1].messages or ()
    assert [block.get("text") for block in opening["content"]] == ["Find it.", " Seen:", None]
    assert result["content"][0]["text"] == "here"
    assert pixels_of(result["content"])[0][0, 0, 0] == 3


def test_contents_are_joined_as_text_or_blocks() -> None:
    assert joined_content("a", "b", "-") == "a-b"
    assert joined_content("a", [image(1)]) == [{"type": "text", "text": "a"}, image(1)]
    assert joined_content([image(1)], "b", "\n") == [
        image(1),
        {"type": "text", "text": "\n"},
        {"type": "text", "text": "b"},
    ]
