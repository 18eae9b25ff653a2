"""A critic's model: the layers of a policy under a head that gives one number a token.

The value of a token is that of the state before it was written, so it is read off the hidden state one position to
the left: it has seen everything the policy had seen when it chose the token, and nothing more.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from burnish.models.decoder import Decoder
from burnish.models.hf import TransformersBackbone, TransformersPolicy


def backbone_of(policy: Decoder | TransformersPolicy) -> Decoder | TransformersBackbone:
    """A copy of a policy without its output head, of which no copy is ever made; an embedding tied to it stays."""
    if isinstance(policy, TransformersPolicy):
        return TransformersBackbone(policy)
    with torch.device("meta"):
        copy = Decoder(replace(policy.arch, tied=True))
    state = {name: t.clone() for name, t in policy.state_dict().items() if not name.startswith("head.")}
    copy.load_state_dict(state, assign=True)
    return copy


class ValueModel(nn.Module):
    """A policy's backbone and a scalar head that starts at 0: the first advantages are then plain returns."""

    def __init__(self, policy: Decoder | TransformersPolicy) -> None:
        super().__init__()
        self.backbone = backbone_of(policy)
        out = policy.head_weight if isinstance(policy, Decoder) else policy.inner.get_output_embeddings().weight
        # In a half type values near 1 would be 2^-8 apart, and so would the targets' differences.
        wide = torch.promote_types(out.dtype, torch.float32)
        self.head = nn.Parameter(torch.zeros(1, out.shape[1], dtype=wide, device=out.device))

    def token_values(self, tokens: Tensor, offsets: Tensor, wanted: Tensor) -> Tensor:
        """[M] the value of the state before each `wanted` token (none may be first in its sequence)."""
        hidden = self.backbone.hidden(tokens, offsets)[wanted - 1]
        return (hidden.to(self.head.dtype) @ self.head.t()).squeeze(1)
