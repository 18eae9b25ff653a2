"""Drawing with numpy: filled shapes and a bitmap font of our own, for generated tasks and boards of games.

An image is uint8 [height, width, 3]. Coordinates are pixels, (0, 0) at the top left; what lies outside of the image is cut off. Drawing
depends on its arguments alone, so every machine draws the same pixels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 119, 220),
    "yellow": (240, 200, 30),
    "purple": (148, 60, 189),
    "cyan": (23, 190, 207),
    "gray": (127, 127, 127),
    "brown": (140, 86, 45),
}
WHITE: Colour = (255, 255, 255)
BLACK: Colour = (0, 0, 0)

GLYPHS = {
    "A": "25755", "B": "65656", "C": "34443", "D": "65556", "E": "74647", "F": "74644", "G": "34553", "H": "55755", "I": "72227",
    "J": "11152", "K": "55655", "L": "44447", "M": "57755", "N": "65555", "O": "25552", "P": "65644", "Q": "25563", "R": "65655",
    "S": "34216", "T": "72222", "U": "55557", "V": "55522", "W": "55775", "X": "55255", "Y": "55222", "Z": "71247", "0": "75557",
    "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71111", "8": "75757", "9": "75717",
    ".": "00002", ",": "00024", ":": "02020", "-": "00700", "+": "02720", "?": "71202", "%": "51245", "/": "11244", "(": "12221",
    ")": "42224", "=": "07070", ">": "42124", "<": "12421", "!": "22202", "#": "57575", " ": "00000",
}  # fmt: skip
"""Five rows of three pixels each, every row an octal digit."""
GLYPH_WIDTH, GLYPH_HEIGHT = 3, 5


def canvas(height: int, width: int, colour: Colour = WHITE) -> np.ndarray:
    """Return an image of one colour."""
    import numpy as np

    return np.full((height, width, 3), colour, dtype=np.uint8)


def fill_rectangle(image: np.ndarray, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
    """Fill the pixels from (left, top) to (right, bottom), the last ones excluded."""
    rows, columns = (slice(max(round(a), 0), max(round(b), 0)) for a, b in ((top, bottom), (left, right)))
    image[rows, columns] = colour


def draw_frame(
    image: np.ndarray, left: float, top: float, right: float, bottom: float, colour: Colour, width: int = 1
) -> None:
    """Draw the border of a rectangle, inside of it."""
    fill_rectangle(image, left, top, right, top + width, colour)
    fill_rectangle(image, left, bottom - width, right, bottom, colour)
    fill_rectangle(image, left, top, left + width, bottom, colour)
    fill_rectangle(image, right - width, top, right, bottom, colour)


def fill_shape(image: np.ndarray, shape: str, x: float, y: float, radius: float, colour: Colour) -> None:
    """Fill a shape of a name of `SHAPES` around a point."""
    import numpy as np

    reach = math.ceil(1.2 * radius) + 1
    left, top = max(math.floor(x) - reach, 0), max(math.floor(y) - reach, 0)
    part = image[top : max(math.floor(y) + reach, 0), left : max(math.floor(x) + reach, 0)]
    dx = np.arange(left, left + part.shape[1])[None, :] + 0.5 - x
    dy = np.arange(top, top + part.shape[0])[:, None] + 0.5 - y
    part[SHAPES[shape](dx, dy, radius)] = colour


def _circle(dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    inside: np.ndarray = dx**2 + dy**2 <= radius**2
    return inside


def _square(dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    import numpy as np

    inside: np.ndarray = np.maximum(abs(dx), abs(dy)) <= 0.85 * radius
    return inside


def _triangle(dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    inside: np.ndarray = (dy <= 0.8 * radius) & (2 * abs(dx) <= dy + radius)
    return inside


def _diamond(dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    inside: np.ndarray = abs(dx) + abs(dy) <= 1.1 * radius
    return inside


def _cross(dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    import numpy as np

    far, near = np.maximum(abs(dx), abs(dy)), np.minimum(abs(dx), abs(dy))
    inside: np.ndarray = (far <= radius) & (near <= 0.35 * radius)
    return inside


SHAPES = {"circle": _circle, "square": _square, "triangle": _triangle, "diamond": _diamond, "cross": _cross}
"""Shapes by name: which pixels are inside, of their distances to the middle."""


def text_width(text: str, scale: int = 1) -> int:
    """Return the width of a text in pixels, without the gap behind its last character."""
    return max(len(text) * (GLYPH_WIDTH + 1) - 1, 0) * scale


def draw_text(image: np.ndarray, left: int, top: int, text: str, colour: Colour = BLACK, scale: int = 1) -> None:
    """Draw a text in capitals. A character without a glyph is a box."""
    for place, character in enumerate(text.upper()):
        glyph = GLYPHS.get(character, "75557")
        for row in range(GLYPH_HEIGHT):
            for column in range(GLYPH_WIDTH):
                if int(glyph[row]) >> (GLYPH_WIDTH - 1 - column) & 1:
                    x = left + (place * (GLYPH_WIDTH + 1) + column) * scale
                    y = top + row * scale
                    fill_rectangle(image, x, y, x + scale, y + scale, colour)
