"""Attention over a prefix tree in pieces equals a masked softmax over all tokens, and so do its gradients."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.models.kernels import attention, tree_attention
from burnish.models.kernels.attention import PackedAttention
from burnish.models.kernels.shared_prefix import computed_rows
from burnish.models.kernels.tree_attention import (
    CPU_KERNEL,
    CUDNN_KERNEL,
    Piece,
    PieceKernel,
    gpu_pieces,
    has_cudnn_kernel,
    node_pieces,
    tree_nodes,
)
from tests.kernels import CUDA, error

HEADS, KV_HEADS, DIM = 4, 2, 8
Packing = tuple[Tensor, Tensor]


@st.composite
def packings(draw: st.DrawFn, most: int = 9) -> Packing:
    """Offsets of sequences, and the tokens that each shares with the one before it."""
    lengths, shared = [draw(st.integers(1, most))], [0]
    for _ in range(draw(st.integers(0, 7))):
        shared.append(draw(st.integers(0, lengths[-1])))
        lengths.append(shared[-1] + draw(st.integers(1, most)))
    return torch.tensor([0, *lengths]).cumsum(0), torch.tensor(shared)


def naive(q: Tensor, k: Tensor, v: Tensor, packing: Packing, window: int | None) -> Tensor:
    """Every sequence by itself, with repeated keys; the outputs of own rows."""
    offsets, shared = packing
    rows = computed_rows(offsets, shared)
    out = []
    for start, end, skipped in zip(offsets.tolist(), offsets.tolist()[1:], shared.tolist(), strict=False):
        of = rows.row_of[start:end]
        scores = torch.einsum("qhd,khd->hqk", q[of], k[of].repeat_interleave(HEADS // KV_HEADS, 1)) * DIM**-0.5
        distance = torch.arange(end - start, device=q.device)[:, None] - torch.arange(end - start, device=q.device)
        hidden = (distance < 0) | (distance >= (window or end))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v[of].repeat_interleave(HEADS // KV_HEADS, 1))[skipped:])
    return torch.cat(out)


def drawn(packing: Packing, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output, in float64."""
    generator = torch.Generator().manual_seed(seed)
    count = computed_rows(*packing).num_rows
    return [
        torch.randn(count, heads, DIM, dtype=torch.float64, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def results(function: object, tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = function(*leaves)  # type: ignore[operator]
    return [out, *torch.autograd.grad(out, leaves, tensors[3])]


class ExplicitKernel:
    """A variable-length kernel with the mask of flash attention, aligned at the end of a segment, by explicit scores."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, window: int | None) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, piece, window)
        values = v.repeat_interleave(HEADS // KV_HEADS, 1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1).t().contiguous()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        shared = HEADS // KV_HEADS
        keys, values = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        weights = (self._scores(q, k, piece, window) - lse.t()[..., None]).exp()
        slopes = torch.einsum("qhd,khd->hqk", grad, values) - (grad * out).sum(-1).t()[..., None]
        slopes = weights * slopes * DIM**-0.5
        grads = torch.einsum("hqk,qhd->khd", slopes, q), torch.einsum("hqk,qhd->khd", weights, grad)
        grad_k, grad_v = (x.unflatten(1, (KV_HEADS, shared)).sum(2) for x in grads)
        return torch.einsum("hqk,khd->qhd", slopes, keys), grad_k, grad_v

    @staticmethod
    def _scores(q: Tensor, k: Tensor, piece: Piece, window: int | None) -> Tensor:
        bounds = piece.query_bounds.long(), piece.key_bounds.long()
        segment = [torch.repeat_interleave(torch.arange(len(b) - 1), b.diff()) for b in bounds]
        # Positions counted from the end of the segment.
        place = [torch.arange(len(s)) - b[1:][s] for s, b in zip(segment, bounds, strict=True)]
        visible = segment[0][:, None] == segment[1]
        distance = place[0][:, None] - place[1]
        if piece.is_causal:
            visible &= distance >= 0
        if window is not None:
            visible &= distance < window
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // KV_HEADS, 1)) * DIM**-0.5
        return scores.masked_fill(~visible, -torch.inf)


def assert_same(pieces: list[Piece], kernel: PieceKernel, packing: Packing, window: int | None = None) -> None:
    tensors = drawn(packing)
    found = results(lambda *qkv: tree_attention.tree_attention(*qkv, pieces, kernel, window), tensors)
    for got, expected in zip(found, results(lambda *qkv: naive(*qkv, packing, window), tensors), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=0)


@settings(max_examples=40, deadline=None)
@given(packings())
def test_a_piece_for_every_node_gives_the_attention_of_single_sequences(packing: Packing) -> None:
    assert_same(node_pieces(computed_rows(*packing)), CPU_KERNEL, packing)


def dense_pieces(packing: Packing, min_rows: int, min_pairs: int, rounding: int = 16) -> list[Piece]:
    """The pieces for a GPU with a dense kernel, with small sizes in place of those of the product."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "ROUNDING", rounding)
        patch.setattr(tree_attention, "MIN_DENSE_ROWS", min_rows)
        patch.setattr(tree_attention, "MIN_DENSE_PAIRS", min_pairs)
        patch.setattr(tree_attention, "MIN_DENSE_SIDE", 1)
        patch.setattr(tree_attention, "TILE", 1)
        return gpu_pieces(computed_rows(*packing), packing[0], True)


@settings(max_examples=80, deadline=None)
@given(packings(), st.sampled_from([1, 4, 1000]), st.sampled_from([1, 20, 1000]), st.sampled_from([1, 2, 16]))
def test_so_do_dense_pieces_for_long_sequences_and_large_roots(
    packing: Packing, min_rows: int, min_pairs: int, rounding: int
) -> None:
    pieces = dense_pieces(packing, min_rows, min_pairs, rounding)
    assert_same(pieces, ExplicitKernel(), packing)
    for piece in pieces:
        if piece.is_dense:
            assert isinstance(piece.queries, slice)
            assert isinstance(piece.keys, slice)
            assert piece.is_causal == (not piece.is_further)
            # The kernel's causal mask begins at the first key, the explicit one ends at the last: they agree on a square.
            assert not piece.is_causal or (piece.queries == piece.keys and piece.longest[0] == piece.longest[1])
            assert rounding > 1 or all(size.bit_count() == 1 for size in piece.longest)
    assert sum(not piece.is_dense and not piece.is_further for piece in pieces) <= 1
    assert sum(not piece.is_dense and piece.is_further for piece in pieces) <= 1


def test_dense_pieces_have_few_shapes_of_whole_tiles() -> None:
    for up, limit in ((True, lambda size: size * 17 / 16), (False, lambda size: size * 15 / 16)):
        found = {size: tree_attention.rounded(size, up) for size in range(1024, 32769)}
        assert len({*found.values()}) == 8 + 4 * 16 + 1
        assert not any(value % 128 for value in found.values())
        wide = [size for size in found if size >= 2048]
        assert all(
            (size <= found[size] <= limit(size)) if up else (limit(size) <= found[size] <= size) for size in wide
        )


@settings(max_examples=40, deadline=None)
@given(packings(), st.sampled_from([None, 1, 4]))
def test_so_does_one_piece_over_copies_of_all_prefixes(packing: Packing, window: int | None) -> None:
    pieces = gpu_pieces(computed_rows(*packing), packing[0], False)
    assert [(piece.is_causal, piece.is_dense) for piece in pieces] == [(True, False)]
    assert_same(pieces, ExplicitKernel(), packing, window)


def test_a_trace_of_turns_is_its_first_sequence_its_root_and_its_short_turns() -> None:
    """A prompt of 8,192 tokens and 8 turns of 256, of which each keeps 64 tokens of the one before."""
    lengths, shared = torch.tensor([8448 + 64 * t for t in range(8)]), [0, *(8192 + 64 * t for t in range(7))]
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    prompt, turns, root = gpu_pieces(computed_rows(offsets, torch.tensor(shared)), offsets, True)
    rows = int(lengths.sum()) - sum(shared)
    assert (prompt.queries, prompt.keys, prompt.is_causal, prompt.is_dense) == (slice(0, 8448),) * 2 + (True, True)
    assert (root.queries, root.keys, root.is_causal, root.is_dense) == (slice(8448, rows), slice(0, 8192), False, True)
    assert (turns.queries, turns.is_causal, turns.is_dense) == (slice(8448, rows), True, False)
    # A turn reads the tokens that earlier turns keep, but no token of the first sequence.
    assert turns.key_bounds.diff().tolist() == [256 + 64 * t for t in range(1, 8)]
    assert isinstance(turns.keys, Tensor)
    assert int(turns.keys.min()) == 8448


def test_long_sequences_on_a_cpu_take_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = torch.tensor([0, 9, 20, 33, 40, 51]), torch.tensor([0, 6, 8, 0, 3])
    tensors = drawn(packing)
    monkeypatch.setattr(attention, "MAX_C_ATTENTION_LENGTH", 8)
    monkeypatch.setattr(PackedAttention, "_whole", None)
    found = results(lambda *qkv: PackedAttention(packing[0], None, computed_rows(*packing))(0, *qkv), tensors)
    for got, expected in zip(found, results(lambda *qkv: naive(*qkv, packing, None), tensors), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=0)


def test_no_pair_is_computed_twice() -> None:
    """A prompt of 8 tokens, two turns that drop the thinking of the one before, and another sample of the prompt."""
    shared, lengths = [0, 8, 10, 8], [12, 14, 16, 11]
    own = [0, *torch.tensor([n - s for n, s in zip(lengths, shared, strict=True)]).cumsum(0).tolist()]
    nodes = tree_nodes(shared, own)
    assert nodes == [(slice(12, 27), slice(0, 8)), (slice(18, 24), slice(12, 14))]
    pairs = sum((q.stop - q.start) * (k.stop - k.start) for q, k in nodes)
    assert pairs == sum((n - s) * s for n, s in zip(lengths, shared, strict=True))


def test_a_sequence_cannot_share_more_than_there_is() -> None:
    for shared in ([0, 5], [0, 3]):
        with pytest.raises(ValueError, match="cannot share"):
            computed_rows(torch.tensor([0, 4, 7]), torch.tensor(shared))


@pytest.mark.parametrize("window", [None, 4])
def test_the_calls_of_the_gpu_kernels_have_the_arguments_that_torch_expects(window: int | None) -> None:
    """On the meta device, which checks the arguments and gives the shapes of the results."""
    packing = torch.tensor([0, 9, 20, 33, 40, 51]), torch.tensor([0, 6, 8, 0, 3])
    q, k = (x.bfloat16().to("meta") for x in drawn(packing)[:2])
    pieces = dense_pieces(packing, 6, 1) if window is None else gpu_pieces(computed_rows(*packing), packing[0], False)
    assert [piece.is_dense for piece in pieces] == (
        [True, True, True, False, True, True] if window is None else [False]
    )
    for piece in pieces:
        rows, keys = q[piece.queries], k[piece.keys]
        out, lse = CUDNN_KERNEL.forward(rows, keys, keys, piece, window)
        assert (out.shape, lse.shape) == (rows.shape, rows.shape[:2])
        found = CUDNN_KERNEL.backward(rows, rows, keys, keys, out, lse, piece, window)
        assert [x.shape for x in found] == [rows.shape, keys.shape, keys.shape]


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("has_dense", [False, True], ids=["copied keys", "dense pieces"])
@pytest.mark.parametrize("window", [None, 40])
def test_the_pieces_on_a_gpu(monkeypatch: pytest.MonkeyPatch, window: int | None, has_dense: bool) -> None:
    lengths, shared = torch.tensor([700, 640, 650, 90, 300, 280]), torch.tensor([0, 512, 576, 0, 0, 256])
    packing = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).cuda(), shared.cuda()
    monkeypatch.setattr(sys.modules[__name__], "DIM", 64)
    tensors = [x.cuda().bfloat16() for x in drawn(packing)]
    if has_dense and not has_cudnn_kernel(tensors[0]):
        pytest.skip("cuDNN's attention needs compute capability 9.0")
    monkeypatch.setattr(attention, "has_cudnn_kernel", lambda q: has_dense)
    monkeypatch.setattr(tree_attention, "MIN_DENSE_ROWS", 256)
    monkeypatch.setattr(tree_attention, "MIN_DENSE_PAIRS", 64 * 512)
    assert attention.has_varlen_kernel(tensors[0])
    kinds = [piece.is_dense for piece in gpu_pieces(computed_rows(*packing), packing[0], has_dense)]
    assert kinds == ([True, True, False, True] if has_dense else [False])
    with monkeypatch.context() as patch:
        patch.setattr(PackedAttention, "_whole", None)
        found = results(lambda *qkv: PackedAttention(packing[0], window, computed_rows(*packing))(0, *qkv), tensors)
    truth = results(lambda *qkv: naive(*qkv, packing, window), [x.double() for x in tensors])
    monkeypatch.setattr(tree_attention, "PIECES_ON_GPU", False)
    whole = results(lambda *qkv: PackedAttention(packing[0], window, computed_rows(*packing))(0, *qkv), tensors)
    for got, expected, same in zip(found, truth, whole, strict=True):
        assert error(got, expected) < 0.01
        assert error(got, expected) < 1.5 * error(same, expected)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("length", [1024, 1088, 1100, 1984])
def test_gradients_are_finite_where_all_scores_are_far_below_zero(length: int) -> None:
    """A head of Qwen2.5 has scores near -120, whose log-sum-exp no exponential of a number near 0 may be divided by."""
    tensors = [torch.randn(length, heads, 64, device="cuda", dtype=torch.bfloat16) * 0.1 for heads in (4, 2, 2)]
    tensors[0][..., 0], tensors[1][..., 0] = 1.0, -120.0 * 8
    if not has_cudnn_kernel(tensors[0]):
        pytest.skip("cuDNN's attention needs compute capability 9.0")
    offsets = torch.tensor([0, length], device="cuda")
    packing = offsets, torch.tensor([0], device="cuda")
    found = results(lambda *qkv: PackedAttention(offsets, None)(0, *qkv), tensors)
    truth = results(lambda *qkv: naive(*qkv, packing, None), [x.double() for x in tensors])
    for got, expected in zip(found, truth, strict=True):
        assert bool(got.isfinite().all())
        assert error(got, expected) < 0.02
