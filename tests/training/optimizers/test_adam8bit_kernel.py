"""The one-pass update of 8-bit Adam against its twin in torch, given the same random bits.

It runs where CUDA is, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 with triton installed.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from burnish.config.model import Optimizer as Config
from burnish.training.optimizers import stochastic_rounding, update_rules
from burnish.training.optimizers.stochastic_rounding import seed_for
from burnish.training.optimizers.update_rules import Adam8bit
from tests.kernels import DEVICE, kernel

pytestmark = kernel


if importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl

    from burnish.training.optimizers.adam8bit_triton import triton_noise

    @triton.jit
    def _draw(first_ptr, second_ptr, seed, num, SIZE: tl.constexpr):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        first, second = triton_noise(seed, at)
        tl.store(first_ptr + at, first, mask=at < num)
        tl.store(second_ptr + at, second, mask=at < num)


def words(seed: int, num: int) -> tuple[Tensor, Tensor]:
    """The random bits of the first places."""
    first, second = (torch.empty(num, dtype=torch.int32, device=DEVICE) for _ in range(2))
    _draw[(triton.cdiv(num, 1024),)](first, second, seed, num, SIZE=1024)
    return first, second


def trained(shape: tuple[int, int], by_kernel: bool, updates: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weight and the state after some updates."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(DEVICE)
    spread = torch.exp(2 * torch.randn(shape, generator=generator))
    optimizer = Adam8bit({"w": weight}, Config(name="adam8bit", lr=1.0, weight_decay=0.1))
    monkeypatch.setattr(update_rules, "use_triton", lambda x: by_kernel)
    drawn: list[Tensor] = []

    def same_noise(like: Tensor, bits: int, _: torch.Generator) -> Tensor:
        return (drawn.pop(0) & ((1 << bits) - 1)).view(like.shape)

    monkeypatch.setattr(stochastic_rounding, "random_bits", same_noise)
    for update in range(1, updates + 1):
        weight.grad = (spread * torch.randn(shape, generator=generator)).to(DEVICE)
        if not by_kernel:
            drawn.extend(words(seed_for("moments", "w", update, 0), weight.numel()))
        optimizer.step(0.01, update)
    return [weight, *(optimizer.state["w"][key] for key in ("exp_avg", "exp_avg_scale", "root", "root_scale"))]


@pytest.mark.parametrize("shape", [(20, 256), (9, 600), (50, 96), (7, 1024)])
def test_weights_codes_and_scales_are_those_of_the_twin(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trained(shape, True, 3, monkeypatch)
    theirs = trained(shape, False, 3, monkeypatch)
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
    for codes, scales, expected_codes, expected_scales in ((*ours[1:3], *theirs[1:3]), (*ours[3:], *theirs[3:])):
        torch.testing.assert_close(scales, expected_scales, atol=0, rtol=1e-5)
        # The last bit of a number decides once in a million whether it is rounded up.
        assert (codes != expected_codes).float().mean() < 2e-3
    assert not torch.equal(ours[0], trained(shape, True, 2, monkeypatch)[0])


def test_words_of_random_bits_are_uniform_and_of_their_own() -> None:
    first, second = (word.double() / 2**32 for word in words(12345678901234567, 20000))
    other, _ = (word.double() / 2**32 for word in words(12345678901234568, 20000))
    for word in (first, second, other):
        assert abs(float(word.mean())) < 0.01
        assert float(word.var()) == pytest.approx(1 / 12, rel=0.03)
    for one, two in ((first, second), (first, other), (first[1:], first[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.03
