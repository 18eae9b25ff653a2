"""Supervised fine-tuning: the learner with a likelihood loss, on examples whose mask says what the assistant said.

Used by `burnish sft` (`sft_session.py`) and as the warm start of `burnish train`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from burnish.algorithms.aggregation import aggregation_weights
from burnish.algorithms.losses import NllLoss
from burnish.config.schema import Sft
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.data.supervised import Example, example_order
from burnish.trainers.performance import learner_values
from burnish.trainers.updates import Around, OnUpdate
from burnish.training.learner import Learner
from burnish.training.memory_use import restart_peak


def pack_examples(examples: Sequence[Example]) -> Batch:
    """Examples as a batch; the masks mark what is learnt. A sequence's first token has no past, so it never is."""
    mask = torch.tensor([m and k > 0 for e in examples for k, m in enumerate(e.mask)], dtype=torch.bool)
    return Batch(
        tokens=torch.tensor([t for e in examples for t in e.tokens]),
        offsets=offsets_from_lengths(torch.tensor([len(e.tokens) for e in examples])),
        token={"action_mask": mask, "loss_mask": mask},
    )


def train(
    learner: Learner,
    examples: Sequence[Example],
    config: Sft,
    seed: int,
    on_update: OnUpdate,
    start: int = 0,
    around: Around = lambda update: nullcontext(),
) -> None:
    """Updates `start`+1 to `config.updates`, each on the next `batch_size` examples of the seeded order.

    `start` is not the learner's own count: that leaves out updates that were skipped, which used up their examples.
    `around` gives the context an update is made in, by its number.
    """
    order = example_order(len(examples), seed, config.updates * config.batch_size)
    for update in range(start, config.updates):
        started = time.perf_counter()
        restart_peak(learner.device)
        chosen = [examples[i] for i in order[update * config.batch_size : (update + 1) * config.batch_size]]
        batch = pack_examples(chosen).to(learner.device)
        batch = batch.with_token(weight=aggregation_weights(batch, "token-mean"))
        with around(update + 1):
            learning = time.perf_counter()
            share = learner.ranks.share(batch, learner.packing.attention_cost)
            result = learner.update(share, NllLoss())
            speed = learner_values([learner], learning)
        values = {f"sft/{name}": value for name, value in result.stats.items()} | speed
        if result.skipped:
            values["sft/skipped"] = 1.0
        values["time/step_s"] = time.perf_counter() - started
        values["time/tokens_per_s"] = batch.num_tokens / values["time/step_s"]
        if on_update(update + 1, values):
            return
