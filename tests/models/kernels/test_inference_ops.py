"""The forward pass over a paged cache against `Decoder.forward`, and the Triton kernels against the torch implementations.

The kernels run where CUDA is, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 with triton installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from burnish.inference.native.device_state import LIVE, POSITION, DeviceRows, NewRow, SamplerFlags
from burnish.inference.native.sampler import truncate
from burnish.models.cached_forward import paged_forward
from burnish.models.decoder import Decoder
from burnish.models.kernels import exact, inference_ops
from burnish.models.kernels.attention import window_of
from burnish.models.kernels.elementwise import swiglu
from burnish.models.kernels.fp8 import FP8, Fp8Rows, dequantised, empty_rows, quantise_rows
from burnish.models.kernels.inference_ops import (
    PrefillAttention,
    add_norm,
    num_split_k,
    partial_linear,
    partial_products,
)
from burnish.models.kernels.paged_cache import (
    Fp8Cache,
    HeadNorms,
    Placement,
    read_pages,
    write_pages,
)
from burnish.models.layer_products import ModelProducts
from burnish.models.weight_files import load_decoder
from tests.kernels import CUDA, DEVICE, kernel

VARIANTS = [
    "llama", "llama-theta", "llama-linear", "llama3", "llama-bias", "qwen2", "qwen3", "qwen3-bias", "mistral-window", "mistral",
    "llama-yarn", "deepseek", "deepseek-plain", "gemma2", "gemma3", "gemma3-linear",
]  # fmt: skip
PAGE = 4
TinyModel = Callable[..., tuple[Any, Path]]

HALF = [torch.bfloat16, torch.float16] if CUDA else []


def shuffled_table(rows: int, width: int, seed: int = 0) -> Tensor:
    """A page table [rows, width] of pages from 1 on, in random order."""
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(seed))
    return (order + 1).int().view(rows, width)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- the forward -------------------------------------------------------------------------------------------------------------


class Paged:
    """A model with a cache that is fed token by token or chunk by chunk."""

    def __init__(self, model: Decoder, rows: int, width: int) -> None:
        arch = model.arch
        self.model, self.table = model, shuffled_table(rows, width)
        shape = (arch.num_layers, 2, rows * width + 1, arch.num_kv_heads, PAGE, arch.head_dim)
        self.cache = torch.zeros(shape, dtype=model.embedding.weight.dtype)
        self.rotations = [model.rotations(width * PAGE, layer) for layer in range(arch.num_layers)]

    def prefill(self, tokens: list[Tensor], stretches: list[tuple[int, int, int]]) -> Tensor:
        """Hidden states of (row, start, stop) chunks, one after the other."""
        rows, starts, stops = (np.array(x) for x in zip(*stretches, strict=True))
        owner = torch.from_numpy(np.repeat(rows, stops - starts))
        position = torch.cat([torch.arange(a, b) for _, a, b in stretches])
        place = Placement(owner, position, self.table)
        arch = self.model.arch
        options = place, self.rotations, PAGE, arch.windows, arch.score_softcap
        attend = PrefillAttention(rows, starts, stops - starts, *options)
        packed = torch.cat([tokens[row][a:b] for row, a, b in stretches])
        return paged_forward(self.model, packed, self.cache, attend, ModelProducts())

    def decode(self, tokens: list[Tensor], positions: list[int]) -> Tensor:
        """Hidden states of one token per row; position -1 is an empty row."""
        place = Placement(torch.arange(len(positions)), torch.tensor(positions), self.table)

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor) -> Tensor:
            window, softcap = window_of(self.model.arch.windows, layer), self.model.arch.score_softcap
            tables = self.rotations[layer]
            return inference_ops.decode_attention(qkv, *tables, place, norms, keys, values, window, softcap=softcap)

        drawn = torch.stack([row[position] for row, position in zip(tokens, positions, strict=True)])
        return paged_forward(self.model, drawn, self.cache, attend, ModelProducts())


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_in_pieces_and_decoding_give_the_decoders_hidden_states(tiny_model: TinyModel, variant: str) -> None:
    model = load_decoder(tiny_model(variant, variant == "qwen2", torch.float64)[1], torch.float64, torch.device("cpu"))
    lengths = [30, 9, 21]
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 61, (n,), generator=generator) for n in lengths]
    with torch.inference_mode():
        expected = [model.hidden(row, torch.tensor([0, len(row)])) for row in tokens]
        run = Paged(model, rows=3, width=8)
        found: list[list[Tensor]] = [[], [], []]
        for stretches in ([(0, 0, 13), (1, 0, 1), (2, 0, 16)], [(2, 16, 18), (0, 13, 14)], [(0, 14, 22), (1, 1, 5)]):
            parts = run.prefill(tokens, stretches).split([stop - start for _, start, stop in stretches])
            for (row, _, _), part in zip(stretches, parts, strict=True):
                found[row].append(part)
        known = [22, 5, 18]
        while any(known[row] < n for row, n in enumerate(lengths)):
            positions = [p if p < n else -1 for p, n in zip(known, lengths, strict=True)]
            hidden = run.decode(tokens, positions)
            assert hidden.isfinite().all()
            for row, position in enumerate(positions):
                if position >= 0:
                    found[row].append(hidden[row : row + 1])
                    known[row] += 1
    for parts, hidden in zip(found, expected, strict=True):
        assert (torch.cat(parts) - hidden).abs().max() < 1e-10


def test_a_stretch_reads_what_another_stretch_of_the_same_forward_computes(tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model("qwen3", False, torch.float64)[1], torch.float64, torch.device("cpu"))
    first = torch.arange(14) % 61
    second = torch.cat([first[:8], torch.tensor([5, 6, 7])])
    run = Paged(model, rows=2, width=4)
    run.table[1, :2] = run.table[0, :2]
    with torch.inference_mode():
        hidden = run.prefill([first, second], [(0, 0, 14), (1, 8, 11)])
        expected = model.hidden(second, torch.tensor([0, 11]))
    assert (hidden[14:] - expected[8:]).abs().max() < 1e-10


# --- the kernels -------------------------------------------------------------------------------------------------------------


def close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Assert equality up to the rounding of the dtype."""
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got.double().cpu(), expected.double(), rtol=tolerance, atol=tolerance)


def on_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies on the kernels' device, so that the torch implementations do not see what kernels write in place."""
    return tuple(tensor.clone().to(DEVICE) for tensor in tensors)


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("size", [7, 48, 1536, 5000])
def test_add_norm_and_gate_kernels(dtype: torch.dtype, size: int) -> None:
    from burnish.models.kernels.triton import elementwise_kernels

    x, delta, weight = (
        randn(5, size, dtype=dtype),
        randn(5, size, dtype=dtype, seed=1),
        randn(size, dtype=dtype, seed=2),
    )
    parts = torch.stack([randn(5, size, dtype=dtype, seed=s) for s in (4, 5, 6)])
    for step, shift in ((delta, 0.0), (None, 0.0), (parts, 0.0), (delta, 1.0)):
        expected = x.clone()
        normed = inference_ops.add_norm(expected, step, weight, 1e-5, shift)
        there, scale = on_device(x, weight)
        got, moved = torch.empty_like(there), None if step is None else step.to(DEVICE)
        again, rows = there.clone(), empty_rows(there.shape, there.device)
        elementwise_kernels.add_norm(there, moved, scale, 1e-5, shift, got)
        elementwise_kernels.add_norm(again, moved, scale, 1e-5, shift, rows.data, rows.scale)
        close(got, normed, dtype)
        close(there, expected, dtype)
        assert torch.equal(again, there)
        assert torch.allclose(rows.scale, quantise_rows(got).scale)
        assert torch.allclose(dequantised(rows, torch.float32), got.float(), rtol=0.08 if CUDA else 0.6, atol=0.02)
    both = randn(5, 2 * size, dtype=dtype, seed=3)
    with torch.no_grad():
        close(elementwise_kernels.swiglu(both.to(DEVICE)), swiglu(both.clone()), dtype)


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (3, 1, 16), (6, 6, 20), (12, 2, 128)])
@pytest.mark.parametrize(("has_norms", "shift", "query_scale"), [(False, 0.0, 1.0), (True, 0.0, 1.0), (True, 1.0, 0.8)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rotate_store_kernel(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    has_norms: bool,
    shift: float,
    query_scale: float,
    in_place: bool,
) -> None:
    from burnish.models.kernels.triton import elementwise_kernels

    table = shuffled_table(4, 5)
    rotation = torch.tensor([5, 0, 3, 0, 19, 2]) if kv_heads == 1 else None
    place = Placement(torch.tensor([2, 2, 0, 3, 1, 1]), torch.tensor([0, 1, 19, -1, 7, 8]), table, rotation)
    qkv = randn(6, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos, sin = randn(20, 1, dim // 2, dtype=dtype, seed=1), randn(20, 1, dim // 2, dtype=dtype, seed=2)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    weights = randn(dim, dtype=dtype, seed=3), randn(dim, dtype=dtype, seed=4)
    norms = HeadNorms(*weights, 1e-6, shift, query_scale) if has_norms else None
    keys, values = (randn(21, kv_heads, PAGE, dim, dtype=dtype, seed=s) for s in (5, 6))
    there = on_device(qkv, cos, sin, keys, values)
    moved = Placement(*on_device(place.owner, place.position, table), None if rotation is None else rotation.to(DEVICE))
    sent = None if norms is None else norms._replace(query=norms.query.to(DEVICE), key=norms.key.to(DEVICE))
    before = qkv.clone()
    got = elementwise_kernels.rotate_store(*there[:3], moved, sent, *there[3:], in_place)
    with torch.no_grad():
        expected = inference_ops.rotate_store(qkv, cos, sin, place, norms, keys, values, in_place)
    known = place.position >= 0
    assert torch.equal(qkv, before) is not in_place
    close(there[0].cpu()[known], qkv[known], dtype)
    close(got.cpu()[known], expected[known], dtype)
    close(there[3][1:], keys[1:], dtype)  # page 0 belongs to no row
    close(there[4][1:], values[1:], dtype)


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(4, 2, 8, None), (4, 2, 8, 1), (4, 2, 8, 70), (3, 1, 16, 70), (2, 2, 20, None), (12, 2, 128, None)],
)
def test_exact_attention_kernel(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    from burnish.models.kernels.triton.exact_kernels import exact_attention

    page, positions = 16, torch.tensor([0, 15, 16, -1, 63, 64, 150, 3])
    rows, table = len(positions), shuffled_table(len(positions), 10)
    keys, values = (randn(rows * 10 + 1, kv_heads, page, dim, dtype=dtype, seed=s) for s in (1, 2))
    place = Placement(torch.arange(rows), positions, table)
    q = randn(rows, heads, dim, dtype=dtype)
    expected = inference_ops.attend_pages(q, keys, values, place, window)
    moved = Placement(*on_device(place.owner, positions, table))
    got = exact_attention(*on_device(q, keys, values), moved, window).flatten(1)
    there = positions >= 0
    close(got.cpu()[there], expected[there], dtype)
    assert got.isfinite().all()


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("window", [None, 5, 70])
def test_exact_attention_reads_up_to_the_last_key_that_a_token_sees(dtype: torch.dtype, window: int | None) -> None:
    """Tokens of a picture see those behind them."""
    from burnish.models.kernels.triton.exact_kernels import exact_attention

    positions, last = torch.tensor([0, 15, 16, -1, 63, 64, 150]), torch.tensor([9, 15, 30, -1, 80, 64, 155])
    rows, table = len(positions), shuffled_table(len(positions), 10)
    keys, values = (randn(rows * 10 + 1, 2, 16, 8, dtype=dtype, seed=s) for s in (1, 2))
    q, owner = randn(rows, 4, 8, dtype=dtype), torch.arange(rows)
    expected = exact._paged_online_softmax(q, table, positions, last, keys, values, window, None)
    moved = Placement(*on_device(owner, positions, table), last=last.to(DEVICE))
    got = exact_attention(*on_device(q, keys, values), moved, window).flatten(1)
    there = positions >= 0
    close(got.cpu()[there], expected[there], dtype)


def state_of(rows: list[NewRow], size: int, device: str, never: tuple[int, ...] = ()) -> DeviceRows:
    with torch.inference_mode():
        state = DeviceRows(size, 1, torch.device(device), never)
        state.start(rows)
        return state


@kernel
@pytest.mark.parametrize("vocab", [13, 4096, 4097, 20_000])
@pytest.mark.parametrize(
    "wants",
    [
        SamplerFlags(),
        SamplerFlags(truncated=True),
        SamplerFlags(biased=True),
        SamplerFlags(raw=True),
        SamplerFlags(True, True, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_never", [False, True])
def test_the_drawing_kernel(monkeypatch: pytest.MonkeyPatch, vocab: int, wants: SamplerFlags, has_never: bool) -> None:
    """The same tokens, log-probs and row state as in torch, over steps in which rows stop, reach their limit or are idle."""
    base = NewRow(row=0, position=4, limit=9, key=7, drawn=2, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stop_tokens=())  # fmt: skip
    new = [
        replace(base, row=3, key=11),
        replace(base, row=0, key=2**63 + 5, temperature=0.0, drawn=0),
        replace(base, row=5, key=13, temperature=0.6, limit=2),
        replace(base, row=1, key=14, temperature=1.7, stop_tokens=tuple(range(5))),
    ]
    if wants.truncated:
        new += [replace(base, row=6, key=15, top_k=3), replace(base, row=2, key=16, top_p=0.3, min_p=0.05)]
    if wants.biased:
        pairs = [((3, 2.5), (vocab - 1, 4.0), (0, -3.0)), ((5, 7.0),), ((vocab // 2, 1.5),)]
        new[:3] = [replace(row, bias=bias) for row, bias in zip(new[:3], pairs, strict=True)]
    never = (1, vocab - 2) if has_never else ()
    twin, mine = (state_of(new, 8, device, never) for device in ("cpu", DEVICE))
    order, lines = torch.tensor([r.row for r in new] + [4]), torch.tensor([2, 0, 1, 2, 3, 1, 0][: len(new) + 1])
    for step in range(3):
        logits = 3 * randn(4, vocab, seed=step)
        logits[:2, vocab - 2] = 12.0  # often the likeliest token
        with torch.inference_mode():
            twin.draw(logits, lines, order, wants)
            with monkeypatch.context() as patch:
                patch.setattr("burnish.inference.native.device_state.use_triton", lambda x: True)
                mine.draw(*on_device(logits, lines, order), wants)
    assert torch.equal(mine.ints.cpu(), twin.ints)
    assert torch.equal(mine.ring_token.cpu(), twin.ring_token)
    torch.testing.assert_close(mine.ring_logp.cpu(), twin.ring_logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.ring_raw.cpu(), twin.ring_raw, rtol=1e-5, atol=1e-5)
    assert bool(twin.ring_raw.any()) == wants.raw
    assert twin.ints[LIVE, 5] == 0, "it has reached its limit"
    assert twin.ints[LIVE, 4] == 0, "it was never there"
    assert twin.ints[POSITION, 3] == 7


# --- truncation ----------------------------------------------------------------------------------------------------------------


def kept(logits: Tensor, value: Tensor, last: Tensor) -> Tensor:
    """The tokens that a cut keeps, without those of probability 0."""
    value, last = value.cpu()[:, None], last.cpu()[:, None]
    behind = torch.arange(logits.shape[1]) > last
    return ~((logits < value) | ((logits == value) & behind)) & (logits > -torch.inf)


def option_rows(vocab: int) -> tuple[list[float], list[int], list[float], list[float]]:
    """Temperature, top-k, top-p and min-p of rows: each alone, at its extremes, and all together."""
    rows = [
        (1.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (0.0, 3, 1.0, 0.0), (0.7, vocab - 1, 1.0, 0.0), (1.0, vocab + 9, 1.0, 0.0),
        (1.0, 0, 1e-9, 0.0), (1.0, 0, 0.5, 0.0), (2.0, 0, 0.97, 0.0), (1.0, 0, 1 - 1e-13, 0.0), (1.0, 0, 1.0, 0.3),
        (1.0, 0, 1.0, 1.0), (1.4, 0, 1.0, 1e-9), (1.0, 50, 0.6, 0.0), (0.5, 5, 0.999, 0.02), (1.7, vocab // 2, 0.8, 0.01),
        (0.0, 7, 0.9, 0.2),
    ]  # fmt: skip
    a, b, c, d = zip(*rows, strict=True)
    return list(a), list(b), list(c), list(d)


TIES: dict[str, Callable[[Tensor], Tensor]] = {
    "no ties": lambda x: x,
    "some ties": lambda x: (4 * x).round() / 4,
    "many ties": torch.round,
    "all equal": lambda x: torch.full_like(x, -1.5),
    "half precision": lambda x: x.bfloat16().float(),
    "some impossible": lambda x: torch.where(torch.arange(x.shape[1]) % 3 == 0, -torch.inf, x),
    "one certain": lambda x: torch.where(torch.arange(x.shape[1]) == x.shape[1] // 2, 60.0, x),
}


@kernel
@pytest.mark.parametrize("vocab", [2, 13, 4096, 9001, *([151_936] if CUDA else [])])
@pytest.mark.parametrize("ties", TIES)
def test_a_cut_keeps_the_tokens_that_sorting_keeps(vocab: int, ties: str) -> None:
    from burnish.models.kernels.triton import truncation

    temperature, top_k, top_p, min_p = option_rows(vocab)
    rows = len(top_k)
    logits = TIES[ties](3 * randn(rows, vocab, seed=vocab))
    options = [
        torch.tensor(temperature).double(),
        torch.tensor(top_k),
        *(torch.tensor(x).double() for x in (top_p, min_p)),
    ]
    source, row = torch.arange(rows - 1, -1, -1), torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    value, last = truncation.find_cut(*on_device(logits, source, row, *options))
    found = kept(logits[source], value, last)
    heat = torch.where(options[0] == 0, 1.0, options[0])
    expected = truncate(logits[source], heat[row], *(x[row] for x in options[1:])) > -torch.inf
    for k in range(rows):
        # A sum of a few hundred thousand float32 terms is accurate to about 1e-6: a token at the limit may be kept or not.
        differs = found[k] != expected[k]
        p = (logits[source[k]] / heat[row[k]]).softmax(-1)
        assert p[differs].sum() <= 1e-6, (k, int(found[k].sum()), int(expected[k].sum()))
        if options[2][row[k]] >= 1:
            assert not differs.any(), "only a mass can be a matter of rounding"
    whole = (row == 0).nonzero()[0, 0]
    assert found[whole].sum() == (logits[source[whole]] > -torch.inf).sum(), "it asks for nothing"
    (first,) = (row == 1).nonzero()[:, 0].tolist()
    assert found[first].sum() == 1
    assert found[first].int().argmax() == logits[source[first]].argmax(), "of equal ones the first"


@kernel
def test_a_cut_of_what_is_no_number_ends_and_hides_nothing() -> None:
    from burnish.models.kernels.triton import truncation

    logits = randn(4, 300)
    logits[0, 7], logits[1], logits[2, 9] = torch.nan, torch.nan, torch.inf
    every, ones = torch.arange(4), torch.ones(4, dtype=torch.float64)
    options = on_device(logits, every, every, ones, torch.full((4,), 5), 0.5 * ones, 0.1 * ones)
    value, last = truncation.find_cut(*options)
    cut = (logits < value.cpu()[:, None]) | (
        (logits == value.cpu()[:, None]) & (torch.arange(300) > last.cpu()[:, None])
    )
    assert not cut[logits.isnan()].any()
    assert cut[3].sum() > 290


# --- 8 bits --------------------------------------------------------------------------------------------------------------------


def test_a_vector_in_8_bits_is_right_to_a_sixteenth_whatever_its_size() -> None:
    """e4m3 has three bits after the leading one; the scale maps every vector to the range where all of them are used."""
    x = randn(50, 16) * (10.0 ** torch.arange(-20, 30).float())[:, None]
    x[7] = 0.0
    back = read_pages(quantise_rows(x), slice(None), torch.float32)
    error = (back - x).abs() / x.abs().amax(1, keepdim=True).clamp(min=1e-30)
    assert error.max() <= 1 / 16 * 448 / 256 / 2 + 1e-6  # half a step of the largest numbers, 256 to 448 in steps of 32
    assert torch.equal(back[7], x[7])


def test_pages_in_8_bits_are_written_and_read_where_they_are_said_to_be() -> None:
    pages = Fp8Rows(torch.zeros(5, 2, PAGE, 8).to(FP8), torch.zeros(5, 2, PAGE))
    x = randn(3, 2, 8)
    at = (torch.tensor([1, 4, 1]), slice(None), torch.tensor([0, 3, 2]))
    write_pages(pages, at, x)
    assert torch.equal(read_pages(pages, at, torch.float32), read_pages(quantise_rows(x), slice(None), torch.float32))
    assert int((pages.scale > 0).sum()) == 6


def in_8_bits(x: Tensor) -> Fp8Rows:
    return Fp8Rows(*(part.to(DEVICE) for part in quantise_rows(x)))


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (3, 1, 16), (6, 6, 20), (12, 2, 128)])
def test_rotate_store_kernel_in_8_bits(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    from burnish.models.kernels.triton import elementwise_kernels

    place = Placement(torch.tensor([2, 2, 0, 3, 1, 1]), torch.tensor([0, 1, 19, -1, 7, 8]), shuffled_table(4, 5))
    qkv = randn(6, (heads + 2 * kv_heads) * dim, dtype=dtype)
    qkv[4] = 0.0
    cos, sin = randn(20, 1, dim // 2, dtype=dtype, seed=1), randn(20, 1, dim // 2, dtype=dtype, seed=2)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    pages = [quantise_rows(randn(21, kv_heads, PAGE, dim, seed=s)) for s in (5, 6)]
    there = [Fp8Rows(*(part.clone().to(DEVICE) for part in x)) for x in pages]
    moved = Placement(*on_device(place.owner, place.position, place.table))
    got = elementwise_kernels.rotate_store(*on_device(qkv, cos, sin), moved, None, *there)
    expected = inference_ops.rotate_store(qkv, cos, sin, place, None, *pages)
    known = place.position >= 0
    close(got.cpu()[known], expected[known], dtype)
    for mine, twin in zip(there, pages, strict=True):
        torch.testing.assert_close(
            mine.scale[1:].cpu(), twin.scale[1:], rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0
        )
        mine, twin = (
            read_pages(Fp8Rows(*(part.cpu() for part in x)), slice(1, None), torch.float32) for x in (mine, twin)
        )
        differs = ~torch.isclose(mine, twin, rtol=1e-2 if dtype != torch.float32 else 1e-4)
        if not CUDA:  # Triton's interpreter halves fp8 numbers that round up to a power of two
            differs &= ~torch.isclose(mine, twin / 2, rtol=1e-4)
        # A rotation that differs in its last bit may round to a neighbouring fp8 number: seldom, and no further.
        assert differs.float().mean() <= (1e-3 if dtype == torch.float32 else 0.05)
        torch.testing.assert_close(mine[differs], twin[differs], rtol=0.15, atol=0.05)


def test_a_forward_over_8_bits_is_near_the_decoders(tiny_model: TinyModel) -> None:
    """In chunks, so that one chunk reads what another wrote."""
    model = load_decoder(tiny_model("qwen2", False, torch.float32)[1], torch.float32, torch.device("cpu"))
    tokens = [torch.arange(30) * 7 % 61]
    run = Paged(model, rows=1, width=8)
    small, scale = torch.zeros(run.cache.shape).to(FP8), torch.zeros(run.cache.shape[:-1])
    run.cache = Fp8Cache(small, scale, run.cache[:0], [True] * len(small))  # type: ignore[assignment]
    with torch.inference_mode():
        parts = [run.prefill(tokens, [(0, 0, 13)]), run.prefill(tokens, [(0, 13, 20)])]
        parts += [run.decode(tokens, [position]) for position in range(20, 30)]
        expected = model.hidden(tokens[0], torch.tensor([0, 30]))
    gap = (torch.cat(parts) - expected).abs().mean() / expected.abs().mean()
    assert 1e-4 < gap < 0.05


# --- split-K linear layers ---


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_add_up_to_the_product(parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (5, 7))
    found = partial_products(x, weight, parts)
    assert found.shape == (parts, 5, 7)
    torch.testing.assert_close(found.sum(0), x @ weight.t(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "parts"),
    [
        (256, 8960, 1536, 4),  # into the residual of a 1.5B model
        (512, 8960, 1536, 2),
        (1024, 8960, 1536, 1),
        (256, 1536, 1536, 2),
        (256, 18944, 3584, 2),
        (256, 1000, 1536, 1),  # not divisible into equal parts
        (64, 768, 768, 1),
    ],
)
def test_a_product_is_cut_while_the_tiles_leave_processors_idle(
    rows: int, inputs: int, outputs: int, parts: int
) -> None:
    assert num_split_k(rows, inputs, outputs) == parts


def test_elsewhere_a_layer_is_whole() -> None:
    layer, x = nn.Linear(8192, 128, bias=False), torch.randn(3, 8192)
    assert torch.equal(partial_linear(layer, x), layer(x))


def test_the_norm_adds_parts_up() -> None:
    x, parts, weight = torch.randn(3, 8), torch.randn(4, 3, 8), torch.rand(8)
    one, other = x.clone(), x.clone()
    torch.testing.assert_close(add_norm(one, parts, weight, 1e-6), add_norm(other, parts.sum(0), weight, 1e-6))
    torch.testing.assert_close(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cut on a GPU alone")
def test_on_a_gpu_a_layer_in_parts_is_as_exact_as_whole() -> None:
    layer = nn.Linear(8960, 1536, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 8960, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found, whole = partial_linear(layer, x), layer(x)
        exact = x.double() @ layer.weight.double().t()
    assert found.shape == (4, 256, 1536)
    gaps = [(y.double() - exact).square().mean().sqrt() for y in (found.float().sum(0), whole)]
    assert gaps[0] < 1.2 * gaps[1]
