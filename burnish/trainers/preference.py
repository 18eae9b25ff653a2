"""Preference training: the learner with a loss on pairs of answers, or on answers labelled good or bad.

Used by `burnish prefer` (`preference_session.py`). A unit is what an update counts: a pair, or a labelled answer together
with another prompt's answer behind the same prompt, by which KTO sees how far the policy has moved. Either is two sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.algorithms.losses.model_losses import PreferenceLoss, measures
from burnish.algorithms.losses.view import View, view_of
from burnish.algorithms.terms.loss_terms import weights_of_sequences
from burnish.config.errors import UserError
from burnish.config.preference import Preference
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum
from burnish.data.preference_pairs import Labelled, Pair
from burnish.data.supervised import Example, example_order
from burnish.trainers.offline_run import Around, OnUpdate
from burnish.trainers.performance import learner_values
from burnish.trainers.sft import pack_examples
from burnish.training.learner import Learner
from burnish.training.meter import restart_peak

STREAM = "preference"


@dataclass(frozen=True)
class Unit:
    """Two answers behind one prompt: chosen and rejected, or a labelled one and one that belongs elsewhere."""

    id: str
    first: Example
    second: Example
    is_good: bool = True
    """Whether the first is a good answer; of a pair it always is."""


References = Callable[[Sequence[int], Batch], Tensor]
"""[2U] mean log-prob of each answer under the reference, of the units of these numbers, packed as this batch."""


def units_of_pairs(pairs: Sequence[Pair]) -> list[Unit]:
    return [Unit(pair.id, pair.chosen, pair.rejected) for pair in pairs]


def units_of_labelled(answers: Sequence[Labelled], max_tokens: int) -> list[Unit]:
    """Each answer with the next one in the data that answers another prompt and fits behind this one's."""
    return [Unit(one.id, one.answer, _mismatched(answers, i, max_tokens), one.is_good) for i, one in enumerate(answers)]


def _mismatched(answers: Sequence[Labelled], index: int, max_tokens: int) -> Example:
    prompt, _ = _parts(answers[index].answer)
    for step in range(1, len(answers)):
        other, said = _parts(answers[(index + step) % len(answers)].answer)
        if other.tokens != prompt.tokens and len(prompt.tokens) + len(said.tokens) <= max_tokens:
            name = f"{answers[index].id}/mismatched"
            return Example(name, prompt.tokens + said.tokens, prompt.mask + said.mask)
    raise UserError(
        f"{answers[index].id}: kto needs the answer to another prompt behind this one's, and there is none that fits into "
        f"{max_tokens} tokens: give rows of more than one prompt, or raise preference.max_tokens"
    )


def _parts(example: Example) -> tuple[Example, Example]:
    """What is before the first token of the answer, and what is from there on."""
    at = example.mask.index(True)
    before, after = (Example(example.id, example.tokens[s], example.mask[s]) for s in (slice(at), slice(at, None)))
    return before, after


def pack_units(units: Sequence[Unit], loss: PreferenceLoss) -> Batch:
    """Units as a batch of twice as many sequences, the first of each before the second, with the columns the loss reads."""
    batch = pack_examples([example for unit in units for example in (unit.first, unit.second)])
    is_first = torch.tensor([True, False]).repeat(len(units))
    columns = {"group_ids": torch.arange(len(units)).repeat_interleave(2)}
    if loss.is_paired:
        columns["chosen"] = is_first
    else:
        columns["mismatched"] = ~is_first
        columns["desirable"] = torch.tensor([unit.is_good for unit in units]).repeat_interleave(2)
    return batch.with_sequence(weight=weights_of_sequences(batch, "seq-mean-token-mean"), **columns)


def mean_logprobs(ask: Callable[[Batch], Tensor], learner: Learner, batch: Batch) -> Tensor:
    """[S] the mean log-prob of every answer's tokens, float64, each rank asked for its share."""
    share = learner.ranks.share(batch, learner.packing.attention_cost)
    whole = learner.ranks.whole(share, {"logp": ask(share)})
    sums = contiguous_sum(whole.outputs["logp"].double(), batch.offsets)
    return sums / contiguous_sum(batch.loss_mask.double(), batch.offsets)


def train(
    learner: Learner,
    units: Sequence[Unit],
    loss: PreferenceLoss,
    config: Preference,
    order: Sequence[int],
    references: References | None,
    on_update: OnUpdate,
    start: int = 0,
    around: Around = lambda update: nullcontext(),
) -> None:
    """Updates `start`+1 to `config.updates`, each on the next `batch_size` units of the `order`.

    `references` is None for a loss that compares with none. `around` gives the context an update is made in.
    """
    for update in range(start, config.updates):
        started = time.perf_counter()
        restart_peak(learner.device)
        rows = order[update * config.batch_size : (update + 1) * config.batch_size]
        batch = prepared(learner, units, rows, loss, references)
        with around(update + 1):
            learning = time.perf_counter()
            share = learner.ranks.share(batch, learner.packing.attention_cost)
            result = learner.update(share, loss)
            speed = learner_values([learner], learning)
        assert result.logp is not None, "columns were asked for"
        told = result.stats | measures(whole_view(learner, share, result.logp), loss)
        values = {f"preference/{name}": value for name, value in told.items()} | speed
        if result.skipped:
            values["preference/skipped"] = 1.0
        values["time/step_s"] = time.perf_counter() - started
        values["time/tokens_per_s"] = batch.num_tokens / values["time/step_s"]
        if on_update(update + 1, values):
            return


def unit_order(num_units: int, config: Preference, seed: int) -> list[int]:
    """The numbers of the units of all updates: seeded epochs, a new order each."""
    return example_order(num_units, seed, config.updates * config.batch_size, STREAM)


def prepared(
    learner: Learner, units: Sequence[Unit], rows: Sequence[int], loss: PreferenceLoss, references: References | None
) -> Batch:
    """The units of these numbers as a batch on the learner's device, with the reference's word on them."""
    batch = pack_units([units[i] for i in rows], loss).to(learner.device)
    return batch if references is None else batch.with_sequence(ref_logp=references(rows, batch).to(learner.device))


def whole_view(learner: Learner, share: Batch, logp: Tensor) -> View:
    """What the loss sees of a batch and [N] log-probs, put together from all ranks."""
    whole = learner.ranks.whole(share, {"logp": logp})
    return view_of(whole.batch, logp=whole.outputs["logp"][whole.batch.loss_mask])


def measure(
    learner: Learner, units: Sequence[Unit], loss: PreferenceLoss, references: References | None
) -> dict[str, float]:
    """Loss, accuracy, margin, implicit rewards and log-probs on all of some units, without gradient."""
    batch = prepared(learner, units, range(len(units)), loss, references)
    share = learner.ranks.share(batch, learner.packing.attention_cost)
    view = whole_view(learner, share, learner.logprobs(share))
    with torch.no_grad():
        return {"loss": float(loss(view)[0]), **measures(view, loss)}
