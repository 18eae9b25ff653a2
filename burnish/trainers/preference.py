"""Preference training (`burnish prefer`): a loss on pairs of answers, or on answers labelled good or bad.

A training example is an `AnswerPair`: chosen and rejected answer, or for KTO a labelled answer and a mismatched one. The mismatched answer
belongs to another prompt; KTO estimates from it the KL between policy and reference. In both cases an example is two sequences.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView, loss_view
from burnish.algorithms.losses.preference_losses import PreferenceLoss, preference_metrics
from burnish.algorithms.terms.loss_terms import sequence_aggregation_weights
from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.schema import PreferConfig, Preference
from burnish.core.batch import Batch
from burnish.core.pictures import distinct_tokens, shifted
from burnish.core.segments import contiguous_sum
from burnish.data.preference_pairs import (
    EncodingOptions,
    LabelledAnswer,
    LeftOutRows,
    PreferencePair,
    load_labelled,
    load_pairs,
)
from burnish.data.supervised import Example, example_order
from burnish.distributed.roles import build_policy
from burnish.memory_plan.from_config import plan_run
from burnish.models.activation_checkpointing import set_activations
from burnish.models.policy import PolicyModel, resolve_device
from burnish.run.durable_files import FolderId, atomic_write
from burnish.run.run import Run
from burnish.run.trackers.tracker_process import check_trackers
from burnish.trainers import offline_run
from burnish.trainers.offline_run import OnOpen, OnUpdate, Outcome, RowsRun, UpdateContext, validation_name
from burnish.trainers.performance import MemoryPlanCheck, learner_metrics
from burnish.trainers.sft import pack_examples
from burnish.training.learner import Learner
from burnish.training.meter import reset_peak_memory
from burnish.training.parallel.ranks import Ranks, join_process_group, parallelize_model
from burnish.training.reference import Reference

ORDER_LABEL = "preference"
"""Label of the random keys that order the pairs."""
PAIRS_PER_FILE = 512
"""Pairs per file of reference log-probs."""
REFERENCE_FOLDER = "reference"


@dataclass(frozen=True)
class AnswerPair:
    """Two answers after one prompt: chosen and rejected, or a labelled and a mismatched one."""

    id: str
    first: Example
    second: Example
    is_good: bool = True
    """Whether the first answer is good; always true for chosen and rejected."""


References = Callable[[Sequence[int], Batch], Tensor]
"""[2P] mean log-prob of each answer under the reference, for the pairs of these indices, packed as this batch."""


def answer_pairs(pairs: Sequence[PreferencePair]) -> list[AnswerPair]:
    return [AnswerPair(pair.id, pair.chosen, pair.rejected) for pair in pairs]


def answer_pairs_of_labelled(answers: Sequence[LabelledAnswer], max_tokens: int) -> list[AnswerPair]:
    """Each labelled answer with the next answer in the data that belongs to another prompt and fits after this one."""
    return [
        AnswerPair(one.id, one.answer, _mismatched_answer(answers, i, max_tokens), one.is_good)
        for i, one in enumerate(answers)
    ]


def _mismatched_answer(answers: Sequence[LabelledAnswer], index: int, max_tokens: int) -> Example:
    prompt, _ = _split_prompt(answers[index].answer)
    for step in range(1, len(answers)):
        other, said = _split_prompt(answers[(index + step) % len(answers)].answer)
        is_other = distinct_tokens(other.tokens, other.pictures) != distinct_tokens(prompt.tokens, prompt.pictures)
        if is_other and len(prompt.tokens) + len(said.tokens) <= max_tokens:
            name = f"{answers[index].id}/mismatched"
            pictures = prompt.pictures + shifted(said.pictures, len(prompt.tokens))
            return Example(name, prompt.tokens + said.tokens, prompt.mask + said.mask, pictures)
    raise UserError(
        f"{answers[index].id}: kto needs an answer to another prompt that fits after this prompt, and none fits into "
        f"{max_tokens} tokens: give rows of more than one prompt, or raise preference.max_tokens"
    )


def _split_prompt(example: Example) -> tuple[Example, Example]:
    """The tokens before the answer, and the answer."""
    at, pictures = example.mask.index(True), example.pictures
    earlier = tuple(span for span in pictures if span.start < at)
    before = Example(example.id, example.tokens[:at], example.mask[:at], earlier)
    after = Example(example.id, example.tokens[at:], example.mask[at:], shifted(pictures[len(earlier) :], -at))
    return before, after


def pack_answer_pairs(pairs: Sequence[AnswerPair], loss: PreferenceLoss) -> Batch:
    """Pairs as a batch of twice as many sequences, first answer before second, with the columns that the loss reads."""
    batch = pack_examples([example for pair in pairs for example in (pair.first, pair.second)])
    is_first = torch.tensor([True, False]).repeat(len(pairs))
    columns = {"group_ids": torch.arange(len(pairs)).repeat_interleave(2)}
    if loss.is_paired:
        columns["chosen"] = is_first
    else:
        columns["mismatched"] = ~is_first
        columns["desirable"] = torch.tensor([pair.is_good for pair in pairs]).repeat_interleave(2)
    return batch.with_sequence(weight=sequence_aggregation_weights(batch, "seq-mean-token-mean"), **columns)


def mean_logprobs(ask: Callable[[Batch], Tensor], learner: Learner, batch: Batch) -> Tensor:
    """[S] float64 mean log-prob of each answer; every rank computes its share."""
    share = learner.ranks.local_shard(batch, learner.packing.attention_cost)
    whole = learner.ranks.gather_batch(share, {"logp": ask(share)})
    sums = contiguous_sum(whole.outputs["logp"].double(), batch.offsets)
    return sums / contiguous_sum(batch.loss_mask.double(), batch.offsets)


def train(
    learner: Learner,
    pairs: Sequence[AnswerPair],
    loss: PreferenceLoss,
    config: Preference,
    order: Sequence[int],
    references: References | None,
    on_update: OnUpdate,
    start: int = 0,
    around: UpdateContext = lambda update: nullcontext(),
) -> None:
    """Run updates `start`+1 to `config.updates`, each on the next `batch_size` pairs of the `order`.

    `references` is None for a loss without a reference. `around` returns the context manager of an update.
    """
    for update in range(start, config.updates):
        started = time.perf_counter()
        reset_peak_memory(learner.device)
        rows = order[update * config.batch_size : (update + 1) * config.batch_size]
        batch = prepare_batch(learner, pairs, rows, loss, references)
        with around(update + 1):
            learning = time.perf_counter()
            share = learner.ranks.local_shard(batch, learner.packing.attention_cost)
            result = learner.update(share, loss)
            speed = learner_metrics([learner], learning)
        assert result.logp is not None, "update() returns columns by default"
        told = result.stats | preference_metrics(gathered_view(learner, share, result.logp), loss)
        values = {f"preference/{name}": value for name, value in told.items()} | speed
        if result.skipped:
            values["preference/skipped"] = 1.0
        values["time/step_s"] = time.perf_counter() - started
        values["time/tokens_per_s"] = batch.num_tokens / values["time/step_s"]
        if on_update(update + 1, values):
            return


def answer_pair_order(num_pairs: int, config: Preference, seed: int) -> list[int]:
    """Indices of the pairs of all updates: seeded epochs, each in a new order."""
    return example_order(num_pairs, seed, config.updates * config.batch_size, ORDER_LABEL)


def prepare_batch(
    learner: Learner,
    pairs: Sequence[AnswerPair],
    rows: Sequence[int],
    loss: PreferenceLoss,
    references: References | None,
) -> Batch:
    """The pairs of these indices as a batch on the learner's device, with the reference's log-probs."""
    batch = pack_answer_pairs([pairs[i] for i in rows], loss).to(learner.device)
    return batch if references is None else batch.with_sequence(ref_logp=references(rows, batch).to(learner.device))


def gathered_view(learner: Learner, share: Batch, logp: Tensor) -> LossView:
    """The loss view of a batch and its log-probs [N], gathered from all ranks."""
    whole = learner.ranks.gather_batch(share, {"logp": logp})
    return loss_view(whole.batch, logp=whole.outputs["logp"][whole.batch.loss_mask])


def measure(
    learner: Learner, pairs: Sequence[AnswerPair], loss: PreferenceLoss, references: References | None
) -> dict[str, float]:
    """Loss, accuracy, margin, implicit rewards and log-probs of pairs, without gradient."""
    batch = prepare_batch(learner, pairs, range(len(pairs)), loss, references)
    share = learner.ranks.local_shard(batch, learner.packing.attention_cost)
    view = gathered_view(learner, share, learner.logprobs(share))
    with torch.no_grad():
        return {"loss": float(loss(view)[0]), **preference_metrics(view, loss)}


# --- Reference log-probs --------------------------------------------------------------------------------------------------
#
# They are computed once with the initial model, so that no second model is held in memory. They are saved in chunks: a kill loses at most
# one, and a resumed run reads the others bit for bit. Each file has a fingerprint of its tokens; changed data is an error.


def cached_mean_logprobs(
    run: Run, name: str, learner: Learner, pairs: Sequence[AnswerPair], loss: PreferenceLoss
) -> Tensor:
    """[P, 2] float64 mean log-prob of each answer under the initial weights, read from the cache or computed now."""
    found = []
    folder = run.directory.path / REFERENCE_FOLDER
    for start in range(0, len(pairs), PAIRS_PER_FILE):
        part = pairs[start : start + PAIRS_PER_FILE]
        path = folder / f"{name}-{start:08d}.safetensors"
        # Only the first process reads: others might see a file that appeared just now, and all would deadlock.
        values = learner.ranks.broadcast_from_first(_read_means(path, part) if learner.ranks.is_first else None)
        if values is None and path.is_file():
            run.display.note(f"{path} is damaged: its log-probs are computed again")
        if values is None:
            run.display.phase(f"reference log-probs of {name} {start:,}/{len(pairs):,}")
            batch = pack_answer_pairs(part, loss).to(learner.device)
            values = mean_logprobs(learner.logprobs, learner, batch).view(-1, 2).cpu()
            if learner.ranks.is_first:
                _write_means(path, part, values)
        found.append(values)
    return torch.cat(found)


def fingerprint(pairs: Sequence[AnswerPair]) -> str:
    """A hash of the tokens, images and answer masks of pairs."""
    digest = hashlib.sha256()
    for pair in pairs:
        first, second = (list(distinct_tokens(one.tokens, one.pictures)) for one in (pair.first, pair.second))
        digest.update(repr((first, pair.first.mask, second, pair.second.mask)).encode())
    return digest.hexdigest()


def _read_means(path: Path, pairs: Sequence[AnswerPair]) -> Tensor | None:
    """The values of a file; None if it is missing or damaged. They are then computed again with the same weights."""
    if not path.is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            known, values = (file.metadata() or {}).get("tokens", ""), file.get_tensor("means")
    except (SafetensorError, OSError):
        return None
    tokens, _, crc = known.partition(" ")
    if crc != _checksum(tokens, values):
        return None
    if tokens != fingerprint(pairs):
        raise UserError(
            f"{path} was computed from other rows: the data (or the tokenizer) has changed since this run began. "
            "Put the old data back, or give the run another run.name"
        )
    return values


def _checksum(tokens: str, values: Tensor) -> str:
    return f"{zlib.crc32(values.numpy().tobytes(), zlib.crc32(tokens.encode())):08x}"


def _write_means(path: Path, pairs: Sequence[AnswerPair], values: Tensor) -> None:
    from safetensors.torch import save

    path.parent.mkdir(exist_ok=True)
    tokens = fingerprint(pairs)
    # A single metadata entry: the library writes several in any order, and equal runs must have equal files.
    atomic_write(path, save({"means": values.contiguous()}, {"tokens": f"{tokens} {_checksum(tokens, values)}"}))


@dataclass
class PreferenceRun(RowsRun[AnswerPair]):
    """A preference run: what is measured, and when."""

    config: PreferConfig = field(kw_only=True)
    loss: PreferenceLoss = field(kw_only=True)
    references: dict[str, References | None] = field(default_factory=dict, kw_only=True)
    """By `train` and `held_out`."""

    @property
    def kind(self) -> str:
        return "pairs" if self.loss.is_paired else "answers"

    def measure(self, update: int) -> dict[str, float]:
        """Held-out metrics before the first update, every `held_out_every` updates, and after the last."""
        every = self.config.preference.held_out_every
        if not self.held_out or not (update in (0, self.total) or (every and update % every == 0)):
            return {}
        self.run.display.phase("measuring on held-out rows", of=validation_name(update))
        found = measure(self.learner, self.held_out, self.loss, self.references["held_out"])
        return {f"validation/{self.kind}/{name}": value for name, value in found.items()}


def execute(
    config: PreferConfig,
    resolved: dict[str, Any],
    base: Path,
    name: str,
    profile: int | None = None,
    replaced: FolderId | None = None,
    on_open: OnOpen | None = None,
) -> Outcome | None:
    """One preference run from start to end, or resumed. Mistakes in model and data are found before the run directory is created.

    `profile` is the update to record with a profiler, or `NEXT_STEP`; `replaced` and `on_open` are those of `open_run`. With several
    processes each trains on its share of every batch; the first one owns the run and returns the outcome.
    """
    stage = config.preference
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    # Read only for the alphabet of a new model's tokenizer. Options do not change it, and tasks refuse those of preferences here.
    plain = [source.model_copy(update={"options": {}}) for source in stage.data]
    ranks = join_process_group(config.parallel, resolve_device(config.model.device).type == "cuda")
    memory = plan_run(config, base)
    warnings = memory.check()
    policy = build_policy(config.model, plain, config.seed, base, ranks)
    loss = PreferenceLoss(stage.loss.name, stage.loss.model_dump(exclude={"name"}))
    pairs, left_out = load_answer_pairs(config, stage.data, loss, policy, base, "train")
    held_out, _ = load_answer_pairs(config, stage.held_out, loss, policy, base, "test")
    live = live_reference(config, policy, ranks)
    set_activations(policy.module, stage.activations)
    parallelize_model(policy.module, ranks, config.parallel.offload)
    learner = Learner(policy.module, stage.optimizer, stage.updates, stage.token_budget, ranks=ranks)
    with offline_run.open_run(config, resolved, base, name, ranks, replaced, on_open) as run:
        session = PreferenceRun(
            config.run, run, policy, learner, stage.updates, "preference", memory=MemoryPlanCheck(memory, "preference"),
            config=config, loss=loss, rows=pairs, held_out=held_out, batch_size=stage.batch_size,
            order=answer_pair_order(len(pairs), stage, config.seed),
        )  # fmt: skip
        for text in [memory.text, *warnings, *left_out.notes]:
            run.display.note(text)
        session.references = make_references(session, live)  # the weights are still those the run started from
        offline_run.resume(session)
        _train_remaining(session, profile)
        return offline_run.outcome(session) if ranks.is_first else None


def load_answer_pairs(
    config: PreferConfig, sources: list[Source], loss: PreferenceLoss, policy: PolicyModel, base: Path, split: str
) -> tuple[list[AnswerPair], LeftOutRows]:
    """The pairs that fit `preference.max_tokens` and the model's positions, and the rows that do not."""
    stage = config.preference
    if not sources:
        return [], LeftOutRows()
    longest = min(stage.max_tokens, policy.max_positions or stage.max_tokens)
    reading = EncodingOptions(policy.tokenizer, config.template, longest, stage.overlong, base, config.seed)
    if loss.is_paired:
        pairs, left_out = load_pairs(sources, reading, split)
        return answer_pairs(pairs), left_out
    answers, left_out = load_labelled(sources, reading, split)
    return answer_pairs_of_labelled(answers, longest), left_out


def live_reference(config: PreferConfig, policy: PolicyModel, ranks: Ranks) -> Reference | None:
    """A copy of the initial model for `reference: live`, which computes in every update. Call it before the model is sharded."""
    if config.preference.reference != "live":
        return None
    return Reference(policy.module, config.preference.token_budget, 1.0, ranks)


def make_references(session: PreferenceRun, live: Reference | None) -> dict[str, References | None]:
    """The functions that return reference log-probs, for training and held-out pairs."""
    if "reference" not in session.config.preference.loss.needs:
        return {"train": None, "held_out": None}
    if live is not None:
        return dict.fromkeys(("train", "held_out"), _live_references(live, session.learner))
    tables = {"train": session.rows, "held_out": session.held_out}
    return {
        name: _cached_references(cached_mean_logprobs(session.run, name, session.learner, pairs, session.loss))
        if pairs
        else None
        for name, pairs in tables.items()
    }


def _live_references(live: Reference, learner: Learner) -> References:
    def ask(rows: Sequence[int], batch: Batch) -> Tensor:
        return mean_logprobs(live.logprobs, learner, batch)

    return ask


def _cached_references(means: Tensor) -> References:
    def look(rows: Sequence[int], batch: Batch) -> Tensor:
        return means[torch.tensor(rows)].view(-1)

    return look


def _train_remaining(session: PreferenceRun, profile: int | None) -> None:
    """Run the remaining updates, with a measurement before the first one."""
    if not offline_run.start_training(session, f"{session.loss.name} on {len(session.rows):,} {session.kind}", profile):
        return
    offline_run.run_updates(
        session,
        lambda after, around: train(
            session.learner,
            session.rows,
            session.loss,
            session.config.preference,
            session.order,
            session.references["train"],
            after,
            session.updates,
            around,
        ),
    )
