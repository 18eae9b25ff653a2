"""Images in requests: OpenAI's `image_url` and `input_image`, Anthropic's `image`.

A protocol reads a content with images as blocks (`data/images.py`) in which an image is still the URL that the client sent. `opened`
turns the URLs into images: a `data:` URL, or a file below a folder that the server allows. Nothing is fetched from the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from burnish.config.errors import UserError
from burnish.data.images import image_input
from burnish.gateway.openai_schema import ApiError, bad_value

if TYPE_CHECKING:
    from burnish.gateway.protocols.fields import Fields

Json = dict[str, Any]
IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of parts that are images, of OpenAI's chats, OpenAI's responses and Anthropic's messages."""


def image_block(part: Fields, kind: str) -> Json:
    """The block of a part of one of `IMAGE_PARTS`."""
    if kind == "image":
        return {"type": "image", "image": _source_url(part.required_child("source"))}
    if isinstance(part.values.get("image_url"), str):
        return {"type": "image", "image": part.required_text("image_url")}
    if kind == "input_image" and part.has("file_id"):
        raise part.error("file_id", "no files are stored here; give image_url", "unsupported_parameter")
    return {"type": "image", "image": part.required_child("image_url").required_text("url")}


def _source_url(source: Fields) -> str:
    """The URL of an image of Anthropic's messages."""
    kind = source.required_text("type")
    if kind == "base64":
        return f"data:{source.required_text('media_type')};base64,{source.required_text('data')}"
    if kind == "url":
        return source.required_text("url")
    raise source.error("type", f"got {kind[:50]!r}; expected base64 or url", "unsupported_parameter")


def content_of(parts: Sequence[str | Json], separator: str = "") -> str | list[Json]:
    """A content from texts and blocks of images: one text if there are only texts, which `separator` joins."""
    if all(isinstance(part, str) for part in parts):
        return separator.join(part for part in parts if isinstance(part, str))
    found: list[Json] = []
    for part in parts:
        if not isinstance(part, str):
            found.append(part)
        elif found and found[-1]["type"] == "text":
            found[-1] = {"type": "text", "text": found[-1]["text"] + separator + part}
        else:
            found.append({"type": "text", "text": part})
    return found


def opened(messages: Sequence[Mapping[str, Any]], folder: Path | None) -> list[Json]:
    """Messages with the images of their URLs; `folder` is the one whose files a client may name, if any."""
    found: list[Json] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            blocks = [
                {**block, "image": _opened_image(block["image"], f"messages[{index}].content[{place}]", folder)}
                if block.get("type") == "image"
                else block
                for place, block in enumerate(content)
            ]
            message = {**message, "content": blocks}
        found.append(dict(message))
    return found


def _opened_image(value: Any, where: str, folder: Path | None) -> Any:
    if not isinstance(value, str):
        return value
    if value[:5].lower() != "data:":
        value = _allowed_file(value, where, folder)
    try:
        return image_input(value, where)
    except UserError as error:
        raise bad_value(where, str(error)) from error


def _allowed_file(url: str, where: str, folder: Path | None) -> Path:
    """A file that a client names by its path or by a `file:` URL, if it is below the folder. Links are followed before the check."""
    scheme = urlsplit(url).scheme.lower()
    if scheme not in ("", "file"):
        raise refused(
            where, f"this server fetches nothing from the network ({url[:80]!r}); send the image as a data: URL"
        )
    if folder is None:
        raise refused(where, "this server reads no files of its own for clients; send the image as a data: URL")
    root = folder.resolve()
    path = (root / unquote(urlsplit(url).path if scheme else url)).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        raise bad_value(where, f"there is no file {url[:80]!r} below the folder of images of this server")
    return path


def refused(where: str, reason: str) -> ApiError:
    """The error for an image that is given in a form that the server does not take."""
    return bad_value(where, reason, "unsupported_content")
