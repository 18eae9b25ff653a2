"""An engine in this process with a copy of the weights, so that it can sample while the learner changes them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from burnish.core.engine import Completion, Engine, Request


class OwnWeights:
    """An engine of `make_engine` on a copy of `policy`, the module that is trained, which it follows at every `load`."""

    def __init__(self, make_engine: Callable[[Any], Engine], policy: nn.Module) -> None:
        self.policy = policy
        self.engine = make_engine(copy.deepcopy(policy).requires_grad_(False))

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)

    def stream(self) -> Iterator[Completion]:
        return self.engine.stream()

    def interrupt(self) -> None:
        self.engine.interrupt()

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        return self.engine.abort(ids, keep)

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """The policy's weights as they are now, and over them those sent."""
        self.engine.load(version, (dict(self.policy.named_parameters()) | dict(named_tensors)).items())

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()
