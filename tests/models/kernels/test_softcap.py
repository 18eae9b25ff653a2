"""Soft-capped attention scores and logits against plain formulas in float64.

The Triton kernel runs where CUDA is, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 with triton installed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.models.kernels.attention import PackedAttention
from burnish.models.kernels.divergence import head_comparison
from burnish.models.kernels.exact import exact_softcapped
from burnish.models.kernels.logprob import Distribution, Divergence, head_logprob, head_statistics, softcapped
from burnish.models.kernels.shared_prefix import computed_rows
from tests.kernels import CUDA, DEVICE, kernel

CAP = 0.7


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Attention of each sequence's queries, which are its last tokens, over its keys."""
    shared, out, q_start, k_start = q.shape[1] // k.shape[1], [], 0, 0
    counts = [length // 2 if q.shape[0] < k.shape[0] else length for length in lengths]
    for length, count in zip(lengths, counts, strict=True):
        queries, keys, values = (
            q[q_start : q_start + count],
            k[k_start : k_start + length],
            v[k_start : k_start + length],
        )
        keys, values = (x.repeat_interleave(shared, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / q.shape[2] ** 0.5
        distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        weights = (CAP * (scores / CAP).tanh()).masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, values))
        q_start, k_start = q_start + count, k_start + length
    return torch.cat(out)


@pytest.mark.parametrize("lengths", [[5, 5], [9, 1, 17, 30]])
@pytest.mark.parametrize("window", [None, 4])
def test_packed_attention_and_its_gradients(lengths: list[int], window: int | None) -> None:
    q, k, v = (randn(sum(lengths), heads, 6, seed=heads).requires_grad_() for heads in (4, 2, 2))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    got = PackedAttention(offsets, window, softcap=CAP)(0, q, k, v)
    expected = naive(q, k, v, lengths, window)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    assert (got - PackedAttention(offsets, window)(0, q, k, v)).abs().max() > 0.05
    slope = randn(*got.shape, seed=9)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), slope) for x in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def test_shared_prefixes_give_the_rows_of_the_whole_sequences() -> None:
    offsets, shared = torch.tensor([0, 7, 12, 20]), torch.tensor([0, 3, 2])
    rows = computed_rows(offsets, shared)
    q, k, v = (randn(rows.num_rows, heads, 6, seed=heads) for heads in (4, 2, 2))
    got = PackedAttention(offsets, 4, rows, CAP)(0, q, k, v)
    whole = PackedAttention(offsets, 4, softcap=CAP)(0, *(x[rows.row_of] for x in (q, k, v)))
    torch.testing.assert_close(got, whole[rows.own], atol=1e-12, rtol=0)


@kernel
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("is_chunk", [False, True])
@pytest.mark.parametrize("dim", [16, 24, *([128, 256] if CUDA else [])])
def test_the_kernel_and_its_gradients(dim: int, is_chunk: bool, window: int | None) -> None:
    from burnish.models.kernels.triton.packed_attention import packed_attention

    lengths = [70, 2, 130]
    counts = [length // 2 if is_chunk else length for length in lengths]
    wide = [randn(sum(n), heads, dim, seed=heads) for n, heads in ((counts, 4), (lengths, 2), (lengths, 2))]
    expected_inputs = [x.float().double().to(DEVICE).requires_grad_() for x in wide]
    inputs = [x.float().to(DEVICE).requires_grad_() for x in wide]
    bounds = tuple(torch.tensor([0, *n]).cumsum(0).int().to(DEVICE) for n in (counts, lengths))
    got = packed_attention(*inputs, bounds, (max(counts), max(lengths)), window, CAP)
    expected = naive(*expected_inputs, lengths, window)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)
    slope = randn(*got.shape, seed=9).to(DEVICE)
    grads = torch.autograd.grad(got, inputs, slope.float())
    for a, b in zip(grads, torch.autograd.grad(expected, expected_inputs, slope), strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)


@kernel
def test_the_exact_kernel_caps_the_scores() -> None:
    from burnish.models.kernels.paged_cache import Placement
    from burnish.models.kernels.triton.exact_kernels import exact_attention

    length, page = 20, 4
    q, k, v = (randn(length, heads, 16, seed=heads).float().to(DEVICE) for heads in (4, 2, 2))
    pages = [x.view(-1, page, 2, 16).transpose(1, 2).contiguous() for x in (k, v)]
    positions = torch.arange(length, device=DEVICE)
    table = torch.arange(length // page, device=DEVICE).int()[None]
    got = exact_attention(q, *pages, Placement(torch.zeros_like(positions), positions, table), None, CAP)
    expected = naive(q.double(), k.double(), v.double(), [length], None)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_entropies_and_divergences_of_capped_logits(temperature: float) -> None:
    hidden, weight = randn(6, 8).requires_grad_(), randn(11, 8, seed=1).requires_grad_()
    targets = torch.tensor([0, 3, 10, 5, 5, 1])
    teacher = Distribution(randn(6, 8, seed=2), randn(11, 8, seed=3), softcap=1.1)

    def log_softmax(states: Tensor, head: Tensor, cap: float) -> Tensor:
        return (cap * (states @ head.t() / cap).tanh() / temperature).log_softmax(-1)

    log_p, log_q = log_softmax(hidden, weight, CAP), log_softmax(teacher.hidden, teacher.weight, 1.1)
    logp, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    kl, reverse = (log_p.exp() * (log_p - log_q)).sum(-1), (log_q.exp() * (log_q - log_p)).sum(-1)
    jsd = teacher._replace(divergence=Divergence(alpha=0.0))
    inputs = hidden, weight, targets
    cases = [
        (head_logprob(*inputs, temperature, True, CAP), (logp, entropy)),
        (head_comparison(*inputs, teacher, temperature, CAP), (logp, entropy, kl)),
        (head_comparison(*inputs, jsd, temperature, CAP), (logp, entropy, reverse)),
    ]
    for found, expected in cases:
        total = sum((index + 1) * (x * randn(6, seed=4)).sum() for index, x in enumerate(expected))
        got = sum((index + 1) * (x * randn(6, seed=4)).sum() for index, x in enumerate(found))
        torch.testing.assert_close(got, total, atol=1e-12, rtol=0)
        grads = [torch.autograd.grad(x, (hidden, weight), retain_graph=True) for x in (got, total)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    statistics = head_statistics(*inputs, temperature, CAP)
    for a, b in zip(statistics, (logp, entropy, log_p.exp().square().sum(-1)), strict=True):
        torch.testing.assert_close(a, b.detach(), atol=1e-12, rtol=0)


def test_the_exact_cap_has_the_same_bits_in_any_batch_and_the_value_of_the_other() -> None:
    x = 5 * randn(1000).float()
    whole = exact_softcapped(x, CAP)
    torch.testing.assert_close(whole, softcapped(x, CAP), atol=1e-6, rtol=0)
    for size in (1, 7, 33):
        assert torch.equal(torch.cat([exact_softcapped(part, CAP) for part in x.split(size)]), whole)
