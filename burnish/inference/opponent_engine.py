"""`OpponentEngine` samples from the policy and from earlier weights of it, each request from the weights that it names.

The engines take turns: one works off its requests, then the next. In a game the players take turns anyway. Every completion carries the
version of the weights that wrote it, and `OpponentEngine` checks that it is the one that the request asked for.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from burnish.core.engine import Completion, Engine, Request
from burnish.models.policy import PolicyModel


def copy_policy(policy: PolicyModel) -> PolicyModel:
    """A copy of a policy with weights of its own. Of a policy with adapters only the adapters are copied; the base is shared."""
    shared: dict[int, object] = {}
    if policy.lora is not None:
        frozen = [p for p in policy.module.parameters() if not p.requires_grad]
        shared = {id(tensor): tensor for tensor in (*frozen, *policy.module.buffers())}
    return replace(policy, module=copy.deepcopy(policy.module, shared).requires_grad_(False))


class Opponent:
    """One set of earlier weights, with the engine that samples from it."""

    def __init__(self, policy: PolicyModel, engine: Engine) -> None:
        self.policy, self.engine = policy, engine
        self.version: int | None = None
        """The step after which the policy had these weights; None before the first `load`."""

    def load(self, version: int, read: Callable[[PolicyModel], None]) -> None:
        """Take the weights of a version, which `read` writes into the policy."""
        if self.version != version:
            self.version = None  # while the weights are neither the old nor the new ones
            read(self.policy)
            self.engine.load(version, ())
            self.version = version


class OpponentEngine:
    """The policy's engine, together with opponents that have earlier weights."""

    def __init__(self, policy: Engine, opponents: Sequence[Opponent]) -> None:
        self.policy, self.opponents = policy, opponents
        self._owner: dict[str, tuple[Engine, int | None]] = {}
        """The engine of each unfinished request, and the version it must have; None for the policy's."""
        self._streaming: Engine | None = None
        self._is_interrupted = False
        self._lock = threading.Lock()

    @property
    def engines(self) -> list[Engine]:
        return [self.policy, *(one.engine for one in self.opponents)]

    def submit(self, requests: Sequence[Request]) -> None:
        loaded = {one.version: one.engine for one in self.opponents}
        for engine in self.engines:
            own = [request for request in requests if self._engine_of(request, loaded) is engine]
            if own:
                engine.submit(own)
                self._owner |= {request.id: (engine, request.opponent) for request in own}

    def _engine_of(self, request: Request, loaded: dict[int | None, Engine]) -> Engine:
        if request.opponent is None:
            return self.policy
        if request.opponent not in loaded:
            raise RuntimeError(
                f"{request.id} asks for the weights of step {request.opponent}, but only {sorted(v for v in loaded if v is not None)} are loaded"
            )
        return loaded[request.opponent]

    def stream(self) -> Iterator[Completion]:
        while not self._take_interrupt() and self._owner:  # an interrupt is consumed even if nothing is left
            for engine in self.engines:
                if not any(owner is engine for owner, _ in self._owner.values()):
                    continue
                self._streaming = engine
                try:
                    for completion in engine.stream():
                        yield self._checked(completion)
                finally:
                    self._streaming = None
                if self._is_interrupted:
                    break

    def _take_interrupt(self) -> bool:
        with self._lock:
            was, self._is_interrupted = self._is_interrupted, False
            return was

    def _checked(self, completion: Completion) -> Completion:
        _, version = self._owner.pop(completion.id)
        if version is not None and completion.version != version:
            raise RuntimeError(
                f"{completion.id}: weights of step {completion.version} played instead of step {version}"
            )
        return completion

    def interrupt(self) -> None:
        with self._lock:
            self._is_interrupted = True
            streaming = self._streaming
        if streaming is not None:
            streaming.interrupt()

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        wanted = set(ids)
        found = list[Completion]()
        for engine in self.engines:
            own = [name for name in wanted if name in self._owner and self._owner[name][0] is engine]
            if own:
                stopped = engine.abort(own, keep)
                for name in own if not keep else [completion.id for completion in stopped]:
                    self._owner.pop(name, None)
                found += stopped
        return found

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights of the policy. Opponents keep theirs."""
        self.policy.load(version, named_tensors)

    def sleep(self) -> None:
        for engine in self.engines:
            engine.sleep()

    def wake(self) -> None:
        for engine in self.engines:
            engine.wake()
