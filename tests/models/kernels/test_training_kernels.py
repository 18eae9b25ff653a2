"""The kernels of the learner's forward and backward, and the exact operations, against plain torch in float64.

They run where CUDA is, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 with triton installed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.kernels import logprob
from tests.kernels import DEVICE, kernel

pytestmark = kernel


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_the_gated_activation_and_its_gradient() -> None:
    from burnish.models.kernels.triton import elementwise_kernels

    gate_up, grad = randn(5, 2 * 1300), randn(5, 1300, seed=1)
    wide = gate_up.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    expected = functional.silu(gate) * up
    expected.backward(grad.double())
    torch.testing.assert_close(elementwise_kernels.swiglu(gate_up).double(), expected.detach(), atol=1e-5, rtol=1e-5)
    assert wide.grad is not None
    torch.testing.assert_close(
        elementwise_kernels.swiglu_backward(grad, gate_up).double(), wide.grad, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("which", ["both", "logp", "entropy"])
def test_logprobs_entropies_and_the_gradient_of_logits(temperature: float, which: str) -> None:
    from burnish.models.kernels.triton import logprob_head

    logits, targets = 3 * randn(7, 5000), torch.tensor([0, 4999, 17, 4095, 4096, 1, 2500], device=DEVICE)
    logits[3, 100:] = -torch.inf  # masked tokens have probability 0 and gradient 0
    targets[3] = 5
    wide = logits.double().requires_grad_()
    log_p = (wide / temperature).log_softmax(-1)
    p = log_p.exp()
    logp = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    got_logp, total, got_entropy = logprob_head.logprob_rows(logits, targets, temperature, True)
    torch.testing.assert_close(got_logp.double(), logp.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_entropy.double(), entropy.detach(), atol=1e-5, rtol=1e-5)
    of_logp, of_entropy = randn(7, seed=1), randn(7, seed=2)
    loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
    if which != "entropy":
        loss = loss + (of_logp * logp).sum()
    if which != "logp":
        loss = loss + (of_entropy * entropy).sum()
    loss.backward()
    slopes = logprob_head.logit_gradients_(
        logits.clone(), targets, total, got_entropy,
        of_logp if which != "entropy" else None, of_entropy if which != "logp" else None, temperature,
    )  # fmt: skip
    assert wide.grad is not None
    torch.testing.assert_close(slopes.double(), wide.grad.nan_to_num(), atol=1e-5, rtol=1e-5)


def test_a_row_of_the_exact_linear_layer_does_not_see_its_neighbours() -> None:
    from burnish.models.kernels.triton import exact_kernels as kernel

    x, weight, bias = randn(130, 100), randn(150, 100, seed=1), randn(150, seed=2)
    whole = kernel.exact_linear(x, weight, bias)
    torch.testing.assert_close(
        whole.double(), functional.linear(x.double(), weight.double(), bias.double()), atol=1e-4, rtol=1e-4
    )
    for some in ([5], [129, 0, 64], list(range(37))):
        assert torch.equal(kernel.exact_linear(x[some], weight, bias), whole[some])


def test_the_score_of_a_token_is_the_log_prob_its_draw_reported() -> None:
    from burnish.inference.native.device_state import DeviceRows, NewRow
    from burnish.models.kernels.triton import sampling

    logits = 3 * randn(9, 9999)
    state = DeviceRows(9, 4, torch.device(DEVICE))
    state.start([NewRow(i, i, 99, 123 + i, i, 0.7, 0, 1.0, 0.0, ()) for i in range(9)])
    every = torch.arange(9, device=DEVICE)
    sampling.draw(logits, every, every, state.temperature, state.ints, state.stop, state.ring_token, state.ring_logp)
    assert torch.equal(sampling.token_logprobs(logits, state.ring_token[:, 0].long(), 0.7), state.ring_logp[:, 0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the product into a float32 sum is cuBLAS's")
def test_the_gradient_of_the_head_is_rounded_once_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = (randn(*shape, seed=seed).bfloat16() for seed, shape in enumerate([(600, 64), (1000, 64)]))
    targets, slopes = torch.arange(600, device=DEVICE), randn(600, seed=2)

    def gradient(dtype: torch.dtype) -> Tensor:
        states, head = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
        (logprob.head_logprob(states, head, targets)[0] * slopes).sum().backward()
        assert head.grad is not None
        return head.grad

    truth, errors = gradient(torch.float64), []
    for rows in (600, 8):  # one chunk, 75 chunks
        monkeypatch.setitem(logprob.KERNEL_CHUNK_ELEMENTS, DEVICE, rows * 1000)
        errors.append(float((gradient(torch.bfloat16) - truth).norm() / truth.norm()))
    assert errors[1] < 1.02 * errors[0] < 0.01
