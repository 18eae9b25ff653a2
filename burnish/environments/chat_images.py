"""Images in the messages of a dialogue.

Shapes and transitions of a chat template work on texts (`chat_shapes.py`, `chat_transitions.py`). So a content of blocks becomes a text in which
one noncharacter stands for each image. The template gets blocks again when messages are rendered, and writes one mark token for each image. The marks
are replaced by placeholder tokens when all else is done, once, in the order of the images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from burnish.config.errors import UserError
from burnish.core.pictures import PictureSpan, shifted
from burnish.data.images import ImageInput, Media, VideoInput, image_input, video_input
from burnish.data.row import Message

if TYPE_CHECKING:
    from burnish.models.tokenizer import Tokenizer
    from burnish.models.vision.interfaces import Expansion

IMAGE, VIDEO = "\ufdd8", "\ufdd9"
"""Unicode noncharacters, reserved for use inside a program, beside those of `models/tokenizer.py` and `observed_tokens.py`."""
STAND_INS = re.compile(f"[{IMAGE}{VIDEO}]")
KINDS = {IMAGE: "image", VIDEO: "video"}
UNKNOWN = "\ufffd"


class FlatMessages(NamedTuple):
    """Messages whose contents are texts, and the images and videos that stand in them, in order."""

    messages: list[Message]
    media: list[Media]


def flattened(messages: Sequence[Message]) -> FlatMessages:
    """Return messages with texts as contents. A message with a text is the same object."""
    found, media = list[Message](), list[Media]()
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            found.append({**message, "content": _flat_content(content, f"messages[{number}].content", media)})
        elif isinstance(content, str) and STAND_INS.search(content):
            found.append({**message, "content": STAND_INS.sub(UNKNOWN, content)})
        else:
            found.append(message)
    return FlatMessages(found, media)


def _flat_content(content: list[Message], where: str, media: list[Media]) -> str:
    parts = list[str]()
    for index, block in enumerate(content):
        place, kind = f"{where}[{index}]", block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append(STAND_INS.sub(UNKNOWN, block["text"]))
        elif kind in ("image", "image_url"):
            media.append(image_input(block.get(kind), place))
            parts.append(IMAGE)
        elif kind == "video":
            media.append(video_input(block.get("video"), place))
            parts.append(VIDEO)
        else:
            raise UserError(
                f"{place} should be a block of text, image or video, such as {{'type': 'image', 'image': array}}, got {str(block)[:80]!r}"
            )
    return "".join(parts)


def as_blocks(message: Message) -> Message:
    """Return a flat message as a chat template reads it: with blocks if there are images in it. Otherwise it is the same object."""
    content = message.get("content")
    if not isinstance(content, str) or not STAND_INS.search(content):
        return message
    blocks, at = list[Message](), 0
    for found in STAND_INS.finditer(content):
        blocks += [{"type": "text", "text": content[at : found.start()]}] if found.start() > at else []
        blocks.append({"type": KINDS[found[0]]})
        at = found.end()
    return {**message, "content": blocks + ([{"type": "text", "text": content[at:]}] if content[at:] else [])}


def literal_text(content: str, tokenizer: Tokenizer) -> str:
    """Return the content of a flat message for a text without a chat template: the model's own marks stand for images."""
    text = tokenizer.literal(content)
    return STAND_INS.sub(lambda found: tokenizer.media_mark(KINDS[found[0]]), text)


def expansion_of(item: Media, tokenizer: Tokenizer) -> Expansion:
    """Return the placeholder tokens of an image or a video, and its pixels as the model sees them."""
    processor = tokenizer.image_processor
    if processor is None:
        raise UserError(
            f"{item.where} is {'an image' if isinstance(item, ImageInput) else 'a video'}, but this model reads text only"
        )
    if isinstance(item, VideoInput):
        return processor.video(item.load(), item.frames_per_second)
    return processor.image(item.load())


class PlacedImages(NamedTuple):
    """Tokens with placeholders in place of marks."""

    tokens: tuple[int, ...]
    pictures: tuple[PictureSpan, ...]
    observed: np.ndarray | None


def place_images(
    tokens: tuple[int, ...], expansions: Sequence[Expansion], tokenizer: Tokenizer, observed: np.ndarray | None = None
) -> PlacedImages:
    """Replace the marks of images by their placeholders, each by the next expansion. Placeholders are no bodies of messages."""
    processor = tokenizer.image_processor
    if not expansions or processor is None:
        return PlacedImages(tokens, (), observed)
    marks = [at for at, token in enumerate(tokens) if token in (processor.image_mark, processor.video_mark)]
    if len(marks) != len(expansions):
        raise UserError(
            f"the chat template of this model writes {len(marks)} marks for {len(expansions)} images and videos: it has no place for them in "
            "such messages, or reads no videos"
        )
    found, pictures, at = list[int](), list[PictureSpan](), 0
    roles = list[np.ndarray]()
    for mark, expansion in zip(marks, expansions, strict=True):
        found += tokens[at:mark]
        pictures += shifted(expansion.pictures, len(found))
        found += expansion.tokens
        if observed is not None:
            roles += [observed[at:mark], np.zeros(len(expansion.tokens), dtype=observed.dtype)]
        at = mark + 1
    found += tokens[at:]
    return PlacedImages(
        tuple(found), tuple(pictures), None if observed is None else np.concatenate([*roles, observed[at:]])
    )
