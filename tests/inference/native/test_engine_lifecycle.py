"""Life cycle of requests and engines: late submission, priorities, interrupts, aborts, new weights, sleep, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


@pytest.fixture(scope="module")
def alone(tools: Any, native: Any, model: Decoder) -> dict[str, Completion]:
    """Each mixed request alone in an engine."""
    return {r.id: tools.run(DenseEngine(model), [r])[r.id] for r in native.mixed_requests()}


def running(engine: DenseEngine | PagedEngine) -> list[str]:
    """Ids of the running requests."""
    if isinstance(engine, DenseEngine):
        return [request.id for request in engine.rows.requests]
    return [state.request.id for state in engine.scheduler.running()]


# --- the stream --------------------------------------------------------------------------------------------------------------


def test_requests_may_be_submitted_while_streaming(
    native: Any, make: Any, model: Decoder, alone: dict[str, Completion]
) -> None:
    waiting = native.mixed_requests()
    engine = make(model, max_rows=2)
    engine.submit([waiting.pop()])
    got = {}
    for completion in engine.stream():
        got[completion.id] = completion
        if waiting:
            engine.submit([waiting.pop() for _ in range(min(2, len(waiting)))])
    assert got.keys() == alone.keys()
    for name, completion in got.items():
        native.same(completion, alone[name])


def test_of_those_that_wait_the_highest_priority_goes_first(tools: Any, make: Any, model: Decoder) -> None:
    engine = make(model, max_rows=1)
    base = tools.requests([(3, 4), (5,)], 3, max_tokens=3)
    engine.submit([replace(r, priority=p) for r, p in zip(base, (0, 0, 1, 0, 5, 1), strict=True)])
    stream = engine.stream()
    order = [next(stream).id]
    engine.submit([Request("late", (7,), SamplingOptions(max_tokens=2), 1, priority=1)])
    order += [completion.id for completion in stream]
    assert order == ["1.1", "0.2", "1.2", "late", "0.0", "0.1", "1.0"]


def test_a_stream_interrupted_again_and_again_loses_nothing(
    native: Any, make: Any, model: Decoder, alone: dict[str, Completion]
) -> None:
    engine = make(model, 4, listener=lambda name, token: engine.interrupt())
    engine.submit(native.mixed_requests())
    engine.interrupt()
    assert list(engine.stream()) == []
    got: dict[str, Completion] = {}
    streams = 0
    while got.keys() != alone.keys():
        got |= {completion.id: completion for completion in engine.stream()}
        streams += 1
    assert streams > 10
    assert list(engine.stream()) == []
    for name, completion in got.items():
        native.same(completion, alone[name])


def test_a_stream_that_is_left_goes_on_in_the_next_one(tools: Any, make: Any, model: Decoder) -> None:
    """Also for requests that ended in the same step as the last one yielded."""
    wanted = tools.requests([(3, 4), (5,)], 4, max_tokens=5)
    engine = make(model, max_rows=8)
    engine.submit(wanted)
    found = []
    while len(found) < len(wanted):
        stream = engine.stream()
        found.append(next(stream).id)
        stream.close()
    assert sorted(found) == sorted(r.id for r in wanted)
    assert list(engine.stream()) == []


# --- abort -------------------------------------------------------------------------------------------------------------------


def test_an_aborted_request_can_be_continued_as_if_it_had_never_stopped(tools: Any, make: Any, model: Decoder) -> None:
    short, *long = [
        replace(r, sampling=SamplingOptions(max_tokens=n))
        for r, n in zip(tools.requests([(3, 4)], 4), (6, 40, 40, 40), strict=True)
    ]
    whole = {r.id: tools.run(DenseEngine(model), [r])[r.id] for r in long}
    engine = make(model, max_rows=2)
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
    tools: Any, native: Any, make: Any, model: Decoder, alone: dict[str, Completion]
) -> None:
    engine = make(model, max_rows=3)
    wanted = native.mixed_requests()
    engine.submit([*wanted[8::-1], *wanted[9:]])
    stream = engine.stream()
    first = next(stream)
    dropped = {"r6", "r0"}
    assert dropped & set(running(engine)) == {"r6"}, "one that runs, one that waits"
    assert engine.abort(dropped, keep=False) == []
    rest = {c.id: c for c in stream} | {first.id: first}
    assert rest.keys() == alone.keys() - dropped
    again = tools.run(engine, [r for r in native.mixed_requests() if r.id in dropped])  # the ids are free again
    for name, completion in (rest | again).items():
        native.same(completion, alone[name])


@pytest.mark.parametrize("keep", [True, False])
def test_a_request_that_has_ended_and_was_not_handed_over_can_be_aborted(
    tools: Any, make: Any, model: Decoder, keep: bool
) -> None:
    wanted = tools.requests([(3, 4)], 4, max_tokens=5)
    engine = make(model, max_rows=4)
    engine.submit(wanted)
    stream = engine.stream()
    first = next(stream)
    ended = {c.id for c in engine.ready}
    assert len(ended) == 3
    with pytest.raises(ValueError, match="already running"):
        engine.submit([r for r in wanted if r.id in ended])
    gone = sorted(ended)[1]
    kept = engine.abort([gone], keep)
    assert [(c.id, c.finish, len(c.tokens)) for c in kept] == ([(gone, "length", 5)] if keep else [])
    assert {c.id for c in stream} == {r.id for r in wanted} - {first.id, gone}


def test_aborting_what_is_not_there_is_an_error_and_changes_nothing(tools: Any, make: Any, model: Decoder) -> None:
    engine = make(model)
    with pytest.raises(KeyError, match="never"):
        engine.abort(["never"], keep=True)
    tools.run(engine, tools.requests([(3,)]))
    with pytest.raises(KeyError, match=r"0\.0"):
        engine.abort(["0.0"], keep=True)
    engine.submit(tools.requests([(3,)]))
    with pytest.raises(KeyError, match="never"):
        engine.abort(["0.0", "never"], keep=False)
    assert [c.id for c in engine.stream()] == ["0.0"]


@pytest.mark.parametrize("keep", [True, False])
def test_a_prompt_whose_waiting_samples_are_aborted_is_forgotten(
    tools: Any, make: Any, model: Decoder, keep: bool
) -> None:
    """Otherwise new weights would be refused without end, and the next sample would read the cache of old ones."""
    a, b = SamplingOptions(max_tokens=2), SamplingOptions(max_tokens=2)
    engine = make(model, max_rows=1)
    engine.submit([Request("a1", (3, 4), a, 1), Request("b", (5,), b, 2), Request("a2", (3, 4), a, 3)])
    stream = engine.stream()
    assert [next(stream).id, next(stream).id] == ["a1", "b"]
    engine.abort(["a2"], keep)
    assert list(stream) == []
    engine.load(1, [])


# --- weights -----------------------------------------------------------------------------------------------------------------


def test_the_engine_reads_the_very_tensors_of_the_model(tools: Any, native: Any, make: Any) -> None:
    """Keys and values of the old weights are not used again."""
    model = tools.decoder()
    addresses = [p.data_ptr() for p in model.parameters()]
    engine = make(model, max_rows=4)
    wanted = tools.requests([(3, 4, 5) * 20], 2)
    before = tools.run(engine, wanted)
    assert {c.version for c in before.values()} == {0}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    engine.load(5, [])
    after = tools.run(engine, wanted)
    assert {c.version for c in after.values()} == {5}
    native.agree(tools, model, after, wanted)
    for request in wanted:
        assert not np.allclose(after[request.id].logp, before[request.id].logp)
    assert [p.data_ptr() for p in engine.model.parameters()] == addresses


def test_named_tensors_are_copied_in_place(tools: Any, native: Any, make: Any) -> None:
    model, other = tools.decoder(), tools.decoder(seed=1)
    engine = make(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    engine.load(1, ((name, p.detach()) for name, p in other.named_parameters()))
    wanted = tools.requests([(3, 4, 5)], 2)
    native.agree(tools, other, tools.run(engine, wanted), wanted)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_new_weights_while_rows_run_are_refused(native: Any, make: Any, model: Decoder) -> None:
    engine = make(model)
    engine.submit(native.mixed_requests())
    stream = engine.stream()
    next(stream)
    with pytest.raises(RuntimeError, match="rows are running"):
        engine.load(1, [])
    engine.abort(running(engine), keep=False)
    list(stream)  # those that had finished already
    engine.load(1, [])


def test_the_engine_works_again_after_sleep_and_does_not_sleep_at_work(
    tools: Any, native: Any, make: Any, model: Decoder, alone: dict[str, Completion]
) -> None:
    engine = make(model, max_rows=4)
    engine.sleep()  # before the first request: nothing to give back
    engine.wake()
    tools.run(engine, native.mixed_requests())
    prefilled = engine.stats.prefilled_tokens
    engine.sleep()
    engine.sleep()
    engine.wake()
    for name, completion in tools.run(engine, native.mixed_requests()).items():
        native.same(completion, alone[name])
    assert engine.stats.prefilled_tokens == 2 * prefilled, "what was cached went with the memory"
    engine.sleep()
    engine.submit(native.mixed_requests())  # which wakes it
    with pytest.raises(RuntimeError, match="12 requests unfinished"):
        engine.sleep()
    assert len(list(engine.stream())) == 12


def test_sleep_gives_the_cache_back(tools: Any, native: Any, model: Decoder) -> None:
    dense, paged = DenseEngine(model, max_rows=4), PagedEngine(model, max_rows=4)
    for engine in (dense, paged):
        tools.run(engine, native.mixed_requests())
    assert dense.cache.keys.numel() > 0
    assert paged.runner.cache.numel() > 0
    for engine in (dense, paged):
        engine.sleep()
    assert dense.cache.keys.numel() == dense.cache.values.numel() == 0
    with pytest.raises(AssertionError):
        _ = paged.runner


# --- refusals ----------------------------------------------------------------------------------------------------------------


def test_a_request_too_long_for_the_model_is_refused_with_the_numbers(tools: Any, make: Any) -> None:
    engine = make(tools.decoder(max_positions=20))
    with pytest.raises(UserError, match=r"request 0\.0: 9 prompt tokens \+ 12 new ones = 21.*20 positions"):
        engine.submit(tools.requests([(3,) * 9]))
    assert len(tools.run(engine, tools.requests([(3,) * 8]))["0.0"].tokens) == 12


def test_bad_requests_are_refused_before_any_of_them_is_queued(tools: Any, make: Any, model: Decoder) -> None:
    engine = make(model)
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


@pytest.mark.parametrize("options", [{"temperature": 1e-9}, {"top_k": 2**63}], ids=str)
def test_numbers_that_no_row_can_hold_are_refused(
    tools: Any, make: Any, model: Decoder, options: dict[str, Any]
) -> None:
    engine, (name,) = make(model), options
    with pytest.raises(UserError, match=f"{name} .*; expected"):
        engine.submit(tools.requests([(1, 2)], max_tokens=3, **options))
    assert len(tools.run(engine, tools.requests([(1, 2)], max_tokens=3))) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_request_whose_numbers_are_none_leaves_none_to_others(tools: Any, make: Any, dtype: torch.dtype) -> None:
    """Token 5 gives NaN; the rows and blocks of prompts with it are reused by other requests."""
    model = tools.decoder(dtype)
    model.embedding.weight.data[5] = torch.nan
    clean = tools.requests([(1, 2, 3), (4, 6), tuple([7, 8] * 20)], 2, max_tokens=6, logit_bias=((5, -100.0),))
    poisoned = tools.requests([(1, 5), tuple([5, 2] * 30)], 3, max_tokens=9)
    alone = tools.run(make(model), clean)
    engine = make(model)
    engine.submit([*(replace(r, id=f"poisoned {r.id}") for r in poisoned), *clean])
    beside = {completion.id: completion for completion in engine.stream()}
    after = tools.run(engine, clean)
    assert np.isnan(beside[f"poisoned {poisoned[0].id}"].logp).any()
    for request in clean:
        for found in (beside, after):
            assert not np.isnan(found[request.id].logp).any()
            if dtype != torch.bfloat16:
                assert found[request.id].tokens.tolist() == alone[request.id].tokens.tolist()


def test_two_requests_of_one_id_are_refused_also_within_one_call(tools: Any, make: Any, model: Decoder) -> None:
    engine = make(model)
    with pytest.raises(ValueError, match=r"0\.0"):
        engine.submit(tools.requests([(3,)]) * 2)
    assert list(engine.stream()) == []


@pytest.mark.parametrize("tokens", [(3, 13), (-1, 3)])
def test_a_token_that_the_model_does_not_have_is_refused(tools: Any, make: Any, tokens: tuple[int, ...]) -> None:
    engine = make(tools.decoder())
    with pytest.raises(UserError, match="is not one of the model's, 0 to 12"):
        engine.submit([Request("strange", tokens, SamplingOptions(max_tokens=2), 0)])
    assert list(engine.stream()) == []
