"""Memory and arithmetic of vision towers in training. A tower is a stack of pre-norm blocks on patches, as in ViT (2010.11929)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from burnish.config.model import Vision

if TYPE_CHECKING:
    from burnish.models.vision.interfaces import VisionShape

Grid = tuple[int, int, int]
BLOCK_STATES = 11
"""Tensors as wide as the residual stream that a block saves: two inputs, two normed ones, the projections (3), rotated queries and
keys (2), and the output of attention before and after its heads are joined (2)."""


def block_bytes(hidden_size: int, mlp_size: int, is_gated: bool, element: int) -> int:
    """Bytes of one patch that a block saves. A gated MLP saves gate, its activation, up and their product; a plain one two of these."""
    return element * (BLOCK_STATES * hidden_size + (4 if is_gated else 2) * mlp_size)


def tower_bytes(
    num_patches: int, num_layers: int, hidden_size: int, mlp_size: int, is_gated: bool, element: int, recomputes: bool
) -> int:
    """Bytes that the blocks of a tower save: everything, or their inputs and everything of the one that is recomputed."""
    one = num_patches * block_bytes(hidden_size, mlp_size, is_gated, element)
    return num_layers * num_patches * hidden_size * element + one if recomputes else num_layers * one


def pass_flops(
    shape: VisionShape, grids: Sequence[Grid], part: Vision, with_gradient: bool, recomputes: bool
) -> tuple[int, int]:
    """FLOPs of the tower in a learner's pass: those that the mathematics needs, and those executed.

    The features of a frozen tower are computed once for all passes, so they count in none. Of a projector that is trained alone the
    backward pass computes only the gradients of its own products.
    """
    if part == "frozen" or not grids:
        return 0, 0
    forward = shape.tower_flops(grids)
    if not with_gradient:
        return round(forward), round(forward)
    tokens = sum(frames * rows * columns for frames, rows, columns in grids)
    projector = 2 * tokens * shape.num_projector_parameters
    needed = 3 * forward if part == "trained" else forward + 2 * projector
    again = forward - projector if recomputes and part == "trained" else 0
    return round(needed), round(needed + again)
