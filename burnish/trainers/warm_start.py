"""The warm start of a run: supervised training on demonstrations before RL, and the checksums of the model that it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.config.schema import Sft
from burnish.data.supervised import Example, load_examples
from burnish.data.tasks.picture_task import image_as_url
from burnish.data.tasks.registry import make_demonstrations
from burnish.models.activation_checkpointing import set_activations
from burnish.models.policy import AnyPolicy
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import (
    Checksums,
    are_checksums,
    first_damaged_file,
    folder_checksums,
    write_contents,
)
from burnish.run.durable_files import START_OVER_HINT, atomic_directory, atomic_write
from burnish.run.run import Run
from burnish.trainers import sft
from burnish.training.learner import Learner

if TYPE_CHECKING:
    from burnish.trainers.assembly import RunParts


def load_warm_start_examples(
    config: Sft, template: Template, seed: int, base: Path | None, policy: AnyPolicy
) -> tuple[list[Example], str | None]:
    """The examples of the warm start, and a note about those that were left out."""
    longest = min(config.max_tokens, policy.max_positions or config.max_tokens)
    examples, left_out = load_examples(config.data, policy.tokenizer, template, longest, config.overlong, base, seed)
    note = f"{left_out} demonstrations are longer than {longest} tokens and were left out" if left_out else None
    return examples, note


def warm_start(parts: RunParts, config: Sft, run: Run, path: Path) -> None:
    """Train the policy on demonstrations in place, and save it at `path`. A run does this once, unless the folder is damaged later."""
    seed, policy = parts.config.seed, parts.policy
    for k, source in enumerate(config.data):
        if source.task is not None:  # write them where the user can look at them
            rows = make_demonstrations(source.task, source.options, seed)[: source.limit]
            lines = (json.dumps(row, default=image_as_url) + "\n" for row in rows)
            atomic_write(run.directory.path / f"demonstrations-{k}.jsonl", "".join(lines))
    run.display.start(f"warm start on {len(parts.examples):,} demonstrations: {policy.note}", config.updates)
    set_activations(policy.module, config.activations)
    learner = Learner(policy.module, config.optimizer, config.updates, config.token_budget)
    sft.train(learner, parts.examples, config, seed, run.display.step)
    run.display.stop()  # shows the last step before any later note
    expected = (read_warm_checksums(path) or folder_checksums(path)) if run.journal.num_events else None
    with atomic_directory(path, replace=True) as folder:
        sums = write_contents(folder, policy.contents(keep_in_place))
        if expected not in (None, {}, sums):
            raise UserError(
                f"{path} is damaged or missing, and training it again gives other weights than the run began with (another "
                f"machine, library or number of threads?): restore the folder from a copy, {START_OVER_HINT}"
            )
        atomic_write(
            warm_checksum_file(path), json.dumps(sums, indent=1) + "\n"
        )  # before the folder appears: without checksums it could not be checked


def warm_checksum_file(path: Path) -> Path:
    """The checksum file of a warm-started model, next to its folder, which is a plain model directory."""
    return path.with_name(f"{path.name}.json")


def read_warm_checksums(path: Path) -> Checksums | None:
    """The checksums of a warm-started model; None if their file is missing or damaged."""
    try:
        sums: Any = json.loads(warm_checksum_file(path).read_text())
    except (OSError, ValueError):
        return None
    return sums if sums and are_checksums(sums) else None  # a model has files


def warm_start_damage(path: Path) -> str | None:
    """Why a warm-started model cannot be used, or None."""
    sums = read_warm_checksums(path)
    if sums is None:
        return f"{warm_checksum_file(path).name}, which has its checksums, is missing or damaged"
    return first_damaged_file(path, sums)
