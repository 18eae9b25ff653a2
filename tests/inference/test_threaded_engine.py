"""An interrupted stream ends early, loses nothing, and continues where it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.threaded_engine import EngineThread


@pytest.fixture
def model(tools: Any) -> Any:
    return tools.decoder()


def wanted(tools: Any) -> list[Any]:
    return tools.requests([(1, 2, 3), (4, 5)], n=3, max_tokens=40)


def test_a_stream_interrupted_at_every_step_gives_the_same_completions(tools: Any, model: Any) -> None:
    whole = tools.run(DenseEngine(model, max_rows=4), wanted(tools))
    engine = DenseEngine(model, max_rows=4, listener=lambda name, token: engine.interrupt())
    engine.submit(wanted(tools))
    found: dict[str, Any] = {}
    streams = 0
    while engine.waiting or len(engine.rows):
        found |= {c.id: c for c in engine.stream()}
        streams += 1
    assert streams > 20
    assert {k: c.tokens.tolist() for k, c in found.items()} == {k: c.tokens.tolist() for k, c in whole.items()}


def test_an_interrupt_from_a_listener_or_a_thread_ends_the_step_only(tools: Any, model: Any) -> None:
    engine = DenseEngine(model, listener=lambda name, token: engine.interrupt())
    engine.submit(wanted(tools))
    assert list(engine.stream()) == []
    assert engine.stats.tokens == 12  # of the prompts' forward and of the step behind it
    assert list(engine.stream()) == []
    assert engine.stats.tokens == 18
    engine.listener = None
    thread = threading.Thread(target=engine.interrupt)
    thread.start()
    thread.join()
    assert list(engine.stream()) == []
    assert engine.stats.tokens == 18
    assert len(list(engine.stream())) == 6


def test_between_two_streams_requests_can_be_aborted_and_submitted(tools: Any, model: Any) -> None:
    requests = wanted(tools)
    whole = tools.run(DenseEngine(model), requests)
    engine = DenseEngine(model, listener=lambda name, token: engine.interrupt())
    engine.submit(requests[:5])
    list(engine.stream())
    engine.listener = None
    (stopped,) = engine.abort([requests[1].id], keep=True)
    assert stopped.finish == "aborted"
    assert stopped.tokens.tolist() == whole[stopped.id].tokens.tolist()[:2]
    engine.submit(requests[5:])
    found = {c.id: c.tokens.tolist() for c in engine.stream()}
    assert found == {k: c.tokens.tolist() for k, c in whole.items() if k != stopped.id}


def test_a_thread_that_was_closed_says_so_to_who_still_asks(tools: Any, model: Any) -> None:
    thread = EngineThread(DenseEngine(model))
    assert thread.do(lambda engine: 7) == 7
    thread.close()
    thread.close()
    thread._thread.join(20)
    with pytest.raises(RuntimeError, match="was closed"):
        thread.do(lambda engine: 7)
