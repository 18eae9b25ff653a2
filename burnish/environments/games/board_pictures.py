"""Boards as pictures, for models that see (VAGEN, Wang et al. 2025, 2510.16907): a tile of 16 x 16 pixels for every cell.

The tiles are drawn from the board's text, so a picture shows exactly what the text says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from burnish.data.drawing import BLACK, WHITE, Colour, canvas, draw_frame, fill_rectangle, fill_shape

TILE = 16
MIDDLE = TILE / 2
FLOOR: Colour = (235, 228, 214)
WALL, MORTAR = (120, 72, 50), (176, 140, 120)
TARGET: Colour = (214, 39, 40)
BOX, BOX_EDGE = (222, 170, 80), (130, 90, 30)
READY: Colour = (60, 170, 75)
SKIN, SHIRT = (70, 50, 40), (31, 119, 220)
ICE, WATER = (214, 236, 248), (20, 50, 110)

SOKOBAN_TILES = {
    "#": "wall",
    "_": "floor",
    "O": "floor target",
    "X": "floor box",
    "√": "floor box ready",
    "P": "floor player",
    "S": "floor target player",
}
LAKE_TILES = {
    "_": "ice",
    "O": "ice hole",
    "G": "ice flag",
    "P": "ice player",
    "X": "ice hole player",
    "√": "ice flag player",
}
"""What each symbol of a board's text is drawn as, from the ground up."""


def board_picture(board: str, tiles: Mapping[str, str]) -> np.ndarray:
    """Draw a board from its text: uint8 [16 rows, 16 columns, 3]."""
    rows = [np.concatenate([_tile(tiles[symbol]) for symbol in line], axis=1) for line in board.splitlines()]
    return np.concatenate(rows)


@lru_cache(maxsize=64)
def _tile(layers: str) -> np.ndarray:
    image = canvas(TILE, TILE)
    for layer in layers.split():
        LAYERS[layer](image)
    image.setflags(write=False)  # it is shared
    return image


def _wall(image: np.ndarray) -> None:
    image[:] = WALL
    for top in (0, 8):
        fill_rectangle(image, 0, top, TILE, top + 1, MORTAR)
        x = 4 if top else 12
        fill_rectangle(image, x, top, x + 1, top + 8, MORTAR)


def _floor(image: np.ndarray) -> None:
    image[:] = FLOOR


def _target(image: np.ndarray) -> None:
    fill_shape(image, "circle", MIDDLE, MIDDLE, 6, TARGET)
    fill_shape(image, "circle", MIDDLE, MIDDLE, 4, FLOOR)
    fill_shape(image, "circle", MIDDLE, MIDDLE, 2, TARGET)


def _box(image: np.ndarray) -> None:
    fill_rectangle(image, 2, 2, 14, 14, BOX)
    draw_frame(image, 2, 2, 14, 14, BOX_EDGE, width=2)
    fill_shape(image, "cross", MIDDLE, MIDDLE, 4, BOX_EDGE)


def _ready(image: np.ndarray) -> None:
    draw_frame(image, 0, 0, TILE, TILE, READY, width=3)


def _player(image: np.ndarray) -> None:
    fill_shape(image, "triangle", MIDDLE, 9.5, 6, SHIRT)
    fill_shape(image, "circle", MIDDLE, 5, 3, SKIN)


def _ice(image: np.ndarray) -> None:
    image[:] = ICE
    draw_frame(image, 0, 0, TILE, TILE, WHITE)


def _hole(image: np.ndarray) -> None:
    fill_shape(image, "circle", MIDDLE, MIDDLE, 6.5, WATER)


def _flag(image: np.ndarray) -> None:
    fill_rectangle(image, 4, 2, 6, 15, BLACK)
    fill_rectangle(image, 6, 2, 13, 8, READY)


LAYERS = {
    "wall": _wall,
    "floor": _floor,
    "target": _target,
    "box": _box,
    "ready": _ready,
    "player": _player,
    "ice": _ice,
    "hole": _hole,
    "flag": _flag,
}
