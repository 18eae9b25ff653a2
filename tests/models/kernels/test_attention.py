from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.models.kernels import attention
from burnish.models.kernels.attention import PackedAttention
from burnish.models.kernels.softcap_attention import causal_mask

pytestmark = pytest.mark.usefixtures("either_way")


def naive(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """softmax(QK^T) V of each sequence and head separately, with an explicit mask."""
    group = q.shape[1] // k.shape[1]
    out, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        heads = []
        for head in range(q.shape[1]):
            scores = q[part, head] @ k[part, head // group].t() / q.shape[2] ** 0.5
            distance = torch.arange(length)[:, None] - torch.arange(length)
            hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[part, head // group])
        out.append(torch.stack(heads, 1))
        start += length
    return torch.cat(out)


def check(lengths: list[int], heads: int, kv_heads: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))

    def draw(width: int) -> Tensor:
        return torch.randn(sum(lengths), width, 6, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    slope = torch.randn(sum(lengths), heads, 6, dtype=torch.float64, generator=generator)
    got = PackedAttention(torch.tensor([0, *lengths]).cumsum(0), window)(0, q, k, v)
    expected = naive(q, k, v, lengths, window)
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(got, (q, k, v), slope), torch.autograd.grad(expected, (q, k, v), slope), strict=True
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=7),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 3, 8]),
)
@pytest.mark.parametrize("short", [0, 12, 256], ids=["fused", "both", "explicit"])
def test_output_and_gradients_equal_a_naive_softmax(
    short: int, lengths: list[int], kv_heads: int, window: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "EXPLICIT_SCORES_LENGTH", short)
        patch.setattr(attention, "MIN_WINDOW_BLOCK", 2)
        check(lengths, 4, kv_heads, window)


def test_no_mask_of_a_long_sequence_with_a_window_has_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def recorded(length: int, window: int | None, device: torch.device) -> Tensor:
        sizes.append(length)
        return causal_mask(length, window, device)

    monkeypatch.setattr(attention, "causal_mask", recorded)
    monkeypatch.setattr(attention, "MAX_C_ATTENTION_LENGTH", 0)
    check([3000], 2, 1, 100)
    assert sizes == [attention.MIN_WINDOW_BLOCK + 100]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("short", [0, 256], ids=["fused", "explicit"])
def test_equal_lengths_take_the_path_without_buckets_and_agree(
    monkeypatch: pytest.MonkeyPatch, short: int, window: int | None
) -> None:
    monkeypatch.setattr(attention, "EXPLICIT_SCORES_LENGTH", short)
    check([9, 9, 9], 4, 2, window)
    assert PackedAttention(torch.tensor([0, 9, 18, 27]), window).buckets == []


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=2, max_size=30).filter(lambda x: len(set(x)) > 1))
def test_buckets_hold_every_token_once_and_waste_little(lengths: list[int]) -> None:
    plan = PackedAttention(torch.tensor([0, *lengths]).cumsum(0)).buckets
    where = torch.cat([w for _, _, w in plan])
    assert torch.equal(where.sort().values, torch.arange(sum(lengths)))
    for gather, keep, _ in plan:
        sizes = keep.sum(1)
        assert gather.shape[1] == sizes.max()
        assert sizes.max() <= max(1.25 * sizes.min(), sizes.min() + 4)
