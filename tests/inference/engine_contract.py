"""What every engine must do, as tests: `from tests.inference.engine_contract import *` in a module with a `subject` fixture.

A subject is an engine and the model whose weights it has. An engine that is slow to start may be one for all tests of a module:
each leaves it with nothing to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Engine, Request, SamplingOptions
from burnish.core.random_keys import fold

LETTERS = "abcdefghijklm"
"""Text of the tokens."""
MEAN, MOST = 1e-5, 2e-4
"""Largest difference of float32 log-probs from the learner's."""
OPTIONS = {
    "plain": SamplingOptions(max_tokens=9, raw_logprobs=True),
    "stop tokens": SamplingOptions(max_tokens=30, temperature=0.7, stop_tokens=(1, 4)),
    "cold": SamplingOptions(max_tokens=12, temperature=0.5, raw_logprobs=True),
    "hot": SamplingOptions(max_tokens=12, temperature=1.7),
    "top k": SamplingOptions(max_tokens=12, top_k=4, raw_logprobs=True),
    "top p": SamplingOptions(max_tokens=12, top_p=0.8),
    "min p": SamplingOptions(max_tokens=12, min_p=0.2, raw_logprobs=True),
    "top k and p": SamplingOptions(max_tokens=12, temperature=1.3, top_k=6, top_p=0.9),
    "bias": SamplingOptions(max_tokens=12, logit_bias=((5, 3.0), (0, -100.0)), raw_logprobs=True),
    "greedy": SamplingOptions(max_tokens=8, temperature=0.0, raw_logprobs=True),
    "greedy with bias": SamplingOptions(
        max_tokens=8, temperature=0.0, logit_bias=((7, 4.0), (4, 3.9)), raw_logprobs=True
    ),
    "one token": SamplingOptions(max_tokens=1, temperature=0.9, raw_logprobs=True),
}
PROMPTS = [(3,), (4, 5, 6), (3, 3, 9, 2, 7, 7, 8, 1, 0, 4), (4, 5, 6), (6,) * 40]


@dataclass
class Subject:
    """An engine under test."""

    engine: Engine
    logits: Callable[[list[int]], Tensor]
    """Logits [tokens, vocab] after each token, with the engine's weights."""
    change: Callable[[int], None]
    """Change the model's weights and load them into the engine as a version."""
    rows: int
    """Requests that run at the same time."""
    positions: int
    stops_at_work: bool = True
    """Whether running requests can be aborted, and new weights are refused while they run."""
    refused: tuple[str, ...] = ()
    """The entries of `OPTIONS` that the engine refuses, since it would draw or report them differently."""


def spell(tokens: list[int]) -> str:
    """The text of tokens, a letter each."""
    return "".join(LETTERS[token] for token in tokens)


def requests_of(options: SamplingOptions, n: int = 2, name: str = "r") -> list[Request]:
    return [
        Request(f"{name}{i}.{k}", prompt, options, fold("contract", name, i, k))
        for i, prompt in enumerate(PROMPTS)
        for k in range(n)
    ]


def judge(tools: Any, subject: Subject, request: Request, completion: Completion) -> np.ndarray:
    """Differences of a completion's log-probs from the model's. Every token must be possible, and the finish reason right."""
    options, tokens = request.sampling, completion.tokens.tolist()
    logits = subject.logits([*request.tokens, *tokens])[len(request.tokens) - 1 : -1].double()
    p = torch.stack([tools.distribution(line, options) for line in logits])
    chosen = torch.tensor(tokens)[:, None]
    if options.temperature == 0:
        assert tokens == p.argmax(1).tolist()
    assert (p.gather(1, chosen) > 0).all(), "a token that cannot be drawn"
    far = np.abs(completion.logp - p.gather(1, chosen)[:, 0].log().numpy())
    assert (completion.raw_logp is not None) == options.raw_logprobs
    if completion.raw_logp is not None:
        raw = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
        far = np.concatenate([far, np.abs(completion.raw_logp - raw)])
    assert not set(tokens[:-1]) & set(options.stop_tokens)
    assert completion.finish == ("stop" if tokens[-1] in options.stop_tokens else "length")
    assert completion.finish == "stop" or len(tokens) == options.max_tokens
    return far


def agree(tools: Any, subject: Subject, wanted: list[Request], got: dict[str, Completion]) -> None:
    far = np.concatenate([judge(tools, subject, request, got[request.id]) for request in wanted])
    assert far.mean() <= MEAN
    assert far.max() <= MOST


# --- what is sampled -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIONS)
def test_log_probs_are_of_the_distribution_that_is_sampled_from(tools: Any, subject: Subject, kind: str) -> None:
    wanted = requests_of(OPTIONS[kind], name=kind)
    if kind in subject.refused:
        with pytest.raises(UserError, match=wanted[0].id):
            subject.engine.submit(wanted)
        return
    agree(tools, subject, wanted, tools.run(subject.engine, wanted))


def test_requests_with_all_kinds_of_options_run_beside_each_other(tools: Any, subject: Subject) -> None:
    taken = {kind: options for kind, options in OPTIONS.items() if kind not in subject.refused}
    wanted = [r for kind, options in taken.items() for r in requests_of(options, 1, kind)]
    agree(tools, subject, wanted, tools.run(subject.engine, wanted))


def test_a_key_always_gives_the_same_tokens_and_another_key_others(tools: Any, subject: Subject) -> None:
    wanted = requests_of(SamplingOptions(max_tokens=20), 3)
    first = tools.run(subject.engine, wanted)
    again = tools.run(subject.engine, wanted[::-1])
    for request in wanted:
        assert first[request.id].tokens.tolist() == again[request.id].tokens.tolist()
    texts = {tuple(c.tokens.tolist()) for c in first.values()}
    assert len(texts) == len(wanted)
    later = tools.run(subject.engine, [replace(r, generated=5) for r in wanted])
    assert {tuple(c.tokens.tolist()) for c in later.values()}.isdisjoint(texts), "noise goes on behind what was drawn"


def test_tokens_are_drawn_as_often_as_they_are_likely(tools: Any, subject: Subject) -> None:
    """Four standard deviations: a correct sampler fails once in a thousand choices of keys, and the keys are fixed."""
    options, num = SamplingOptions(max_tokens=1, temperature=1.4, top_k=9), 600
    wanted = [Request(f"d{k}", (4, 5, 6), options, fold("drawn", k)) for k in range(num)]
    got = tools.run(subject.engine, wanted)
    counts = np.bincount([int(c.tokens[0]) for c in got.values()], minlength=len(LETTERS))
    p = tools.distribution(subject.logits([4, 5, 6])[-1], options).numpy()
    assert (np.abs(counts - num * p) <= 4 * np.sqrt(num * p * (1 - p)) + 1e-9).all()


def test_a_completion_ends_with_the_token_that_completes_a_stop_string(tools: Any, subject: Subject) -> None:
    wanted = requests_of(SamplingOptions(max_tokens=25), 3)
    free = {name: c.tokens.tolist() for name, c in tools.run(subject.engine, wanted).items()}
    pair = spell(next(tokens[6:8] for tokens in free.values()))
    stopped = tools.run(subject.engine, [replace(r, sampling=replace(r.sampling, stop=(pair, "zz"))) for r in wanted])
    ends = 0
    for name, tokens in free.items():
        at = spell(tokens).find(pair)
        assert stopped[name].tokens.tolist() == (tokens if at < 0 else tokens[: at + 2])
        assert stopped[name].finish == ("length" if at < 0 else "stop")
        ends += at >= 0
    assert ends


# --- the stream ----------------------------------------------------------------------------------------------------------


def test_requests_may_be_submitted_while_streaming(tools: Any, subject: Subject) -> None:
    waiting = requests_of(SamplingOptions(max_tokens=6))
    names = {r.id for r in waiting}
    subject.engine.submit([waiting.pop()])
    got = []
    for completion in subject.engine.stream():
        got.append(completion.id)
        if waiting:
            subject.engine.submit([waiting.pop() for _ in range(min(2, len(waiting)))])
    assert sorted(got) == sorted(names)


def test_of_those_that_wait_the_highest_priority_goes_first(subject: Subject) -> None:
    short, long = SamplingOptions(max_tokens=2), SamplingOptions(max_tokens=60)
    subject.engine.submit([Request(f"b{k}", (3, 4), long, k, priority=9) for k in range(subject.rows - 1)])
    subject.engine.submit([Request(f"w{k}", (5,), short, k, priority=p) for k, p in enumerate((0, 1, 5, 2))])
    order = [c.id for c in subject.engine.stream() if c.id.startswith("w")]
    assert order == ["w2", "w3", "w1", "w0"]


def test_a_stream_that_is_interrupted_or_left_loses_nothing(tools: Any, subject: Subject) -> None:
    wanted = requests_of(SamplingOptions(max_tokens=15))
    whole = {name: c.tokens.tolist() for name, c in tools.run(subject.engine, wanted).items()}
    engine = subject.engine
    engine.submit(wanted)
    engine.interrupt()
    assert list(engine.stream()) == []
    got: dict[str, list[int]] = {}
    timers = []
    for turn in range(3 * len(wanted)):
        if turn % 3 == 0:  # in the middle of a stream; the one behind it may end at once, the third takes a completion
            timers.append(threading.Timer(0.001, engine.interrupt))
            timers[-1].start()
        stream = engine.stream()
        for completion in stream:
            assert completion.id not in got
            got[completion.id] = completion.tokens.tolist()
            break
        stream.close()
    for timer in timers:
        timer.join()
    got |= {c.id: c.tokens.tolist() for _ in range(2) for c in engine.stream()}
    assert got == whole
    assert list(engine.stream()) == []


# --- abort ---------------------------------------------------------------------------------------------------------------


def test_what_is_aborted_and_kept_is_the_beginning_of_what_would_have_come(tools: Any, subject: Subject) -> None:
    if not subject.stops_at_work:
        pytest.skip("this engine cannot stop a request that runs")
    options = SamplingOptions(max_tokens=100, temperature=0.9, raw_logprobs=True)
    long = [Request(f"l{k}", (3, 4), options, fold("long", k)) for k in range(subject.rows + 1)]
    whole = tools.run(subject.engine, long)
    short = Request("short", (5,), SamplingOptions(max_tokens=4), 1, priority=1)
    subject.engine.submit([short, *long])
    stream = subject.engine.stream()
    assert next(stream).id == "short"
    kept = {c.id: c for c in subject.engine.abort([r.id for r in long], keep=True)}
    assert list(stream) == []
    assert kept.keys() == whole.keys()
    for name, part in kept.items():
        assert part.finish == "aborted"
        count = len(part.tokens)
        assert count < 100
        assert part.tokens.tolist() == whole[name].tokens.tolist()[:count]
        assert part.raw_logp is not None
        assert whole[name].raw_logp is not None
        np.testing.assert_allclose(part.logp, whole[name].logp[:count], atol=MOST)
        np.testing.assert_allclose(part.raw_logp, whole[name].raw_logp[:count], atol=MOST)
    assert sorted(len(c.tokens) for c in kept.values())[0] == 0, "one waited"
    assert max(len(c.tokens) for c in kept.values()) > 0


def test_what_is_dropped_is_gone_and_its_id_is_free(tools: Any, subject: Subject) -> None:
    wanted = requests_of(SamplingOptions(max_tokens=20), 1)
    whole = tools.run(subject.engine, wanted)
    subject.engine.submit(wanted)
    dropped = [wanted[-1].id, *([wanted[0].id] if subject.stops_at_work else [])]
    assert subject.engine.abort(dropped, keep=False) == []
    rest = {c.id: c for c in subject.engine.stream()}
    assert rest.keys() == whole.keys() - set(dropped)
    again = tools.run(subject.engine, [r for r in wanted if r.id in dropped])
    for name, completion in (rest | again).items():
        assert completion.tokens.tolist() == whole[name].tokens.tolist()


def test_aborting_what_is_not_there_is_an_error_and_changes_nothing(subject: Subject) -> None:
    if not subject.stops_at_work:
        pytest.skip("this engine says nothing of requests it does not have: one that runs cannot be told from none")
    request = Request("there", (3,), SamplingOptions(max_tokens=3), 0)
    with pytest.raises(KeyError, match="never"):
        subject.engine.abort(["never"], keep=True)
    subject.engine.submit([request])
    with pytest.raises(KeyError, match="never"):
        subject.engine.abort(["there", "never"], keep=False)
    assert [c.id for c in subject.engine.stream()] == ["there"]


# --- weights -------------------------------------------------------------------------------------------------------------


def test_after_a_load_everything_comes_from_the_new_weights(tools: Any, subject: Subject) -> None:
    """Also the cached prefix of a long prompt."""
    prompt = tuple((7 * i + i * i) % 13 for i in range(200))
    wanted = [
        Request(f"p{k}", prompt, SamplingOptions(max_tokens=10, temperature=0.8), fold("probe", k)) for k in range(3)
    ]
    for version in (3, 4):
        before = tools.run(subject.engine, wanted)
        subject.change(version)
        after = tools.run(subject.engine, wanted)
        assert {c.version for c in after.values()} == {version}
        agree(tools, subject, wanted, after)
        moved = [not np.allclose(after[r.id].logp[:1], before[r.id].logp[:1], atol=1e-2) for r in wanted]
        assert any(moved)


def test_new_weights_while_requests_run_are_refused(subject: Subject) -> None:
    if not subject.stops_at_work:
        pytest.skip("between two batches of this engine nothing runs")
    subject.engine.submit(
        [
            Request("long", (3,), SamplingOptions(max_tokens=80), 0),
            Request("short", (3,), SamplingOptions(max_tokens=2), 0),
        ]
    )
    stream = subject.engine.stream()
    assert next(stream).id == "short"
    with pytest.raises(RuntimeError, match="rows are running"):
        subject.engine.load(9, ())
    subject.engine.abort(["long"], keep=False)
    assert list(stream) == []


def test_the_engine_works_again_after_sleep_and_does_not_sleep_at_work(tools: Any, subject: Subject) -> None:
    wanted = requests_of(SamplingOptions(max_tokens=10))
    before = tools.run(subject.engine, wanted)
    subject.engine.sleep()
    subject.engine.wake()
    subject.engine.sleep()
    after = tools.run(subject.engine, wanted)  # which wakes it
    for name, completion in after.items():
        assert completion.tokens.tolist() == before[name].tokens.tolist()
    if subject.stops_at_work:
        subject.engine.submit(wanted)
        with pytest.raises(RuntimeError, match="requests unfinished"):
            subject.engine.sleep()
        assert len(list(subject.engine.stream())) == len(wanted)


# --- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "options", "words"),
    [
        ((), {}, "no tokens"),
        ((3,) * 8, {"max_tokens": 10_000}, "positions"),
        ((3,), {"logit_bias": ((99, 1.0),)}, "not one of the model's, 0 to 12"),
        ((3,), {"logit_bias": ((2, float("nan")),)}, "finite"),
    ],
)
def test_requests_that_can_never_run_are_refused_and_none_beside_them_is_queued(
    subject: Subject, tokens: tuple[int, ...], options: dict[str, Any], words: str
) -> None:
    good = Request("good", (3,), SamplingOptions(max_tokens=2), 0)
    with pytest.raises(UserError, match=words):
        subject.engine.submit([good, Request("bad", tokens, SamplingOptions(**({"max_tokens": 2} | options)), 0)])
    assert list(subject.engine.stream()) == []


def test_two_requests_of_one_id_are_refused(subject: Subject) -> None:
    request = Request("same", (3,), SamplingOptions(max_tokens=2), 0)
    with pytest.raises(ValueError, match="same"):
        subject.engine.submit([request, request])
    subject.engine.submit([request])
    with pytest.raises(ValueError, match="same"):
        subject.engine.submit([request])
    assert [c.id for c in subject.engine.stream()] == ["same"]


def test_a_sequence_may_be_as_long_as_the_model_is_made_for(tools: Any, subject: Subject) -> None:
    options = SamplingOptions(max_tokens=5, temperature=0.7, raw_logprobs=True)
    request = Request("long", tuple(k % 13 for k in range(subject.positions - 5)), options, 7)
    agree(tools, subject, [request], tools.run(subject.engine, [request]))
