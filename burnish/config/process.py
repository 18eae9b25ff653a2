"""The implicit process reward model: a second language model, and how it is trained on outcomes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from burnish.config.optimizer import Optimizer
from burnish.config.slots.base import Record


class ProcessModel(Record):
    """A language model trained on which answers were right; beta times its log-ratio to its own start is the reward of a token."""

    path: str | None = None
    """The model directory it starts from, with the policy's tokenizer; null starts from the weights RL starts from."""
    beta: float = Field(0.05, gt=0)
    """What the log-ratio to the frozen start is multiplied by: the reward of a token, and summed over an answer the log-odds of being right."""
    loss: Literal["cross_entropy", "contrast"] = "cross_entropy"
    """Of an answer's log-odds against its outcome, or against the mean log-odds of the group's answers of the other outcome."""
    update: Literal["before", "after"] = "before"
    """Whether it learns a batch's outcomes before it rewards the batch's tokens, or after (one forward pass less)."""
    mini_batches: int = Field(1, ge=1)
    """Its optimizer steps for each batch; a group is never split over two."""
    optimizer: Optimizer = Optimizer(lr=1e-6, clip_norm=10.0)
    """The optimizer and its schedule."""
