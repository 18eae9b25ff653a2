"""The bytes saved for the backward pass agree with the formulas: counted on a CPU, and with fakes of the GPU kernels."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from burnish.config.model import Lora
from burnish.models import activation_checkpointing, decoder
from burnish.models.activation_bytes import ActivationEstimate
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.expert_shape import ExpertShape
from burnish.models.kernels import attention, elementwise, tree_attention, triton
from burnish.models.latent_shape import LatentShape
from burnish.models.lora.adapters import add_lora
from burnish.models.model_families import FAMILIES
from tests.alive import Alive

POLICIES = ("keep", "selective", "recompute", "offload")
LENGTH, SEQUENCES = 12, 3
TOKENS = torch.arange(LENGTH * SEQUENCES) % 7  # all sequences have the same prefix, so that they can share it
OFFSETS = torch.arange(SEQUENCES + 1) * LENGTH
SHARED = torch.tensor([0, 5, 5])
ROWS_SHARED = LENGTH * SEQUENCES - 2 * 5


DEEPSEEK_EXPERTS = ExpertShape(
    6, 2, 20, scoring="sigmoid", has_score_bias=True, num_groups=3, chosen_groups=2, weight_scale=1.5, shared_size=24
)


def arch_of(family: str, num_layers: int) -> Architecture:
    kind = FAMILIES[family]
    window = {"window": 5 if family in ("mistral", "gemma2", "gemma3_text") else None}
    sizes = (61, 32, num_layers, 4, 2, 8, 96, 64)
    if family == "deepseek_v3":
        latent, experts = LatentShape(20, 12, 10, 8, 14), DEEPSEEK_EXPERTS
        return Architecture(family, 61, 32, num_layers, 4, 4, latent.head_dim, 96, 64, latent=latent, experts=experts)
    return Architecture(family, *sizes, **{**kind.fixed, **kind.new_model_fields(num_layers), **window})


def fitting(family: str, lora: Lora | None) -> Lora | None:
    """The adapters, with the projections of latent attention in place of those that it does not have."""
    if lora is None or lora.targets == "all-linear" or family != "deepseek_v3":
        return lora
    other: dict[str, Any] = {"q_proj": "q_b_proj", "v_proj": "kv_b_proj"}
    return lora.model_copy(update={"targets": [other.get(name, name) for name in lora.targets]})


def made(family: str, num_layers: int, dtype: torch.dtype, lora: Lora | None) -> Decoder:
    """A model whose shared tables already exist, so that they are not counted for a layer."""
    model = Decoder(arch_of(family, num_layers)).to(dtype)
    if lora is not None:
        add_lora(model, lora, 0)
    model.rotations(64)
    with torch.no_grad():
        model.hidden(TOKENS, OFFSETS)
    return model


def kept(model: Decoder, policy: str, shared_prefix: Tensor | None) -> int:
    """Bytes saved by the third layer. The first reads an embedding that may be frozen; the last has full attention."""
    set_activations(model, policy)
    after = []
    with Alive(*model.parameters(), *model.buffers(), TOKENS, OFFSETS) as alive:
        hooks = [layer.register_forward_hook(lambda *_: after.append(alive.bytes)) for layer in model.layers]
        model.hidden(TOKENS, OFFSETS, shared_prefix=shared_prefix)
    for hook in hooks:
        hook.remove()
    return after[2] - after[1]


def wrong(family: str, dtype: torch.dtype, lora: Lora | None, on_gpu: bool) -> list[str]:
    """Differences between the bytes saved by a layer and the formula."""
    lora = fitting(family, lora)
    model = made(family, 4, dtype, lora)
    found = []
    for policy, shared_prefix in product(POLICIES, (None, SHARED)):
        rows = ROWS_SHARED if shared_prefix is not None else TOKENS.numel()
        forward = ActivationEstimate(model.arch, dtype.itemsize, on_gpu, lora, shared_prefix is not None, LENGTH)
        # On a CPU the host's copy of an offloaded input is counted with the rest.
        expected = forward.layer("recompute" if policy == "offload" else policy).of(rows, TOKENS.numel())
        is_kept = kept(model, policy, shared_prefix)
        if is_kept != expected:
            found.append(f"{policy}, {'apart' if shared_prefix is None else 'shared'}: {is_kept} bytes, not {expected}")
    return found


ADAPTERS = [
    None,
    Lora(rank=3),
    Lora(rank=2, targets=["q_proj", "v_proj"]),
    Lora(rank=2, targets=["down_proj", "o_proj"]),
    Lora(rank=2, targets=["q_proj", "up_proj"], base="nf4"),
]
NAMES = ["no adapter", "all", "q v", "down o", "q up, nf4"]
LAYERS = list({repr(replace(arch_of(family, 4), family="any")): family for family in reversed(FAMILIES)}.values())
"""One family for each kind of decoder layer: the first of those that differ in nothing else, or in what they see with."""
ALL_ADAPTERS = ("llama", "deepseek_v3", "qwen3_moe", "gemma3")
CASES = [
    pytest.param(family, lora, id=f"{family}, {name}")
    for family in LAYERS
    for lora, name in zip(ADAPTERS, NAMES, strict=True)
    if family in ALL_ADAPTERS or name in ("no adapter", "all")
]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("family", "lora"), CASES)
def test_a_layer_on_a_cpu_keeps_what_the_formula_says(family: str, lora: Lora | None) -> None:
    assert wrong(family, torch.float32, lora, on_gpu=False) == []


@pytest.mark.parametrize("family", ALL_ADAPTERS)
def test_so_it_does_in_float64(family: str) -> None:
    assert wrong(family, torch.float64, None, on_gpu=False) == []


# --- fakes of the GPU kernels that save the same tensors ---


class Norm(torch.autograd.Function):
    """torch's fused norm saves its input and 1 / rms in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        root = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, root, weight)
        return (x.float() * root).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError


class Varlen(torch.autograd.Function):
    """The attention kernel saves its inputs, its output, and a float32 for each query of each head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q).contiguous()
        ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def swiglu(gate_up: Tensor) -> Tensor:
        return gate_up[:, ::2].contiguous()

    kernels = ModuleType("elementwise_kernels")
    kernels.swiglu = swiglu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "burnish.models.kernels.triton.elementwise_kernels", kernels)
    monkeypatch.setattr(triton, "elementwise_kernels", kernels, raising=False)
    monkeypatch.setattr(elementwise, "use_triton", lambda x: True)
    monkeypatch.setattr(attention, "use_triton", lambda x: True)
    capped = ModuleType("packed_attention")
    capped.packed_attention = lambda q, k, v, *_: Varlen.apply(q, k, v)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "burnish.models.kernels.triton.packed_attention", capped)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda q: True)
    monkeypatch.setattr(attention, "varlen_attention", lambda q, k, v, *_: Varlen.apply(q, k, v))
    monkeypatch.setattr(
        tree_attention.FlashKernel,
        "forward",
        lambda self, q, *_: (torch.zeros(q.shape).to(q), torch.zeros(q.shape[:2])),
    )
    monkeypatch.setattr(attention.PackedAttention, "__init__", _ragged(attention.PackedAttention.__init__))
    monkeypatch.setattr(elementwise.functional, "rms_norm", lambda x, _, weight, eps: Norm.apply(x, weight, eps))
    assert decoder.GATED_ACTIVATIONS["silu"] is elementwise.swiglu
    assert functional.rms_norm is elementwise.functional.rms_norm


def _ragged(init: Any) -> Any:
    def wrapped(self: Any, *args: Any) -> None:
        init(self, *args)
        self.uniform = None

    return wrapped


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("family", "lora"), CASES)
def test_a_layer_on_a_gpu_keeps_what_the_formula_says(family: str, lora: Lora | None) -> None:
    assert wrong(family, torch.bfloat16, lora, on_gpu=True) == []


@pytest.mark.parametrize(
    ("policy", "text"), [("keep", "4 h + 3 q + 3 k + 3 m"), ("selective", "2 h + 2 q + 2 k + 2 m")]
)
def test_the_formula_in_the_text_is_the_one_that_counts(policy: str, text: str) -> None:
    assert text in str(activation_checkpointing.__doc__)
    h, q, k, m, heads = 1536, 1536, 256, 8960, 12
    arch = Architecture("qwen2", 151936, h, 28, heads, 2, 128, m, 32768, qkv_bias=True, tied=True)
    factors = [int(term.split()[0]) for term in text.split(" + ")]
    expected = 2 * sum(f * width for f, width in zip(factors, (h, q, k, m), strict=True))
    assert ActivationEstimate(arch, 2, True).layer(policy).row == expected + 4 * (
        heads + (2 if policy == "keep" else 0)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_a_layer_on_a_real_gpu_keeps_what_the_formula_says(family: str, policy: str) -> None:
    def requested() -> int:
        """Requested bytes, since allocated blocks may be up to a MiB larger."""
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    kind = FAMILIES[family]
    held = []
    lengths = torch.arange(100, 164)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).cuda()
    for num_layers in (5, 4):
        arch = Architecture(
            family, 512, 512, num_layers, 8, 2, 64, 1536, 512, **kind.fixed, **kind.new_model_fields(num_layers)
        )
        model = Decoder(arch).to("cuda", torch.bfloat16)
        set_activations(model, policy)
        tokens = torch.arange(int(offsets[-1]), device="cuda") % 512
        model.hidden(tokens, offsets)  # tables, workspaces
        before = requested()
        out = model.hidden(tokens, offsets)
        held.append(requested() - before)
        del out
    expected = ActivationEstimate(arch, 2, True).layer(policy).of(tokens.numel(), tokens.numel())
    assert held[0] - held[1] == pytest.approx(expected, rel=0.01, abs=8192)
