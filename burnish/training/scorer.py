"""A model as a reward: a scorer trained by `burnish reward-model` (or any such directory) that scores answers in batches.

    reward:
      parts: [{name: model, options: {path: runs/scorer-0/checkpoints/step-000250}}, number]

Where its tokenizer is the policy's, it reads the very tokens the policy read and wrote; otherwise text goes through its
own chat template. A text it cannot score (longer than its positions, a score that is no number) is a failure of the
scorer, which leaves the sample without a reward; it is never a 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from burnish.config.errors import UserError
from burnish.config.plugins import check_options
from burnish.config.schema import Template
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.data.rows import Row
from burnish.data.supervised import encode_example
from burnish.models.policy import pick_device
from burnish.models.score import ScoreModel, load_scorer, score_positions
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.types import Failure, Result, ScoreRequest
from burnish.training.forward import Packing, batch_outputs

STATISTICS = "scores.json"
"""Beside a scorer's weights: where its scores of held-out answers lie."""
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class ScorerOptions:
    """Options of the reward part `model`."""

    path: str
    """A directory for sequence classification with one label, relative to the recipe or to the working directory."""
    device: str = "auto"
    dtype: str = "float32"
    token_budget: int = 8192
    """Most tokens of one forward pass."""
    standardise: bool = False
    """Subtract the mean of its scores of held-out answers and divide by their standard deviation (`scores.json`)."""
    clip: float | None = None
    """Scores are cut to -clip..clip, after standardising."""

    @staticmethod
    def of(options: Mapping[str, Any], where: str) -> ScorerOptions:
        """From the options of a part; the error for what is wrong with them."""
        check_options(ScorerOptions, options, where)
        if not isinstance(options.get("path"), str):
            raise UserError(f"{where}: give options.path, the directory of a reward model")
        made = ScorerOptions(**options)
        if made.dtype not in DTYPES:
            raise UserError(f"{where}: dtype {made.dtype!r} is not one of {', '.join(DTYPES)}")
        if not isinstance(made.token_budget, int) or made.token_budget < 1:
            raise UserError(f"{where}: token_budget should be a whole number above 0, got {made.token_budget!r}")
        if made.clip is not None and not (isinstance(made.clip, int | float) and made.clip > 0):
            raise UserError(f"{where}: clip should be a number above 0, got {made.clip!r}")
        return made


class ModelScorer:
    """Scores batches of answers in this process."""

    def __init__(self, directory: Path, options: ScorerOptions, policy_tokenizer: Tokenizer) -> None:
        self.options = options
        device = pick_device(options.device)
        self.model: ScoreModel = load_scorer(directory, getattr(torch, options.dtype), device).eval()
        self.tokenizer = Tokenizer.load(directory)
        self.device = device
        self.packing = Packing.of(self.model, options.token_budget)
        self.shift, self.scale = _statistics(directory) if options.standardise else (0.0, 1.0)
        self.reads_tokens = self.tokenizer.means_the_same_as(policy_tokenizer)
        """Whether token ids of the policy are its own."""

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Result | Failure]:
        """The score of each answer, in order. Which others are scored with it changes rounding at most."""
        found: dict[int, Result | Failure] = {}
        texts: dict[int, list[int]] = {}
        # In the order of their ids: how completions happened to end does not decide what is packed together.
        for index in sorted(range(len(requests)), key=lambda i: requests[i].id):
            tokens = self.tokens_of(requests[index])
            if isinstance(tokens, Failure):
                found[index] = tokens
            else:
                texts[index] = tokens
        for index, score in zip(texts, self.scores(list(texts.values())), strict=True):
            found[index] = self._result(score)
        return [found[index] for index in range(len(requests))]

    def tokens_of(self, request: ScoreRequest) -> list[int] | Failure:
        """What is scored: the trajectory's own tokens where they mean the same here, else its text in our template."""
        if self.reads_tokens and request.tokens is not None:
            tokens = [int(token) for token in request.tokens]
        else:
            row = Row(request.id, request.prompt, request.data_source, None, {}, completion=request.completion)
            try:
                tokens, mask = encode_example(row, self.tokenizer, Template())
            except UserError as error:
                return Failure(f"the reward model cannot read the answer: {error}")
            if request.truncated:  # it never came to the end that the template writes
                while mask and (not mask[-1] or self.tokenizer.is_special(tokens[-1])):
                    tokens, mask = tokens[:-1], mask[:-1]
        longest = self.model.arch.max_positions
        if len(tokens) > longest:
            return Failure(f"{len(tokens)} tokens are more than the {longest} positions of the reward model")
        return tokens if tokens else Failure("there is no token to score")

    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """The raw score of token sequences."""
        if not texts:
            return []
        tokens = torch.tensor([token for text in texts for token in text])
        offsets = offsets_from_lengths(torch.tensor([len(text) for text in texts]))
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        mask[score_positions(tokens, offsets, self.tokenizer.pad_id)] = True
        batch = Batch(tokens, offsets, {"loss_mask": mask}).to(self.device)
        values = batch_outputs(self.model, batch, frozenset({"value"}), self.packing, 1.0, "loss_mask")["value"]
        scores: list[float] = values[batch.loss_mask].tolist()
        return scores

    def _result(self, score: float) -> Result | Failure:
        if not math.isfinite(score):
            return Failure(f"the reward model's score is {score}")
        value = (score - self.shift) / self.scale
        if self.options.clip is not None:
            value = max(-self.options.clip, min(self.options.clip, value))
        return Result(value)


def _statistics(directory: Path) -> tuple[float, float]:
    """Mean and standard deviation of the scores of held-out answers."""
    path = directory / STATISTICS
    if not path.is_file():
        raise UserError(
            f"{directory} has no {STATISTICS}, so its scores cannot be standardised: train it with reward_model.held_out, "
            "or set standardise: false"
        )
    saved = json.loads(path.read_text())
    if not saved["std"] > 0:
        raise UserError(f"{path}: all held-out scores are the same, so there is nothing to divide by")
    return float(saved["mean"]), float(saved["std"])
