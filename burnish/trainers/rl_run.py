"""One RL run from start to end, or resumed: checks, run directory, warm start, training. Also the supervised control runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.loading import add_missing_defaults, dump
from burnish.config.placement import has_remote_rewards
from burnish.config.schema import Sft, TrainConfig
from burnish.data.prompt_pool import ReadRows
from burnish.data.supervised import load_examples
from burnish.data.tasks.registry import make_demonstrations
from burnish.distributed import engine_builder, roles
from burnish.distributed.judge_process import EngineJudge
from burnish.distributed.placement import check_placement
from burnish.distributed.ray_roles import open_cluster
from burnish.distributed.roles import build_outline, build_policy, build_scorers, policy_updates
from burnish.memory_plan.from_config import is_gpu_device, plan_run
from burnish.models.activation_checkpointing import set_activations
from burnish.models.kernels.device import deterministic_algorithms
from burnish.rewards.reward_parts import JUDGE, MODEL
from burnish.rewards.scoring import Rewards
from burnish.run.durable_files import FolderId, atomic_write
from burnish.run.metrics import read_metrics
from burnish.run.run import Run
from burnish.run.run_directory import RunDirectory, run_name
from burnish.run.trackers.tracker_process import check_trackers
from burnish.trainers import rl, sft
from burnish.trainers.assembly import RunParts, build_context, build_inputs, build_parts
from burnish.trainers.context import restore
from burnish.trainers.held_out_validation import build_validation, held_out_prompts
from burnish.trainers.input_checks import often_repeated_rows, read_checked_rows, record_inputs
from burnish.trainers.performance import MemoryPlanCheck
from burnish.trainers.prompt_values import prepare_prompt_values
from burnish.trainers.warm_start import load_warm_start_examples, warm_start, warm_start_damage
from burnish.training.learner import Learner
from burnish.training.optimizers.update_rules import describe_lr
from burnish.training.profiler import step_to_profile

MORE_DEMONSTRATIONS, MORE_UPDATES = 10, 4
"""How many times the demonstrations of the warm start one control has, and the updates that both make."""
Rows = list[dict[str, str]]


@contextmanager
def checked_run(
    config: TrainConfig, resolved: dict[str, Any], base: Path, name: str, replaced: FolderId | None = None
) -> Iterator[tuple[RunParts, Run]]:
    """Build and check the parts of a run, then create or open its directory, and yield both.

    `replaced` is the folder of an old run of this name, which is then moved to another name.
    """
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    location = _run_location(config, name)
    rewards_are_remote = has_remote_rewards(config.placement)
    with (
        deterministic_algorithms(config.training.deterministic and is_gpu_device(config.model.device)),
        RunDirectory.claim(*location, partial(add_missing_defaults, TrainConfig), replaced) as directory,
        Rewards(config.reward, base, rewards_are_remote, config.training.steps) as rewards,
    ):
        check_placement(config.placement)
        rows = read_checked_rows(config, base, rewards)
        sources = [*config.data.train, *config.data.validation]
        is_local = config.placement.name == "local"
        memory = plan_run(config, base) if is_local else None
        notes = [memory.text, *memory.check()] if memory is not None else []
        warm = warm_start_folder(directory)
        has_warm = warm.is_dir() and not directory.is_replaced
        damage = warm_start_damage(warm) if config.warm_start is not None and has_warm else None
        needs_warm_start = config.warm_start is not None and (damage is not None or not has_warm)
        notes += [f"{warm}: {damage}; the warm start is made again"] if damage is not None else []
        # If other processes train, this one needs the weights on a device only for a warm start.
        model = config.model if is_local or needs_warm_start else config.model.model_copy(update={"device": "cpu"})
        policy = build_policy(model, sources, config.seed, base)
        kinds = (JUDGE,) if rewards_are_remote else (MODEL, JUDGE)
        scorers = build_scorers(config.reward, policy.tokenizer, base, kinds)
        rewards.attach_scorers(scorers)
        notes += [scorer.note for scorer in scorers.values() if isinstance(scorer, EngineJudge)]
        parts = build_parts(config, base, policy, rewards, rows.take)
        parts.notes = [*notes, *often_repeated_rows(config, rows.sizes), *parts.notes]
        parts.memory_check = MemoryPlanCheck(memory, "training") if memory is not None else None
        if config.warm_start is not None and needs_warm_start:
            parts.makes_warm_start = True
            parts.examples, note = load_warm_start_examples(
                config.warm_start, config.data.template, config.seed, base, policy
            )
            parts.notes += [note] if note is not None else []
        with open_cluster(config) as parts.cluster:
            directory.begin(location[2])
            parts.notes += record_inputs(directory.path, config, resolved, base, directory.forget_rollouts)
            with Run(directory, config.run, resolved) as run:
                yield parts, run


def check_directory(config: TrainConfig, name: str) -> None:
    """Refuse a config with which the run of this name cannot resume. Takes no lock and writes nothing."""
    RunDirectory.check(*_run_location(config, name), partial(add_missing_defaults, TrainConfig))


def check_without_weights(config: TrainConfig, base: Path, name: str, rewards: Rewards, read: ReadRows) -> None:
    """The checks of `checked_run` that need the policy's tokenizer and architecture, but no weights and no server."""
    policy = build_outline(config.model, [*config.data.train, *config.data.validation], config.seed, base)
    build_scorers(config.reward, policy.tokenizer, base, kinds=())
    build_inputs(config, base, policy, rewards, read)
    root, folder, _ = _run_location(config, name)
    if config.warm_start is not None and not warm_start_folder(RunDirectory(root / folder)).is_dir():
        load_warm_start_examples(config.warm_start, config.data.template, config.seed, base, policy)


def execute(parts: RunParts, run: Run, profile: int | None = None) -> bool:
    """Run what is left of warm start and RL. Returns True when the run is complete.

    `profile` is the step to record with a profiler, or `NEXT_STEP`.
    """
    config, warm = parts.config, warm_start_folder(run.directory)
    if config.warm_start is not None and parts.makes_warm_start:
        warm_start(parts, config.warm_start, run, warm)
    elif config.warm_start is not None and parts.cluster is None:
        parts.policy.load_weights(warm)
    parts.weights = warm if config.warm_start is not None else None
    context = build_context(parts, run)
    try:
        prepare_prompt_values(parts, run)
        checkpoint = run.resume()
        context.stream.open_journal(run.directory.tasks, run.last_step)
        if checkpoint is not None:
            restore(context, checkpoint.path)
            context.health.recall(read_metrics(run.directory.metrics), context.health_context)
        if context.state.step >= config.training.steps:
            run.display.note(f"{run.directory.path} is complete: all {config.training.steps} steps are done")
            return True
        if run.directory.changes_training:
            run.display.note(describe_lr(config.training.optimizer, context.learner.updates, policy_updates(config)))
        context.profile_step = step_to_profile(profile, context.state.step, config.training.steps)
        return rl.train(context)
    finally:
        context.source.close()


def warm_start_folder(directory: RunDirectory) -> Path:
    """The folder of the warm-started model. It exists complete or not at all."""
    return directory.path / "warm_start"


def _run_location(config: TrainConfig, name: str) -> tuple[Path, str, str]:
    return Path(config.run.directory), run_name(config.run.name, name, config.seed), dump(config)


# --- Control runs ---------------------------------------------------------------------------------------------------------
#
# Two supervised runs show whether imitation alone reaches the result of RL on a generated task. Both start from scratch, as the RL run
# does, and make four times the updates of its warm start. One trains on ten times as many demonstrations, flawed like those of the run.
# The other trains only on the run's correct demonstrations. (Ten times as many *correct* ones would be a perfect teacher: on sort_digits it reaches 99.7% by itself.)


def check_controls(config: TrainConfig) -> tuple[Sft, Source]:
    """The warm start and its task, which controls need."""
    stage = config.warm_start
    if stage is None or len(stage.data) != 1 or stage.data[0].task is None or not config.data.validation:
        raise UserError("--controls needs a warm_start on one task's demonstrations, and data.validation to measure on")
    return stage, stage.data[0]


def control_data(source: Source, seed: int) -> dict[str, Rows]:
    """The demonstrations of each control, by title."""

    def draw(**options: object) -> Rows:
        return make_demonstrations(str(source.task), {**source.options, **options}, seed)

    own, correct = draw(), draw(verified=True)
    # Both read the same stream, so the correct ones among the run's own come first in `correct`.
    verified = {tuple(row.values()) for row in correct}
    num_correct = sum(tuple(row.values()) in verified for row in own)
    return {
        f"SFT on {MORE_DEMONSTRATIONS}x the demonstrations": draw(num=len(own) * MORE_DEMONSTRATIONS),
        "SFT on the demonstrations that are right": correct[:num_correct],
    }


def run_controls(
    config: TrainConfig, base: Path, run: Run, tell: Callable[[str], None] = print
) -> dict[str, dict[str, float]]:
    """Train the controls. Their held-out metrics are printed, and written to controls.json in the run."""
    stage, source = check_controls(config)
    longer = stage.model_copy(update={"updates": stage.updates * MORE_UPDATES})
    results = {}
    with Rewards(config.reward, base) as rewards:
        for number, (title, rows) in enumerate(control_data(source, config.seed).items(), 1):
            policy = roles.build_policy(config.model, config.data.train, config.seed, base)
            rewards.attach_scorers(roles.build_scorers(config.reward, policy.tokenizer, base))
            path = run.directory.path / f"control-{number}.jsonl"
            atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))
            data = [Source(path=str(path.resolve()))]
            template = config.data.template
            examples, _ = load_examples(data, policy.tokenizer, template, stage.max_tokens, stage.overlong)
            set_activations(policy.module, longer.activations)
            learner = Learner(policy.module, longer.optimizer, longer.updates, longer.token_budget)
            run.display.start(f"control: {title}, {len(examples):,} examples", longer.updates)
            sft.train(learner, examples, longer, config.seed, run.display.step)
            runner = roles.build_runner(config, policy, engine_builder.build_engine(policy, config.rollout), base)
            held_out = held_out_prompts(config, base, policy)
            results[title] = build_validation(config, run, policy, runner, rewards, held_out, f"control-{number}-")(0)
            runner.close()
            run.display.stop()
            accuracies = [f"{k.split('/')[1]} {v:.3f}" for k, v in results[title].items() if k.endswith("/accuracy")]
            tell(f"control, {title}: {', '.join(accuracies)}")
    atomic_write(run.directory.path / "controls.json", json.dumps(results, indent=1))
    return results
