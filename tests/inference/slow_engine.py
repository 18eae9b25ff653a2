"""An engine for tests of sources: no model, a token a step for every request, some of them slow, some that never move.

A token follows from the request's key and its position alone, so a sample that was stopped and went on must have the tokens of one
that was not. What a request begins with is checked against the tokens drawn for it so far.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from burnish.core.engine import Completion, CompletionFinish, Request
from burnish.core.random_keys import fold, uniform_from_key

VOCAB = 11


def token_of(key: int, position: int) -> int:
    return 2 + fold(key, "token", position) % (VOCAB - 2)


def length_of(key: int, limit: int) -> int:
    """Most answers are short; one in eight has the maximum length."""
    return limit if fold(key, "long") % 8 == 0 else 1 + int(uniform_from_key(fold(key, "length")) * (limit // 2))


class SlowEngine:
    """`stuck(request)` tells which requests draw nothing until they are submitted again."""

    def __init__(self, pause_s: float = 0.0, stuck: Callable[[Request], bool] = lambda request: False) -> None:
        self.pause_s, self.stuck = pause_s, stuck
        self.version = 0
        self.rows: dict[str, tuple[Request, list[int], list[int]]] = {}
        self.ready: deque[Completion] = deque()
        self.num_tokens = self.num_loads = 0
        self.issued: list[str] = []
        self.users: set[str] = set()
        """The threads that sampled."""
        self.time_s = 0.0
        self._interrupted = False

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.id not in self.rows, f"{request.id} is running"
            assert request.sampling.max_tokens > 0
            before = [token_of(request.key, k) for k in range(request.generated)]
            assert list(request.tokens[len(request.tokens) - len(before) :]) == before, "its past is not what was drawn"
            self.rows[request.id] = request, [], []
            self.issued.append(request.id)

    def stream(self) -> Iterator[Completion]:
        while self.ready or (self.rows and not self._interrupted):
            if not self.ready:
                self.users.add(threading.current_thread().name)
                self._step()
            while self.ready:
                yield self.ready.popleft()
        self._interrupted = False

    def _step(self) -> None:
        time.sleep(self.pause_s)
        for name, (request, tokens, _) in list(self.rows.items()):
            if self.stuck(request):
                continue
            position = request.generated + len(tokens)
            tokens.append(token_of(request.key, position))
            self.num_tokens += 1
            total = length_of(request.key, request.generated + request.sampling.max_tokens)
            if position + 1 >= total:
                self.ready.append(self._end(name, "stop"))

    def _end(self, name: str, finish: CompletionFinish) -> Completion:
        _, tokens, _ = self.rows.pop(name)
        logp = np.full(len(tokens), -1.0 - self.version, dtype=np.float32)
        return Completion(name, np.array(tokens, dtype=np.int64), logp, finish, self.version)

    def clock(self) -> float:
        """A clock that advances one second a call, only while nothing moves, so that a busy machine causes no timeouts."""
        rows = list(self.rows.values())
        self.time_s += float(bool(rows) and not self.ready and all(self.stuck(request) for request, *_ in rows))
        return self.time_s

    def interrupt(self) -> None:
        self._interrupted = True

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        wanted = set(ids)
        kept = [c for c in self.ready if c.id in wanted]
        self.ready = deque(c for c in self.ready if c.id not in wanted)
        kept += [self._end(name, "aborted") for name in list(self.rows) if name in wanted]
        return kept if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        assert not self.rows, "new weights under running requests"
        self.version, self.num_loads = version, self.num_loads + 1

    def sleep(self) -> None:
        """Nothing to do."""

    def wake(self) -> None:
        """Nothing to do."""
