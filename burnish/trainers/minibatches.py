"""Mini-batches of a prepared batch, with every weight of the loss fixed before anything is split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from burnish.algorithms.aggregation import weights_of_sequences
from burnish.algorithms.auxiliary import positive_nll_weights
from burnish.config.algorithm import Algorithm
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids


def mini_batches(batch: Batch, algorithm: Algorithm, num: int, epochs: int, horizon: int) -> Iterator[Batch]:
    """`epochs` passes over `num` parts of nearly equal group count, weights fixed; a group is never split.

    `horizon` divides seq-mean-token-sum-norm where the configuration names none.
    """
    groups, count = compact_ids(batch.sequence["group_ids"])
    num = min(num, count)
    for _ in range(epochs):
        for k in range(num):
            part = (groups >= k * count // num) & (groups < (k + 1) * count // num)
            yield weighted(batch.select(part.nonzero().squeeze(1)), algorithm, horizon)


def weighted(mini: Batch, algorithm: Algorithm, horizon: int) -> Batch:
    """The mini-batch with the weights of its policy loss and of the imitation of its right answers."""
    aggregation = algorithm.aggregation
    others = {name: column for name, column in mini.token.items() if name != "weight"}
    weights = weights_of_sequences(mini, aggregation.name, aggregation.horizon or horizon)
    mini = replace(mini, token=others).with_sequence(weight=weights)
    if algorithm.auxiliary.positive_nll > 0:
        mini = mini.with_token(nll_weight=positive_nll_weights(mini, algorithm.auxiliary.positive_nll))
    return mini
