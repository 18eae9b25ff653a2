"""The paged engine: launches of several steps, preemption, new caches, compaction, stops that only the host can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.inference.native import paged_engine
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.device_state import MAX_STOP_TOKENS, RING_SIZE
from burnish.inference.native.model_runner import ModelRunner
from burnish.inference.native.paged_engine import PagedEngine
from burnish.memory_plan.kv_cache import BLOCK_SIZE
from burnish.models.decoder import Decoder

TEXT = tuple((5 * i + i * i // 7) % 13 for i in range(200))


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


def crowd(tools: Any) -> list[Request]:
    """Requests of up to 6 blocks, some of which begin alike."""
    prompts = [TEXT[:20], TEXT[:31], TEXT[7:10], TEXT[:33], TEXT[50:66]]
    base = tools.requests(prompts, 2)
    return [replace(r, sampling=SamplingOptions(max_tokens=12 + 17 * (i % 4))) for i, r in enumerate(base)]


# --- launches ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 20, RING_SIZE - 1])
def test_the_number_of_steps_in_a_launch_changes_no_result(tools: Any, native: Any, model: Decoder, steps: int) -> None:
    wanted = [*native.mixed_requests(), *crowd(tools)]
    engine = PagedEngine(model, max_rows=5, steps_per_launch=steps)
    native.agree(tools, model, tools.run(engine, wanted), wanted)
    native.no_block_is_held(engine)


def test_launches_are_shorter_while_few_rows_run(
    tools: Any, native: Any, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PagedEngine(model, max_rows=6, steps_per_launch=8)
    engine.quick_rows = 3
    launches, decode = list[tuple[int, int]](), ModelRunner.decode

    def noted(self: ModelRunner, rows: int, steps: int, *rest: Any) -> None:
        launches.append((engine.scheduler.num_running, steps))
        decode(self, rows, steps, *rest)

    monkeypatch.setattr(ModelRunner, "decode", noted)
    lengths = (17, 17, 17, 41, 41, 41)
    base = tools.requests([TEXT[:20]], 6)
    wanted = [replace(r, sampling=SamplingOptions(max_tokens=n)) for r, n in zip(base, lengths, strict=True)]
    native.agree(tools, model, tools.run(engine, wanted), wanted)
    assert {steps for running, steps in launches if running > 3} == {8}
    assert {steps for running, steps in launches if running <= 3} == {4}


@pytest.mark.parametrize("steps", [0, -1, RING_SIZE])
def test_a_launch_that_the_rings_cannot_hold_is_refused(model: Decoder, steps: int) -> None:
    with pytest.raises(ValueError, match=f"steps_per_launch={steps}: expected 1 to {RING_SIZE - 1}"):
        PagedEngine(model, steps_per_launch=steps)


def test_more_stop_tokens_than_the_device_looks_for_still_stop(tools: Any) -> None:
    stops = tuple(range(100, 100 + MAX_STOP_TOKENS))
    wanted = [
        Request("known", (3,), SamplingOptions(max_tokens=60, stop_tokens=(9, *stops)), 1),
        Request("host", (3,), SamplingOptions(max_tokens=60, stop_tokens=(*stops, 9)), 2),
        Request("later", (3,), SamplingOptions(max_tokens=60, stop_tokens=(*stops, 23)), 3),
    ]
    got = tools.run(PagedEngine(tools.successor(32), max_rows=2), wanted)
    assert {c.finish for c in got.values()} == {"stop"}
    ends = {"known": 9, "host": 9, "later": 23}
    assert {name: c.tokens.tolist() for name, c in got.items()} == {k: list(range(4, n + 1)) for k, n in ends.items()}


@pytest.mark.parametrize("end", range(1, 20))
def test_a_stop_string_cuts_off_the_tokens_drawn_after_it(tools: Any, native: Any, end: int) -> None:
    """The row is reassigned to the waiting request, and the listener gets no token after the end."""
    heard: list[tuple[str, int]] = []
    engine = PagedEngine(tools.successor(64), 2, native.spell, lambda *what: heard.append(what))
    stop = (native.spell([end - 1, end]) if end > 1 else "b",)
    wanted = tools.requests([(0,), (20,), (40,)], max_tokens=20)
    wanted[0] = replace(wanted[0], sampling=SamplingOptions(max_tokens=40, stop=stop))
    got = tools.run(engine, wanted)
    assert got["0.0"].finish == "stop"
    assert got["0.0"].tokens.tolist() == list(range(1, end + 1))
    for k in (1, 2):
        assert got[f"{k}.0"].tokens.tolist() == list(range(20 * k + 1, 20 * k + 21))
    assert [token for name, token in heard if name == "0.0"] == got["0.0"].tokens.tolist()
    assert engine.stats.tokens == len(heard)
    native.no_block_is_held(engine)


def test_a_row_is_not_heard_before_another_one_that_was_drawn_earlier(tools: Any, model: Decoder) -> None:
    """Completions are streamed as they finish, the shortest first."""
    base = tools.requests([TEXT[:5]], 6)
    lengths = (40, 2, 30, 12, 21, 60)
    wanted = [replace(r, sampling=SamplingOptions(max_tokens=n)) for r, n in zip(base, lengths, strict=True)]
    engine = PagedEngine(model, max_rows=6, steps_per_launch=4)
    engine.submit(wanted)
    assert [len(c.tokens) for c in engine.stream()] == sorted(lengths)


def test_a_row_that_only_the_host_can_end_writes_nothing_afterwards(tools: Any, native: Any, model: Decoder) -> None:
    """Its blocks go to the waiting request, which takes an earlier row: its own stays empty."""
    stops = (*range(100, 100 + MAX_STOP_TOKENS), *range(13))  # any token, but none that the device knows
    wanted = tools.requests([TEXT[:4], TEXT[10:17], TEXT[20:32], TEXT[40:51], TEXT[60:100]], max_tokens=50)
    wanted[0] = replace(wanted[0], sampling=SamplingOptions(max_tokens=2))
    wanted[1] = replace(wanted[1], sampling=SamplingOptions(max_tokens=50, stop_tokens=stops))
    engine = PagedEngine(model, max_rows=4, steps_per_launch=8)
    native.agree(tools, model, tools.run(engine, wanted), wanted)


# --- few blocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "steps"), [(7, 8), (11, 1), (11, 31), (15, 3)])
def test_preempted_rows_keep_their_tokens(tools: Any, native: Any, model: Decoder, num_blocks: int, steps: int) -> None:
    heard: dict[str, list[int]] = {}
    engine = PagedEngine(
        model,
        6,
        listener=lambda name, token: heard.setdefault(name, []).append(token),
        num_blocks=num_blocks,
        steps_per_launch=steps,
    )
    wanted = [replace(r, sampling=SamplingOptions(max_tokens=55)) for r in crowd(tools)]
    got = tools.run(engine, wanted)
    native.agree(tools, model, got, wanted)
    assert engine.stats.preemptions > 0
    assert engine.stats.tokens == sum(r.sampling.max_tokens for r in wanted)
    assert heard == {name: c.tokens.tolist() for name, c in got.items()}
    native.no_block_is_held(engine)


def test_rows_that_all_fit_at_their_longest_never_wait_for_one_another(tools: Any, model: Decoder) -> None:
    for length, new in ((2, 5), (10, 7), (16, 1), (15, 2), (20, 40)):
        engine = PagedEngine(model, max_rows=4)
        engine.submit(tools.requests([TEXT[k : k + length] for k in range(4)], max_tokens=new))
        stream = engine.stream()
        next(stream)
        assert len(engine.ready) == 3, "all four came in together and end together"
        assert len(list(stream)) == 3
        assert engine.stats.preemptions == 0


def test_the_last_admitted_row_is_preempted_and_returns_before_waiting_requests(tools: Any, model: Decoder) -> None:
    engine = PagedEngine(model, max_rows=3, num_blocks=1 + 6, listener=lambda *what: engine.interrupt())
    first, second, waiting = (
        replace(r, sampling=SamplingOptions(max_tokens=n), priority=p)
        for r, n, p in zip(tools.requests([TEXT[:30]], 3), (60, 50, 30), (0, 0, 9), strict=True)
    )
    engine.submit([first, second])
    while not engine.stats.preemptions:
        assert list(engine.stream()) == []
    assert [state.request.id for state in engine.waiting] == [second.id]
    engine.submit([waiting])
    assert [state.request.id for state in engine.waiting] == [second.id, waiting.id]
    engine.listener = None
    assert next(iter(engine.stream())).id == first.id


def test_a_request_that_can_never_fit_is_refused_and_disturbs_no_other(tools: Any, native: Any, model: Decoder) -> None:
    engine = PagedEngine(model, max_rows=2, num_blocks=1 + 4)
    with pytest.raises(UserError, match=r"request 0\.0: 60 prompt tokens \+ 12 new ones need 5 blocks of 16.*has 4"):
        engine.submit(tools.requests([TEXT[:60]]))
    wanted = tools.requests([TEXT[:3], TEXT[:5]], max_tokens=45)
    wanted[0] = replace(wanted[0], sampling=SamplingOptions(max_tokens=10))
    engine.submit(wanted)
    stream = iter(engine.stream())
    got = {}
    for _ in range(2):
        with pytest.raises(UserError, match=r"request long: .* need 5 blocks"):
            engine.submit([Request("short", (3,), SamplingOptions(max_tokens=2), 1), Request("long", TEXT[:70], SamplingOptions(max_tokens=4), 1)])  # fmt: skip
        completion = next(stream)
        got[completion.id] = completion
    native.agree(tools, model, got, wanted)
    assert list(stream) == []
    assert engine.stats.preemptions == 0
    assert engine.stats.prefilled_tokens == 8


def test_a_row_at_its_limit_is_reassigned_at_the_next_launch(tools: Any, native: Any, model: Decoder) -> None:
    short, long, next_ = (
        replace(r, sampling=SamplingOptions(max_tokens=n))
        for r, n in zip(tools.requests([TEXT[:5], TEXT[:7], TEXT[:9]]), (5, 40, 36), strict=True)
    )
    engine = PagedEngine(model, max_rows=2, steps_per_launch=4)
    native.agree(tools, model, tools.run(engine, [short, long, next_]), [short, long, next_])
    assert engine.stats.decode_steps == 39, (
        "the third began when the first had made its 4 steps, and made its 35 with the second"
    )


def test_a_draining_row_has_its_stop_string_and_raw_log_probs(tools: Any, native: Any) -> None:
    """Its row is reassigned meanwhile, and the new request must go on."""
    model = tools.successor(64)
    engine = PagedEngine(model, 2, native.spell, steps_per_launch=4)
    wanted = tools.requests([(0,), (20,), (40,)], max_tokens=20)
    options = SamplingOptions(max_tokens=9, stop=(native.spell([6, 7]),), raw_logprobs=True)
    wanted[0] = replace(wanted[0], sampling=options)
    got = tools.run(engine, wanted)
    assert (got["0.0"].finish, got["0.0"].tokens.tolist()) == ("stop", [1, 2, 3, 4, 5, 6, 7])
    np.testing.assert_allclose(got["0.0"].raw_logp, got["0.0"].logp)
    for k in (1, 2):
        assert got[f"{k}.0"].tokens.tolist() == list(range(20 * k + 1, 20 * k + 21))
    assert engine.stats.decode_steps == 8 + 19, "the third began when the first had made its 8 steps"
    native.no_block_is_held(engine)


@pytest.mark.parametrize(("stop", "steps"), [("", 8), (" never ", 4)])
def test_a_row_with_stop_strings_draws_less_in_vain(tools: Any, native: Any, stop: str, steps: int) -> None:
    """A row whose end only the host can see draws on for the rest of its launch and one more, which are shorter for its sake."""
    engine = PagedEngine(tools.successor(64), 1, native.spell, steps_per_launch=8)
    many = tuple(range(40, 40 + MAX_STOP_TOKENS))  # the device knows these, and the host the one behind them
    options = SamplingOptions(max_tokens=50, stop_tokens=(*many, 4), stop=(stop,) if stop else ())
    (wanted,) = (replace(one, sampling=options) for one in tools.requests([(0,)]))
    assert tools.run(engine, [wanted])["0.0"].tokens.tolist() == [1, 2, 3, 4]
    assert engine.stats.decode_steps == 2 * steps, (
        "the launch in which it ended, and the one that ran when the host read of it"
    )


@pytest.mark.parametrize("token", range(1, 9))
def test_a_listener_that_raises_loses_no_request(tools: Any, native: Any, token: int) -> None:
    heard: list[int] = []

    def hear(name: str, drawn: int) -> None:
        heard.append(drawn)
        if len(heard) == token:
            raise ValueError("not now")

    engine = PagedEngine(tools.successor(64), 2, listener=hear, steps_per_launch=4)
    wanted = tools.requests([(0,), (20,), (40,)], max_tokens=5)
    engine.submit(wanted)
    got = []
    with pytest.raises(ValueError, match="not now"):
        got += list(engine.stream())
    got += list(engine.stream())
    found = {completion.id: completion.tokens.tolist() for completion in got}
    assert found == {f"{k}.0": list(range(20 * k + 1, 20 * k + 6)) for k in range(3)}
    native.no_block_is_held(engine)
    engine.load(1, ())


def test_weights_are_not_changed_while_steps_are_in_flight(tools: Any, model: Decoder) -> None:
    engine = PagedEngine(model, max_rows=1, steps_per_launch=4)
    engine.listener = lambda name, token: engine.interrupt()  # after its first token, when its last steps are launched
    engine.submit(tools.requests([TEXT[:5]], max_tokens=5))
    assert list(engine.stream()) == []
    assert engine.scheduler.num_running == 0
    with pytest.raises(RuntimeError, match="1 rows are running"):
        engine.load(1, ())
    (completion,) = engine.stream()
    assert len(completion.tokens) == 5
    engine.load(1, ())


def test_a_longer_request_makes_a_new_cache_and_nothing_is_lost(tools: Any, native: Any, model: Decoder) -> None:
    heard: dict[str, list[int]] = {}
    engine = PagedEngine(model, 2, listener=lambda name, token: heard.setdefault(name, []).append(token))
    wanted = tools.requests([TEXT[:20], TEXT[3:9], TEXT[:21]], max_tokens=30)
    wanted[0] = replace(wanted[0], sampling=SamplingOptions(max_tokens=3))
    engine.submit(wanted)
    stream = engine.stream()
    first = next(stream)
    width = engine.scheduler.max_blocks
    longer = Request("longer", TEXT[:150], SamplingOptions(max_tokens=40), 77)
    engine.submit([longer])
    assert engine.scheduler.max_blocks > width
    with pytest.raises(RuntimeError, match="2 rows are running"):
        engine.load(1, [])  # the preempted row has tokens of the old weights
    got = {c.id: c for c in stream} | {first.id: first}
    native.agree(tools, model, got, [*wanted, longer])
    assert heard == {name: c.tokens.tolist() for name, c in got.items()}
    native.no_block_is_held(engine)
    engine.load(1, [])
    tools.run(engine, wanted)
    assert engine.scheduler.max_blocks == -(-190 // BLOCK_SIZE), "the larger cache stays"


# --- rows --------------------------------------------------------------------------------------------------------------------


def test_a_larger_cache_that_cannot_be_had_leaves_what_runs_as_it_was(
    tools: Any, native: Any, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tools.requests([(1, 2, 3), (4, 5)], 2, max_tokens=20)
    engine = PagedEngine(model, max_rows=4, steps_per_launch=4)
    engine.submit(wanted)
    real, asked = paged_engine.ModelRunner, list[int]()

    def scarce(model: Decoder, plan: Any, *rest: Any) -> Any:
        asked.append(plan.longest)
        if plan.longest > 100:
            raise UserError("the GPU has too little memory")
        return real(model, plan, *rest)

    monkeypatch.setattr(paged_engine, "ModelRunner", scarce)
    with pytest.raises(UserError, match="too little memory"):
        engine.submit([replace(r, id="long") for r in tools.requests([(1, 2)], max_tokens=300)])
    assert len(asked) == 2
    native.agree(tools, model, {completion.id: completion for completion in engine.stream()}, wanted)


def test_rows_move_together_when_few_are_left(
    tools: Any, native: Any, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (5, 30, 5, 5, 12, 5, 5, 50)
    base = tools.requests([TEXT[k : k + 3 * k + 1] for k in range(8)])
    wanted = [replace(r, sampling=SamplingOptions(max_tokens=n, top_k=k)) for k, (r, n) in enumerate(zip(base, lengths, strict=True))]  # fmt: skip
    engine = PagedEngine(model, max_rows=8, steps_per_launch=4)
    engine.submit(wanted)
    steps: list[int] = []
    decode = engine.runner.decode

    def spy(rows: int, count: int, *rest: Any) -> None:
        steps.extend([rows] * count)
        decode(rows, count, *rest)

    monkeypatch.setattr(engine.runner, "decode", spy)
    got = {c.id: c for c in engine.stream()}
    native.agree(tools, model, got, wanted)
    assert steps == sorted(steps, reverse=True)
    assert set(steps) == {8, 4, 2, 1}


def test_a_batch_is_never_larger_than_the_number_of_rows(tools: Any, native: Any, model: Decoder) -> None:
    engine = PagedEngine(model, max_rows=5)
    wanted = tools.requests([TEXT[:4]], 5, max_tokens=3)
    native.agree(tools, model, tools.run(engine, wanted), wanted)
    assert [engine.runner.batch_size(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 5]


# --- abort -------------------------------------------------------------------------------------------------------------------


def test_an_aborted_request_keeps_tokens_that_the_host_had_not_read(tools: Any, native: Any, model: Decoder) -> None:
    engine = PagedEngine(model, max_rows=1, steps_per_launch=3, listener=lambda *what: engine.interrupt())
    (wanted,) = tools.requests([TEXT[:5]], max_tokens=40)
    engine.submit([wanted])
    assert list(engine.stream()) == []
    assert (engine.stats.tokens, engine.stats.decode_steps) == (1, 3), "the first token is read while the steps run"
    assert list(engine.stream()) == []
    assert engine.stats.tokens == 4, "one of two launches was read"
    engine.listener = None
    (part,) = engine.abort([wanted.id], keep=True)
    assert len(part.tokens) == 1 + engine.stats.decode_steps == 7
    assert tools.run(engine, [wanted])[wanted.id].tokens.tolist()[:7] == part.tokens.tolist()


def rest_of(request: Request, part: Completion) -> Request:
    """The request for the rest of an aborted one."""
    done = len(part.tokens)
    options = replace(request.sampling, max_tokens=request.sampling.max_tokens - done)
    return Request("rest", (*request.tokens, *part.tokens.tolist()), options, request.key, done)


def to_abort(tools: Any) -> list[Request]:
    return tools.requests([TEXT[:30], TEXT[:30], TEXT[3:20], TEXT[9:20]], max_tokens=50)


@pytest.fixture(scope="module")
def whole(tools: Any, model: Decoder) -> dict[str, Completion]:
    """The completion of each of them alone."""
    return {r.id: tools.run(DenseEngine(model), [r])[r.id] for r in to_abort(tools)}


@pytest.mark.parametrize("state", ["queued", "running", "preempted", "new cache"])
@pytest.mark.parametrize("keep", [True, False])
def test_a_request_can_be_aborted_in_every_state(
    tools: Any, native: Any, model: Decoder, whole: dict[str, Completion], state: str, keep: bool
) -> None:
    wanted = to_abort(tools)
    engine = PagedEngine(model, max_rows=2, num_blocks=1 + 6, listener=lambda *what: engine.interrupt())
    engine.submit(wanted)

    def those(state: str) -> Sequence[str]:
        queued = {state.request.id: bool(state.tokens) for state in engine.waiting}
        if state == "running":
            return [r.id for r in wanted if r.id not in queued]
        return [name for name, begun in queued.items() if begun == (state != "queued")]

    while not those(state):
        assert list(engine.stream()) == []
        if state == "new cache":
            engine.listener = None
            engine.submit([Request("longer", TEXT[:80], SamplingOptions(max_tokens=16), 1)])
            engine.abort(["longer"], keep=False)
    engine.listener = None  # it would interrupt the next stream before its first turn
    name = those(state)[0]
    kept = engine.abort([name], keep)
    assert [c.id for c in kept] == ([name] if keep else [])
    got = {c.id: c for c in engine.stream()}
    assert got.keys() == whole.keys() - {name}
    for completion in got.values():
        native.same(completion, whole[completion.id])
    native.no_block_is_held(engine)
    if keep:
        (part,) = kept
        assert part.finish == "aborted"
        assert bool(len(part.tokens)) == (state != "queued")
        again = tools.run(engine, [rest_of(next(r for r in wanted if r.id == name), part)])["rest"]
        assert [*part.tokens, *again.tokens] == whole[name].tokens.tolist()
        np.testing.assert_allclose([*part.logp, *again.logp], whole[name].logp, rtol=2e-7)
