"""Many engines as one: the same samples as one engine's, nothing lost and nothing twice when one ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.core.dispatch import WorkerLost
from burnish.core.engine import SamplingOptions
from burnish.inference import remote_engine
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.request_arrays import (
    distinct_requests,
    group_by_prompt,
    pack_completions,
    pack_requests,
    unpack_completions,
    unpack_requests,
)
from tests.distributed.in_process_backend import HereBackend
from tests.distributed.toy_run import OPTIONS, learn, parts_of, requests, run, told


def test_many_engines_give_what_one_gives(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, engines=3)
    asked = requests(7, 3)
    assert run(parts.engine, asked) == run(parts.local, asked)
    learn(parts.trainer)
    parts.engine.load(4, ())
    local = parts.local
    local.load(4, ())
    found = run(parts.engine, asked)
    assert found == run(local, asked)
    assert {version for _, _, version in found.values()} == {4}


def test_samples_of_a_prompt_stay_together_and_work_is_dealt_evenly(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, engines=3)
    asked = requests(9, 4)
    parts.engine.submit(asked)
    homes = [{request.tokens for request in member.running.values()} for member in parts.engine.engines]
    assert [len(home) for home in homes] == [3, 3, 3]
    assert not homes[0] & homes[1]
    assert len({member.work for member in parts.engine.engines}) == 1
    assert len(list(parts.engine.stream())) == 36
    assert [member.work for member in parts.engine.engines] == [0, 0, 0]


def test_requests_may_be_submitted_while_others_run(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts.engine.submit(requests(3))
    found, more = {}, requests(3, first=3)
    for completion in parts.engine.stream():
        found[completion.id] = told(completion)
        if more:
            parts.engine.submit(more)
            more = []
    assert found == run(parts.local, requests(6))


def test_a_request_that_can_never_run_is_refused_at_once(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    with pytest.raises(UserError, match="made for 32 positions"):
        parts.engine.submit(requests(1, sampling=SamplingOptions(max_tokens=100)))
    parts.engine.submit(requests(1))
    with pytest.raises(ValueError, match="already running"):
        parts.engine.submit(requests(1))


def test_the_id_of_a_completion_that_is_not_delivered_yet_is_taken(tmp_path: Path) -> None:
    engine = parts_of(tmp_path).engine
    engine.submit(requests(2))
    while engine.num_unfinished:
        engine._collect()
    with pytest.raises(ValueError, match="its completion is not delivered yet"):
        engine.submit(requests(1))
    assert sorted(completion.id for completion in engine.stream()) == sorted(request.id for request in requests(2))
    engine.submit(requests(1))  # now it is free


def test_an_interrupted_stream_goes_on_later(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts.engine.submit(requests(4))
    parts.engine.interrupt()
    assert not list(parts.engine.stream())
    assert {c.id: told(c) for c in parts.engine.stream()} == run(parts.local, requests(4))


def test_aborted_requests_are_gone_or_handed_over(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts.engine.submit(requests(4))
    kept = parts.engine.abort(["0.0", "1.1"], keep=True)
    rest = {c.id for c in parts.engine.stream()}
    # One that had finished is handed over by the stream instead.
    assert {c.id for c in kept} | rest == {request.id for request in requests(4)}
    assert not {c.id for c in kept} & rest
    assert parts.engine.num_unfinished == 0
    with pytest.raises(KeyError, match="not running"):
        parts.engine.abort(["0.0"], keep=False)


def test_sleep_needs_no_word_to_an_engine_that_sleeps(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    run(parts.engine, requests(2))
    parts.engine.sleep()
    parts.engine.sleep()
    assert Counter(call.method for call in parts.backend.sent)["sleep"] == 2
    assert run(parts.engine, requests(2)) == run(parts.local, requests(2))


# --- engines that end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engines", "how"), [(1, "dead"), (2, "dead"), (2, "mute")])
def test_an_engine_that_ends_is_started_again_and_nothing_is_lost_or_twice(
    tmp_path: Path, engines: int, how: str
) -> None:
    parts = parts_of(tmp_path, engines=engines)
    parts.engine.deadline_s = 0.3
    asked = requests(6, 3)
    expected = run(parts.local, asked)
    parts.engine.submit(asked)
    getattr(parts.backend, how).add(engines - 1)
    found = [(c.id, told(c)) for c in parts.engine.stream()]
    assert len(found) == len(asked)
    assert dict(found) == expected
    assert parts.backend.restarted == [engines - 1]
    assert parts.counted["controller/restarts"] == 1
    assert f"engine {engines - 1} is started again, and its" in parts.notes[0]
    learn(parts.trainer)
    parts.engine.load(1, ())  # the new one gets all weights
    local = parts.local
    local.load(1, ())
    assert run(parts.engine, asked) == run(local, asked)


@pytest.mark.parametrize("has_answered", [True, False])
def test_an_engine_that_has_answered_is_not_silent_however_long_nobody_listened(
    tmp_path: Path, has_answered: bool
) -> None:
    class Late(HereBackend):
        def __init__(self, *made: Any) -> None:
            super().__init__(*made)
            self.late = {1}

        def any_of(self, tokens: Sequence[Any], timeout_s: float) -> list[Any]:
            return [token for token in self.wait(tokens, timeout_s) if token.rank not in self.late]

        def restart(self, rank: int) -> None:
            super().restart(rank)
            self.late.discard(rank)

    parts = parts_of(tmp_path, backend=Late)
    parts.engine.deadline_s = 600.0
    asked = requests(4)
    parts.engine.submit(asked)
    parts.engine._collect()
    assert parts.engine.engines[1].pending is not None
    later = time.monotonic() + remote_engine.MAX_SILENCE_S + 1
    parts.engine.clock = lambda: later
    if has_answered:
        parts.backend.late.clear()  # type: ignore[attr-defined]
    assert {c.id: told(c) for c in parts.engine.stream()} == run(parts.local, asked)
    assert parts.backend.restarted == ([] if has_answered else [1])


def test_what_an_engine_took_with_it_counts_as_stopped_before_its_first_token(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    asked = requests(6)
    expected = run(parts.local, asked)
    parts.engine.submit(asked)
    lost = sorted(request.id for request in parts.engine.engines[1].running.values())
    parts.backend.dead.add(1)
    kept = parts.engine.abort(lost[:2], keep=True)
    assert sorted(c.id for c in kept) == lost[:2]
    assert all(len(c.tokens) == len(c.logp) == 0 and c.finish == "aborted" for c in kept)
    assert parts.backend.restarted == [1]
    # The others it had are sampled elsewhere.
    rest = {c.id: told(c) for c in parts.engine.stream()}
    assert rest == {id: found for id, found in expected.items() if id not in lost[:2]}


def test_an_engine_that_ends_in_its_sleep_is_started_again(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    run(parts.engine, requests(2))
    parts.backend.dead.add(0)
    parts.engine.sleep()
    assert parts.backend.restarted == [0]
    assert run(parts.engine, requests(4)) == run(parts.local, requests(4))


def test_an_engine_that_ends_while_it_takes_weights_is_sent_them_again(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, "placement.sync=delta")
    run(parts.engine, requests(2))
    parts.backend.dead.add(0)
    learn(parts.trainer)
    parts.engine.load(1, ())
    parts.engine.confirm()
    assert parts.backend.restarted == [0]
    assert [member.has_weights for member in parts.engine.engines] == [True, True]
    assert {version for _, _, version in run(parts.engine, requests(4)).values()} == {1}


@pytest.mark.parametrize("source", ["sync", "ahead"])
def test_the_time_that_weights_take_is_counted_once_though_an_engine_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    parts = parts_of(tmp_path, f"rollout.source={source}", "placement.layout=split")
    run(parts.engine, requests(2))
    parts.counted.clear()
    clock = 0.0
    monkeypatch.setattr(remote_engine, "time", SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: clock))

    def slow(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal clock
            clock += 1.0
            return method(*arguments)

        return call

    for name in ("begin", "repeat", "finish"):
        monkeypatch.setattr(parts.engine.sync, name, slow(getattr(parts.engine.sync, name)))
    parts.backend.dead.add(0)
    parts.engine.load(1, ())
    parts.engine.confirm()
    assert parts.backend.restarted == [0]
    assert clock == 4.0  # sent and waited for, twice
    assert parts.counted["time/sync_s"] == 4.0


def test_an_engine_that_always_ends_stops_the_run(tmp_path: Path) -> None:
    class Doomed(HereBackend):
        def restart(self, rank: int) -> None:
            super().restart(rank)
            self.dead.add(rank)

    parts = parts_of(tmp_path, engines=1, backend=Doomed)
    parts.engine.submit(requests(2))
    parts.backend.dead.add(0)
    with pytest.raises(WorkerLost, match=r"rollout rank 0 of 1 has ended in `take`"):
        list(parts.engine.stream())
    assert len(parts.backend.restarted) == remote_engine.MAX_RESTARTS


# --- messages ------------------------------------------------------------------------------------------------------------


def test_requests_and_completions_travel_as_they_are(tmp_path: Path) -> None:
    asked = requests(3) + requests(1, sampling=replace(OPTIONS, raw_logprobs=True, top_k=3), first=9)
    asked[2] = replace(asked[2], key=(1 << 64) - 1, generated=5, priority=-2, may_continue=True)
    together = [request for group in group_by_prompt(asked) for request in group]
    assert [request.id for request in together[:3]] == ["0.0", "0.1", "9.0"]  # equal prompts together
    assert sorted(request.id for request in together) == sorted(request.id for request in asked)
    assert {request.id for request in distinct_requests(group_by_prompt(asked))} == {"0.0", "1.0", "2.0", "9.0", "9.1"}
    back = unpack_requests(pack_requests(group_by_prompt(asked), first=70))
    assert back == [replace(request, id=str(number)) for number, request in enumerate(together, 70)]
    assert unpack_requests(pack_requests([])) == []
    parts = parts_of(tmp_path)
    engine = parts.local
    assert isinstance(engine, DenseEngine)
    engine.submit([replace(request, generated=0, id=str(k)) for k, request in enumerate(asked)])
    done = list(engine.stream())
    packed = pack_completions(done)
    assert packed.numbers == [int(one.id) for one in done]
    back = unpack_completions(packed, [one.id for one in done])
    for one, other in zip(done, back, strict=True):
        assert (one.id, one.finish, one.version) == (other.id, other.finish, other.version)
        for name in ("tokens", "logp", "raw_logp"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or (mine.dtype.kind == theirs.dtype.kind and mine.tolist() == theirs.tolist())
    assert unpack_completions(pack_completions([]), []) == []


def test_an_engine_that_fails_says_so_to_whoever_waits(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, engines=1)
    run(parts.engine, requests(1))
    worker = parts.backend.workers[0]

    def broken(*_: Any) -> Any:
        raise RuntimeError("no more tokens")

    worker.thread.engine._decode = broken
    parts.engine.submit(requests(2))
    with pytest.raises(RuntimeError, match="no more tokens"):
        list(parts.engine.stream())
    with pytest.raises(RuntimeError, match="no more tokens"):
        worker.sleep()
    until = time.monotonic() + 5
    while worker.thread._thread.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    assert not worker.thread._thread.is_alive()
