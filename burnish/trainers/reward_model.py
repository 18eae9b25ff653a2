"""Reward models: the learner with a Bradley-Terry loss, on pairs of answers of which one is preferred."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.algorithms.losses.model_losses import ScorerLoss
from burnish.algorithms.losses.sequence_losses import bradley_terry
from burnish.config.preference import RewardModel
from burnish.core.batch import Batch
from burnish.core.random_keys import permutation
from burnish.core.segments import offsets_from_lengths
from burnish.data.preference_pairs import Pair
from burnish.models.heads import score_positions
from burnish.trainers.offline_run import Around, OnUpdate
from burnish.trainers.performance import learner_values
from burnish.training.learner import Learner
from burnish.training.meter import restart_peak

CHUNK = 256  # pairs measured at once


def pack_pairs(pairs: Sequence[Pair], pad_id: int) -> Batch:
    """Pairs as a batch of twice as many sequences, chosen before rejected; the masks mark the token each is scored at.

    Sequence columns: `group_ids` (the pair), `chosen`, `margin`, `weight` (1 / pairs).
    """
    sequences = [answer.tokens for pair in pairs for answer in (pair.chosen, pair.rejected)]
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    offsets = offsets_from_lengths(torch.tensor([len(sequence) for sequence in sequences]))
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[score_positions(tokens, offsets, pad_id)] = True
    return Batch(
        tokens=tokens,
        offsets=offsets,
        token={"action_mask": mask, "loss_mask": mask},
        sequence={
            "group_ids": torch.arange(len(pairs)).repeat_interleave(2),
            "chosen": torch.tensor([True, False]).repeat(len(pairs)),
            "margin": torch.tensor([pair.margin for pair in pairs], dtype=torch.float64).repeat_interleave(2),
            "weight": torch.full((2 * len(pairs),), 1 / len(pairs), dtype=torch.float64),
        },
    )


def train(
    learner: Learner,
    pairs: Sequence[Pair],
    pad_id: int,
    config: RewardModel,
    order: Sequence[int],
    on_update: OnUpdate,
    start: int = 0,
    around: Around = lambda update: nullcontext(),
) -> None:
    """Updates `start`+1 to `config.updates`, each on the next `batch_size` pairs of the order.

    `around` gives the context an update is made in, by its number.
    """
    loss = ScorerLoss(config.margin, config.centre)
    for update in range(start, config.updates):
        started = time.perf_counter()
        restart_peak(learner.device)
        chosen = [pairs[i] for i in order[update * config.batch_size : (update + 1) * config.batch_size]]
        batch = pack_pairs(chosen, pad_id).to(learner.device)
        with around(update + 1):
            learning = time.perf_counter()
            result = learner.update(batch, loss, columns=False)
            speed = learner_values([learner], learning)
        values = {f"reward_model/{name}": value for name, value in result.stats.items()} | speed
        if result.skipped:
            values["reward_model/skipped"] = 1.0
        values["time/step_s"] = time.perf_counter() - started
        values["time/tokens_per_s"] = batch.num_tokens / values["time/step_s"]
        if on_update(update + 1, values):
            return


def pair_order(size: int, seed: int, num_draws: int) -> list[int]:
    """Indices of the pairs to train on: seeded epochs, a new order each."""
    epochs = (permutation(size, seed, "reward-model", epoch) for epoch in range(-(-num_draws // size)))
    return list(itertools.chain.from_iterable(epochs))[:num_draws]


@dataclass(frozen=True)
class Measured:
    """How a scorer does on pairs it was not trained on, and where its scores lie."""

    accuracy: float
    """Share of pairs whose chosen answer has the higher score."""
    margin: float
    """Mean of chosen less rejected score."""
    loss: float
    mean: float
    """Of all scores."""
    std: float
    pairs: int

    @property
    def values(self) -> dict[str, float]:
        """As metrics."""
        named = {"accuracy": self.accuracy, "margin": self.margin, "loss": self.loss}
        named |= {"score_mean": self.mean, "score_std": self.std}
        return {f"validation/pairs/{name}": value for name, value in named.items()}


def measure(learner: Learner, pairs: Sequence[Pair], pad_id: int, config: RewardModel, chunk: int = CHUNK) -> Measured:
    """Scores of pairs, without gradient; the loss is the one that is trained."""
    found: list[Tensor] = []
    for at in range(0, len(pairs), chunk):
        batch = pack_pairs(pairs[at : at + chunk], pad_id).to(learner.device)
        values = learner.outputs(batch, frozenset({"value"}))["value"][batch.loss_mask]
        found.append(values.double().view(-1, 2).cpu())
    scores = torch.cat(found)  # [P, 2] chosen, rejected
    ahead = scores[:, 0] - scores[:, 1]
    margins = torch.tensor([pair.margin + config.margin for pair in pairs], dtype=torch.float64)
    terms = bradley_terry(scores[:, 0], scores[:, 1], margins)
    return Measured(
        accuracy=float((ahead > 0).double().mean()),
        margin=float(ahead.mean()),
        loss=float((terms + config.centre * scores.sum(1).square()).mean()),
        mean=float(scores.mean()),
        std=math.sqrt(float(scores.var(correction=0))),
        pairs=len(pairs),
    )
