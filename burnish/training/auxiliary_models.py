"""The critic: a value model with a learner of its own."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from burnish.algorithms.losses.model_losses import ValueLoss
from burnish.algorithms.losses.policy_loss import Loss
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.models.heads import ValueModel
from burnish.models.lora.adapters import adapter_weights
from burnish.models.tokenizer import Tokenizer
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import Content
from burnish.training.learner import Learner, Update
from burnish.training.parallel.ranks import SOLO, Ranks
from burnish.training.reference import Reference
from burnish.training.sharded_checkpoint import load_tensors_into, tensor_contents

CRITIC_FOLDER, CRITIC_WEIGHTS = "critic", "model"


class Critic:
    """Values of tokens, and one optimizer step at a time towards their returns."""

    def __init__(
        self,
        model: ValueModel,
        optimizer: Optimizer,
        total_updates: int,
        token_budget: int,
        clip: float | None = 0.5,
        share_prompts: bool = True,
        ranks: Ranks = SOLO,
    ) -> None:
        self.model, self.loss = model, ValueLoss(clip)
        self.learner = Learner(model, optimizer, total_updates, token_budget, share_prompts=share_prompts, ranks=ranks)

    def values(self, batch: Batch) -> Tensor:
        """[N] the value of the state before each token the model wrote; 0 elsewhere."""
        return self.learner.outputs(batch, frozenset({"value"}))["value"]

    def update(self, mini_batch: Batch) -> Update:
        """One step on the token columns `returns`, `values` (from before the batch's first update) and `weight`."""
        return self.learner.update(mini_batch, self.loss, columns=False)

    def contents(self, stage: TensorStaging) -> list[Content]:
        """The weights that are trained and their optimizer state, to lie in `critic/` of a checkpoint."""
        weights = tensor_contents(f"{CRITIC_FOLDER}/{CRITIC_WEIGHTS}", self.learner.names, self.model, stage)
        return [*weights, *self.learner.contents(stage, f"{CRITIC_FOLDER}/")]

    def load(self, folder: Path) -> None:
        """What a checkpoint has, back; tensors keep their addresses."""
        load_tensors_into(folder / CRITIC_FOLDER, CRITIC_WEIGHTS, self.learner.names, self.model)
        self.learner.load(folder / CRITIC_FOLDER)


# --- An implicit process reward model: a language model with a learner of its own, beside its frozen start (PRIME, 2502.01456).
#
# Both give log-probs at temperature 1: what the policy was sampled at is no business of theirs.

PROCESS_FOLDER, PROCESS_WEIGHTS = "process", "model"
Model = TypeVar("Model", bound=nn.Module)


def trainable_copy(policy: Model) -> Model:
    """A copy to be trained by itself. Of a policy with adapters these alone are copied: the frozen weights below are the policy's own."""
    own = adapter_weights(policy)
    shared = {
        id(t): t for name, t in chain(policy.named_parameters(), policy.named_buffers()) if own and name not in own
    }
    return copy.deepcopy(policy, shared)


class ProcessRewardModel:
    """Log-probs of a model in training and of its start, which is made again from the run's start and never saved."""

    def __init__(
        self,
        model: nn.Module,
        start: Reference,
        optimizer: Optimizer,
        total_updates: int,
        token_budget: int,
        share_prompts: bool = True,
        ranks: Ranks = SOLO,
    ) -> None:
        self.model, self.start = model, start
        self.learner = Learner(model, optimizer, total_updates, token_budget, share_prompts=share_prompts, ranks=ranks)

    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-prob of every token the policy wrote, under the weights in training; 0 elsewhere."""
        return self.learner.logprobs(batch)

    def prior(self, batch: Batch) -> Tensor:
        """[N] the same under the frozen start."""
        return self.start.logprobs(batch)

    def update(self, mini_batch: Batch, loss: Loss) -> Update:
        """One optimizer step; its column of log-probs is from before it."""
        return self.learner.update(mini_batch, loss)

    def contents(self, stage: TensorStaging) -> list[Content]:
        """The weights that are trained and their optimizer state, to lie in `process/` of a checkpoint."""
        weights = tensor_contents(f"{PROCESS_FOLDER}/{PROCESS_WEIGHTS}", self.learner.names, self.model, stage)
        return [*weights, *self.learner.contents(stage, f"{PROCESS_FOLDER}/")]

    def load(self, folder: Path) -> None:
        """What a checkpoint has, back; tensors keep their addresses."""
        load_tensors_into(folder / PROCESS_FOLDER, PROCESS_WEIGHTS, self.learner.names, self.model)
        self.learner.load(folder / PROCESS_FOLDER)


# --- Where the steps of an answer end: what a process reward model is read at.


def step_ends(
    tokens: Sequence[int], written: Sequence[bool], tokenizer: Tokenizer, delimiter: str, last: int
) -> list[int]:
    """Positions at which the steps of what was `written` end, in order: one at least, and the last is `last`.

    A step ends with the token that completes the delimiter, which may be the name of a special token. Steps without text
    are none: delimiters in a row end one step, and what follows the last one belongs to the step before if it is blank.
    """
    where = [position for position, is_written in enumerate(written) if is_written]
    named = tokenizer.pieces([tokens[position] for position in where], skip_special=False)
    is_text = [not tokenizer.is_special(tokens[position]) for position in where]
    # A special token's name is not text, and a delimiter that is a part of it is not there.
    pieces = [piece if real or piece == delimiter else "" for piece, real in zip(named, is_text, strict=True)]
    stops, text = list(accumulate(map(len, pieces))), "".join(pieces)
    ends: list[int] = []
    start = 0
    while (at := text.find(delimiter, start)) >= 0:
        end = where[bisect_left(stops, at + len(delimiter))]
        if text[start:at].strip() and end not in ends:
            ends.append(end)
        start = at + len(delimiter)
    if not text[start:].strip():
        ends = ends[:-1]
    return [end for end in ends if end < last] + [last]
