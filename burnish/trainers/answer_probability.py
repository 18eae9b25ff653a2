"""`AnswerProbability` measures how likely the policy finds the known answer before each turn, for the shaper information_gain.

The context in which turn k begins is everything before it, tool results included. Behind it come `before`, which begins a final answer,
and the tokens of the known answer. p = exp(mean log-prob of these tokens), by the trainer's model and without gradient. IGPO (2510.14967).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import turns_of
from burnish.algorithms.shaping.shapers import ANSWER_PROBABILITY
from burnish.algorithms.shaping.spec import InformationGainShaper
from burnish.config.errors import UserError
from burnish.core.batch import Batch, Ragged
from burnish.core.pictures import PictureSpan
from burnish.core.segments import contiguous_sum, offsets_from_lengths
from burnish.core.trajectory import Trajectory
from burnish.models.tokenizer import Tokenizer
from burnish.trainers.teacher_columns import Prompts
from burnish.training.interfaces import AnyLearner


class AnswerProbability:
    """Adds the ragged column `answer_probability`. `before_pass` is called before the learner computes."""

    def __init__(
        self,
        shaper: InformationGainShaper,
        tokenizer: Tokenizer,
        learner: AnyLearner,
        before_pass: Callable[[], None],
    ) -> None:
        self.encode, self.learner, self.before_pass = tokenizer.encode, learner, before_pass
        self.before = tokenizer.encode(shaper.before)

    def __call__(self, batch: Batch, trajectories: Sequence[Trajectory], prompts: Prompts) -> Batch:
        rows = [prompts[t.prompt_id, t.visit].row for t in trajectories]
        answers = [self.encode(answer_of(row.answer, row.id)) for row in rows]
        self.before_pass()
        owners = batch.sequence["trajectory_ids"].tolist()
        return answer_probability(batch, [answers[k] for k in owners], self.before, self._logprobs)

    def _logprobs(self, asked: Batch) -> Tensor:
        logp = self.learner.outputs(asked.to(self.learner.device), frozenset())["logp"]
        return logp.to(asked.tokens.device)


def answer_of(answer: Any, row: str) -> str:
    """The known answer of a row as text; of several equal ones the first."""
    first = answer[0] if isinstance(answer, list | tuple) and answer else answer
    if isinstance(first, bool) or not isinstance(first, str | int | float) or first == "":
        raise UserError(
            f"shaping information_gain asks how likely the known answer of a row is, but row {row} has {str(answer)[:60]!r}: give every row "
            "an answer of text or numbers (data.train.answer_key), or remove the shaper"
        )
    return str(first)


def answer_probability(
    batch: Batch, answers: Sequence[Sequence[int]], before: Sequence[int], logprobs: Callable[[Batch], Tensor]
) -> Batch:
    """The batch with `answer_probability`, one number for each turn of each sequence. `answers` are those of the sequences [S]."""
    turns = turns_of(batch)
    firsts = torch.searchsorted(turns.turn_of_token, torch.arange(turns.num_turns, device=batch.tokens.device))
    starts = turns.token_indices[firsts]  # [K] the first token of each turn
    tokens, is_answer, lengths, spans = list[Tensor](), list[Tensor](), list[int](), list[tuple[PictureSpan, ...]]()
    for sequence, start in zip(turns.sequence_of_turn.tolist(), starts.tolist(), strict=True):
        behind = torch.tensor([*before, *answers[sequence]], dtype=batch.tokens.dtype, device=batch.tokens.device)
        first = int(batch.offsets[sequence])
        context = batch.tokens[first:start]
        spans.append(batch.spans_within(first, start))
        tokens += [context, behind]
        mask = torch.zeros(len(context) + len(behind), dtype=torch.bool, device=batch.tokens.device)
        mask[len(context) + len(before) :] = True
        is_answer.append(mask)
        lengths.append(mask.numel())
    mask, groups = torch.cat(is_answer), torch.arange(len(lengths), device=batch.tokens.device)
    columns = {"action_mask": mask, "loss_mask": mask}
    asked = Batch(torch.cat(tokens), offsets_from_lengths(torch.tensor(lengths)), columns, {"group_ids": groups})
    logp = logprobs(asked.with_pictures(spans)).double()[mask]
    sizes = torch.tensor([len(answers[k]) for k in turns.sequence_of_turn.tolist()])
    probability = (contiguous_sum(logp, offsets_from_lengths(sizes)) / sizes).exp()
    counts = torch.bincount(turns.sequence_of_turn, minlength=batch.num_sequences)
    return replace(
        batch, ragged={**batch.ragged, ANSWER_PROBABILITY: Ragged(probability, offsets_from_lengths(counts))}
    )
