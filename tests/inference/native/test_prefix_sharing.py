"""Common prefixes are computed once, and the tokens are those of a sampler without a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from burnish.core.engine import SamplingOptions
from burnish.inference.native.paged_engine import PagedEngine
from burnish.memory_plan.kv_cache import BLOCK_SIZE
from burnish.models.decoder import Decoder

TEXT = tuple((5 * i + i * i // 7) % 13 for i in range(600))


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder(max_positions=1024)


def test_a_common_beginning_of_many_prompts_is_prefilled_once(tools: Any, native: Any, model: Decoder) -> None:
    """Also if only a later request has it again, when no running request uses it."""
    tails = [(i % 13, i // 13, 3)[: 2 + i % 2] for i in range(64)]
    wanted = tools.requests([TEXT[:512] + tail for tail in tails], max_tokens=2)
    engine = PagedEngine(model, max_rows=64)
    got = tools.run(engine, wanted)
    unique = 512 + sum(len(tail) for tail in tails)
    assert engine.stats.prefilled_tokens == unique
    native.agree(tools, model, got, wanted)
    later = [replace(r, id=f"later {r.id}", key=r.key + 1) for r in wanted[:3]]
    native.agree(tools, model, tools.run(engine, later), later)
    assert engine.stats.prefilled_tokens == unique + sum(len(tail) for tail in tails[:3])
    native.no_block_is_held(engine)


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("length", [3, 16, 17, 32, 37])
def test_the_prompt_of_a_group_admitted_together_is_prefilled_once(
    tools: Any, native: Any, options: dict[str, Any], length: int
) -> None:
    model = tools.decoder(**options)
    engine = PagedEngine(model, max_rows=8)
    wanted = tools.requests([TEXT[:length], TEXT[40:45]], 4, max_tokens=20)
    native.agree(tools, model, tools.run(engine, wanted), wanted)
    assert engine.stats.prefilled_tokens == length + 5


@pytest.mark.parametrize("length", [16, 20, 32, 37])
def test_full_blocks_are_shared_and_the_partial_one_is_copied(
    tools: Any, native: Any, model: Decoder, length: int
) -> None:
    engine = PagedEngine(model, max_rows=4, steps_per_launch=2)
    short, *long = tools.requests([TEXT[:length]], 4, max_tokens=30)
    wanted = [replace(short, sampling=SamplingOptions(max_tokens=2)), *long]
    engine.submit(wanted)
    stream = engine.stream()
    first = next(stream)
    assert first.id == short.id
    held = [state.block_table for state in engine.scheduler.running()]
    full = length // BLOCK_SIZE
    assert len(held) == 3
    assert all(blocks[:full] == held[0][:full] for blocks in held)
    own = [block for blocks in held for block in blocks[full:]]
    assert len(own) == len(set(own)) >= 3, "what a row writes to is its own"
    got = {c.id: c for c in stream} | {first.id: first}
    native.agree(tools, model, got, wanted)


def test_a_group_that_comes_row_by_row_computes_only_the_end_of_its_prompt_again(
    tools: Any, native: Any, model: Decoder
) -> None:
    for length, again in ((37, 5), (32, 16)):  # the last token's block is computed again: its logits are wanted
        engine = PagedEngine(model, max_rows=1)
        wanted = tools.requests([TEXT[:length]], 4, max_tokens=6)
        native.agree(tools, model, tools.run(engine, wanted), wanted)
        assert engine.stats.prefilled_tokens == length + 3 * again


def test_beginnings_that_differ_or_end_before_a_block_does_share_nothing(
    tools: Any, native: Any, model: Decoder
) -> None:
    """Equal tokens after a different first block are different blocks."""
    prompts = [TEXT[:15], TEXT[:14], (0, *TEXT[:40]), (1, *TEXT[:40]), TEXT[16:32] + TEXT[:16] + (1,)]
    prompts.append(TEXT[32:48] + TEXT[:16] + (1,))
    engine = PagedEngine(model, max_rows=8)
    wanted = tools.requests(prompts, max_tokens=8)
    native.agree(tools, model, tools.run(engine, wanted), wanted)
    assert engine.stats.prefilled_tokens == sum(len(p) for p in prompts)


@pytest.mark.parametrize("size", [1, 7, 16, 50])
def test_long_prompts_in_pieces_and_what_they_share(
    tools: Any, native: Any, model: Decoder, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A prefix may still be computed when a prompt that shares it is admitted."""
    monkeypatch.setattr("burnish.inference.native.scheduler.MAX_PREFILL_TOKENS", size)
    prompts = [TEXT[:100], TEXT[:3], (*TEXT[:64], 7, 7), TEXT[:100], TEXT[50:71]]
    engine = PagedEngine(model, max_rows=10)
    wanted = tools.requests(prompts, 2, max_tokens=5)
    native.agree(tools, model, tools.run(engine, wanted), wanted)
    # Of the second prompt of 100 tokens only what a block does not hold may be computed again.
    assert sum(len(p) for p in prompts) - 164 <= engine.stats.prefilled_tokens <= sum(len(p) for p in prompts) - 160


def test_new_weights_forget_what_was_shared(tools: Any, native: Any) -> None:
    model, other = tools.decoder(), tools.decoder(seed=1)
    engine = PagedEngine(model, max_rows=4)
    wanted = tools.requests([TEXT[:50], TEXT[:40]], 2, max_tokens=6)
    native.agree(tools, model, tools.run(engine, wanted), wanted)
    before = engine.stats.prefilled_tokens
    engine.load(1, [(name, p.detach()) for name, p in other.named_parameters()])
    native.agree(tools, other, tools.run(engine, wanted), wanted)
    assert engine.stats.prefilled_tokens == 2 * before
    native.no_block_is_held(engine)


def test_a_beginning_is_found_again_after_others_took_room(tools: Any, native: Any, model: Decoder) -> None:
    """The end of an unused prompt is evicted before its beginning, without which the end cannot be found."""
    engine = PagedEngine(model, max_rows=1, num_blocks=1 + 8)
    first, other = (
        replace(r, id=str(i)) for i, r in enumerate(tools.requests([TEXT[:97], TEXT[200:240]], max_tokens=2))
    )
    tools.run(engine, [first])  # 7 blocks, 6 of them published
    tools.run(engine, [other])  # 3 blocks: one was free, one was not published
    before = engine.stats.prefilled_tokens
    again = replace(first, id="again")
    native.agree(tools, model, tools.run(engine, [again]), [again])
    assert engine.stats.prefilled_tokens - before == 97 - 5 * BLOCK_SIZE


def test_shared_blocks_are_read_in_every_precision(tools: Any, native: Any) -> None:
    for dtype, gap in ((torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        model = tools.decoder(dtype)
        wanted = tools.requests([TEXT[:40], TEXT[:36]], 2, max_tokens=10)
        got = tools.run(PagedEngine(model, max_rows=4), wanted)
        for request in wanted:
            expected = native.learner_logp(model, request, got[request.id])
            assert abs(got[request.id].logp - expected).mean() < gap
