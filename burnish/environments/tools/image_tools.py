"""Tools with which a model looks closer at the images of its prompt: crop, zoom, highlight and mask.

VTool-R1 (2505.19255) and DeepEyes (2505.14362) train models that think with images: a call names a region, and the result is a new image that the
model sees in its next turn. A region is a box `[left, top, right, bottom]`. Images are numbered from 1: those of the prompt, then the results of
calls, so that a crop can be cropped again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from burnish.config.errors import UserError
from burnish.environments.base import Episode, RunsIn
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.values import WrongArguments, check_arguments, error_result, tool_schema

if TYPE_CHECKING:
    import numpy as np

MAX_ZOOM = 8
OUTLINE = (255, 0, 0)
"""Colour of a highlighted box."""


class ImageTool(Tool):
    """Base class of the tools on images. One object serves one episode and keeps its images."""

    runs_in: ClassVar[RunsIn] = "loop"
    is_stateful: ClassVar[bool] = True
    default_name: ClassVar[str]
    description: ClassVar[str]

    def __init__(self, name: str | None = None, scale: int | None = 1000, min_pixels: int = 4) -> None:
        """`scale`: boxes go from 0 to this number on both axes, whatever the size of the image; null means pixels.

        `min_pixels` is the smallest side of a box, in pixels of the image.
        """
        if scale is not None and scale < 1:
            raise UserError(f"image tool: scale should be null or at least 1, got {scale}")
        if min_pixels < 1:
            raise UserError(f"image tool: min_pixels should be at least 1, got {min_pixels}")
        self._scale, self._min_pixels = scale, min_pixels
        unit = "in pixels" if scale is None else f"from 0 to {scale} on both axes"
        properties = {
            "box": {
                "type": "array",
                "items": {"type": "number"},
                "description": f"The region [left, top, right, bottom], {unit}.",
            },
            "image": {
                "type": "integer",
                "description": "The number of the image, from 1; by default the first. Results of calls are numbered on.",
            },
        } | self.more_properties()
        self.schema = tool_schema(name or self.default_name, self.description, properties, ["box"])
        self._images: list[np.ndarray] = []

    def more_properties(self) -> dict[str, Any]:
        """Return further parameters of the tool."""
        return {}

    async def start(self, episode: Episode, arguments: Mapping[str, Any]) -> None:
        self._images = episode.images
        if not self._images:
            raise UserError(f"row of episode {episode.id}: the tool {self.name!r} needs a prompt with an image")

    async def call(self, arguments: dict[str, Any]) -> ToolResult | str:
        """Change an image, and return it as a new one. A box that is none gives an error text."""
        try:
            checked = check_arguments(self.schema, arguments)
            image, (left, top, right, bottom) = self._region(checked)
        except WrongArguments as error:
            return error_result(str(error), "wrong_arguments")
        made = self.changed(image, left, top, right, bottom, checked)
        self._images.append(made)
        return ToolResult(f"Image {len(self._images)}:", images=(made,))

    def changed(
        self, image: np.ndarray, left: int, top: int, right: int, bottom: int, arguments: Mapping[str, Any]
    ) -> np.ndarray:
        """Return the new image."""
        raise NotImplementedError

    async def close(self) -> None:
        self._images = []

    def _region(self, arguments: Mapping[str, Any]) -> tuple[np.ndarray, tuple[int, int, int, int]]:
        """Return the image of a call, and the box in its pixels, cut at its edges."""
        number, box = arguments.get("image", 1), arguments["box"]
        if not 1 <= number <= len(self._images):
            raise WrongArguments(f"there is no image {number}; the images are 1 to {len(self._images)}")
        image = self._images[number - 1]
        height, width = image.shape[:2]
        if len(box) != 4:
            raise WrongArguments(f"'box' must be four numbers [left, top, right, bottom], got {len(box)}")
        across, down = (1.0, 1.0) if self._scale is None else (width / self._scale, height / self._scale)
        left, right = (min(max(round(box[k] * across), 0), width) for k in (0, 2))
        top, bottom = (min(max(round(box[k] * down), 0), height) for k in (1, 3))
        if right - left < self._min_pixels or bottom - top < self._min_pixels:
            raise WrongArguments(
                f"the box {box} is {right - left} x {bottom - top} pixels of the image of {width} x {height}; each side needs "
                f"{self._min_pixels} or more, and left < right, top < bottom"
            )
        return image, (left, top, right, bottom)


class ImageCrop(ImageTool):
    """Cuts a region out of an image."""

    default_name = "crop_image"
    description = "Cut a region out of an image, and see it alone."

    def changed(
        self, image: np.ndarray, left: int, top: int, right: int, bottom: int, arguments: Mapping[str, Any]
    ) -> np.ndarray:
        return image[top:bottom, left:right].copy()


class ImageZoom(ImageTool):
    """Cuts a region out of an image and enlarges it."""

    default_name = "zoom_image"
    description = "Enlarge a region of an image to see small details."

    def more_properties(self) -> dict[str, Any]:
        text = f"How many times larger the region becomes, a whole number from 2 to {MAX_ZOOM}; by default 2."
        return {"factor": {"type": "integer", "description": text}}

    def changed(
        self, image: np.ndarray, left: int, top: int, right: int, bottom: int, arguments: Mapping[str, Any]
    ) -> np.ndarray:
        factor = min(max(int(arguments.get("factor", 2)), 2), MAX_ZOOM)
        return image[top:bottom, left:right].repeat(factor, axis=0).repeat(factor, axis=1)


class ImageHighlight(ImageTool):
    """Draws a box around a region."""

    default_name = "highlight_image"
    description = "Draw a red box around a region of an image."

    def changed(
        self, image: np.ndarray, left: int, top: int, right: int, bottom: int, arguments: Mapping[str, Any]
    ) -> np.ndarray:
        made, width = image.copy(), max(1, min(image.shape[:2]) // 128)
        made[top:bottom, left:right] = OUTLINE
        inner = (
            slice(top + width, max(bottom - width, top + width)),
            slice(left + width, max(right - width, left + width)),
        )
        made[inner] = image[inner]
        return made


class ImageMask(ImageTool):
    """Hides a region, or with `keep` everything else."""

    default_name = "mask_image"
    description = "Hide a region of an image behind white, or everything but the region."

    def more_properties(self) -> dict[str, Any]:
        return {"keep": {"type": "boolean", "description": "Whether the region stays and all else is hidden."}}

    def changed(
        self, image: np.ndarray, left: int, top: int, right: int, bottom: int, arguments: Mapping[str, Any]
    ) -> np.ndarray:
        made = image.copy()
        if arguments.get("keep", False):
            made[:] = 255
            made[top:bottom, left:right] = image[top:bottom, left:right]
        else:
            made[top:bottom, left:right] = 255
        return made
