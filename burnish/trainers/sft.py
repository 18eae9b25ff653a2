"""Supervised fine-tuning: the learner with a likelihood loss on the assistant's tokens.

Used by `burnish sft` (`execute`) and for the warm start of `burnish train` (`train`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.schema import Sft, SftConfig
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.data.supervised import Example, example_order, load_examples
from burnish.distributed.roles import build_policy
from burnish.memory_plan.from_config import plan_run
from burnish.models.activation_checkpointing import set_activations
from burnish.models.policy import PolicyModel, resolve_device
from burnish.run.durable_files import FolderId
from burnish.run.trackers.tracker_process import check_trackers
from burnish.trainers import offline_run
from burnish.trainers.offline_run import OfflineRun, OnOpen, OnUpdate, Outcome, UpdateContext
from burnish.trainers.performance import MemoryPlanCheck, learner_metrics
from burnish.training.learner import Learner
from burnish.training.meter import reset_peak_memory
from burnish.training.parallel.ranks import join_process_group, parallelize_model


def pack_examples(examples: Sequence[Example]) -> Batch:
    """Examples as a batch. The masks mark the trained tokens; the first token of a sequence is never trained."""
    mask = torch.tensor([m and k > 0 for e in examples for k, m in enumerate(e.mask)], dtype=torch.bool)
    batch = Batch(
        tokens=torch.tensor([t for e in examples for t in e.tokens]),
        offsets=offsets_from_lengths(torch.tensor([len(e.tokens) for e in examples])),
        token={"action_mask": mask, "loss_mask": mask},
    )
    return batch.with_pictures([e.pictures for e in examples])


def train(
    learner: Learner,
    examples: Sequence[Example],
    config: Sft,
    seed: int,
    on_update: OnUpdate,
    start: int = 0,
    around: UpdateContext = lambda update: nullcontext(),
) -> None:
    """Run updates `start`+1 to `config.updates`, each on the next `batch_size` examples of the seeded order.

    `start` counts skipped updates, unlike the learner's own count: they used up their examples. `around` returns the context manager of
    an update, by its number.
    """
    order = example_order(len(examples), seed, config.updates * config.batch_size)
    for update in range(start, config.updates):
        started = time.perf_counter()
        reset_peak_memory(learner.device)
        chosen = [examples[i] for i in order[update * config.batch_size : (update + 1) * config.batch_size]]
        batch = pack_examples(chosen).to(learner.device)
        batch = batch.with_token(weight=aggregation_weights(batch, "token-mean"))
        with around(update + 1):
            learning = time.perf_counter()
            share = learner.ranks.local_shard(batch, learner.packing.attention_cost)
            result = learner.update(share, NllLoss())
            speed = learner_metrics([learner], learning)
        values = {f"sft/{name}": value for name, value in result.stats.items()} | speed
        if result.skipped:
            values["sft/skipped"] = 1.0
        values["time/step_s"] = time.perf_counter() - started
        values["time/tokens_per_s"] = batch.num_tokens / values["time/step_s"]
        if on_update(update + 1, values):
            return


def execute(
    config: SftConfig,
    resolved: dict[str, Any],
    base: Path,
    name: str,
    profile: int | None = None,
    replaced: FolderId | None = None,
    on_open: OnOpen | None = None,
) -> Outcome | None:
    """One supervised run from start to end, or resumed. Mistakes in model and data are found before the run directory is created.

    `profile` is the update to record with a profiler, or `NEXT_STEP`; `replaced` and `on_open` are those of `open_run`. With several
    processes each trains on its share of every batch; the first one owns the run and returns the outcome.
    """
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    # Read only for the alphabet of a new model's tokenizer. Options do not change it, and tasks refuse those of demonstrations here.
    plain = [source.model_copy(update={"options": {}}) for source in config.sft.data]
    ranks = join_process_group(config.parallel, resolve_device(config.model.device).type == "cuda")
    memory = plan_run(config, base)
    warnings = memory.check()
    policy = build_policy(config.model, plain, config.seed, base, ranks)
    examples, note = load_sft_examples(config, policy, base)
    stage = config.sft
    set_activations(policy.module, stage.activations)
    parallelize_model(policy.module, ranks, config.parallel.offload)
    learner = Learner(policy.module, stage.optimizer, stage.updates, stage.token_budget, ranks=ranks)
    with offline_run.open_run(config, resolved, base, name, ranks, replaced, on_open) as run:
        session = OfflineRun(
            config.run, run, policy, learner, stage.updates, "sft", memory=MemoryPlanCheck(memory, "sft")
        )
        offline_run.resume(session)
        if offline_run.start_training(session, f"supervised on {len(examples):,} examples", profile):
            for text in [memory.text, *warnings, *([note] if note is not None else [])]:
                run.display.note(text)
            offline_run.run_updates(
                session,
                lambda after, around: train(learner, examples, stage, config.seed, after, session.updates, around),
            )
        return offline_run.outcome(session) if ranks.is_first else None


def load_sft_examples(config: SftConfig, policy: PolicyModel, base: Path) -> tuple[list[Example], str | None]:
    """The examples that fit `sft.max_tokens` and the model's positions, and a note about those that do not."""
    longest = min(config.sft.max_tokens, policy.max_positions or config.sft.max_tokens)
    examples, left_out = load_examples(
        config.sft.data, policy.tokenizer, config.template, longest, config.sft.overlong, base, config.seed
    )
    return examples, f"{left_out} examples are longer than {longest} tokens and were left out" if left_out else None
