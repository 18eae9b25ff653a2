"""Process reward models (`reward_model.steps`): batches of answers with values of their steps, and what is measured on held-out ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from burnish.algorithms.losses.model_losses import share_ahead
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.data.step_values import SteppedAnswer
from burnish.training.learner import Learner

MEASURE_CHUNK = 512
"""Answers per forward pass of a measurement."""
THRESHOLD = 0.5
"""A step is called right above this probability, and is right above this value."""


def pack_steps(answers: Sequence[SteppedAnswer]) -> Batch:
    """Answers as a batch whose masks mark the tokens at which their labelled steps are scored.

    Token column: `step_value`. Sequence columns: `group_ids` (the answer), `weight` (1 / labelled steps of the batch).
    """
    lengths = [len(answer.tokens) for answer in answers]
    starts = [0, *accumulate(lengths)]
    labelled = [(start + at, value) for start, one in zip(starts, answers, strict=False) for at, value in one.labelled]
    where = torch.tensor([at for at, _ in labelled])
    tokens = torch.tensor([token for answer in answers for token in answer.tokens])
    mask = torch.zeros(tokens.shape, dtype=torch.bool).index_fill(0, where, True)
    values = torch.zeros(tokens.shape, dtype=torch.float64)
    values[where] = torch.tensor([value for _, value in labelled], dtype=torch.float64)
    batch = Batch(
        tokens=tokens,
        offsets=offsets_from_lengths(torch.tensor(lengths)),
        token={"action_mask": mask, "loss_mask": mask, "step_value": values},
        sequence={
            "group_ids": torch.arange(len(answers)),
            "weight": torch.full((len(answers),), 1 / len(labelled), dtype=torch.float64),
        },
    )
    return batch.with_pictures([answer.pictures for answer in answers])


@dataclass(frozen=True)
class StepMeasurements:
    """How well a scorer predicts the values of held-out steps. A figure without any step or answer to count is None."""

    loss: float
    """Mean binary cross-entropy of the steps with a value."""
    accuracy: float | None
    """Share of steps on the right side of 0.5, among those whose value is not 0.5."""
    ranking: float | None
    """Share of (right, wrong) pairs of these steps whose right one has the higher score: the area under the ROC curve."""
    first_error: float | None
    """Share of answers with a wrong step whose first wrong step is the first one below 0.5 (ProcessBench, 2412.06559)."""
    no_error: float | None
    """Share of answers without a wrong step in which no step is below 0.5."""
    f1: float | None
    """The harmonic mean of the two, which is ProcessBench's score."""
    predicted: float
    """Mean predicted probability."""
    value: float
    """Mean value. Predictions are calibrated on average if the two agree."""
    mean: float
    """Mean of all scores, which are log-odds."""
    std: float
    steps: int
    answers: int

    @property
    def values(self) -> dict[str, float]:
        """The measurements as metrics; those that could be made."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        found |= {"score_mean": found.pop("mean"), "score_std": found.pop("std")}
        return {f"validation/steps/{name}": float(x) for name, x in found.items() if name not in ("steps", "answers")}

    @property
    def lines(self) -> list[str]:
        """What a command prints at its end."""
        shares = (
            (self.accuracy, "on the right side of 0.5"),
            (self.ranking, "of right and wrong pairs in order"),
        )
        rows = (
            (self.first_error, "of first errors found"),
            (self.no_error, "of answers without error accepted"),
        )
        told = [
            ", ".join(f"{share:.1%} {what}" for share, what in some if share is not None) for some in (shares, rows)
        ]
        return [
            f"held-out steps: {self.steps:,} of {self.answers:,} answers, loss {self.loss:.4f}"
            + (told[0] and f", {told[0]}"),
            *([f"held-out answers: {told[1]}"] if told[1] else []),
            f"probabilities: mean {self.predicted:.3f}, of values {self.value:.3f}",
        ]


def measure_steps(learner: Learner, answers: Sequence[SteppedAnswer], chunk: int = MEASURE_CHUNK) -> StepMeasurements:
    """Score the labelled steps of answers without gradient."""
    found: list[Tensor] = []
    for at in range(0, len(answers), chunk):
        batch = pack_steps(answers[at : at + chunk]).to(learner.device)
        scores = learner.outputs(batch, frozenset({"value"}))["value"][batch.loss_mask]
        found.append(scores.double().cpu())
    wanted = torch.tensor([value for one in answers for _, value in one.labelled], dtype=torch.float64)
    return step_measurements(torch.cat(found), wanted, [len(one.labelled) for one in answers])


def step_measurements(scores: Tensor, wanted: Tensor, counts: Sequence[int]) -> StepMeasurements:
    """The measurements of scores [T] of steps with values [T]; `counts` are the steps of each answer, in order."""
    chances = scores.sigmoid()
    is_clear = wanted != THRESHOLD
    right, called = wanted[is_clear] > THRESHOLD, chances[is_clear] > THRESHOLD
    errors: list[bool] = []
    clean: list[bool] = []
    for given, seen in zip(wanted.split(list(counts)), chances.split(list(counts)), strict=True):
        first, said = first_below(given), first_below(seen)
        (clean if first is None else errors).append(said == first)
    first_error, no_error = _share(errors), _share(clean)
    f1 = None
    if first_error is not None and no_error is not None:
        both = first_error + no_error
        f1 = 2 * first_error * no_error / both if both else 0.0
    return StepMeasurements(
        loss=float(binary_cross_entropy_with_logits(scores, wanted)),
        accuracy=float((called == right).double().mean()) if right.numel() else None,
        ranking=share_ahead(scores[is_clear], right),
        first_error=first_error,
        no_error=no_error,
        f1=f1,
        predicted=float(chances.mean()),
        value=float(wanted.mean()),
        mean=float(scores.mean()),
        std=float(scores.std(correction=0)),
        steps=scores.numel(),
        answers=len(counts),
    )


def first_below(values: Tensor) -> int | None:
    """The index of the first value below 0.5; None if there is none."""
    below = (values < THRESHOLD).nonzero()
    return int(below[0]) if below.numel() else None


def _share(hits: list[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None
