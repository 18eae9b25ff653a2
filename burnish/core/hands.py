"""Threads that compute side by side on a CPU, each with its share of the cores.

torch divides every operation among all cores and waits for the last of them, thousands of times a step for a small model. Pieces of
work that do not depend on each other go to a thread each instead, which computes with cores of its own, and they meet once,
when all are done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Hands:
    """`number` threads, the caller's among them.

    While they work, torch's number of threads is each one's share of it, for the whole process: nothing else may compute then.
    """

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self._others: ThreadPoolExecutor | None = None

    def map(
        self, function: Callable[[int, Item], Result], items: Sequence[Item], most: int | None = None
    ) -> list[Result]:
        """function(hand, item) of every item, in their order; at `most` so many at once.

        Item i is hand i modulo their number's, who takes its items in order: what a hand adds up is the same each time, to the
        bit. An error of any hand is raised when all have ended.
        """
        number = min(self.number, len(items), self.number if most is None else most)
        if number < 2:
            return [function(0, item) for item in items]
        threads, grad, inference = torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        share = max(1, threads // number)

        def work(hand: int) -> list[Result]:
            torch.set_num_threads(share)
            # A thread of its own starts with gradients on.
            with (
                _own_core(hand, number) if share == 1 else nullcontext(),
                torch.set_grad_enabled(grad),
                torch.inference_mode() if inference else nullcontext(),
            ):
                return [function(hand, item) for item in items[hand::number]]

        if self._others is None:
            self._others = ThreadPoolExecutor(self.number - 1, "hand")
        others = [self._others.submit(work, hand) for hand in range(1, number)]
        try:
            done = [work(0)]
        finally:
            wait(others)
            torch.set_num_threads(threads)
        done += [other.result() for other in others]
        return [done[i % number][i // number] for i in range(len(items))]


@contextmanager
def _own_core(hand: int, number: int) -> Iterator[None]:
    """This thread on its share of the cores: beside other work the system would wake two hands on the same one.

    For hands of one thread: those that torch starts for one of more would keep what is meant for a moment.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < number:
        yield
        return
    os.sched_setaffinity(0, cores[hand::number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


ALONE = Hands()
