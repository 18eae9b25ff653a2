"""Batch-invariant operations: a token's result has the same bits whatever other rows are in the batch.

Matmul libraries choose a kernel by the number of rows, and a softmax over a longer row sums in another order. The
learner's log-prob of a token therefore differs from the engine's by rounding. Here matmuls run in row tiles of one size,
and attention visits a row's keys in order, in blocks of one size. Norms, rotations and activations need no change, as
they treat every row by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.experts import Activate, ExpertLinear, ExpertMlp, dispatch, weighted_rows
from burnish.models.kernels.device import use_triton
from burnish.models.kernels.elementwise import swiglu
from burnish.models.kernels.grouped_products import expert_spans, sum_slots
from burnish.models.kernels.paged_cache import Placement
from burnish.models.lora.adapters import LoraExpertLinear, LoraLinear
from burnish.models.nf4 import Nf4ExpertLinear, dense_weight

ROW_TILE = 64
"""Rows of one matmul."""
TOKENS_PER_CHUNK = 1024
"""Tokens whose keys are gathered at once, on a CPU."""


def exact_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer and its adapters to rows [N, in]."""
    y = _tiled_linear(x, dense_weight(layer.weight, x.dtype), layer.bias)
    if isinstance(layer, LoraLinear) and layer.is_on:
        z = _tiled_linear(x, layer.lora_a, None)
        for ((start, stop), _, b), part in zip(layer.blocks(), z.split(layer.rank, 1), strict=True):
            y[:, start:stop] += layer.scale * _tiled_linear(part.contiguous(), b, None)
    return y


def exact_experts(mlp: ExpertMlp, x: Tensor, activate: Activate) -> Tensor:
    """The experts' output of tokens [N, hidden]. The choice of experts is batch-invariant too."""
    choice = mlp.choose(exact_linear(mlp.router, x))
    way = dispatch(choice.experts, mlp.shape.num_experts)
    gate_up = _exact_expert_linear(mlp.gate_up, x[way.tokens], way.ends)
    rows = weighted_rows(activate, gate_up, choice.weights.reshape(-1).index_select(0, way.slots))
    return sum_slots(_exact_expert_linear(mlp.down, rows, way.ends), way.rows)


def _exact_expert_linear(
    layer: ExpertLinear | Nf4ExpertLinear | LoraExpertLinear, rows: Tensor, ends: Tensor
) -> Tensor:
    """Apply the layer of their expert and its adapters to sorted rows [M, in]; [M, out]."""
    if isinstance(layer, ExpertLinear):
        return _exact_grouped_product(rows, layer.matrices(), ends)
    adapters = layer.enabled_adapters if isinstance(layer, LoraExpertLinear) else (None, None)
    return layer.frozen().product(rows, *adapters, ends, _exact_grouped_product)[0]


def _exact_grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if use_triton(rows):
        from burnish.models.kernels.triton import expert_kernels

        return expert_kernels.grouped_product(rows, matrices, ends)
    product = rows.new_empty(rows.shape[0], matrices.shape[1])
    for expert, span in expert_spans(ends):
        product[span] = _tiled_linear(rows[span], matrices[expert], None)
    return product


def exact_logits(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    """Apply the output head to rows [N, hidden]; [N, vocab], soft-capped if the model does so."""
    logits = _tiled_linear(hidden, weight, None)
    return logits if softcap is None else exact_softcapped(logits, softcap)


def _tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if use_triton(x):
        from burnish.models.kernels.triton import exact_kernels as kernel

        return kernel.exact_linear(x, weight, bias)
    rows = x.shape[0]
    padded = functional.pad(x, (0, 0, 0, -rows % ROW_TILE))
    return torch.cat([functional.linear(tile, weight, bias) for tile in padded.split(ROW_TILE)])[:rows]


def exact_swiglu(gate_up: Tensor) -> Tensor:
    """Batch-invariant SwiGLU of rows [N, 2 * size]."""
    if use_triton(gate_up):
        return swiglu(gate_up)
    # torch's silu rounds the end of each thread's range differently from the rest; its exponential does not.
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def exact_softcapped(x: Tensor, softcap: float) -> Tensor:
    """Batch-invariant softcap * tanh(x / softcap), in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # torch's tanh rounds the end of each thread's range differently from the rest; its exponential does not.
    return (softcap - 2 * softcap / (1 + (wide * (2 / softcap)).exp())).to(x.dtype)


def exact_attention(
    q: Tensor, keys: Tensor, values: Tensor, placement: Placement, window: int | None, softcap: float | None = None
) -> Tensor:
    """Attention of each token's query [N, heads, D] over its sequence up to its own position or `placement.last`; [N, heads * D]."""
    if use_triton(q):
        from burnish.models.kernels.triton import exact_kernels as kernel

        return kernel.exact_attention(q, keys, values, placement, window, softcap).flatten(1)
    table = placement.table[placement.owner]
    last = placement.position if placement.last is None else placement.last
    parts = [
        _paged_online_softmax(*part, keys, values, window, softcap)
        for part in zip(
            q.split(TOKENS_PER_CHUNK),
            table.split(TOKENS_PER_CHUNK),
            placement.position.split(TOKENS_PER_CHUNK),
            last.split(TOKENS_PER_CHUNK),
            strict=True,
        )
    ]
    return torch.cat(parts)


def _paged_online_softmax(
    q: Tensor,
    table: Tensor,
    position: Tensor,
    last: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Online softmax over the pages in order. Pages past the last key that a token sees do not change its sums."""
    rows, heads, dim = q.shape
    _, kv_heads, page, _ = keys.shape
    # In float32 at least: in half types a batched matmul chooses its kernel by the batch size.
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.reshape(rows * kv_heads, -1, dim).to(wide)
    best = queries.new_full((*queries.shape[:2], 1), -torch.inf)
    total, sums = torch.zeros_like(best), torch.zeros_like(queries)
    for k in range(int(last.max()) // page + 1):
        number = table[:, k].long()
        column = torch.arange(k * page, (k + 1) * page, device=q.device)
        seen = column <= last[:, None]
        if window is not None:
            seen &= column > position[:, None] - window
        key, value = (x[number].view(-1, page, dim).to(wide) for x in (keys, values))
        unseen = ~seen.repeat_interleave(kv_heads, 0)
        value = value.masked_fill(unseen[:, :, None], 0)  # stale entries of a page may be NaN, and 0 * NaN is NaN
        scores = torch.bmm(queries, key.transpose(1, 2)) * dim**-0.5
        scores = scores if softcap is None else exact_softcapped(scores, softcap)
        scores = scores.masked_fill(unseen[:, None], -torch.inf)
        top = torch.maximum(best, scores.amax(-1, keepdim=True))
        base = top.masked_fill(top == -torch.inf, 0.0)  # no key seen yet: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
        weight, shrink = (scores - base).exp(), (best - base).exp()
        total = total * shrink + weight.sum(-1, keepdim=True)
        sums = sums * shrink + torch.bmm(weight, value)
        best = top
    return (sums / total.masked_fill(total == 0, 1.0)).view(rows, heads * dim).to(q.dtype)


def token_logp(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs [N] of the tokens under logits [N, vocab], with the same arithmetic as the sampler."""
    if use_triton(logits):
        from burnish.models.kernels.triton import sampling

        return sampling.token_logprobs(logits, tokens, temperature)
    return log_softmax_at_temperature(logits, temperature).gather(1, tokens[:, None])[:, 0]


def log_softmax_at_temperature(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """log_softmax(logits / temperature) in float32 at least; the temperature is a number or [N, 1]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide / temperature).log_softmax(-1)
