"""A critic's model: the layers of a policy under a head that gives one number a token.

The value of a token is that of the state before it was written, so it is read off the hidden state one position to
the left: it has seen everything the policy had seen when it chose the token, and nothing more.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, nn

from burnish.models.decoder import Decoder
from burnish.models.hf import TransformersBackbone, TransformersPolicy
from burnish.models.lora import adapter_weights, wrap_layers
from burnish.models.meta import without_memory
from burnish.models.ops.trunks import Trunks


def backbone_of(policy: Decoder | TransformersPolicy) -> Decoder | TransformersBackbone:
    """A copy of a policy without its output head, of which no copy is ever made; an embedding tied to it stays.

    Of a policy with adapters these alone are copied: the frozen weights below are the policy's own tensors.
    """
    if isinstance(policy, TransformersPolicy):
        return TransformersBackbone(policy)
    return headless(policy, policy.state_dict() if policy.lora is None else adapter_weights(policy))


def headless(policy: Decoder, copied: Collection[str] = ()) -> Decoder:
    """A decoder without output head on the very tensors of another, but for copies of those whose names are in `copied`."""
    with without_memory():
        copy = Decoder(replace(policy.arch, tied=True))
        if policy.lora is not None:
            wrap_layers(copy, policy.lora)
    state = {name: tensor for name, tensor in policy.state_dict().items() if not name.startswith("head.")}
    copy.load_state_dict({name: t.clone() if name in copied else t for name, t in state.items()}, assign=True)
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

    @property
    def attention_cost(self) -> float | None:
        """The backbone's; None where it does not say."""
        return getattr(self.backbone, "attention_cost", None)

    def token_values(self, tokens: Tensor, offsets: Tensor, wanted: Tensor, trunks: Trunks | None = None) -> Tensor:
        """[M] the value of the state before each `wanted` token (none may be first in its sequence)."""
        hidden, cut = self.backbone.states(tokens, offsets, wanted - 1, trunks)
        # The sum over one entry is a tensor of its own: FSDP hangs its hook on what is returned, and a view would lose it.
        return cut.whole((hidden.to(self.head.dtype) @ self.head.t()).sum(1))
