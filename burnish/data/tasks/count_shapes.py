"""Counting in drawn scenes: how many of the shapes in a picture have a colour, a form, or both? `red circle?` is answered by `2`.

It is CLEVR's question (Johnson et al. 2017, 1612.06890) in small: a scene has `min_shapes` to `max_shapes` shapes in cells of a grid,
each with a form, a colour, a size and a shift of its own. The answer is drawn first, evenly from what the scene allows, so that guessing
the most frequent number gains little. A hash of the scene, without sizes and shifts, decides the split.

Demonstrations look before they count: `Arc1B..1Cbs1Drc2=2` names every cell in reading order, what is in it (the first letters of a colour
and a form), and the number so far. Only what stands behind the last `=` is scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from burnish.config.errors import UserError
from burnish.data.drawing import COLOURS, canvas, fill_shape
from burnish.data.row import Message, Row
from burnish.data.tasks.picture_task import CELLS, EMPTY, PRINTABLE, RESULT, check_side, picture_prompt
from burnish.data.tasks.task import Dice, check_span, final_answer, first_on_split

if TYPE_CHECKING:
    import numpy as np

COUNT_SHAPES = "count_shapes"
FORMS = ("circle", "square", "triangle")
TINTS = ("red", "green", "blue", "yellow")
Asked = Literal["colour", "form", "both"]
BACKGROUND = (236, 236, 230)


class Shape(NamedTuple):
    """A shape of a scene."""

    cell: int
    form: str
    tint: str


class Scene(NamedTuple):
    """The shapes of a scene, and what is asked about it."""

    shapes: tuple[Shape, ...]
    form: str | None
    tint: str | None

    @property
    def question(self) -> str:
        return " ".join(word for word in (self.tint, self.form) if word is not None) + "?"

    def counts(self, shape: Shape) -> bool:
        """Whether a shape is asked for."""
        return self.form in (None, shape.form) and self.tint in (None, shape.tint)

    @property
    def num_asked(self) -> int:
        return sum(map(self.counts, self.shapes))


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """1 for exactly the number: in `<answer>` tags, behind the last `=`, or alone; else 0."""
    return float(final_answer(completion).rpartition(RESULT)[2].strip() == answer)


def draw_scene(scene: Scene, cells: int, side: int, dice: Dice) -> np.ndarray:
    """Draw a scene; the dice choose sizes and shifts."""
    image = canvas(side, side, BACKGROUND)
    cell = side / cells
    for shape in scene.shapes:
        row, column = divmod(shape.cell, cells)
        radius = cell * (0.26 + 0.14 * dice.unit())
        slack = cell / 2 - radius
        x, y = ((place + 0.5) * cell + slack * (2 * dice.unit() - 1) for place in (column, row))
        fill_shape(image, shape.form, x, y, radius, COLOURS[shape.tint])
    return image


class CountShapes:
    """Scenes of `min_shapes` to `max_shapes` shapes, `side` pixels wide, with questions of the kinds `asked`."""

    name = COUNT_SHAPES
    alphabet = "".join(sorted(set("".join((*FORMS, *TINTS)) + "0123456789 ?" + CELLS + EMPTY + RESULT)))
    score = staticmethod(score)

    def __init__(
        self,
        seed: int,
        min_shapes: int = 1,
        max_shapes: int = 4,
        side: int = 32,
        asked: list[Asked] | None = None,
        words: bool = False,
    ) -> None:
        check_span(COUNT_SHAPES, "shapes", min_shapes, max_shapes, least=1, most=9)
        check_side(COUNT_SHAPES, side)
        self.asked: tuple[Asked, ...] = get_args(Asked) if asked is None else tuple(asked)
        if not self.asked or not set(self.asked) <= set(get_args(Asked)):
            raise UserError(f"{COUNT_SHAPES}: asked should be some of {', '.join(get_args(Asked))}, got {asked!r}")
        self.seed, self.min_shapes, self.max_shapes = seed, min_shapes, max_shapes
        self.side, self.words = side, words
        self.cells = 2 if max_shapes <= 4 else 3
        if words:
            self.alphabet = PRINTABLE

    def row(self, split: str, index: int) -> Row:
        """The index-th scene of a split; extra["length"] is the number of its shapes."""
        key = (self.seed, COUNT_SHAPES, split, index)
        scene = self._scene(split, *key)
        extra = {"task": COUNT_SHAPES, "length": len(scene.shapes), "question": scene.question}
        prompt = self._prompt(scene, *key)
        return Row(f"{COUNT_SHAPES}/{split}/{index}", prompt, COUNT_SHAPES, str(scene.num_asked), extra)

    def demonstrations(self, num: int = 2000, seed: int = 0, overlooked: float = 0.55) -> list[dict[str, Any]]:
        """What a careless counter says about scenes of the train split: a share `overlooked` of what should count is not counted."""
        if not 0 <= overlooked < 1:
            raise UserError(
                f"{COUNT_SHAPES}: overlooked should be a share of at least 0 and below 1, got {overlooked!r}"
            )
        rows = []
        for index in range(num):
            key = (seed, COUNT_SHAPES, "demonstrations", index)
            scene = self._scene("train", *key)
            dice = Dice(*key, "counter")
            rows.append({"prompt": self._prompt(scene, *key), "completion": self._count_aloud(scene, overlooked, dice)})
        return rows

    def _count_aloud(self, scene: Scene, overlooked: float, dice: Dice) -> str:
        """The cells in reading order, each with what is in it and the number so far, and the result."""
        shapes = {shape.cell: shape for shape in scene.shapes}
        said, number = "", 0
        for cell, name in enumerate(CELLS[: self.cells**2]):
            shape = shapes.get(cell)
            number += shape is not None and scene.counts(shape) and dice.unit() >= overlooked
            said += f"{name}{EMPTY if shape is None else shape.tint[0] + shape.form[0]}{number}"
        return f"{said}{RESULT}{number}"

    def _prompt(self, scene: Scene, *key: int | str) -> list[Message]:
        image = draw_scene(scene, self.cells, self.side, Dice(*key, "drawing"))
        words = f"How many {scene.question[:-1]} shapes are in the picture? Answer with the number in <answer> tags."
        return picture_prompt(image, words if self.words else scene.question)

    def _scene(self, split: str, *key: int | str) -> Scene:
        number = Dice(*key).between(self.min_shapes, self.max_shapes)

        def propose(attempt: int) -> tuple[str, Scene]:
            dice = Dice(*key, attempt)
            asked = self.asked[dice.between(0, len(self.asked) - 1)]
            form = _one_of(FORMS, dice) if asked in ("form", "both") else None
            tint = _one_of(TINTS, dice) if asked in ("colour", "both") else None
            wanted = dice.between(0, number)
            cells = list(range(self.cells**2))
            shapes = []
            for place in range(number):
                cell = cells.pop(dice.between(0, len(cells) - 1))
                shapes.append(Shape(cell, *_kind(form, tint, place < wanted, dice)))
            scene = Scene(tuple(sorted(shapes)), form, tint)
            return f"{COUNT_SHAPES} {scene}", scene

        return first_on_split(split, propose, COUNT_SHAPES)


def _one_of(choices: tuple[str, ...], dice: Dice) -> str:
    return choices[dice.between(0, len(choices) - 1)]


def _kind(form: str | None, tint: str | None, is_counted: bool, dice: Dice) -> tuple[str, str]:
    """A form and a colour that are asked for, or not."""
    if is_counted:
        return form or _one_of(FORMS, dice), tint or _one_of(TINTS, dice)
    kinds = [(f, t) for f in FORMS for t in TINTS if not (form in (None, f) and tint in (None, t))]
    return kinds[dice.between(0, len(kinds) - 1)]
