"""Images of samples: PNG files in `samples/pictures/`, named by the hash of their content, so that each is written once a run.

In the texts of a table an image is the mark `<image:NAME>`, in place of its placeholder tokens. The column `pictures` names the images
of a sample. PNG is written here, because a run needs no imaging library for it (RFC 2083).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.run.durable_files import atomic_write

if TYPE_CHECKING:
    import numpy as np

    from burnish.core.pictures import Picture

PICTURES_FOLDER = "pictures"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
UP_FILTER = 2
"""Each byte is stored as its difference to the byte above it."""
COMPRESSION = 1


def picture_name(key: int) -> str:
    """Return the name of an image: its key in hexadecimal."""
    return f"{key:016x}"


def picture_mark(key: int) -> str:
    """Return what stands for an image in the text of a sample."""
    return f"<image:{picture_name(key)}>"


def picture_file(samples: Path, name: str) -> Path:
    """Return the file of an image of the tables in a folder."""
    return samples / PICTURES_FOLDER / f"{name}.png"


def write_pictures(samples: Path, pictures: Iterable[Picture]) -> list[str]:
    """Write the images that are not there yet, and return the names of all. The frames of a video are side by side."""
    names = []
    for picture in pictures:
        names.append(picture_name(picture.key))
        path = picture_file(samples, names[-1])
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            frames, height, width, _ = picture.pixels.shape
            atomic_write(path, png_bytes(picture.pixels.swapaxes(0, 1).reshape(height, frames * width, 3)))
    return names


def png_bytes(pixels: np.ndarray) -> bytes:
    """Return a PNG file of pixels, uint8 [H, W, 3]."""
    import numpy as np

    height, width, _ = pixels.shape
    rows = pixels.reshape(height, -1)
    above = np.concatenate([np.zeros_like(rows[:1]), rows[:-1]])
    lines = np.concatenate([np.full((height, 1), UP_FILTER, dtype=np.uint8), rows - above], axis=1)
    header = struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    data = zlib.compress(lines.tobytes(), COMPRESSION)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + name + data + struct.pack("!I", zlib.crc32(name + data))
