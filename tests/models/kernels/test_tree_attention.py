"""Attention over a prefix tree in pieces equals a masked softmax over all tokens, and so do its gradients."""

from __future__ import annotations

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
    FLASH_KERNEL,
    Piece,
    PieceKernel,
    node_pieces,
    root_pieces,
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


@settings(max_examples=60, deadline=None)
@given(packings(), st.sampled_from([None, 1, 4]), st.sampled_from([-1, 1, 1000]))
def test_so_do_pieces_for_the_roots_with_a_kernel_of_ragged_segments(
    packing: Packing, window: int | None, saved: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "MIN_KEYS_SAVED", saved)
        pieces = root_pieces(computed_rows(*packing), packing[0], window is not None)
    assert_same(pieces, ExplicitKernel(), packing, window)


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
def test_the_calls_of_the_flash_kernel_have_the_arguments_that_torch_expects(window: int | None) -> None:
    """On the meta device, which checks the arguments and gives the shapes of the results."""
    packing = torch.tensor([0, 9, 20, 33, 40, 51]), torch.tensor([0, 6, 8, 0, 3])
    q, k = (x.bfloat16().to("meta") for x in drawn(packing)[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "MIN_KEYS_SAVED", -1)
        pieces = root_pieces(computed_rows(*packing), packing[0], window is not None)
    assert len(pieces) == (2 if window is None else 1)
    for piece in pieces:
        rows, keys = q[piece.queries], k[piece.keys]
        out, lse = FLASH_KERNEL.forward(rows, keys, keys, piece, window)
        assert (out.shape, lse.shape) == (rows.shape, rows.shape[:2])
        found = FLASH_KERNEL.backward(rows, rows, keys, keys, out, lse, piece, window)
        assert [x.shape for x in found] == [rows.shape, keys.shape, keys.shape]


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("saved", [-1, 1000], ids=["root piece", "copied keys"])
@pytest.mark.parametrize("window", [None, 40])
def test_the_flash_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch, window: int | None, saved: int) -> None:
    lengths, shared = torch.tensor([700, 640, 650, 90, 300, 280]), torch.tensor([0, 512, 576, 0, 0, 256])
    packing = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).cuda(), shared.cuda()
    tensors = [x.cuda().bfloat16() for x in drawn(packing)]
    monkeypatch.setattr(tree_attention, "MIN_KEYS_SAVED", saved)
    monkeypatch.setattr(tree_attention, "PIECES_ON_GPU", True)
    assert attention.has_varlen_kernel(tensors[0])
    assert len(root_pieces(computed_rows(*packing), packing[0], False)) == (2 if saved < 0 else 1)
    with monkeypatch.context() as patch:
        patch.setattr(PackedAttention, "_whole", None)
        found = results(lambda *qkv: PackedAttention(packing[0], window, computed_rows(*packing))(0, *qkv), tensors)
    truth = results(lambda *qkv: naive(*qkv, packing, window), [x.double() for x in tensors])
    for got, expected in zip(found, truth, strict=True):
        assert error(got, expected) < 0.01
