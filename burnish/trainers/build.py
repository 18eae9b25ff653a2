"""Puts an RL run together: roles from the controller, prompts, rewards, the recipe, validation.

Everything that can be wrong with a config's files, names and sizes is found here, before the first step.
"""

from __future__ import annotations

import json
from pathlib import Path

from burnish.config.schema import Sft, Source, Template, TrainConfig
from burnish.controller import roles
from burnish.data.prompts import PromptStream, validation_prompts
from burnish.data.supervised import load_examples
from burnish.data.tasks.registry import make_demonstrations
from burnish.models.policy import PolicyModel
from burnish.rewards.rewards import Rewards
from burnish.rollout.driver import Driver
from burnish.rollout.measure import measure, sampling_options, summary
from burnish.rollout.sources import SyncSource
from burnish.run.files import atomic_directory, atomic_write
from burnish.run.run import Run
from burnish.trainers import observe, sft
from burnish.trainers.prepare import Recipe
from burnish.trainers.rl import Job, TrainerState, Validate
from burnish.training.learner import Learner


def build_job(config: TrainConfig, base: Path | None, run: Run, policy: PolicyModel, rewards: Rewards) -> Job:
    """All parts of an RL run."""
    recipe = Recipe(
        config.algorithm, config.rollout.max_tokens, config.training.mini_batches * config.training.epochs, base
    )
    learner = roles.build_learner(config, policy)
    reference = roles.build_reference(config, policy)
    engine = roles.build_engine(policy, config.rollout)
    driver = roles.build_driver(config, policy, engine, base)
    stream = PromptStream(config.data.train, policy.tokenizer, config.data, config.seed, "train", base)
    if (report := stream.report()) is not None:
        run.display.note(report)
    if config.rollout.top_p < 1 or config.rollout.top_k:
        run.display.note(
            "rollout.top_p or rollout.top_k is on: samples come from a truncated distribution that the learner does not "
            "see, and the mismatch metrics will show it"
        )
    options = sampling_options(config.rollout, policy.tokenizer.eos_ids)
    source = SyncSource(stream, driver, rewards, options, config.rollout.prompts, config.rollout.n, run.journal)
    validate = build_validation(config, base, run, policy, driver, rewards)
    return Job(config, run, policy, learner, reference, engine, stream, source, recipe, validate, TrainerState())


def build_validation(
    config: TrainConfig,
    base: Path | None,
    run: Run,
    policy: PolicyModel,
    driver: Driver,
    rewards: Rewards,
    kind: str = "validation-",
) -> Validate:
    """A function that measures every mode at a step and keeps its samples in tables named `kind` + mode."""
    if not config.data.validation:
        return lambda step: {}
    prompts = validation_prompts(
        config.data.validation, policy.tokenizer, config.data, config.seed, config.validation.limit, base
    )

    def validate(step: int) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, mode in config.validation.modes.items():
            run.display.phase(f"validation, {name}")
            options = sampling_options(mode, policy.tokenizer.eos_ids)
            scored = measure(driver, rewards, prompts, mode.n, options, run.display.phase)
            values |= {f"validation/{name}/{k}": v for k, v in summary(scored, config.validation.by).items()}
            run.samples(step, f"{kind}{name}", observe.sample_rows(scored, None, policy.tokenizer))
        return values

    return validate


def warm_start(config: Sft, template: Template, seed: int, base: Path | None, run: Run, policy: PolicyModel) -> Path:
    """Supervised training of the policy in place, saved as `warm_start/` in the run; done once in a run's life."""
    path = run.directory.path / "warm_start"
    data = [
        _as_file(source, seed, run.directory.path / f"demonstrations-{k}.jsonl") for k, source in enumerate(config.data)
    ]
    longest = min(config.max_tokens, policy.max_positions or config.max_tokens)
    examples, left_out = load_examples(data, policy.tokenizer, template, longest, config.overlong, base, seed)
    run.display.start(f"warm start on {len(examples):,} demonstrations: {policy.note}", config.updates)
    if left_out:
        run.display.note(f"{left_out} demonstrations are longer than {longest} tokens and were left out")
    learner = Learner(policy.module, config.optimizer, config.updates, config.token_budget)
    sft.train(learner, examples, config, seed, run.display.step)
    with atomic_directory(path, replace=True) as folder:
        policy.save(folder)
    return path


def _as_file(source: Source, seed: int, path: Path) -> Source:
    """A task's demonstrations as a file in the run, where they can be looked at; any other source as it is."""
    if source.task is None:
        return source
    rows = make_demonstrations(source.task, source.options, seed)
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))
    return Source(path=str(path.resolve()), limit=source.limit, name=source.name or source.task)
