"""Images and videos of rows, messages and requests: what may stand for one, and their pixels.

An image is a file (a path or its bytes), a data URL, a PIL image or an array. It stays as it is until a prompt is rendered, so a data
set of images needs no more memory than its files. Nothing is fetched from the network. A message with images has a list of blocks as
its content: `{"type": "text", "text": ...}`, `{"type": "image", "image": ImageInput}` and `{"type": "video", "video": VideoInput}`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from burnish.config.errors import UserError
from burnish.config.extras import install_hint

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import TypeIs

Message = dict[str, Any]
IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"
"""What stands for an image or a video in the text of a row that has a column of them (verl, ShareGPT)."""
MAX_SOURCE_PIXELS = 1 << 27
"""Pixels of an image before it is resized. A small file can hold many more, which would fill the memory."""
MAX_FRAMES = 768
"""Frames of one video."""
DEFAULT_FRAMES_PER_SECOND = 2.0
"""Frames per second of a video that is given as frames; Qwen2.5-VL samples videos at this rate."""
WRAPPERS = ("image", "image_url", "url", "path")
"""Keys under which an object holds an image that is not given as bytes (verl, TRL, OpenAI)."""


def is_array(value: Any) -> TypeIs[np.ndarray]:
    """Whether a value is a numpy array. Only a process that has imported numpy can have one, and this one may be without."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


@dataclass(frozen=True, eq=False)
class ImageInput:
    """An image as it was given. `load` decodes it."""

    content: bytes | Path | np.ndarray = field(repr=False)
    """An encoded file, the path of one, or pixels: uint8 [H, W, 3]."""
    where: str = "image"
    """Where it was given, for errors."""

    def load(self) -> np.ndarray:
        """The pixels, uint8 [H, W, 3]. Transparent ones are white, and a photo stands upright."""
        if is_array(self.content):
            return self.content
        with _opened(self) as image:
            return _pixels_of(image)

    def size(self) -> tuple[int, int]:
        """Width and height in pixels, without decoding a file."""
        if is_array(self.content):
            return self.content.shape[1], self.content.shape[0]
        with _opened(self) as image:
            width, height = image.size
            return int(width), int(height)

    @cached_property
    def digest(self) -> str:
        """The hash of the content, by which inputs are compared."""
        if is_array(self.content):
            data = repr(self.content.shape).encode() + self.content.tobytes()
        else:
            data = self._bytes()
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    def data_url(self) -> str:
        """The image as a `data:` URL, for a file of JSON lines or a request."""
        data = self.encoded()
        return f"data:{_media_type(data)};base64,{base64.b64encode(data).decode()}"

    def encoded(self) -> bytes:
        """The image as an encoded file: as it was given, or as PNG if it was given as pixels."""
        if not is_array(self.content):
            return self._bytes()
        stream = io.BytesIO()
        _pillow().fromarray(self.content).save(stream, format="PNG")
        return stream.getvalue()

    def _bytes(self) -> bytes:
        if isinstance(self.content, bytes):
            return self.content
        assert isinstance(self.content, Path)
        try:
            return self.content.read_bytes()
        except OSError as error:
            raise UserError(f"{self.where}: cannot read {self.content}: {error.strerror}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageInput) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True)
class VideoInput:
    """A video as frames, or as one file of several frames (an animated GIF, PNG or WebP)."""

    frames: tuple[ImageInput, ...] | ImageInput
    frames_per_second: float = DEFAULT_FRAMES_PER_SECOND
    where: str = field(default="video", compare=False)

    def load(self) -> list[np.ndarray]:
        """The frames, uint8 [H, W, 3] each, all of one size."""
        if isinstance(self.frames, tuple):
            found = [frame.load() for frame in self.frames]
        elif is_array(self.frames.content):
            found = list(self.frames.content)
        else:
            found = list(_animation(self.frames))
        sizes = {frame.shape for frame in found}
        if len(sizes) > 1:
            raise UserError(f"{self.where}: the frames of a video should have one size, got {sorted(sizes)}")
        return found

    @property
    def digest(self) -> str:
        """The hash of the content."""
        frames = self.frames if isinstance(self.frames, tuple) else (self.frames,)
        parts = ",".join([repr(self.frames_per_second), *(frame.digest for frame in frames)])
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


Media = ImageInput | VideoInput


# --- reading what users give -------------------------------------------------------------------------------------------


def image_input(value: Any, where: str, folder: Path | None = None) -> ImageInput:
    """An image from anything that may stand for one. Relative paths are tried from `folder`, then from the working directory."""
    if isinstance(value, ImageInput):
        return value
    if isinstance(value, Mapping):
        return _wrapped_image(value, where, folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageInput(bytes(value), where)
    if isinstance(value, Path):
        return ImageInput(_found_file(value, where, folder), where)
    if isinstance(value, str):
        return _image_of_text(value, where, folder)
    if is_array(value):
        return ImageInput(_checked_array(value, where), where)
    if type(value).__module__.partition(".")[0] == "PIL":
        return ImageInput(_pixels_of(_checked_size(value, where)), where)
    raise UserError(
        f"{where} should be an image (a path, bytes, a data: URL, a PIL image or a uint8 array [height, width, 3]), got {type(value).__name__}"
    )


def _wrapped_image(value: Mapping[str, Any], where: str, folder: Path | None) -> ImageInput:
    """An image in an object: `{"bytes": ..., "path": ...}` of Hugging Face `datasets`, or `{"image": ...}` of verl."""
    given = {key: one for key, one in value.items() if one is not None and key not in ("type", "detail")}
    if "bytes" in given and set(given) <= {"bytes", "path"}:  # the path is only the name that the file had
        data = given["bytes"]
        return image_input(_decoded(data, where) if isinstance(data, str) else data, where, folder)
    if len(given) == 1 and (key := next(iter(given))) in WRAPPERS:
        return image_input(given[key], where, folder)
    unknown = [key for key in given if key not in ("bytes", *WRAPPERS)]
    if unknown:
        raise UserError(
            f"{where}: {unknown[0]!r} of an image is not used, because all images of a run are resized by model.image_pixels; remove it"
        )
    raise UserError(
        f"{where} should hold one image under bytes, {', '.join(WRAPPERS)}; has: {', '.join(value) or 'none'}"
    )


def _image_of_text(text: str, where: str, folder: Path | None) -> ImageInput:
    scheme = urlsplit(text).scheme.lower() if ":" in text[:16] else ""
    if scheme == "data":
        return ImageInput(_data_url_bytes(text, where), where)
    if scheme in ("http", "https", "ftp"):
        raise UserError(
            f"{where}: burnish does not fetch {text[:80]!r} from the network; download it, and give the file"
        )
    return ImageInput(
        _found_file(Path(unquote(urlsplit(text).path) if scheme == "file" else text), where, folder), where
    )


def _data_url_bytes(text: str, where: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma or not head.lower().startswith("data:image/") or not head.lower().endswith(";base64"):
        raise UserError(f"{where} should be data:image/...;base64,..., got {text[:40]!r}")
    return _decoded(body, where)


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{where} is not valid base64: {error}") from error


def _found_file(path: Path, where: str, folder: Path | None) -> Path:
    roots = [path] if folder is None or path.is_absolute() else [folder / path, path]
    found = next((root for root in roots if root.is_file()), None)
    if found is None:
        raise UserError(f"{where}: no such file: {' or '.join(map(str, roots))}")
    return found.absolute()


def _checked_array(value: np.ndarray, where: str) -> np.ndarray:
    import numpy as np

    if value.dtype == np.uint8 and value.ndim == 2:
        value = np.repeat(value[:, :, None], 3, axis=2)
    if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
        raise UserError(
            f"{where} should be uint8 [height, width, 3] with values from 0 to 255, got {value.dtype} {list(value.shape)}"
        )
    return np.ascontiguousarray(value)


def video_input(value: Any, where: str, folder: Path | None = None) -> VideoInput:
    """A video from frames, an array [frames, height, width, 3], an animated image, or an object with `video` and perhaps `fps`."""
    if isinstance(value, VideoInput):
        return value
    rate = DEFAULT_FRAMES_PER_SECOND
    if isinstance(value, Mapping) and "video" in value:
        given = {key: one for key, one in value.items() if one is not None and key != "type"}
        unknown = [key for key in given if key not in ("video", "fps", "sample_fps")]
        if unknown:
            raise UserError(f"{where}: {unknown[0]!r} of a video is not used; remove it (known: video, fps)")
        rate, value = float(given.get("fps", given.get("sample_fps", rate))), given["video"]
        if isinstance(value, VideoInput):
            return value
    if rate <= 0:
        raise UserError(f"{where}: fps should be above 0, got {rate}")
    if is_array(value) and value.ndim == 4:
        value = list(value)
    if isinstance(value, list | tuple):
        if not value or len(value) > MAX_FRAMES:
            raise UserError(f"{where}: a video has 1 to {MAX_FRAMES} frames, got {len(value)}; give fewer of them")
        frames = tuple(image_input(frame, f"{where}[{index}]", folder) for index, frame in enumerate(value))
        return VideoInput(frames, rate, where)
    return VideoInput(image_input(value, where, folder), rate, where)


# --- pixels ------------------------------------------------------------------------------------------------------------


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(f"images need pillow: {install_hint('vision')}") from error
    return Image


def _opened(image: ImageInput) -> Any:
    """The PIL image of a file, not yet decoded."""
    assert not is_array(image.content)
    try:
        stream = io.BytesIO(image.content) if isinstance(image.content, bytes) else image.content
        return _checked_size(_pillow().open(stream), image.where)
    except (OSError, ValueError, SyntaxError) as error:  # pillow raises each of them for damaged files
        name = "the bytes" if isinstance(image.content, bytes) else str(image.content)
        raise UserError(f"{image.where}: {name} cannot be read as an image: {error}") from error


def _checked_size(image: Any, where: str) -> Any:
    width, height = image.size
    if not 0 < width * height <= MAX_SOURCE_PIXELS:
        raise UserError(f"{where}: an image of {width} x {height} pixels; the limit is {MAX_SOURCE_PIXELS:,} pixels")
    return image


def _pixels_of(image: Any) -> np.ndarray:
    import numpy as np
    from PIL import Image, ImageOps

    try:
        upright = ImageOps.exif_transpose(image)
        if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
            seen = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", seen.size, (255, 255, 255, 255)), seen)
        return np.array(upright.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"the image {getattr(image, 'filename', '') or ''} is damaged: {error}") from error


def _animation(image: ImageInput) -> Iterator[np.ndarray]:
    from PIL import ImageSequence

    with _opened(image) as file:
        count = getattr(file, "n_frames", 1)
        if count > MAX_FRAMES:
            raise UserError(f"{image.where}: {count} frames; a video has {MAX_FRAMES} at most")
        for frame in ImageSequence.Iterator(file):
            yield _pixels_of(frame)


def _media_type(data: bytes) -> str:
    kinds = {b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
    return next((name for start, name in kinds.items() if data.startswith(start)), "image/bmp")


# --- messages ----------------------------------------------------------------------------------------------------------


def media_of(messages: Iterable[Mapping[str, Any]]) -> list[Media]:
    """The images and videos of messages, in order."""
    found: list[Media] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, block in enumerate(content if isinstance(content, list) else ()):
            where = f"messages[{number}].content[{index}]"
            if block.get("type") == "image":
                found.append(image_input(block.get("image"), where))
            elif block.get("type") == "video":
                found.append(video_input(block.get("video"), where))
    return found


def content_text(content: Any) -> str:
    """The text of a message's content; `<image>` and `<video>` stand for what is no text."""
    if not isinstance(content, list):
        return str(content)
    return "".join(block["text"] if block["type"] == "text" else f"<{block['type']}>" for block in content)


def with_text(content: Any, text: str) -> Any:
    """The content of a message with a text at its end."""
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text


def without_pixels(messages: Sequence[Message]) -> list[Message]:
    """Messages as plain JSON values: blocks of images and videos have their type only."""
    return [
        {**m, "content": [{"type": b["type"], **({"text": b["text"]} if "text" in b else {})} for b in m["content"]]}
        if isinstance(m.get("content"), list)
        else m
        for m in messages
    ]


def content_digest(value: Any) -> str:
    """The `default` of `json.dumps` for the digest of a row: images by their content, other objects by their type."""
    if is_array(value):
        value = ImageInput(value)
    return value.digest if isinstance(value, ImageInput | VideoInput) else type(value).__name__
