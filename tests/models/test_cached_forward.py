"""The decode steps of the CPU engine, in torch and in C, against `Decoder.forward`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config.model import Lora
from burnish.core.engine import Request, SamplingOptions
from burnish.inference.native.dense_cache import DenseDecodeAttention, DenseKVCache
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.weight_sync import Publisher, apply_publication
from burnish.models.cached_forward import CDecodeStep, DecodeStep, c_decode_step
from burnish.models.decoder import Decoder
from burnish.models.lora.adapters import add_lora
from burnish.models.weight_files import load_decoder
from tests.kernels import error, without_c

VARIANTS = ["llama-bias", "qwen2", "qwen3", "mistral-window", "deepseek", "gemma2", "gemma3", "qwen3-moe", "olmoe"]
TinyModel = Callable[..., tuple[Any, Path]]


def compare(model: Decoder, start: list[int]) -> float:
    """The largest difference over some steps of rows that begin at these positions."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    steps, caches = DecodeStep(model), [DenseKVCache(model.arch, torch.float64, torch.device("cpu")) for _ in range(2)]
    positions = torch.tensor(start)
    with torch.inference_mode():
        for _ in range(9):
            tokens = torch.randint(model.arch.vocab_size, positions.shape, generator=generator)
            longest, shortest = int(positions.max()), int(positions.min())
            found = []
            for forward, cache in zip((model, steps), caches, strict=True):
                cache.reserve(len(start), longest + 1)
                found.append(
                    forward(tokens, positions, DenseDecodeAttention(cache, positions, longest, shortest), longest + 1)
                )
            worst = max(worst, float((found[0] - found[1]).abs().max()))
            positions = positions + 1
    return worst


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_is_the_forward_of_every_family(variant: str, tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model(variant)[1], torch.float64, torch.device("cpu"))
    assert compare(model, [0, 0, 0]) < 1e-12
    assert compare(model, [0, 6, 3]) < 1e-12


def test_a_step_sees_adapters_and_weights_that_change_in_place(tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model("qwen2")[1], torch.float64, torch.device("cpu"))
    add_lora(model, Lora(rank=2), seed=0)
    steps, tokens, positions = DecodeStep(model), torch.tensor([3, 5]), torch.tensor([0, 0])

    def both() -> list[torch.Tensor]:
        found = []
        with torch.inference_mode():
            for forward in (model, steps):
                cache = DenseKVCache(model.arch, torch.float64, torch.device("cpu"))
                cache.reserve(2, 1)
                found.append(forward(tokens, positions, DenseDecodeAttention(cache, positions, 0, 0), 1))
        return found

    before = both()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    after = both()
    assert torch.allclose(*before, atol=1e-12)
    assert torch.allclose(*after, atol=1e-12)
    assert not torch.allclose(before[0], after[0], atol=1e-3)


def fused(model: Decoder) -> CDecodeStep:
    found = c_decode_step(model)
    if found is None:
        pytest.skip("no C compiler here")
    return found


def logits_of_both(model: Decoder, steps: CDecodeStep, start: list[int], dtype: torch.dtype, delta: int = 0) -> float:
    """The largest difference of logits over some steps of rows that begin at these positions and turn by `delta` more."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    plain, other = (DenseKVCache(model.arch, dtype, torch.device("cpu")) for _ in range(2))
    positions = torch.tensor(start)
    with torch.inference_mode():
        for _ in range(20):
            tokens = torch.randint(model.arch.vocab_size, positions.shape, generator=generator)
            longest, shortest = int(positions.max()), int(positions.min())
            plain.reserve(len(start), longest + 1)
            other.reserve(len(start), longest + 1)
            rotation = (positions + delta).clamp(min=0)
            hidden = model(tokens, rotation, DenseDecodeAttention(plain, positions, longest, shortest), longest + 1)
            turned = rotation if delta else None
            found = steps(tokens, positions, other.keys, other.values, longest, turned)
            worst = max(worst, float((model.logits(hidden) - found).abs().max()))
            positions = positions + 1
    return worst


NOT_IN_C = ("deepseek", "gemma2", "qwen3-moe", "olmoe")
C_VARIANTS = [*(v for v in VARIANTS if v not in NOT_IN_C), "qwen3-bias", "llama3", "gemma3-linear"]


@pytest.mark.parametrize("variant", C_VARIANTS)
def test_a_step_in_c_is_the_forward_and_head_of_every_family(variant: str, tiny_model: TinyModel) -> None:
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-3)):
        model = load_decoder(tiny_model(variant)[1], dtype, torch.device("cpu"))
        assert logits_of_both(model, fused(model), [0, 0, 0], dtype) < tolerance
        assert logits_of_both(model, fused(model), [(7 * k) % 60 for k in range(150)], dtype) < tolerance
        assert logits_of_both(model, fused(model), [9, 2], dtype, delta=-5) < tolerance


@pytest.mark.parametrize("variant", C_VARIANTS)
def test_a_step_in_c_of_a_bfloat16_model_is_closer_to_float64_than_torchs(variant: str, tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model(variant)[1], torch.bfloat16, torch.device("cpu"))
    truth = copy.deepcopy(model).double()
    steps = fused(model)
    for start in ([0, 0, 0], [(7 * k) % 60 for k in range(37)], [300, 11]):
        found = bfloat16_errors(model, truth, steps, torch.tensor(start))
        assert found[0] < 0.02
        assert found[0] < found[1]
    with torch.no_grad():
        for parameter in (*model.parameters(), *truth.parameters()):
            parameter *= 0.5
    assert bfloat16_errors(model, truth, steps, torch.tensor([0, 6]))[0] < 0.02


def bfloat16_errors(model: Decoder, truth: Decoder, steps: CDecodeStep, positions: torch.Tensor) -> tuple[float, float]:
    """Relative errors of the logits of the C step and of `DecodeStep`, after some tokens over a cache of random numbers."""
    generator, cpu, shape = torch.Generator().manual_seed(0), torch.device("cpu"), positions.shape
    caches = [DenseKVCache(model.arch, dtype, cpu) for dtype in (torch.float64, torch.bfloat16, torch.bfloat16)]
    for cache in caches:
        cache.reserve(shape[0], int(positions.max()) + 4)
        for store in (cache.keys, cache.values):
            store.copy_(torch.randn(store.shape, generator=generator.manual_seed(1)).bfloat16())
    with torch.inference_mode():
        for _ in range(4):
            tokens = torch.randint(model.arch.vocab_size, shape, generator=generator)
            longest, shortest = int(positions.max()), int(positions.min())
            found = [
                decoder.logits(step(tokens, positions, DenseDecodeAttention(cache, positions, longest, shortest), longest + 1))
                for decoder, step, cache in ((truth, truth, caches[0]), (model, DecodeStep(model), caches[1]))
            ]  # fmt: skip
            found.append(steps(tokens, positions, caches[2].keys, caches[2].values, longest))
            positions = positions + 1
    return error(found[2], found[0]), error(found[1], found[0])


def test_a_step_in_c_sees_weights_that_change_in_place(tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model("qwen2")[1], torch.float64, torch.device("cpu"))
    steps = fused(model)
    assert logits_of_both(model, steps, [0, 3], torch.float64) < 1e-11
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    assert logits_of_both(model, steps, [0, 3], torch.float64) < 1e-11


def test_steps_in_c_are_kept_until_the_engine_has_new_weights(tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model("qwen2")[1], torch.float64, torch.device("cpu"))
    fused(model)
    engine = DenseEngine(model, max_rows=2)

    def drawn() -> tuple[object, list[int]]:
        engine.submit([Request("a", (1, 2, 3), SamplingOptions(max_tokens=6, temperature=0.0), 0)])
        (done,) = engine.stream()
        return engine._c_step, done.tokens.tolist()

    (first, tokens), (again, same) = drawn(), drawn()
    assert first is again
    assert tokens == same
    new = [(name, -2 * parameter.detach()) for name, parameter in model.named_parameters()]
    publication = Publisher(lambda raw: raw).publish(1, new, as_delta=False, complete=True)
    apply_publication(publication, dict(model.named_parameters()), lambda raw: raw)
    assert isinstance(first, CDecodeStep)
    assert logits_of_both(model, first, [0, 3], torch.float64) < 1e-11  # a bucket's write is seen
    engine.load(1, ())
    other, changed = drawn()
    assert other is not first
    assert changed != tokens
    engine.sleep()
    assert engine._c_step is None


def test_parameters_that_do_not_tell_when_they_are_written_take_torchs_steps(tiny_model: TinyModel) -> None:
    with torch.inference_mode():
        model = load_decoder(tiny_model("qwen2")[1], torch.float64, torch.device("cpu"))
    assert c_decode_step(model) is None


def test_a_row_of_a_step_in_c_has_the_same_bits_in_any_crowd_on_any_threads(tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model("qwen3")[1], torch.float32, torch.device("cpu"))
    steps, before, found = fused(model), torch.get_num_threads(), []
    try:
        for rows, threads in ((1, 1), (2, 1), (5, 1), (13, 1), (150, 1), (150, 2)):
            torch.set_num_threads(threads)
            cache = DenseKVCache(model.arch, torch.float32, torch.device("cpu"))
            cache.reserve(rows, 8)
            with torch.inference_mode():
                for position in range(6):
                    tokens = (torch.arange(rows) * 5 + position) % 61
                    logits = steps(tokens, torch.full((rows,), position), cache.keys, cache.values, position)
            found.append(logits[0].clone())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


def test_models_that_are_large_or_not_plain_take_torchs_steps(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_decoder(tiny_model("qwen2")[1], torch.float32, torch.device("cpu"))
    fused(model)
    assert c_decode_step(model.to(torch.float16)) is None
    model.to(torch.float32)
    monkeypatch.setattr("burnish.models.cached_forward.MAX_C_BYTES", 1000)
    assert c_decode_step(model) is None
    monkeypatch.undo()
    add_lora(model, Lora(rank=2), seed=0)
    assert c_decode_step(model) is None
    for variant in NOT_IN_C:
        assert c_decode_step(load_decoder(tiny_model(variant)[1], torch.float32, torch.device("cpu"))) is None


def test_without_kernels_there_is_no_step_in_c(tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model("qwen2")[1], torch.float32, torch.device("cpu"))
    with without_c():
        assert c_decode_step(model) is None
