"""The native engines against a sampler without a cache, against the learner, and against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.inference.native import dense_engine
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder
from burnish.models.expert_shape import ExpertShape
from burnish.models.kernels.cpu.c_library import STORED_TYPES, c_kernels
from burnish.models.latent_shape import LatentShape
from burnish.models.weight_files import save_decoder

GREEDY = [(3, 4, 5), (9,), (2, 2, 7, 1, 8, 11)]


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


GEMMA3 = {
    "family": "gemma3_text", "qk_norm": True, "out_norms": True, "norm_shift": 1.0, "activation": "gelu_tanh",
    "scaled_embedding": True, "tied": True, "window": 6, "local_layers": (True, False), "local_theta": 100.0,
    "query_scale": 0.8,
}  # fmt: skip
EXPERTS = {"family": "olmoe", "wide_qk_norm": True, "experts": ExpertShape(6, 2, 20, (True, False))}
GEMMA2 = {
    **{name: value for name, value in GEMMA3.items() if name not in ("qk_norm", "local_theta")},
    "family": "gemma2", "score_softcap": 0.5, "logit_softcap": 2.0,
}  # fmt: skip
DEEPSEEK = {
    "family": "deepseek_v3", "latent": LatentShape(10, 9, 6, 4, 5), "head_dim": 10, "num_kv_heads": 4, "query_scale": 0.8,
    "experts": ExpertShape(6, 2, 20, (False, True), scoring="sigmoid", has_score_bias=True, num_groups=3, chosen_groups=2, shared_size=24),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tools: Any, native: Any, model: Decoder) -> dict[str, Completion]:
    """Each mixed request alone in an engine."""
    return {r.id: tools.run(DenseEngine(model), [r])[r.id] for r in native.mixed_requests()}


# --- the right tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 6}, {"qk_norm": True, "tied": True}, GEMMA3, GEMMA2, DEEPSEEK, EXPERTS],
    ids=["plain", "window", "norms", "gemma3", "gemma2", "deepseek", "experts"],
)
def test_a_crowd_gets_the_tokens_and_logprobs_of_a_sampler_without_a_cache(
    tools: Any, native: Any, options: dict[str, Any]
) -> None:
    """The strongest test: rows move, the cache grows past its first size, prompts are shared, options are mixed."""
    model = tools.decoder(**options)
    wanted = native.mixed_requests()
    for make in (DenseEngine, PagedEngine):
        native.agree(tools, model, tools.run(make(model, max_rows=4), wanted), wanted)


def test_a_sampler_with_a_forward_for_each_token_draws_the_same(
    tools: Any, native: Any, model: Decoder, alone: dict[str, Completion]
) -> None:
    """`agree` takes all tokens of a completion from one forward."""
    for request in native.mixed_requests():
        tokens, logp, finish = tools.reference(native.full_forward(model), request)
        assert alone[request.id].tokens.tolist() == tokens, request.id
        assert alone[request.id].finish == finish
        np.testing.assert_allclose(alone[request.id].logp, np.float32(logp), rtol=2e-7, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), max_rows=st.integers(1, 9), paged=st.booleans())
def test_a_request_gives_the_same_alone_or_in_any_crowd(
    tools: Any,
    native: Any,
    model: Decoder,
    alone: dict[str, Completion],
    data: st.DataObject,
    max_rows: int,
    paged: bool,
) -> None:
    crowd = data.draw(st.lists(st.sampled_from(native.mixed_requests()), min_size=1, unique_by=lambda r: r.id))
    engine = (PagedEngine if paged else DenseEngine)(model, max_rows)
    for name, completion in tools.run(engine, crowd).items():
        native.same(completion, alone[name])


def test_a_fixed_set_gives_the_same_alone_or_in_a_crowd_in_float32(tools: Any, native: Any, make: Any) -> None:
    model = tools.decoder(torch.float32)
    crowd = tools.run(make(model, max_rows=3), native.mixed_requests())
    for request in native.mixed_requests():
        single = tools.run(make(model, max_rows=1), [request])[request.id]
        assert crowd[request.id].tokens.tolist() == single.tokens.tolist()


@pytest.fixture(scope="module")
def greedy(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, list[list[int]]]:
    """A model, and the greedy completions of transformers with its weights."""
    folder: Path = tmp_path_factory.mktemp("greedy")
    model = tools.decoder(torch.float32)
    save_decoder(model, folder, source=None)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for tokens in GREEDY:
        prompt = torch.tensor([tokens])
        output = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40, pad_token_id=0
        )
        found.append(output[0, prompt.shape[1] :].tolist())
    return model, found


def test_greedy_equals_that_of_transformers(
    tools: Any, native: Any, make: Any, greedy: tuple[Decoder, list[list[int]]]
) -> None:
    model, theirs = greedy
    wanted = tools.requests(GREEDY, temperature=0.0, max_tokens=40)
    got = tools.run(make(model, max_rows=4), wanted)
    for request, tokens in zip(wanted, theirs, strict=True):
        assert got[request.id].tokens.tolist() == tokens
        expected = native.learner_logp(model, request, got[request.id])  # untempered
        np.testing.assert_allclose(got[request.id].logp, expected, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.75}, {"min_p": 0.3, "temperature": 1.5}], ids=str
)
def test_sampled_frequencies_follow_the_model(
    tools: Any, native: Any, make: Any, model: Decoder, options: dict[str, Any]
) -> None:
    n, prompt = 2000, (3, 4, 5)
    wanted = tools.requests([prompt], n, max_tokens=1, **options)
    got = tools.run(make(model, max_rows=n), wanted)
    p = tools.distribution(native.full_forward(model)(list(prompt)), wanted[0].sampling).numpy()
    count = np.bincount([int(c.tokens[0]) for c in got.values()], minlength=len(p))
    assert count[p == 0].sum() == 0
    freedom = int((p > 0).sum()) - 1
    statistic = float(((count - n * p)[p > 0] ** 2 / (n * p[p > 0])).sum())
    assert statistic <= freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
def test_a_greedy_token_has_the_same_logprob_beside_rows_that_truncate(
    tools: Any, make: Any, model: Decoder, options: dict[str, Any]
) -> None:
    wanted = tools.requests([(3, 4)], temperature=0.0, **options)
    beside = Request("beside", (9,), SamplingOptions(max_tokens=12, top_k=2, top_p=0.6, min_p=0.1), 5)
    single = tools.run(make(model, max_rows=2), wanted)["0.0"]
    crowd = tools.run(make(model, max_rows=2), [*wanted, beside])["0.0"]
    assert single.tokens.tolist() == crowd.tokens.tolist()
    np.testing.assert_allclose(single.logp, crowd.logp, rtol=1e-6, atol=1e-12)


# --- log-probs of the learner ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_logprobs_are_the_learners(tools: Any, native: Any, make: Any, temperature: float) -> None:
    prompts = [(3, 4, 5), (9,), (2, 2, 7, 1, 8, 11, 5, 5)]
    single, double = tools.decoder(torch.float32), tools.decoder(torch.float64)
    wanted = tools.requests(prompts, 2, max_tokens=60, temperature=temperature)
    gaps = []
    for model in (single, double):
        got = tools.run(make(model, max_rows=4), wanted)
        gaps.append(np.concatenate([np.abs(got[r.id].logp - native.learner_logp(model, r, got[r.id])) for r in wanted]))
    assert gaps[0].size == 3 * 2 * 60
    assert gaps[0].mean() <= 1e-5
    assert gaps[0].max() <= 1e-3
    # A completion carries float32, so in float64 what is left is one rounding of a log-prob of at most about 16.
    assert gaps[1].max() <= 16 * 2.0**-24


def test_bfloat16_logprobs_are_near_the_learners(tools: Any, native: Any, make: Any) -> None:
    model = tools.decoder(torch.bfloat16)
    wanted = tools.requests([(3, 4, 5), (9,)], 4, max_tokens=30)
    got = tools.run(make(model, max_rows=8), wanted)
    gap = np.concatenate([np.abs(got[r.id].logp - native.learner_logp(model, r, got[r.id])) for r in wanted])
    assert gap.mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_several_steps_in_a_call_draw_the_tokens_of_single_steps(
    tools: Any, dtype: torch.dtype, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if c_kernels(torch.empty(0, dtype=dtype), stored_in=STORED_TYPES) is None:
        pytest.skip("no C compiler here: torch takes every step by itself")
    model = tools.decoder(dtype)
    base = tools.requests([(3, 4, 5), (9,), (2, 2, 7, 1, 8, 11)], 8)
    wanted = [
        replace(r, generated=i % 3, sampling=SamplingOptions(max_tokens=5 + 4 * (i % 10), temperature=temperature, stop_tokens=(4, 6)))
        for i, r in enumerate(base)
    ]  # fmt: skip
    found, calls = [], []
    for most in (1, 32):
        monkeypatch.setattr(dense_engine, "MAX_STEPS_AT_ONCE", most)
        engine = DenseEngine(model, max_rows=32)
        calls.append(0)

        def counted(decode: Any = engine._decode) -> list[Completion]:
            calls[-1] += 1
            return list(decode())

        monkeypatch.setattr(engine, "_decode", counted)
        found.append(tools.run(engine, wanted))
        assert engine._c_step is not None
        assert engine.stats.tokens == sum(len(c.tokens) for c in found[-1].values())
    for one, many in zip(*(found_in.values() for found_in in found), strict=True):
        assert (one.id, one.finish, one.tokens.tolist()) == (many.id, many.finish, many.tokens.tolist())
        assert np.array_equal(one.logp, many.logp)
    assert {c.finish for c in found[0].values()} == {"stop", "length"}
    assert calls[1] < calls[0] / 3


# --- the work done ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [1, 5, 8, 64])
def test_the_prompt_of_a_group_is_prefilled_once(tools: Any, model: Decoder, max_rows: int) -> None:
    """For any number of rows: the dense engine keeps a prompt until its last sample is admitted."""
    prompts = [(3, 4, 5), (9,), (2, 2, 7, 1, 8, 11)]
    engine = DenseEngine(model, max_rows)
    tools.run(engine, tools.requests(prompts, 8, max_tokens=4))
    assert engine.stats.prefilled_tokens == sum(len(p) for p in prompts)
    assert not engine.prefilled
    assert not engine.waiting


@pytest.mark.parametrize("steps", [None, 8])
def test_few_row_steps_are_spent_on_finished_sequences(tools: Any, model: Decoder, steps: int | None) -> None:
    """The dense engine spends none. In the paged one a row at its limit idles to the end of the launch."""
    engine: Any = PagedEngine(model, 8, steps_per_launch=steps) if steps else DenseEngine(model, max_rows=8)
    base = tools.requests([(3, 4, 5), (9,)], 16)
    lengths = [(i * 37) % 32 + 1 for i in range(32)]
    assert sorted(lengths) == list(range(1, 33))
    wanted = [replace(r, sampling=SamplingOptions(max_tokens=n)) for r, n in zip(base, lengths, strict=True)]
    got = tools.run(engine, wanted)
    assert [len(got[r.id].tokens) for r in wanted] == lengths
    idle = (steps or 1) - 1
    assert engine.stats.tokens == sum(lengths)
    assert sum(lengths) - 32 <= engine.stats.row_steps <= sum(lengths) - 32 + 32 * idle
    # Freed rows are filled soon: only the end, when the queue is empty, runs with fewer rows.
    assert engine.stats.decode_steps <= sum(lengths) / 8 + 32 + 8 * idle


@pytest.mark.parametrize(
    ("limit", "engine_class"),
    [("dense_engine.PREFILL_CHUNK_TOKENS", DenseEngine), ("scheduler.MAX_PREFILL_TOKENS", PagedEngine)],
)
def test_long_prompts_are_prefilled_in_parts_with_the_same_result(
    tools: Any,
    native: Any,
    model: Decoder,
    alone: dict[str, Completion],
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    engine_class: Any,
) -> None:
    monkeypatch.setattr(f"burnish.inference.native.{limit}", 8)
    for name, completion in tools.run(engine_class(model, 8), native.mixed_requests()).items():
        native.same(completion, alone[name])


# --- when a request ends ---------------------------------------------------------------------------------------------------


def test_stop_tokens_end_a_completion_and_belong_to_it(tools: Any, make: Any) -> None:
    engine = make(tools.successor(16))
    wanted = [
        *tools.requests([(3,)], stop_tokens=(9, 7), max_tokens=50),
        Request("limit", (3,), SamplingOptions(max_tokens=4, stop_tokens=(8,)), 1),
        Request("both", (3,), SamplingOptions(max_tokens=4, stop_tokens=(7,)), 2),
        Request("many", (3,), SamplingOptions(max_tokens=30, stop_tokens=(*range(1000, 1030), 7)), 3),
    ]
    got = tools.run(engine, wanted)
    assert {name: (c.tokens.tolist(), c.finish) for name, c in got.items()} == {
        "0.0": ([4, 5, 6, 7], "stop"),
        "limit": ([4, 5, 6, 7], "length"),
        "both": ([4, 5, 6, 7], "stop"),
        "many": ([4, 5, 6, 7], "stop"),
    }


@pytest.mark.parametrize(
    ("stop", "length"),
    [(("e",), 1), (("gh",), 4), (("zz", "fgh"), 4), (("xa",), None), (("def",), None), (("abc", "ijk"), 7)],
)
def test_stop_strings_end_a_completion_across_token_borders(
    tools: Any, native: Any, make: Any, stop: tuple[str, ...], length: int | None
) -> None:
    """The prompt is `d`, and the model continues the alphabet. The text of the prompt does not stop it."""
    engine = make(tools.successor(16), decode=native.spell)
    got = tools.run(engine, tools.requests([(3,)], stop=stop, max_tokens=8))["0.0"]
    assert got.finish == ("length" if length is None else "stop")
    assert got.tokens.tolist() == list(range(4, 4 + (length or 8)))
    assert len(got.logp) == len(got.tokens)


def test_a_stop_string_of_wide_characters_is_found_when_each_byte_is_a_token(tools: Any, make: Any) -> None:
    text = "漢字仮名交文" * 2
    spelled = text.encode()
    engine = make(
        tools.successor(len(spelled) + 2),
        decode=lambda tokens: bytes(spelled[t - 1] for t in tokens if 0 < t <= len(spelled)).decode(errors="replace"),
    )
    got = tools.run(engine, tools.requests([(0,)], stop=(text,), max_tokens=len(spelled) + 20))["0.0"]
    assert got.finish == "stop"
    assert len(got.tokens) == len(spelled)


def test_the_listener_hears_every_token_in_order(tools: Any, native: Any, make: Any, model: Decoder) -> None:
    heard: dict[str, list[int]] = {}
    engine = make(model, 3, native.spell, lambda name, token: heard.setdefault(name, []).append(token))
    stopped = replace(native.mixed_requests()[3], id="stopped", sampling=SamplingOptions(max_tokens=60, stop=("a",)))
    got = tools.run(engine, [*native.mixed_requests(), stopped])
    assert got["stopped"].finish == "stop"
    assert heard == {name: c.tokens.tolist() for name, c in got.items()}
