"""One supervised run from start to end, or from where it was: run directory, updates, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from burnish.config.schema import SftConfig
from burnish.controller.memory import planned
from burnish.controller.roles import build_policy
from burnish.data.supervised import Example, load_examples
from burnish.models.activations import set_activations
from burnish.models.policy import PolicyModel, pick_device
from burnish.run.files import FolderId
from burnish.run.trackers import check_trackers
from burnish.trainers import sft, updates
from burnish.trainers.memory import MemoryWatch
from burnish.trainers.updates import Outcome, UpdateJob
from burnish.training.learner import Learner
from burnish.training.parallel.distribute import distribute
from burnish.training.parallel.join import join


def execute(
    config: SftConfig,
    resolved: dict[str, Any],
    base: Path,
    name: str,
    profile: int | None = None,
    replaced: FolderId | None = None,
) -> Outcome | None:
    """Train as far as it is not done. What can be wrong with model and data is found before the run directory is made.

    `profile` is the update to record with a profiler, or `NEXT`; `replaced` an old run's folder, as `open_run` takes it. Of several processes all do the same, each on its share of
    every batch; the first one owns the run, and has the outcome.
    """
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    # Only for the alphabet of a new model's tokenizer, which no option changes; a task refuses those of its demonstrations.
    plain = [source.model_copy(update={"options": {}}) for source in config.sft.data]
    ranks = join(config.parallel, pick_device(config.model.device).type == "cuda")
    # What is divided goes to its device piece by piece: no device has room for all of a model that needs several.
    where = config.model if ranks.weights is None else config.model.model_copy(update={"device": "cpu"})
    memory = planned(config, base)
    warnings = memory.check()
    policy = build_policy(where, plain, config.seed, base)
    examples, note = load(config, policy, base)
    stage = config.sft
    set_activations(policy.module, stage.activations)
    distribute(policy.module, ranks, config.parallel.offload)
    learner = Learner(policy.module, stage.optimizer, stage.updates, stage.token_budget, ranks=ranks)
    with updates.open_run(config, resolved, base, name, ranks, replaced) as run:
        job = UpdateJob(config.run, run, policy, learner, stage.updates, "sft", memory=MemoryWatch(memory, "sft"))
        updates.resume(job)
        if updates.begin(job, f"supervised on {len(examples):,} examples", profile):
            for text in [memory.text, *warnings, *([note] if note is not None else [])]:
                run.display.note(text)
            updates.train(
                job,
                lambda after, around: sft.train(learner, examples, stage, config.seed, after, job.updates, around),
            )
        return updates.outcome(job) if ranks.is_first else None


def load(config: SftConfig, policy: PolicyModel, base: Path) -> tuple[list[Example], str | None]:
    """The examples that fit `sft.max_tokens` and the model's positions, and a note about those left out."""
    longest = min(config.sft.max_tokens, policy.max_positions or config.sft.max_tokens)
    examples, left_out = load_examples(
        config.sft.data, policy.tokenizer, config.template, longest, config.sft.overlong, base, config.seed
    )
    return examples, f"{left_out} examples are longer than {longest} tokens and were left out" if left_out else None
