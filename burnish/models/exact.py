"""Log-probs of given tokens by the very operations that an exact engine draws them with.

The packed sequences get pages of their own and go through `paged_forward` with exact operations, every token a query
against its row, as in decoding. Slower than the learner's forward, which gives the gradient; the value is the engine's,
bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.models.decoder import Decoder
from burnish.models.inference import paged_forward
from burnish.models.ops.attention import window_of
from burnish.models.ops.exact import exact_attention, exact_linear, exact_logits, token_logp
from burnish.models.ops.paged import Norms, Placement, rotate_store

PAGE = 16  # as the engine's: attention walks over keys page by page
LOGITS = 1 << 25  # held at once


@torch.no_grad()
def exact_logprobs(model: Decoder, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(token given its past) at the `wanted` positions [M] (none may be first in its sequence)."""
    lengths = offsets.diff()
    owner = torch.repeat_interleave(torch.arange(lengths.shape[0], device=tokens.device), lengths)
    position = torch.arange(tokens.shape[0], device=tokens.device) - offsets[:-1][owner]
    longest = int(lengths.max())
    pages = -(-lengths // PAGE)
    width = -(-longest // PAGE)
    first = pages.cumsum(0) - pages + 1  # page 0 is nobody's
    table = (first[:, None] + torch.arange(width, device=tokens.device)).int()
    table = torch.where(torch.arange(width, device=tokens.device) < pages[:, None], table, 0)
    place = Placement(owner, position, table)
    arch = model.arch
    shape = (int(pages.sum()) + 1, arch.num_kv_heads, PAGE, arch.head_dim)
    store = torch.zeros(2, *shape, dtype=model.embedding.weight.dtype, device=tokens.device)
    cache = store.expand(arch.num_layers, *store.shape)  # one layer's keys and values are done with before the next's

    def attend(layer: int, qkv: Tensor, norms: Norms | None, keys: Tensor, values: Tensor) -> Tensor:
        q = rotate_store(qkv, *model.rotations(longest, layer), place, norms, keys, values)
        return exact_attention(q, keys, values, place, window_of(arch.windows, layer))

    hidden = paged_forward(model, tokens, cache, attend, exact_linear)[wanted - 1]
    size = max(1, LOGITS // arch.vocab_size)
    parts = zip(hidden.split(size), tokens[wanted].split(size), strict=True)
    return torch.cat([token_logp(exact_logits(h, model.head_weight), t, temperature) for h, t in parts])
