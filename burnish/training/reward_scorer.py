"""Scores answers in batches with a reward model: a directory trained by `burnish reward-model`, or one of that format.

    reward:
      parts: [{name: model, options: {path: runs/scorer-0/checkpoints/step-000250}}, number]

If the model has the policy's tokenizer, it reads the policy's own tokens; otherwise the text goes through its own chat template.
A text that it cannot score (too long, or a score that is not finite) is a failure: the sample has no reward, never a 0.

With a `delimiter` it is a process reward model: it is read at the end of every step, and an aggregation makes one score of them. A model
that was trained on steps names its delimiter in its directory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.config.yaml_text import read_json_object
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.data.row import Row
from burnish.data.supervised import encode_example
from burnish.models.answer_steps import delimiter_of, scored_positions
from burnish.models.heads import SCORE_STATISTICS_FILE, ScoreModel, load_score_model, score_positions
from burnish.models.policy import resolve_device
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.reward_parts import (
    DEFAULT_AGGREGATION,
    EACH_STEP,
    RewardModelOptions,
    aggregate_step_scores,
)
from burnish.rewards.score_types import PartResult, ScoreRequest, ScoringFailure
from burnish.training.forward import Packing, batch_outputs


class ScorerInput(NamedTuple):
    """The tokens of a prompt and an answer."""

    tokens: list[int]
    written: list[bool]
    """Which of the tokens belong to the answer."""


class ModelScorer:
    """Scores batches of answers in this process."""

    def __init__(self, directory: Path, options: RewardModelOptions, policy_tokenizer: Tokenizer) -> None:
        self.options = options
        self.delimiter = delimiter_to_read(directory, options)
        device = resolve_device(options.device)
        self.model: ScoreModel = load_score_model(directory, getattr(torch, options.dtype), device).eval()
        self.tokenizer = Tokenizer.load(directory)
        self.device = device
        self.packing = Packing.of(self.model, options.token_budget)
        self.shift, self.scale = _score_statistics(directory) if options.standardise else (0.0, 1.0)
        self.reads_tokens = self.tokenizer.has_same_vocabulary(policy_tokenizer)
        """Whether the policy's token ids mean the same to this model."""
        self.aggregate = options.aggregate or DEFAULT_AGGREGATION
        if self.aggregate == EACH_STEP and not self.reads_tokens:
            raise UserError(
                f"aggregate: each rewards the policy's tokens, and {directory} has another tokenizer: use last, min, prod or mean"
            )

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[PartResult | ScoringFailure]:
        """The score of each answer, in order. The other answers of the batch change at most its rounding."""
        found: dict[int, PartResult | ScoringFailure] = {}
        texts: dict[int, ScorerInput] = {}
        # Sorted by id, so that packing does not depend on the order in which completions ended.
        for index in sorted(range(len(requests)), key=lambda i: requests[i].id):
            text = self.text_of(requests[index])
            if isinstance(text, ScoringFailure):
                found[index] = text
            else:
                texts[index] = text
        ends = [self.ends_of(text) for text in texts.values()]
        scores = self.scores([text.tokens for text in texts.values()], ends)
        for (index, text), where, each in zip(texts.items(), ends, scores, strict=True):
            found[index] = self._result(text, where, each)
        return [found[index] for index in range(len(requests))]

    def text_of(self, request: ScoreRequest) -> ScorerInput | ScoringFailure:
        """The tokens to score: the trajectory's own if the tokenizers agree, else its text in this model's template."""
        if self.reads_tokens and request.tokens is not None:
            tokens = [int(token) for token in request.tokens]
            mask = [True] * len(tokens) if request.written is None else [bool(one) for one in request.written]
        else:
            row = Row(request.id, request.prompt, request.data_source, None, {}, completion=request.completion)
            try:
                tokens, mask, _ = encode_example(row, self.tokenizer, Template())  # prompts of rewards have no pixels
            except UserError as error:
                return ScoringFailure(f"the reward model cannot read the answer: {error}")
            if request.truncated:  # remove the end of turn that the template writes and the answer never reached
                while mask and (not mask[-1] or self.tokenizer.is_special(tokens[-1])):
                    tokens, mask = tokens[:-1], mask[:-1]
        longest = self.model.arch.max_positions
        if len(tokens) > longest:
            return ScoringFailure(f"{len(tokens)} tokens are more than the {longest} positions of the reward model")
        return ScorerInput(tokens, mask) if tokens else ScoringFailure("there is no token to score")

    def ends_of(self, text: ScorerInput) -> list[int]:
        """Positions to score: the ends of the steps, or only the end of the text."""
        if self.delimiter is not None:
            return scored_positions(text.tokens, text.written, self.tokenizer, self.delimiter)
        offsets = torch.tensor([0, len(text.tokens)])
        return [int(score_positions(torch.tensor(text.tokens), offsets, self.tokenizer.pad_id))]

    def scores(self, texts: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw scores of token sequences at the positions in `ends`."""
        if not texts:
            return []
        tokens = torch.tensor([token for text in texts for token in text])
        offsets = offsets_from_lengths(torch.tensor([len(text) for text in texts]))
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        mask[[start + end for start, some in zip(offsets.tolist(), ends, strict=False) for end in some]] = True
        batch = Batch(tokens, offsets, {"loss_mask": mask}).to(self.device)
        values = batch_outputs(self.model, batch, frozenset({"value"}), self.packing, 1.0, "loss_mask")["value"]
        found = iter(values[batch.loss_mask].tolist())
        return [list(islice(found, len(some))) for some in ends]

    def _result(self, text: ScorerInput, ends: Sequence[int], scores: Sequence[float]) -> PartResult | ScoringFailure:
        if strange := [score for score in scores if not math.isfinite(score)]:
            return ScoringFailure(f"the reward model's score is {strange[0]}")
        values = [(score - self.shift) / self.scale for score in scores]
        if self.options.clip is not None:
            values = [max(-self.options.clip, min(self.options.clip, value)) for value in values]
        if self.delimiter is None:
            return PartResult(values[0], num_tokens=len(text.tokens))
        chances = torch.tensor(values, dtype=torch.float64).sigmoid().tolist()
        shown = " ".join(f"{chance:.3f}" for chance in chances)
        told: dict[str, Any] = {"parts": {"steps": float(len(chances))}, "details": f"steps {shown}"}
        told["num_tokens"] = len(text.tokens)
        if self.aggregate != EACH_STEP:
            return PartResult(aggregate_step_scores(chances, self.aggregate), **told)
        # The last scored token may not be one that the model wrote; its reward goes to the last written token.
        last = max((position for position, is_written in enumerate(text.written) if is_written), default=0)
        where = [*ends[:-1], last]
        return PartResult(sum(chances), steps=tuple(zip(where, chances, strict=True)), **told)


def delimiter_to_read(directory: Path, options: RewardModelOptions) -> str | None:
    """The delimiter of the steps that a model scores; None if it scores whole answers. Options that do not fit raise a UserError."""
    delimiter = delimiter_of(directory, options.delimiter)
    if delimiter is None and options.aggregate is not None:
        raise UserError(
            f"aggregate has no effect without delimiter, which divides an answer into steps, and {directory} names none"
        )
    return delimiter


def _score_statistics(directory: Path) -> tuple[float, float]:
    """Mean and standard deviation of the scores on held-out answers."""
    path = directory / SCORE_STATISTICS_FILE
    if not path.is_file():
        raise UserError(
            f"{directory} has no {SCORE_STATISTICS_FILE}, so its scores cannot be standardised: train it with reward_model.held_out, "
            "or set standardise: false"
        )
    saved = read_json_object(path)
    if not saved["std"] > 0:
        raise UserError(f"{path}: all held-out scores are the same, so there is nothing to divide by")
    return float(saved["mean"]), float(saved["std"])
