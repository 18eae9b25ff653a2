"""SigLIP towers (2303.15343), with the projectors of Idefics3 and SmolVLM (2408.12637, 2504.05299) and of Gemma 3 (2503.19786).

The encoder is a pre-norm transformer over square patches with learned positions. All patches of a picture attend to each other, and
none to another picture. Idefics3 makes one token of a square of patches by concatenation (pixel shuffle), Gemma 3 by their mean. The
modules have the names of their tensors in Hugging Face's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.core.pictures import Picture
from burnish.models.kernels.elementwise import RMSNorm
from burnish.models.vision.interfaces import ImageFeatures, VisionTower
from burnish.models.vision.siglip_shape import SiglipShape

PIXEL_MEAN = PIXEL_STD = 0.5
"""Pixels become (x / 255 - mean) / std. The processor checks that its files agree."""
MAX_PATCHES = 1 << 17
"""Patches that one call of the encoder computes without gradient, for its memory."""


class SiglipTower(VisionTower):
    """The encoder and its projector."""

    def __init__(self, shape: SiglipShape) -> None:
        super().__init__()
        self.shape = shape
        self.encoder = Encoder(shape)
        self.connector: nn.Module = ShuffleProjector(shape) if shape.connector == "shuffle" else MeanProjector(shape)

    @property
    def projector(self) -> nn.ModuleList:
        return nn.ModuleList([self.connector])

    def forward(self, pictures: Sequence[Picture]) -> ImageFeatures:
        """Compute the features of pictures of `image_size`."""
        shape = self.shape
        side = shape.image_size // shape.patch_size
        if not pictures:
            return ImageFeatures(self.encoder.post_layernorm.weight.new_empty(0, shape.out_size))
        for picture in pictures:
            self._check(picture)
        step = len(pictures) if torch.is_grad_enabled() else max(1, MAX_PATCHES // side**2)
        found = []
        for first in range(0, len(pictures), step):
            pixels = np.stack([picture.pixels[0] for picture in pictures[first : first + step]])
            x = self.encoder.embeddings(pixels)
            for layer in cast(nn.ModuleList, self.encoder.encoder["layers"]):
                x = self.run_block(layer, x)
            states = self.encoder.post_layernorm(x)
            found.append(self.connector(states.unflatten(1, (side, side))).flatten(0, 2))
        return ImageFeatures(torch.cat(found))

    def _check(self, picture: Picture) -> None:
        """Raise for a picture of another processor."""
        side, tokens = self.shape.image_size, self.shape.tokens_per_side
        if picture.pixels.shape != (1, side, side, 3) or picture.grid != (1, tokens, tokens):
            raise ValueError(
                f"pixels {picture.pixels.shape} with {picture.grid} tokens do not fit a tower for one frame of {side} x {side} pixels "
                f"and {tokens} x {tokens} tokens; was the picture made by the processor of another model?"
            )


class Encoder(nn.Module):
    """The modules that make hidden states of patches; `SiglipTower.forward` calls them."""

    def __init__(self, shape: SiglipShape) -> None:
        super().__init__()
        self.embeddings = Embeddings(shape)
        layers = nn.ModuleList(EncoderLayer(shape) for _ in range(shape.num_layers))
        self.encoder = nn.ModuleDict({"layers": layers})
        self.post_layernorm = nn.LayerNorm(shape.hidden_size, shape.norm_eps)


class Embeddings(nn.Module):
    """Normalised pixels to embeddings of patches, with their positions."""

    def __init__(self, shape: SiglipShape) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, shape.hidden_size, shape.patch_size, shape.patch_size)
        self.position_embedding = nn.Embedding((shape.image_size // shape.patch_size) ** 2, shape.hidden_size)

    def forward(self, pixels: np.ndarray) -> Tensor:
        """[b, patches, hidden], patches row by row."""
        weight = self.patch_embedding.weight
        channels = torch.from_numpy(pixels).to(weight.device).permute(0, 3, 1, 2)
        scaled = (channels.float() / 255 - PIXEL_MEAN) / PIXEL_STD
        patches: Tensor = self.patch_embedding(scaled.to(weight.dtype))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class EncoderLayer(nn.Module):
    """One pre-norm layer, [b, patches, hidden] in and out."""

    def __init__(self, shape: SiglipShape) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.layer_norm2 = nn.LayerNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + cast(Tensor, self.mlp(self.layer_norm2(x)))


class Attention(nn.Module):
    """Attention of all patches of a picture over all of them."""

    def __init__(self, shape: SiglipShape) -> None:
        super().__init__()
        hidden, self.num_heads = shape.hidden_size, shape.num_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.out_proj(mixed.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """Two matrices with GELU between them."""

    def __init__(self, shape: SiglipShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden_size, shape.mlp_size)
        self.fc2 = nn.Linear(shape.mlp_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc2(functional.gelu(self.fc1(x), approximate="tanh")))


class ShuffleProjector(nn.Module):
    """Pixel shuffle and a matrix (Idefics3): the patches of a square, row by row, are one vector."""

    def __init__(self, shape: SiglipShape) -> None:
        super().__init__()
        self.merge = shape.merge
        self.proj = nn.Linear(shape.hidden_size * shape.merge**2, shape.out_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[b, rows, columns, hidden] of patches to [b, rows / merge, columns / merge, out] of tokens."""
        batch, rows, columns, _ = states.shape
        squares = states.view(batch, rows // self.merge, self.merge, columns // self.merge, self.merge, -1)
        projected: Tensor = self.proj(squares.transpose(2, 3).flatten(3))
        return projected


class MeanProjector(nn.Module):
    """The mean of a square of patches, a norm and a matrix (Gemma 3)."""

    def __init__(self, shape: SiglipShape) -> None:
        super().__init__()
        self.merge = shape.merge
        self.mm_soft_emb_norm = RMSNorm(shape.hidden_size, shape.norm_eps, 1.0)
        self.mm_input_projection_weight = nn.Parameter(torch.empty(shape.hidden_size, shape.out_size))

    def forward(self, states: Tensor) -> Tensor:
        """[b, rows, columns, hidden] of patches to [b, rows / merge, columns / merge, out] of tokens."""
        means = functional.avg_pool2d(states.permute(0, 3, 1, 2), self.merge).permute(0, 2, 3, 1)
        normed = self.mm_soft_emb_norm(means.flatten(0, 2)).unflatten(0, means.shape[:3])
        return cast(Tensor, normed @ self.mm_input_projection_weight)
