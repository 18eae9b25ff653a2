"""Runs that die in the middle of their updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from burnish.training.learner import Learner, Update


@contextmanager
def killed_after(updates: int) -> Iterator[None]:
    """What runs inside dies when it asks for one update more than these; that it does not is a failure."""
    update, count = Learner.update, 0

    def dying(self: Learner, *args: Any, **options: Any) -> Update:
        nonlocal count
        count += 1
        if count > updates:
            raise RuntimeError("killed")
        return update(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", dying)
        with pytest.raises(RuntimeError, match="killed"):
            yield
