"""Every C kernel against the torch implementation, over many shapes, with the same bits on one thread and on two."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.inference.native.dense_cache import DenseDecodeAttention, DenseKVCache
from burnish.inference.native.sampler import sample
from burnish.models.architecture import Architecture
from burnish.models.cached_forward import c_decode_step
from burnish.models.decoder import Decoder, initialise
from burnish.models.kernels.attention import PackedAttention
from burnish.models.kernels.cpu import c_library
from burnish.models.kernels.cpu.c_library import address
from burnish.models.kernels.cpu.cpu_ops import Long, draw, logit_gradients_, logprob_rows
from burnish.models.kernels.elementwise import RMSNorm, geglu, rms_norm, rotate, swiglu
from burnish.models.kernels.half_products import add_to, processor_features
from burnish.models.kernels.logprob import head_logprob
from burnish.models.kernels.shared_prefix import computed_rows
from tests.kernels import error, without_c

TYPES = st.sampled_from([torch.float32, torch.float64])
ROWS, SIZES = st.integers(0, 150), st.integers(1, 70)
SEEDS = st.integers(0, 2**32)


def library(dtype: torch.dtype) -> Any:
    found = c_library.c_kernels(torch.empty(0, dtype=dtype))
    if found is None:
        pytest.skip("no C compiler here")
    return found


def near(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    tolerance = scale * (1e-12 if expected.dtype == torch.float64 else 1e-5)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def results(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """A function's output, and the gradients of its inputs for a fixed gradient of the output."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    slope = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, slope)]


def compare(function: Callable[..., Tensor], *inputs: Tensor, scale: float = 1.0) -> None:
    library(inputs[0].dtype)
    found = results(function, *inputs)
    with without_c():
        expected = results(function, *inputs)
    for a, b in zip(found, expected, strict=True):
        near(a, b, scale)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@settings(max_examples=30)
@given(TYPES, ROWS, SIZES, st.sampled_from([0.0, 1.0]), SEEDS)
def test_norms(dtype: torch.dtype, rows: int, size: int, shift: float, seed: int) -> None:
    norm = RMSNorm(size, 1e-6, shift).to(dtype)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(norm, {"weight": weight}, (x,))
        return found

    x, weight = normal(seed, rows, size, dtype=dtype), normal(seed + 1, size, dtype=dtype)
    compare(function, x, weight, scale=10.0)  # the gradient of the weight is a sum over rows
    with torch.no_grad():
        found = rms_norm(x, weight, 1e-6, shift)
        with without_c():
            near(found, rms_norm(x, weight, 1e-6, shift))


@settings(max_examples=30)
@given(TYPES, ROWS, SIZES, st.sampled_from([swiglu, geglu]), SEEDS)
def test_gated_activations(
    dtype: torch.dtype, rows: int, size: int, function: Callable[[Tensor], Tensor], seed: int
) -> None:
    x = 4 * normal(seed, rows, 2 * size, dtype=dtype)
    compare(function, x, scale=4.0)
    with torch.no_grad():
        found = function(x)
        with without_c():
            near(found, function(x), 4.0)


@settings(max_examples=30)
@given(TYPES, ROWS, st.integers(1, 5), st.integers(1, 35), SEEDS)
def test_rotations_of_heads_that_stand_among_others(
    dtype: torch.dtype, rows: int, heads: int, half: int, seed: int
) -> None:
    cos, sin = (normal(seed + k, rows, 1, half, dtype=dtype) for k in (1, 2))
    table = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    compare(lambda x: rotate(x.split([heads, 2], 1)[0], *table), normal(seed, rows, heads + 2, 2 * half, dtype=dtype))


@st.composite
def packings(draw_: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    """Offsets of sequences, and the tokens that each shares with the one before it."""
    lengths, shared = [draw_(st.integers(1, 60))], [0]
    for _ in range(draw_(st.integers(0, 9))):
        shared.append(draw_(st.one_of(st.just(0), st.integers(0, min(40, lengths[-1])))))
        lengths.append(shared[-1] + draw_(st.integers(1, 40)))
    return torch.tensor([0, *lengths]).cumsum(0), torch.tensor(shared) if draw_(st.booleans()) else None


@settings(max_examples=40)
@given(
    TYPES, packings(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.sampled_from([None, 1, 7]), SEEDS
)
def test_attention_of_sequences_with_beginnings_in_common(
    dtype: torch.dtype,
    packing: tuple[Tensor, Tensor | None],
    kv_heads: int,
    shared: int,
    dim: int,
    window: int | None,
    seed: int,
) -> None:
    offsets, shared_prefix = packing
    rows = None if shared_prefix is None else computed_rows(offsets, shared_prefix)
    count, heads = int(offsets[-1]) if rows is None else rows.num_rows, kv_heads * shared

    def function(qk: Tensor, v: Tensor) -> Tensor:
        return PackedAttention(offsets, window, rows)(0, *qk.split([heads, kv_heads], 1), v)

    qk, v = normal(seed, count, heads + kv_heads, dim, dtype=dtype), normal(seed + 1, count, kv_heads, dim, dtype=dtype)
    compare(function, qk, v, scale=10.0)


@settings(max_examples=30)
@given(TYPES, st.integers(0, 40), st.integers(1, 200), st.booleans(), SEEDS)
def test_draws(dtype: torch.dtype, rows: int, vocab: int, has_temperatures: bool, seed: int) -> None:
    logits = 3 * normal(seed, rows, vocab, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64).clamp_(1e-9)
    temperature = torch.arange(rows) % 4 * 0.5 if has_temperatures else None  # every fourth row is greedy
    temperature = None if temperature is None else temperature.double()
    tokens, logp = draw(library(dtype), logits, uniform, temperature)
    expected, expected_logp = sample(logits, uniform, temperature)
    near(logp, expected_logp, 10.0)
    assert torch.equal(tokens, expected)


@settings(max_examples=60)
@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.integers(1, 40), st.integers(1, 200),
    st.sampled_from([1.0, 0.7]), st.booleans(), SEEDS,
)  # fmt: skip
def test_log_probs_of_rows_of_logits_and_their_gradients(
    dtype: torch.dtype, rows: int, vocab: int, temperature: float, with_entropy: bool, seed: int
) -> None:
    kernels = library(torch.float64 if dtype == torch.float64 else torch.float32)
    logits, targets = 3 * normal(seed, rows, vocab, dtype=dtype), torch.arange(rows) * 7 % vocab
    slopes = [normal(seed + k, rows, dtype=torch.promote_types(dtype, torch.float32)) for k in (1, 2)]
    truth = logits.double().requires_grad_()
    log_p = (truth / temperature).log_softmax(-1)
    expected = [log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)][: 1 + with_entropy]
    objective = torch.stack([(a * b.double()).sum() for a, b in zip(expected, slopes, strict=False)]).sum()
    (gradient,) = torch.autograd.grad(objective, truth)

    logp, log_normaliser, entropy = logprob_rows(kernels, logits, targets, temperature, with_entropy)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for found, wanted in zip((logp, entropy), expected, strict=False):
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=tolerance, atol=tolerance)
    logit_gradients_(
        kernels, logits, targets, log_normaliser, entropy, slopes[0], slopes[1] if with_entropy else None, temperature
    )
    largest = gradient.abs().amax(1, keepdim=True)
    rounding = 2.0**-8 * gradient.abs() if dtype == torch.bfloat16 else 0.0  # half a unit of its last place, and some
    assert bool(((logits.double() - gradient).abs() <= rounding + 3 * tolerance * (largest + 1)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_under_a_soft_cap(dtype: torch.dtype) -> None:
    library(torch.float32)
    hidden, weight = 3 * normal(0, 50, 24, dtype=dtype), normal(1, 130, 24, dtype=dtype)
    targets = torch.arange(50)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        logp, entropy = head_logprob(x, weight, targets, 0.7, True, softcap=5.0)
        assert entropy is not None
        return torch.stack([logp, entropy])

    found, truth = results(function, hidden, weight), results(function, hidden.double(), weight.double())
    for a, b in zip(found, truth, strict=True):
        assert error(a, b) < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    for target in (-1, 5):
        with pytest.raises(IndexError, match="below 5"):
            logprob_rows(library(torch.float32), torch.zeros(2, 5), torch.tensor([0, target]), 1.0, False)


@settings(max_examples=20)
@given(st.integers(0, 300_000), SEEDS)
def test_a_bfloat16_tensor_is_added_without_a_copy(size: int, seed: int) -> None:
    library(torch.float32)
    total, x = normal(seed, size, dtype=torch.float32), normal(seed + 1, size, dtype=torch.bfloat16)
    expected = total + x
    add_to(total, x)
    assert torch.equal(total, expected)


@settings(max_examples=20)
@given(packings(), st.integers(1, 3), st.sampled_from([None, 7]), SEEDS)
def test_attention_in_bfloat16(
    packing: tuple[Tensor, Tensor | None], shared: int, window: int | None, seed: int
) -> None:
    library(torch.float32)
    offsets, beginnings = packing
    rows = None if beginnings is None else computed_rows(offsets, beginnings)
    count = int(offsets[-1]) if rows is None else rows.num_rows
    q, k, v = (normal(seed + i, count, heads, 24, dtype=torch.bfloat16) for i, heads in enumerate((2 * shared, 2, 2)))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return PackedAttention(offsets, window, rows)(0, q, k, v)

    found, truth = results(function, q, k, v), results(function, *(x.double() for x in (q, k, v)))
    for a, b in zip(found, truth, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() < 0.02 * b.norm() + 0.01


def test_a_draw_from_nothing_but_nan_says_so() -> None:
    logits = torch.full((2, 5), torch.nan)
    tokens, logp = draw(library(torch.float32), logits, torch.full((2,), 0.5, dtype=torch.float64), None)
    assert tokens.tolist() == [4, 4]
    assert bool(logp.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_out_numbers_neither_overflow_nor_become_nan(dtype: torch.dtype) -> None:
    library(dtype)
    far = torch.tensor([-1e30, -1e4, -800.0, -100.0, -88.0, 0.0, 88.0, 100.0, 800.0, 1e4], dtype=dtype)
    gate_up = torch.cat([far, torch.ones_like(far)])[None]
    with torch.no_grad():
        found = swiglu(gate_up)
        with without_c():
            near(found, swiglu(gate_up))
        nan = swiglu(torch.tensor([[torch.nan, 1.0]], dtype=dtype))
    assert bool(nan.isnan().all())


def all_kernels() -> list[Tensor]:
    """Outputs of every kernel, or of torch without kernels, for enough rows that two threads are used."""
    rows, heads, dim = 700, 6, 32
    offsets = torch.tensor([0, 90, 190, 300, 500, 700])
    x, weight, half = (
        normal(k, *shape, dtype=torch.float32) for k, shape in enumerate([(rows, 96), (96,), (rows, 1, dim // 2)])
    )
    table = torch.cat([half, half], -1), torch.cat([-half, half], -1)
    qk, v = (normal(k, rows, heads * k, dim, dtype=torch.float32) for k in (1, 2))
    norm = RMSNorm(96, 1e-6)
    norm.weight.data.copy_(weight)
    found = results(norm, x) + results(swiglu, x) + results(geglu, x) + results(lambda x: rotate(x, *table), qk)
    found += results(lambda qk, v: PackedAttention(offsets)(0, qk, qk, v[:, :heads]), qk, v)
    found += results(lambda x: torch.stack(head_logprob(x, torch.eye(96), torch.arange(rows) % 96, 0.7, True)), x)  # type: ignore[arg-type]
    uniform = torch.linspace(0.01, 0.99, rows, dtype=torch.float64)
    in_c = c_library.c_kernels(x)
    return [*found, *(sample(x, uniform, None) if in_c is None else draw(in_c, x, uniform, None))]


def test_two_threads_give_the_same_bits_as_one() -> None:
    library(torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(all_kernels())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


LEVELS = {"x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
"""Levels of x86-64 with 16, 32 and 64 bytes in a vector, and the feature in /proc/cpuinfo that each needs."""


@pytest.mark.parametrize("level", LEVELS)
def test_kernels_for_every_level_of_x86_agree_with_torch(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform.machine() != "x86_64" or LEVELS[level] not in processor_features():
        pytest.skip(f"this processor has no {LEVELS[level]}")
    library(torch.float32)
    # Level 1 of optimisation compiles in half the time.
    flags = (*(flag for flag in c_library.FLAGS if flag != "-O3"), "-O1", f"-march={level}")
    compiled = c_library._open_library(c_library._compile(c_library._compiler(), flags, tmp_path / f"{level}.so"))
    monkeypatch.setattr(c_library, "_library", lambda is_double: None if is_double else compiled)
    found = all_kernels()
    with without_c():
        expected = all_kernels()
    for a, b in zip(found, expected, strict=True):
        assert error(a, b.double()) < 1e-5
    assert decode_error(torch.float32) < 1e-5
    assert decode_error(torch.bfloat16) < 0.01  # keys and values are rounded


def decode_error(dtype: torch.dtype, arch: Architecture | None = None, rows: int = 19) -> float:
    """Relative error of the logits of C decode steps, beside float64 arithmetic on the same weights."""
    # No size of this model is a multiple of a vector.
    model = Decoder(arch or Architecture("qwen2", 61, 36, 2, 6, 2, 22, 50, 64, qkv_bias=True))
    initialise(model, seed=0, std=0.2)
    truth = copy.deepcopy(model.to(dtype)).double()
    steps = c_decode_step(model)
    assert steps is not None
    caches = [DenseKVCache(model.arch, kind, torch.device("cpu")) for kind in (dtype, torch.float64)]
    positions = torch.arange(rows) % 5
    with torch.inference_mode():
        for cache in caches:
            cache.reserve(rows, 30)
        for step in range(12):
            tokens, at = (torch.arange(rows) * 7 + step) % 61, positions + step
            longest, shortest = int(at.max()), int(at.min())
            found = steps(tokens, at, caches[0].keys, caches[0].values, longest)
            attend = DenseDecodeAttention(caches[1], at, longest, shortest)
            expected = truth.logits(truth(tokens, at, attend, longest + 1))
    return error(found, expected)


@pytest.fixture(scope="module", params=["AMX", "in C"])
def with_tiles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernels with matrix tiles: the processor's own, or `tiles_in_c.h` instead of its instructions."""
    found = library(torch.float32)
    if request.param == "AMX":
        if not found.has_tiles():  # the other parameter runs the same code with the instructions written in C
            pytest.skip("this processor has no matrix tiles (AMX)")
        return found
    if (
        "avx512f" not in processor_features()
    ):  # `tiles.c` is compiled with AVX-512 only: all processors with AMX have it
        pytest.skip("this processor has no AVX-512, whose panels are two tiles wide")
    header = Path(__file__).with_name("tiles_in_c.h")
    flags = (*(flag for flag in c_library.FLAGS if flag != "-O3"), "-O1", "-mavx512f", "-mavx2", "-mfma")
    flags = (*flags, "-D__AMX_BF16__", "-include", str(header))
    path = tmp_path_factory.mktemp("tiles") / "tiles.so"
    return c_library._open_library(c_library._compile(c_library._compiler(), flags, path))


@pytest.fixture
def tiles(with_tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations in bfloat16 and float32 run in the kernels with matrix tiles."""
    assert with_tiles.has_tiles()
    monkeypatch.setattr(c_library, "_library", lambda is_double: None if is_double else with_tiles)


TILED = Architecture("qwen2", 61, 96, 2, 4, 2, 16, 160, 64, qkv_bias=True)
"""Inputs of its products are multiples of 32, outputs are not."""


@pytest.mark.usefixtures("tiles")
def test_decode_steps_on_matrix_tiles() -> None:
    for rows in (1, 19, 75):  # one row, some tiles, and tasks of whole and partial tiles
        assert decode_error(torch.bfloat16, TILED, rows) < 0.02  # keys, values and the inputs of products are rounded


def test_a_rows_bits_on_matrix_tiles_do_not_depend_on_the_rows_beside_it(with_tiles: Any) -> None:
    depth = 96
    a, b = normal(0, 96, depth, dtype=torch.bfloat16), normal(1, depth, 32, dtype=torch.bfloat16)
    start = normal(2, 75, 32, dtype=torch.float32)
    pairs = b.view(depth // 2, 2, 32).transpose(1, 2).contiguous()

    def product(adds: bool, first: int, rows: int, columns: int) -> Tensor:
        left, c = a[first:].clone(), start[first : first + rows].clone()
        with_tiles.begin_tiles()
        with_tiles.product_tiles(
            adds, Long(rows), Long(columns), Long(depth), address(left), address(pairs), address(c), Long(32)
        )
        with_tiles.end_tiles()
        return c

    for adds in (False, True):
        truth = a[:75].double() @ b.double() + (start if adds else 0)
        for columns in (32, 20):
            found = product(adds, 0, 75, columns)
            assert error(found[:, :columns], truth[:, :columns]) < 1e-6
            assert torch.equal(found[:, columns:], start[:, columns:])
            for first, rows in ((0, 32), (0, 22), (43, 32), (10, 1)):
                assert torch.equal(product(adds, first, rows, columns), found[first : first + rows])
