"""A worker for tests of the wire."""

from __future__ import annotations

import os
import time

from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.dispatch import dispatch


class Echo:
    """Says what it hears."""

    def __init__(self, number: int) -> None:
        self.number = number
        print(f"echo {number} is here")

    @dispatch("sequences", "sequences")
    def twice(self, batch: Batch) -> Tensor:
        """Every token twice."""
        return batch.tokens * 2

    @dispatch("broadcast", "list")
    def who(self) -> tuple[str, int]:
        """Who it is."""
        return os.environ["RANK"], self.number

    @dispatch("each", "list")
    def own(self, value: int) -> tuple[str, int]:
        """What one alone is told."""
        return os.environ["RANK"], value

    @dispatch("broadcast", "list")
    def fail(self, how: str) -> None:
        """Fail in some way."""
        if how == "user":
            raise UserError("do it otherwise")
        raise ZeroDivisionError("a bug")

    @dispatch("broadcast", "list")
    def wait_for(self, seconds: float) -> None:
        """Wait a while."""
        time.sleep(seconds)
