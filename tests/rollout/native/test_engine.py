"""The native engine against a sampler without a cache, against the learner, and against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.keys import fold
from burnish.models.decoder import Decoder
from burnish.models.weights import save_decoder
from burnish.rollout.native.engine import NativeEngine

SAMPLINGS = [
    SamplingOptions(max_tokens=9),
    SamplingOptions(max_tokens=30, temperature=0.7, stop_tokens=(1,)),
    SamplingOptions(max_tokens=17, top_k=4, stop_tokens=(1, 5)),
    SamplingOptions(max_tokens=25, top_p=0.8),
    SamplingOptions(max_tokens=1),
    SamplingOptions(max_tokens=12, temperature=0.0),
    SamplingOptions(max_tokens=70, temperature=1.3, top_k=6, top_p=0.9),
]


def full_forward(model: Decoder) -> Callable[[list[int]], Tensor]:
    """Logits of the next token, by a forward over everything before it."""

    def next_logits(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            hidden = model.hidden(torch.tensor(tokens), torch.tensor([0, len(tokens)]))
            return model.logits(hidden[-1:])[0]

    return next_logits


def learner_logp(model: Decoder, request: Request, completion: Completion) -> np.ndarray:
    """The learner's log-probs of a completion's tokens."""
    tokens = torch.tensor([*request.tokens, *completion.tokens.tolist()])
    wanted = torch.arange(len(request.tokens), len(tokens))
    with torch.no_grad():
        logp, _ = model.token_logprobs(
            tokens, torch.tensor([0, len(tokens)]), wanted, request.sampling.temperature or 1.0
        )
    return logp.numpy()


def mixed_requests() -> list[Request]:
    """Prompts of different lengths, two of them equal, with every kind of sampling option."""
    prompts = [(3,), (4, 5, 6), (3, 3, 9, 2, 7, 7, 8, 1, 0, 4), (4, 5, 6), (11, 2), (6,) * 40, (9, 8, 7)]
    return [
        Request(f"r{i}", prompt, sampling, fold("mixed", i), generated=i % 3)
        for i, (prompt, sampling) in enumerate(zip(prompts, SAMPLINGS, strict=True))
    ]


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


@pytest.fixture(scope="module")
def alone(tools: Any, model: Decoder) -> dict[str, Completion]:
    """Each mixed request by itself in an engine of its own."""
    return {r.id: tools.run(NativeEngine(model), [r])[r.id] for r in mixed_requests()}


# --- the right tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"qk_norm": True, "tied": True}], ids=str)
def test_a_crowd_gets_the_tokens_and_logprobs_of_a_sampler_without_a_cache(tools: Any, options: dict[str, Any]) -> None:
    """The strongest test: rows move, the cache grows past its first size, prompts are shared, options are mixed."""
    model = tools.decoder(**options)
    engine = NativeEngine(model, max_rows=4)
    wanted = mixed_requests()
    got = tools.run(engine, wanted)
    for request in wanted:
        tokens, logp, finish = tools.reference(full_forward(model), request)
        assert got[request.id].tokens.tolist() == tokens, request.id
        assert got[request.id].finish == finish
        np.testing.assert_allclose(got[request.id].logp, np.float32(logp), rtol=2e-7, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(order=st.permutations(range(len(SAMPLINGS))), size=st.integers(1, 7), max_rows=st.integers(1, 8))
def test_a_request_gives_the_same_alone_or_in_any_crowd(
    tools: Any, model: Decoder, alone: dict[str, Completion], order: list[int], size: int, max_rows: int
) -> None:
    crowd = [mixed_requests()[i] for i in order[:size]]
    for name, completion in tools.run(NativeEngine(model, max_rows), crowd).items():
        assert completion.tokens.tolist() == alone[name].tokens.tolist()
        assert completion.finish == alone[name].finish
        np.testing.assert_allclose(completion.logp, alone[name].logp, rtol=2e-7, atol=1e-12)


def test_a_fixed_set_gives_the_same_alone_or_in_a_crowd_in_float32(tools: Any) -> None:
    model = tools.decoder(torch.float32)
    crowd = tools.run(NativeEngine(model, max_rows=3), mixed_requests())
    for request in mixed_requests():
        single = tools.run(NativeEngine(model), [request])[request.id]
        assert crowd[request.id].tokens.tolist() == single.tokens.tolist()


def test_greedy_equals_that_of_transformers(tools: Any, tmp_path: Path) -> None:
    model = tools.decoder(torch.float32)
    save_decoder(model, tmp_path, source=None)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = tools.requests([(3, 4, 5), (9,), (2, 2, 7, 1, 8, 11)], temperature=0.0, max_tokens=40)
    got = tools.run(NativeEngine(model), wanted)
    for request in wanted:
        prompt = torch.tensor([request.tokens])
        output = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40, pad_token_id=0
        )
        assert got[request.id].tokens.tolist() == output[0, prompt.shape[1] :].tolist()
        expected = learner_logp(model, request, got[request.id])  # untempered
        np.testing.assert_allclose(got[request.id].logp, expected, atol=1e-5)


def test_sampled_frequencies_follow_the_model(tools: Any, model: Decoder) -> None:
    n, prompt = 2000, (3, 4, 5)
    for options in ({}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.75}):
        wanted = tools.requests([prompt], n, max_tokens=1, **options)
        got = tools.run(NativeEngine(model, max_rows=n), wanted)
        p = tools.distribution(full_forward(model)(list(prompt)), wanted[0].sampling).numpy()
        count = np.bincount([int(c.tokens[0]) for c in got.values()], minlength=len(p))
        assert count[p == 0].sum() == 0
        freedom = int((p > 0).sum()) - 1
        statistic = float(((count - n * p)[p > 0] ** 2 / (n * p[p > 0])).sum())
        assert statistic <= freedom + 4 * (2 * freedom) ** 0.5, options


# --- log-probs of the learner ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_logprobs_are_the_learners(tools: Any, temperature: float) -> None:
    prompts = [(3, 4, 5), (9,), (2, 2, 7, 1, 8, 11, 5, 5)]
    single, double = tools.decoder(torch.float32), tools.decoder(torch.float64)
    wanted = tools.requests(prompts, 4, max_tokens=60, temperature=temperature)
    gaps = []
    for model in (single, double):
        got = tools.run(NativeEngine(model, max_rows=7), wanted)
        gaps.append(np.concatenate([np.abs(got[r.id].logp - learner_logp(model, r, got[r.id])) for r in wanted]))
    assert gaps[0].size == 3 * 4 * 60
    assert gaps[0].mean() <= 1e-5
    assert gaps[0].max() <= 1e-3
    # A completion carries float32, so in float64 what is left is one rounding of a log-prob of at most about 16.
    assert gaps[1].max() <= 16 * 2.0**-24


def test_bfloat16_logprobs_are_near_the_learners(tools: Any) -> None:
    model = tools.decoder(torch.bfloat16)
    wanted = tools.requests([(3, 4, 5), (9,)], 4, max_tokens=30)
    got = tools.run(NativeEngine(model), wanted)
    gap = np.concatenate([np.abs(got[r.id].logp - learner_logp(model, r, got[r.id])) for r in wanted])
    assert gap.mean() < 0.02


# --- the work done ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [1, 5, 8, 64])
def test_the_prompt_of_a_group_is_prefilled_once(tools: Any, model: Decoder, max_rows: int) -> None:
    prompts = [(3, 4, 5), (9,), (2, 2, 7, 1, 8, 11)]
    engine = NativeEngine(model, max_rows)
    tools.run(engine, tools.requests(prompts, 8, max_tokens=4))
    assert engine.stats.prefilled_tokens == sum(len(p) for p in prompts)
    assert not engine.prefilled
    assert not engine.waiting


def test_no_row_step_is_spent_on_a_finished_sequence(tools: Any, model: Decoder) -> None:
    engine = NativeEngine(model, max_rows=8)
    base = tools.requests([(3, 4, 5), (9,)], 32)
    lengths = [(i * 37) % 64 + 1 for i in range(64)]
    assert sorted(lengths) == list(range(1, 65))
    wanted = [replace(r, sampling=SamplingOptions(max_tokens=n)) for r, n in zip(base, lengths, strict=True)]
    got = tools.run(engine, wanted)
    assert [len(got[r.id].tokens) for r in wanted] == lengths
    assert engine.stats.tokens == sum(lengths)
    assert engine.stats.row_steps <= 1.1 * sum(lengths)
    # Freed rows are filled at once: only the end, when the queue is empty, runs with fewer rows.
    assert engine.stats.decode_steps <= sum(lengths) / 8 + 64


def test_long_prompts_are_prefilled_in_parts_with_the_same_result(
    tools: Any, model: Decoder, alone: dict[str, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.rollout.native.engine.PREFILL_TOKENS", 8)
    got = tools.run(NativeEngine(model), mixed_requests())
    assert all(got[name].tokens.tolist() == c.tokens.tolist() for name, c in alone.items())


# --- when a request ends ---------------------------------------------------------------------------------------------------


def test_stop_tokens_end_a_completion_and_belong_to_it(tools: Any) -> None:
    engine = NativeEngine(tools.successor(16))
    wanted = [
        *tools.requests([(3,)], stop_tokens=(9, 7), max_tokens=50),
        Request("limit", (3,), SamplingOptions(max_tokens=4, stop_tokens=(8,)), 1),
        Request("both", (3,), SamplingOptions(max_tokens=4, stop_tokens=(7,)), 2),
    ]
    got = tools.run(engine, wanted)
    assert got["0.0"].tokens.tolist() == [4, 5, 6, 7]
    assert got["0.0"].finish == "stop"
    assert got["limit"].tokens.tolist() == [4, 5, 6, 7]
    assert got["limit"].finish == "length"
    assert got["both"].finish == "stop"


@pytest.mark.parametrize(
    ("stop", "length"),
    [(("e",), 1), (("gh",), 4), (("zz", "fgh"), 4), (("xa",), None), (("def",), None), (("abc", "ijk"), 7)],
)
def test_stop_strings_end_a_completion_across_token_borders(
    tools: Any, stop: tuple[str, ...], length: int | None
) -> None:
    """The prompt is `d`, the model continues the alphabet; what the prompt says does not stop it."""
    engine = NativeEngine(tools.successor(16), decode=lambda tokens: "".join(chr(97 + t) for t in tokens))
    got = tools.run(engine, tools.requests([(3,)], stop=stop, max_tokens=8))["0.0"]
    assert got.finish == ("length" if length is None else "stop")
    assert got.tokens.tolist() == list(range(4, 4 + (length or 8)))


def test_a_stop_string_of_wide_characters_is_found_when_each_byte_is_a_token(tools: Any) -> None:
    text = "漢字仮名交文" * 2
    spelled = text.encode()
    engine = NativeEngine(
        tools.successor(len(spelled) + 2),
        decode=lambda tokens: bytes(spelled[t - 1] for t in tokens if 0 < t <= len(spelled)).decode(errors="replace"),
    )
    got = tools.run(engine, tools.requests([(0,)], stop=(text,), max_tokens=len(spelled) + 20))["0.0"]
    assert got.finish == "stop"
    assert len(got.tokens) == len(spelled)


def test_the_listener_hears_every_token_in_order(tools: Any, model: Decoder) -> None:
    heard: dict[str, list[int]] = {}
    engine = NativeEngine(model, 3, listener=lambda name, token: heard.setdefault(name, []).append(token))
    got = tools.run(engine, mixed_requests())
    assert heard == {name: c.tokens.tolist() for name, c in got.items()}


# --- abort, submit meanwhile -------------------------------------------------------------------------------------------------


def test_an_aborted_request_can_be_continued_as_if_it_had_never_stopped(tools: Any, model: Decoder) -> None:
    short, *long = [
        replace(r, sampling=SamplingOptions(max_tokens=n))
        for r, n in zip(tools.requests([(3, 4)], 4), (6, 40, 40, 40), strict=True)
    ]
    whole = {r.id: tools.run(NativeEngine(model), [r])[r.id] for r in long}
    engine = NativeEngine(model, max_rows=3)
    engine.submit([short, *long])
    stream = engine.stream()
    assert next(stream).id == short.id
    kept = {c.id: c for c in engine.abort([r.id for r in long], keep=True)}
    assert list(stream) == []
    assert kept.keys() == whole.keys()
    assert sorted(len(c.tokens) for c in kept.values())[0] == 0, "the request that waited has nothing yet"
    for request in long:
        part = kept[request.id]
        assert part.finish == "aborted"
        done = len(part.tokens)
        rest = Request(
            "rest", (*request.tokens, *part.tokens.tolist()), SamplingOptions(max_tokens=40 - done), request.key, done
        )
        again = tools.run(engine, [rest])["rest"]
        assert [*part.tokens, *again.tokens] == whole[request.id].tokens.tolist()
        np.testing.assert_allclose([*part.logp, *again.logp], whole[request.id].logp, rtol=2e-7)


def test_a_dropped_request_leaves_nothing_and_the_others_as_they_were(
    tools: Any, model: Decoder, alone: dict[str, Completion]
) -> None:
    engine = NativeEngine(model, max_rows=3)
    engine.submit(mixed_requests())
    stream = engine.stream()
    first = next(stream)
    running = [r.id for r in engine.rows.requests]
    dropped = {running[0], "r6"}
    assert engine.abort(dropped, keep=False) == []
    rest = {c.id: c for c in stream} | {first.id: first}
    assert rest.keys() == alone.keys() - dropped
    assert all(c.tokens.tolist() == alone[name].tokens.tolist() for name, c in rest.items())
    again = tools.run(engine, [r for r in mixed_requests() if r.id in dropped])  # the ids are free again
    assert all(c.tokens.tolist() == alone[name].tokens.tolist() for name, c in again.items())


def test_aborting_what_is_not_there_is_an_error(tools: Any, model: Decoder) -> None:
    engine = NativeEngine(model)
    tools.run(engine, tools.requests([(3,)]))
    with pytest.raises(KeyError, match=r"0\.0"):
        engine.abort(["0.0"], keep=True)


def test_requests_may_be_submitted_while_streaming(tools: Any, model: Decoder, alone: dict[str, Completion]) -> None:
    waiting = mixed_requests()
    engine = NativeEngine(model, max_rows=2)
    engine.submit([waiting.pop()])
    got = {}
    for completion in engine.stream():
        got[completion.id] = completion
        if waiting:
            engine.submit([waiting.pop() for _ in range(min(2, len(waiting)))])
    assert got.keys() == alone.keys()
    assert all(c.tokens.tolist() == alone[name].tokens.tolist() for name, c in got.items())


@pytest.mark.parametrize("keep", [True, False])
def test_a_prompt_whose_waiting_samples_are_aborted_is_forgotten(tools: Any, model: Decoder, keep: bool) -> None:
    """Or new weights would be refused for ever, and the next sample would read the cache of old ones."""
    a, b = SamplingOptions(max_tokens=2), SamplingOptions(max_tokens=2)
    engine = NativeEngine(model, max_rows=1)
    engine.submit([Request("a1", (3, 4), a, 1), Request("b", (5,), b, 2), Request("a2", (3, 4), a, 3)])
    stream = engine.stream()
    assert [next(stream).id, next(stream).id] == ["a1", "b"]
    engine.abort(["a2"], keep)
    assert list(stream) == []
    engine.load(1, [])


# --- weights -----------------------------------------------------------------------------------------------------------------


def test_the_engine_reads_the_very_tensors_of_the_model(tools: Any) -> None:
    model = tools.decoder()
    addresses = [p.data_ptr() for p in model.parameters()]
    engine = NativeEngine(model)
    wanted = tools.requests([(3, 4, 5)], 2)
    before = tools.run(engine, wanted)
    assert {c.version for c in before.values()} == {0}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    engine.load(5, [])
    after = tools.run(engine, wanted)
    assert {c.version for c in after.values()} == {5}
    for request in wanted:
        np.testing.assert_allclose(
            after[request.id].logp, learner_logp(model, request, after[request.id]), rtol=2e-7, atol=1e-12
        )
        assert not np.allclose(after[request.id].logp, before[request.id].logp)
    assert [p.data_ptr() for p in engine.model.parameters()] == addresses


def test_named_tensors_are_copied_in_place(tools: Any) -> None:
    model, other = tools.decoder(), tools.decoder(seed=1)
    engine = NativeEngine(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    engine.load(1, ((name, p.detach()) for name, p in other.named_parameters()))
    wanted = tools.requests([(3, 4, 5)], 2)
    got, expected = tools.run(engine, wanted), tools.run(NativeEngine(other), wanted)
    assert all(got[r.id].tokens.tolist() == expected[r.id].tokens.tolist() for r in wanted)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_new_weights_while_rows_run_are_refused(tools: Any, model: Decoder) -> None:
    engine = NativeEngine(model)
    engine.submit(mixed_requests())
    stream = engine.stream()
    next(stream)
    with pytest.raises(RuntimeError, match="rows are running"):
        engine.load(1, [])
    engine.abort([r.id for r in engine.rows.requests], keep=False)
    list(stream)  # those that had finished already
    engine.load(1, [])


def test_sleep_frees_the_cache_and_the_engine_works_again(
    tools: Any, model: Decoder, alone: dict[str, Completion]
) -> None:
    engine = NativeEngine(model, max_rows=4)
    tools.run(engine, mixed_requests())
    assert engine.cache.keys.numel() > 0
    engine.sleep()
    assert engine.cache.keys.numel() == engine.cache.values.numel() == 0
    engine.wake()
    again = tools.run(engine, mixed_requests())
    assert all(again[name].tokens.tolist() == c.tokens.tolist() for name, c in alone.items())
    engine.submit(mixed_requests())
    with pytest.raises(RuntimeError, match="7 requests unfinished"):
        engine.sleep()


# --- refusals ----------------------------------------------------------------------------------------------------------------


def test_a_request_too_long_for_the_model_is_refused_with_the_numbers(tools: Any) -> None:
    engine = NativeEngine(tools.decoder(max_positions=20))
    with pytest.raises(UserError, match=r"request 0\.0: 9 prompt tokens \+ 12 new ones = 21.*20 positions"):
        engine.submit(tools.requests([(3,) * 9]))
    assert len(tools.run(engine, tools.requests([(3,) * 8]))["0.0"].tokens) == 12


def test_bad_requests_are_refused_before_any_of_them_is_queued(tools: Any, model: Decoder) -> None:
    engine = NativeEngine(model)
    good = tools.requests([(3,)])
    with pytest.raises(UserError, match=r"request 1\.0: the prompt has no tokens"):
        engine.submit(tools.requests([(3,), ()]))
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        engine.submit(tools.requests([(3,)], stop=("x",)))
    engine.submit(good)
    with pytest.raises(ValueError, match=r"0\.0 is already running"):
        engine.submit(good)
    assert [c.id for c in engine.stream()] == ["0.0"]
    assert tools.run(engine, good).keys() == {"0.0"}


def test_two_requests_of_one_id_are_refused_also_within_one_call(tools: Any, model: Decoder) -> None:
    engine = NativeEngine(model)
    with pytest.raises(ValueError, match=r"0\.0"):
        engine.submit(tools.requests([(3,)]) * 2)
