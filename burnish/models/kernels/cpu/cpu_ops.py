"""Python wrappers of the C kernels: packed attention, norms, rotations, gated activations, log-probs, token sampling, sums of gradients.

Attention of packed sequences (`attention.c`) needs no padding and no copy of shared prefixes. Row-wise operations are in
`learner.c`, log-probs of rows of logits in `logits.c`. `draw.c` samples tokens as `inference/native/engine_common.py` does without truncation.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from burnish.models.kernels.cpu.c_library import address, num_threads
from burnish.models.kernels.shared_prefix import ComputedRows

MAX_C_ATTENTION_LENGTH = 1024
"""Longest sequence of the C attention kernel: a head's keys must fit in a core's cache."""
ELEMENTS_PER_THREAD = 1 << 14
"""Elements that are worth waking a thread for."""
Pointer, Long, Double = ctypes.c_void_p, ctypes.c_long, ctypes.c_double


class _AttentionArguments(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("q", "k", "v")),
        *((name, Long) for name in ("q_row", "k_row", "v_row")),
        *((name, Pointer) for name in ("sequences", "row_of", "groups")),
        *((name, Long) for name in ("heads", "kv_heads", "dim", "window")),
        *((name, Pointer) for name in ("out", "lse", "grad", "grad_q", "grad_k", "grad_v", "workspace")),
        *((name, Long) for name in ("workspace_size", "longest")),
    ]  # fmt: skip


class PackedSequences:
    """The rows of each sequence of a packing, and the groups of sequences that share rows.

    `table` [S, 4] has (first own row, own rows, shared rows, first token) of each sequence, as `struct sequence` of `attention.c`.
    `row_of` [N] is the row of each token. `groups` [groups + 1] are offsets into `table`: a group is a prefix tree.
    """

    def __init__(self, offsets: Tensor, rows: ComputedRows | None) -> None:
        offsets = offsets.long()  # the C side reads int64
        lengths = offsets.diff()
        self.longest = int(lengths.max()) if lengths.numel() else 0
        if rows is None:
            shared, first = torch.zeros_like(lengths), offsets[:-1]
            self.row_of = torch.arange(int(offsets[-1]))
            self.groups = torch.arange(lengths.shape[0] + 1)
        else:
            shared, first = torch.tensor(rows.shared, dtype=torch.long), rows.offsets.long()[:-1]
            self.row_of = rows.row_of.long()
            self.groups = torch.cat([(shared == 0).nonzero().squeeze(1), torch.tensor([lengths.shape[0]])])
        self.table = torch.stack([first, lengths - shared, shared, offsets[:-1]], 1)

    @property
    def num_groups(self) -> int:
        return self.groups.shape[0] - 1


def c_attention(
    library: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, window: int | None
) -> Tensor:
    """Causal attention of queries [U, heads, D] over keys and values [U, kv_heads, D] of their sequence; [U, heads, D]."""
    return _Attention.apply(q, k, v, library, sequences, window)


class _Attention(torch.autograd.Function):
    """Saves what it was given: tensors in bfloat16 are widened once for the forward and once for the backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, library: ctypes.CDLL, sequences: PackedSequences, window: int | None
    ) -> Tensor:
        wide_q, wide_k, wide_v = (_with_dense_heads(_in_float(x)) for x in (q, k, v))
        out, lse = wide_q.new_empty(q.shape), wide_q.new_empty(q.shape[:2])
        _run_attention(library, "forward", wide_q, wide_k, wide_v, sequences, window, out=out, lse=lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(*((wide_q, wide_k, wide_v) if wide_q.dtype == q.dtype else (q, k, v)), out, lse)
        ctx.plan = library, sequences, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *given, lse = ctx.saved_tensors
        library, sequences, window = ctx.plan
        dtype = given[0].dtype
        q, k, v, out = (_with_dense_heads(_in_float(x)) for x in given)
        found = {f"grad_{name}": x.new_empty(x.shape) for name, x in zip("qkv", (q, k, v), strict=True)}
        of_out = {"out": out, "lse": lse, "grad": _in_float(grads[0]).contiguous()}
        _run_attention(library, "backward", q, k, v, sequences, window, **of_out, **found)
        return *(grad.to(dtype) for grad in found.values()), None, None, None


def _in_float(x: Tensor) -> Tensor:
    """A tensor that the attention kernel can read: bfloat16 as float32."""
    return x.float() if x.dtype == torch.bfloat16 else x


def _with_dense_heads(x: Tensor) -> Tensor:
    """A tensor whose heads are contiguous within a row; rows may be strided."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _run_attention(
    library: ctypes.CDLL,
    way: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    window: int | None,
    **tensors: Tensor,
) -> None:
    (_, heads, dim), kv_heads = q.shape, k.shape[1]
    threads = max(1, min(num_threads(), sequences.num_groups * kv_heads))
    library.attention_workspace_size.restype = Long
    workspace_size = library.attention_workspace_size(Long(sequences.longest), Long(dim), Long(way == "backward"))
    workspace = q.new_empty(threads * workspace_size)
    arguments = _AttentionArguments(
        q=address(q), k=address(k), v=address(v), q_row=q.stride(0), k_row=k.stride(0), v_row=v.stride(0),
        sequences=address(sequences.table), row_of=address(sequences.row_of), groups=address(sequences.groups),
        heads=heads, kv_heads=kv_heads, dim=dim, window=window or 0,
        workspace=address(workspace), workspace_size=workspace_size, longest=sequences.longest,
        **{name: address(x) for name, x in tensors.items()},
    )  # fmt: skip
    function = library.attention_forward if way == "forward" else library.attention_backward
    function(ctypes.byref(arguments), Long(sequences.num_groups), Long(threads))


def _threads(x: Tensor) -> ctypes.c_long:
    return Long(min(num_threads(), -(-x.numel() // ELEMENTS_PER_THREAD)))


def norm(library: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float, shift: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * (shift + weight) over the last dimension of a contiguous x, and 1 / rms(x) [rows]."""
    size = x.shape[-1]
    rows = x.numel() // max(1, size)
    y, scale = torch.empty_like(x), x.new_empty(rows)
    library.norm_forward(
        address(x), address(weight), address(y), address(scale), Long(rows), Long(size), Double(eps), Double(shift), _threads(x)
    )  # fmt: skip
    return y, scale


def norm_backward(
    library: ctypes.CDLL, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: float
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm` with respect to its input and its weight."""
    rows, size = scale.numel(), x.shape[-1]
    library.norm_parts.restype = Long
    grad_x, grad_weight, parts = (
        torch.empty_like(x),
        torch.empty_like(weight),
        x.new_empty(library.norm_parts(Long(rows)), size),
    )
    library.norm_backward(
        address(grad), address(x), address(weight), address(scale), address(grad_x), address(grad_weight), address(parts),
        Long(rows), Long(size), Double(shift), _threads(x),
    )  # fmt: skip
    return grad_x, grad_weight


def rotate(library: ctypes.CDLL, x: Tensor, cos: Tensor, sin: Tensor, way: float) -> Tensor:
    """Rotate heads x [N, H, D] by tables [N, 1, D]; `way` is 1 for the rotation and -1 for its inverse."""
    rows, heads, dim = x.shape
    if x.stride()[1:] != (dim, 1):
        x = x.contiguous()
    cos, sin = (table.expand(rows, 1, dim).contiguous() for table in (cos, sin))
    y = x.new_empty(x.shape)
    library.rotate_heads(
        address(x), address(cos), address(sin), address(y), Long(rows), Long(heads), Long(dim), Long(x.stride(0)),
        Double(way), _threads(x),
    )  # fmt: skip
    return y


def gate(library: ctypes.CDLL, gate_up: Tensor, is_gelu: bool) -> Tensor:
    """act(gate) * up, where gate and up are the halves of the last dimension of a contiguous tensor."""
    size = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], size)
    rows = y.numel() // max(1, size)
    library.gate_forward(address(gate_up), address(y), Long(rows), Long(size), Long(is_gelu), _threads(gate_up))
    return y


def gate_backward(library: ctypes.CDLL, grad: Tensor, gate_up: Tensor, is_gelu: bool) -> Tensor:
    """The gradient of `gate` with respect to `gate_up`."""
    size = grad.shape[-1]
    into = torch.empty_like(gate_up)
    rows = grad.numel() // max(1, size)
    library.gate_backward(
        address(grad), address(gate_up), address(into), Long(rows), Long(size), Long(is_gelu), _threads(gate_up)
    )
    return into


def draw(
    library: ctypes.CDLL, logits: Tensor, uniform: Tensor, temperature: Tensor | None, never: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample tokens [n] and their log-probs [n] from logits [n, V] with one uniform number per row; no temperature means 1.

    Tokens of the list `never` are not drawn; log-probs are those of all tokens.
    """
    rows, vocab = logits.shape
    logits, tokens, logp = logits.contiguous(), uniform.new_empty(rows, dtype=torch.long), logits.new_empty(rows)
    library.draw(
        address(logits), address(uniform), address(temperature), address(never), Long(0 if never is None else never.shape[0]),
        Long(rows), Long(vocab), address(tokens), address(logp),
        _threads(logits),
    )  # fmt: skip
    return tokens, logp


def logprob_rows(
    library: ctypes.CDLL, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the targets, log of the normaliser, and entropies (empty unless requested) of logits [N, vocab]."""
    rows, vocab = logits.shape
    if targets.dtype != torch.long or (rows and not (int(targets.min()) >= 0 and int(targets.max()) < vocab)):
        raise IndexError(f"targets must be int64 tokens below {vocab}: {targets}")
    wide = torch.promote_types(logits.dtype, torch.float32)
    logp, log_normaliser = (logits.new_empty(rows, dtype=wide) for _ in range(2))
    entropy = logits.new_empty(rows if with_entropy else 0, dtype=wide)
    _for_stored(library, "logprob_rows", logits)(
        address(logits), address(targets), address(logp), address(log_normaliser), address(entropy if with_entropy else None),
        Long(rows), Long(vocab), Double(temperature), _threads(logits),
    )  # fmt: skip
    return logp, log_normaliser, entropy


def logit_gradients_(
    library: ctypes.CDLL,
    logits: Tensor,
    targets: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Overwrite the logits with their gradient; a gradient of None counts as 0."""
    rows, vocab = logits.shape
    _for_stored(library, "logit_gradients", logits)(
        address(logits), address(targets), address(log_normaliser), address(entropy), address(grad_logp),
        address(grad_entropy), Long(rows), Long(vocab), Double(temperature), _threads(logits),
    )  # fmt: skip
    return logits


def _for_stored(library: ctypes.CDLL, name: str, x: Tensor) -> Any:
    """The function for tensors of this type."""
    return library[f"{name}_bfloat16" if x.dtype == torch.bfloat16 else name]


def add_half(library: ctypes.CDLL, total: Tensor, x: Tensor) -> None:
    """Add a bfloat16 tensor to a float32 one of the same shape, both contiguous."""
    library.add_bfloat16(address(total), address(x), Long(x.numel()), _threads(x))
