"""The vision towers of Qwen2.5-VL and Qwen3-VL (`qwen_shape.py` says how they differ).

Modules have the names of `transformers`, so the files map to parameters one to one. Patches stand in the order of the files'
processor: frame, then the token's row and column, then row and column within the token. In Qwen2.5-VL they are sorted into windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.core.pictures import Picture
from burnish.models.kernels.elementwise import RMSNorm, inverse_frequencies, rotate
from burnish.models.vision.interfaces import ImageFeatures, VisionTower, join_features
from burnish.models.vision.qwen_shape import Grid, QwenVisionShape
from burnish.models.vision.segments import Segments

NORM_EPS = 1e-6
ROPE_THETA = 10_000.0
MAX_PATCHES = 1 << 16
"""Patches that are computed at once without gradient: their activations are freed layer by layer."""


class PatchEmbedding(nn.Module):
    """One product with each patch: a convolution whose stride is its kernel."""

    def __init__(self, shape: QwenVisionShape) -> None:
        super().__init__()
        kernel = (shape.temporal_patch_size, shape.patch_size, shape.patch_size)
        self.proj = nn.Conv3d(3, shape.hidden_size, kernel, kernel, bias=shape.is_qwen3)

    def forward(self, patches: Tensor) -> Tensor:
        """[P, elements] to [P, hidden]."""
        weight = self.proj.weight
        return functional.linear(patches.to(weight.dtype), weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Attention in both directions with rotary positions."""

    def __init__(self, shape: QwenVisionShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        qkv = self.qkv(x).unflatten(1, (3 * self.num_heads, -1))
        qk, v = qkv.split([2 * self.num_heads, self.num_heads], 1)
        # In float32, as transformers rotates the heads of towers.
        wide = torch.promote_types(qk.dtype, torch.float32)
        q, k = rotate(qk.to(wide), cos.to(wide), sin.to(wide)).to(qk.dtype).chunk(2, 1)
        projected: Tensor = self.proj(segments.attention(q, k, v))
        return projected


class GatedMlp(nn.Module):
    """SwiGLU with biases (Qwen2.5-VL)."""

    def __init__(self, shape: QwenVisionShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class PlainMlp(nn.Module):
    """Two products with GELU between (Qwen3-VL)."""

    def __init__(self, shape: QwenVisionShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden_size, shape.mlp_size)
        self.linear_fc2 = nn.Linear(shape.mlp_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """One layer of the tower."""

    def __init__(self, shape: QwenVisionShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = (_norm(shape, shape.hidden_size) for _ in range(2))
        self.attn = Attention(shape)
        self.mlp = PlainMlp(shape) if shape.is_qwen3 else GatedMlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, segments)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def _norm(shape: QwenVisionShape, size: int) -> nn.Module:
    return nn.LayerNorm(size, NORM_EPS) if shape.is_qwen3 else RMSNorm(size, NORM_EPS)


class Qwen25Merger(nn.Module):
    """The projector of Qwen2.5-VL: the patches of one token side by side, through an MLP."""

    def __init__(self, shape: QwenVisionShape) -> None:
        super().__init__()
        merged = shape.merged_size
        self.ln_q = _norm(shape, shape.hidden_size)
        self.mlp = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, shape.out_size))

    def forward(self, x: Tensor) -> Tensor:
        merged: Tensor = self.mlp(self.ln_q(x).view(-1, self.mlp[0].in_features))
        return merged


class Qwen3Merger(nn.Module):
    """The projectors of Qwen3-VL; those of deep-stack norm the merged patches, the last one each patch."""

    def __init__(self, shape: QwenVisionShape, norms_merged: bool) -> None:
        super().__init__()
        merged = shape.merged_size
        self.norms_merged = norms_merged
        self.norm = nn.LayerNorm(merged if norms_merged else shape.hidden_size, NORM_EPS)
        self.linear_fc1 = nn.Linear(merged, merged)
        self.linear_fc2 = nn.Linear(merged, shape.out_size)

    def forward(self, x: Tensor) -> Tensor:
        merged = self.linear_fc1.in_features
        x = self.norm(x.view(-1, merged)) if self.norms_merged else self.norm(x).view(-1, merged)
        out: Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(x)))
        return out


class QwenTower(VisionTower):
    """A Qwen vision tower with its mergers."""

    def __init__(self, shape: QwenVisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.merger: nn.Module = Qwen3Merger(shape, False) if shape.is_qwen3 else Qwen25Merger(shape)
        if shape.is_qwen3:
            self.pos_embed = nn.Embedding(shape.num_position_embeddings, shape.hidden_size)
            self.deepstack_merger_list = nn.ModuleList(Qwen3Merger(shape, True) for _ in shape.deep_layers)

    @property
    def projector(self) -> nn.ModuleList:
        """The mergers."""
        return nn.ModuleList([self.merger, *(self.deepstack_merger_list if self.shape.is_qwen3 else ())])

    def forward(self, pictures: Sequence[Picture]) -> ImageFeatures:
        """The features of pictures in order."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.blocks.parameters()):
            return self._compute(pictures)
        return join_features([self._compute(part) for part in _parts(pictures, self.shape)])

    def _compute(self, pictures: Sequence[Picture]) -> ImageFeatures:
        shape, weight = self.shape, self.patch_embed.proj.weight
        layout = patch_layout(tuple(picture.grid for picture in pictures), shape)
        x = self.patch_embed(cut_patches(pictures, shape, weight.device))
        if shape.is_qwen3:
            taps, weights = (torch.from_numpy(column).to(weight.device) for column in layout.taps)
            wide = torch.promote_types(x.dtype, torch.float32)
            x = x + (self.pos_embed(taps).to(wide) * weights.to(wide)[..., None]).sum(1).to(x.dtype)
        if layout.order is not None:
            x = x.unflatten(0, (-1, shape.merge_size**2))[torch.from_numpy(layout.order).to(x.device)].flatten(0, 1)
        cos, sin = axial_rotations(layout.positions, shape.hidden_size // shape.num_heads, x.device)
        frames = Segments(layout.frame_lengths, x.device)
        windows = frames if layout.order is None else Segments(layout.window_lengths, x.device)
        deep = []
        for index, block in enumerate(self.blocks):
            is_full = shape.window_size is None or index in shape.full_layers
            x = self.run_block(block, x, cos, sin, frames if is_full else windows)
            if index in shape.deep_layers:
                deep.append(self.deepstack_merger_list[shape.deep_layers.index(index)](x))
        merged = self.merger(x)
        if layout.order is not None:
            merged = merged[torch.from_numpy(layout.order.argsort()).to(x.device)]
        return ImageFeatures(merged, tuple(deep))


def _parts(pictures: Sequence[Picture], shape: QwenVisionShape) -> Iterator[list[Picture]]:
    """Consecutive pictures with at most MAX_PATCHES patches, or single ones."""
    part: list[Picture] = []
    filled = 0
    for picture in pictures:
        patches = picture.num_tokens * shape.merge_size**2
        if part and filled + patches > MAX_PATCHES:
            yield part
            part, filled = [], 0
        part.append(picture)
        filled += patches
    yield part


def cut_patches(pictures: Sequence[Picture], shape: QwenVisionShape, device: torch.device) -> Tensor:
    """Normalised patches [P, elements] in float32, each [3, frames, rows, columns]; the last frame fills a patch's frames."""
    mean = torch.tensor(shape.pixel_mean, device=device)
    std = torch.tensor(shape.pixel_std, device=device)
    size, merge, depth = shape.patch_size, shape.merge_size, shape.temporal_patch_size
    found = []
    for _, same in groupby(pictures, key=lambda picture: (picture.pixels.shape, picture.grid)):
        group = list(same)
        (frames, height, width, _), grid = group[0].pixels.shape, group[0].grid
        expected = (grid[0], grid[1] * shape.pixels_per_token, grid[2] * shape.pixels_per_token)
        if (-(-frames // depth), height, width) != expected:
            raise ValueError(f"a picture of {frames} frames, {height} x {width} pixels, has the grid {grid}")
        pixels = torch.from_numpy(np.stack([picture.pixels for picture in group])).to(device)
        if frames % depth:
            pixels = torch.cat([pixels, *[pixels[:, -1:]] * (-frames % depth)], 1)
        values = (pixels.float() / 255 - mean) / std  # [G, F, H, W, 3]
        values = values.view(len(group), grid[0], depth, grid[1], merge, size, grid[2], merge, size, 3)
        found.append(values.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8).reshape(-1, shape.patch_elements))
    return torch.cat(found)


class PatchLayout:
    """Where the patches of pictures with some grids are: positions, windows and frames. All are arrays on the host."""

    def __init__(self, grids: Sequence[Grid], shape: QwenVisionShape) -> None:
        merge = shape.merge_size
        places, frame_lengths = [], list[int]()
        for frames, rows, columns in grids:
            row, column = (merge * axis for axis in np.indices((rows, columns)))
            inner_row, inner_column = np.indices((merge, merge))
            place = np.stack([row[..., None, None] + inner_row, column[..., None, None] + inner_column])
            places.append(np.tile(place.reshape(2, -1), frames))
            frame_lengths += [rows * columns * merge**2] * frames
        self.positions = np.concatenate(places, 1)  # [2, P] row and column of each patch in its frame
        self.frame_lengths = frame_lengths
        self.window_lengths: list[int] = []
        self.order: np.ndarray | None = None
        """[tokens] the tokens sorted by window; None without windows."""
        self.taps = _interpolation(grids, self.positions, shape) if shape.is_qwen3 else (np.empty(0), np.empty(0))
        if shape.window_size is not None:
            self.order, lengths = _windows(grids, shape.window_tokens)
            self.window_lengths = [int(length) * merge**2 for length in lengths]
            by_token = self.positions.reshape(2, -1, merge**2)
            self.positions = by_token[:, self.order].reshape(2, -1)


@lru_cache(maxsize=64)
def patch_layout(grids: tuple[Grid, ...], shape: QwenVisionShape) -> PatchLayout:
    """The layout of pictures with these grids; batches repeat them."""
    return PatchLayout(grids, shape)


def _windows(grids: Sequence[Grid], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in the order of their windows, and the number of tokens of each window."""
    window_ids, first = [], 0
    for frames, rows, columns in grids:
        across = -(-columns // side)
        frame, row, column = np.indices((frames, rows, columns)).reshape(3, -1)
        per_frame = -(-rows // side) * across
        window_ids.append(first + frame * per_frame + row // side * across + column // side)
        first += frames * per_frame
    ids = np.concatenate(window_ids)
    return ids.argsort(kind="stable"), np.bincount(ids, minlength=first)


def _interpolation(
    grids: Sequence[Grid], positions: np.ndarray, shape: QwenVisionShape
) -> tuple[np.ndarray, np.ndarray]:
    """Learned positions that each patch interpolates [P, 4], and their weights; corners of the grids are aligned."""
    side = int(shape.num_position_embeddings**0.5)
    counts = [frames * rows * columns * shape.merge_size**2 for frames, rows, columns in grids]
    axes = []
    for axis in range(2):
        lengths = np.repeat([grid[1 + axis] * shape.merge_size for grid in grids], counts)
        place = positions[axis].astype(np.float32) * (side - 1) / np.maximum(lengths - 1, 1).astype(np.float32)
        below = np.floor(place).astype(np.int64)
        share = place - below
        axes.append((np.stack([below, np.minimum(below + 1, side - 1)], 1), np.stack([1 - share, share], 1)))
    (rows, row_weights), (columns, column_weights) = axes
    taps = rows[:, :, None] * side + columns[:, None]
    return taps.reshape(-1, 4), (row_weights[:, :, None] * column_weights[:, None]).reshape(-1, 4).astype(np.float32)


def axial_rotations(positions: np.ndarray, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and signed sin [P, 1, head_dim] in float32: a quarter of the dimensions turns with the row, the next with the column."""
    inverse = inverse_frequencies(head_dim // 2, ROPE_THETA, None)
    angles = (torch.from_numpy(positions).float()[..., None] * inverse).permute(1, 0, 2).flatten(1)  # [P, head_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], 1)[:, None].to(device), torch.cat([-sin, sin], 1)[:, None].to(device)
