"""Which rows of a micro-batch a process computes: all of them, or its slice where several share the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
MaybeTensor = TypeVar("MaybeTensor", Tensor, "Tensor | None")


class Cut(Protocol):
    """One micro-batch, cut: M wanted rows among all that are computed, and which of both are here."""

    at: Tensor
    """[m] where the wanted rows that are here stand among the rows that are here; never empty."""

    def rows(self, column: Tensor) -> Tensor:
        """Of a column with an entry a row, the part that is computed here."""

    def attention(self, attend: Attend) -> Attend:
        """Attention over all rows, given queries, keys and values of the rows that are here."""

    def mine(self, column: Tensor) -> Tensor:
        """[M] to [m]: of a column with an entry a wanted row, the entries of `at`."""

    def whole(self, values: MaybeTensor) -> MaybeTensor:
        """[m] to [M]: what was computed at `at`, with the values of the other processes; the gradient is of this one's alone."""


Split = Callable[[int, Tensor], Cut]
"""(number of rows, the wanted ones [M]) -> the cut."""


class Uncut:
    """Everything is here."""

    def __init__(self, at: Tensor) -> None:
        self.at = at

    def rows(self, column: Tensor) -> Tensor:
        return column

    def attention(self, attend: Attend) -> Attend:
        return attend

    def mine(self, column: Tensor) -> Tensor:
        return column

    def whole(self, values: MaybeTensor) -> MaybeTensor:
        return values
