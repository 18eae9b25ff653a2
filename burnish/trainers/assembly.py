"""Builds the parts of an RL run: models, engine, prompts, rewards, pipeline, source of rollouts.

`build_parts` finds mistakes in the config's files, names and sizes before the run directory is created. `build_context` then binds
the parts to the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from burnish.algorithms.advantages.spec import SpoChainAdvantage, SpoTreeAdvantage
from burnish.algorithms.shaping.spec import InformationGainShaper
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.errors import UserError
from burnish.config.explain import config_notes
from burnish.config.records import Slot
from burnish.config.rollout import Ahead, Async, Opponents
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.engine import Engine
from burnish.core.trajectory import Trajectory
from burnish.data.demonstrations import PromptDemonstrations
from burnish.data.prompt_pool import Prompt, ReadRows
from burnish.data.prompt_stream import PromptSample, PromptStream
from burnish.data.row_formats import read_rows
from burnish.data.supervised import Example, example_order, load_examples
from burnish.distributed import engine_builder, roles
from burnish.distributed.ray_roles import Roles, start_roles
from burnish.distributed.roles import build_process_reward_model, check_process_reward_model
from burnish.environments.registry import check_template_for_turns, environment_of
from burnish.environments.worker_output import WorkerLog
from burnish.inference.opponent_engine import OpponentEngine
from burnish.models.activation_checkpointing import check_activations
from burnish.models.compiled_layers import check_compile
from burnish.models.fp8_layers import check_fp8
from burnish.models.policy import AnyPolicy, PolicyModel
from burnish.rewards.scoring import Rewards
from burnish.rollout.ahead_source import AheadSource
from burnish.rollout.async_source import AsyncSource
from burnish.rollout.opponents import OpponentPool, OpponentSource, SnapshotFolder
from burnish.rollout.replay import ReplaySource, ReplayStore
from burnish.rollout.runner import Branching, RolloutRunner, max_trajectory_tokens, no_demonstrations
from burnish.rollout.scoring import GroupDemonstrations, RolloutBatch
from burnish.rollout.segment_rollouts import ChainPlan, TreePlan
from burnish.rollout.sync_source import RolloutPlan, RolloutSource, SyncSource
from burnish.rollout.validation import sampling_options
from burnish.run.health.mismatch_causes import HealthContext
from burnish.run.run import Run
from burnish.trainers import sft
from burnish.trainers.aligned_answers import aligned_columns
from burnish.trainers.answer_probability import AnswerProbability
from burnish.trainers.context import ImitationBatch, TrainContext
from burnish.trainers.held_out_validation import build_validation, held_out_prompts
from burnish.trainers.input_checks import (
    check_observations_are_told,
    check_opponents,
    check_players,
    check_positions,
    check_reader_positions,
    check_roles,
    check_success_is_told,
    check_void_turns_are_told,
)
from burnish.trainers.performance import MemoryPlanCheck
from burnish.trainers.pipeline import AlgorithmPipeline
from burnish.trainers.pipeline_steps import StepContext
from burnish.trainers.process_rewards import ProcessRewards
from burnish.trainers.scored_rollouts import ScoredRollouts
from burnish.trainers.state import initial_state
from burnish.trainers.teacher_columns import AddColumns, teacher_columns
from burnish.trainers.while_scoring import EarlyPasses, WhileScoring

if TYPE_CHECKING:
    from burnish.distributed.ray_cluster import Cluster


FindDemonstrations = Callable[[PromptSample, int], list[Trajectory]]
"""Returns the demonstrations that join the samples of a draw, with sample indices from the given one on."""
TRUNCATED_SAMPLING_NOTE = (
    "rollout.top_p or rollout.top_k is on: samples come from a truncated distribution that the learner does not "
    "see, and the mismatch metrics will show it"
)


@dataclass
class RunParts:
    """The checked parts of a run, before its directory is written."""

    config: TrainConfig
    policy: PolicyModel
    rewards: Rewards
    pipeline: AlgorithmPipeline
    engine: Engine
    runner: RolloutRunner
    stream: PromptStream
    held_out: list[Prompt]
    notes: list[str] = field(default_factory=list)
    """Sentences for the user when the run starts."""
    examples: list[Example] = field(default_factory=list)
    """Examples of a warm start that is still to be trained."""
    imitated: list[Example] = field(default_factory=list)
    """Examples of `data.demonstrations`, imitated during RL."""
    add_columns: list[AddColumns] = field(default_factory=list)
    """Add the columns that need the rows of a step's prompts: those of teachers."""
    memory_check: MemoryPlanCheck | None = None
    """Compares the memory plan with the measured peak."""
    base: Path | None = None
    """The folder in which relative paths are looked up first."""
    cluster: Cluster | None = None
    """The Ray cluster of the run's other processes; None if it has none."""
    weights: Path | None = None
    """The folder of the warm-started model, if any."""
    makes_warm_start: bool = False
    """Whether the warm start is still to be trained, or is damaged."""


@dataclass
class RunInputs:
    """The parts that need config, rows and tokenizer, but no weights."""

    pipeline: AlgorithmPipeline
    stream: PromptStream
    held_out: list[Prompt]
    longest: int
    """Tokens of the longest prompt with its completion."""
    demonstrations: FindDemonstrations
    """Finds the demonstrations that join the samples of a draw."""
    imitated: list[Example]
    """Examples of `data.demonstrations`, imitated during RL."""
    notes: list[str]
    add_columns: list[AddColumns] = field(default_factory=list)
    """Add the columns that need the rows of a step's prompts."""


def build_inputs(
    config: TrainConfig, base: Path | None, policy: AnyPolicy, rewards: Rewards, read: ReadRows = read_rows
) -> RunInputs:
    """Build and check the parts that need no weights. `read` returns the rows of a file or plug-in."""
    updates = config.training.mini_batches * config.training.epochs
    has_demonstrations = config.data.demonstrations_per_group > 0
    pipeline = AlgorithmPipeline(config.algorithm, updates, base, rewards.weights, has_demonstrations)
    check_process_reward_model(config, policy, base)
    roles.check_teacher(config, policy, base)
    roles.check_architecture(config, policy, base)
    if "kl" in pipeline.loss.needs and policy.arch is None:
        raise UserError(
            "algorithm.kl.loss.estimator=full (or loss divergence) needs the native decoder, which has both models' hidden states; this model runs "
            "through transformers: use k3+ or k2, whose gradients are unbiased, or loss.support=sampled"
        )
    engine_builder.engine_kind(config.rollout, policy.arch is not None)
    _, host = environment_of(config.environment, policy.tokenizer, base)
    players = () if host is None else host.kind.roles
    check_players(config, players)
    check_roles(config, players)
    check_opponents(config, players)
    check_success_is_told(config, base)
    check_observations_are_told(config, host is None)
    check_void_turns_are_told(config, host is not None and host.kind.tells_void_turns)
    template_notes = check_template_for_turns(config.environment, policy.tokenizer, config.data.template, base)
    curriculum = config.algorithm.curriculum
    stream = PromptStream(
        config.data.train, policy.tokenizer, config.data, config.seed, "train", base, curriculum, read
    )
    if config.algorithm.needs("prompt_values"):
        stream.check_is_finite()
    held_out = held_out_prompts(config, base, policy, read)
    prompt_tokens = stream.longest()
    longest = check_positions(config, policy.max_positions, prompt_tokens, held_out)
    episode = max_trajectory_tokens(policy.max_positions, config.environment.max_tokens)
    check_reader_positions(config, base, prompt_tokens, held_out, episode)
    if config.environment.name == "single_turn":  # other environments may give the reward themselves
        rewards.check(stream.rows())
        rewards.check((prompt.row for prompt in held_out), "data.validation.answer_key=")
    shown, missing = build_demonstrations(config, policy, stream, base)
    notes = [note for note in (stream.report(), missing) if note is not None] + template_notes
    is_meant = config.algorithm.own_temperature is not None
    notes += [TRUNCATED_SAMPLING_NOTE] if not is_meant and (config.rollout.top_p < 1 or config.rollout.top_k) else []
    notes += config_notes(config)
    imitated, left_out = list[Example](), 0
    if config.data.demonstrations and config.algorithm.auxiliary.imitates:
        most = policy.max_positions or config.data.max_prompt_tokens + config.rollout.max_tokens
        sources, template = config.data.demonstrations, config.data.template
        imitated, left_out = load_examples(sources, policy.tokenizer, template, most, "filter", base, config.seed)
        notes += [f"{left_out} data.demonstrations are longer than {most} tokens"] if left_out else []
    columns = teacher_columns(config, policy.tokenizer, policy.max_positions, stream.rows())
    columns += aligned_columns(config, policy, base)
    return RunInputs(pipeline, stream, held_out, longest, shown, imitated, notes, columns)


def build_parts(
    config: TrainConfig, base: Path | None, policy: PolicyModel, rewards: Rewards, read: ReadRows = read_rows
) -> RunParts:
    """Build and check all parts of an RL run. `read` returns the rows of a file or plug-in."""
    for stage in (config.training, config.warm_start):
        if stage is not None:
            check_activations(policy.module, stage.activations)
    if config.training.layers == "fp8":
        check_fp8(policy.module)
    if config.training.layers == "compiled":
        check_compile(policy.module)
    inputs = build_inputs(config, base, policy, rewards, read)
    engine_builder.set_expert_recording(config, policy)
    engine = engine_builder.build_engine(policy, engine_builder.driver_rollout(config))
    runner = roles.build_runner(config, policy, engine, base)
    runner.demonstrations = inputs.demonstrations
    paged = engine_builder.find_paged_engine(engine)
    if paged is not None and paged.cache_bytes is not None:
        paged.plan(inputs.longest).require_one(f"rollout.cache_gib={config.rollout.cache_gib}")
    parts = RunParts(
        config,
        policy,
        rewards,
        inputs.pipeline,
        engine,
        runner,
        inputs.stream,
        inputs.held_out,
        inputs.notes,
        base=base,
    )
    parts.imitated, parts.add_columns = inputs.imitated, inputs.add_columns
    return parts


def build_context(parts: RunParts, run: Run) -> TrainContext:
    """Bind the parts to a run. The policy must have the weights that RL starts from."""
    config, policy = parts.config, parts.policy
    for note in parts.notes:
        run.display.note(note)
    if parts.runner.host is not None:
        parts.runner.host.log = WorkerLog(run.directory.environment_log)
    built = _build_roles(parts, run)
    parts.policy, parts.engine, parts.runner.engine = built.policy, built.engine, built.engine
    policy = built.policy
    replay = build_replay(config)
    scored = ScoredRollouts(run.directory.scored, parts.runner.tokenizer, run.display.note)
    source = build_source(config, run, parts.stream, parts.runner, parts.rewards, scored)
    source = with_replay(config, source, replay)
    source = with_opponents(config, source, built, parts.runner, run)
    process = None
    if built.process is not None and config.algorithm.process is not None:
        process = ProcessRewards(built.process, config.algorithm.process)

    def free_cache() -> None:
        """Free the KV cache for passes of the learner's models; the next request wakes the engine."""
        if built.learner.device.type == "cuda" and not source.overlaps:
            built.engine.sleep()

    def process_metrics(rollouts: RolloutBatch) -> dict[str, float]:
        if process is None:
            return {}
        free_cache()
        return process.held_out_metrics(rollouts)

    validate_modes = build_validation(
        config, run, policy, parts.runner, parts.rewards, parts.held_out, extra_metrics=process_metrics
    )

    def validate(step: int) -> dict[str, float]:
        source.pause()
        return validate_modes(step)

    while_scoring = None
    if isinstance(source, SyncSource) and not source.overlaps and parts.rewards.may_be_slow:
        passes = EarlyPasses(
            parts.pipeline, config.seed, StepContext(built.learner, built.reference, built.critic), free_cache
        )
        has_passes = parts.pipeline.reward_free_steps and not parts.add_columns
        while_scoring = source.while_scoring = WhileScoring(passes if has_passes else None)
    return TrainContext(
        config=config,
        run=run,
        policy=policy,
        learner=built.learner,
        reference=built.reference,
        critic=built.critic,
        engine=built.engine,
        stream=parts.stream,
        source=source,
        scored=scored,
        replay=replay,
        pipeline=parts.pipeline,
        validate=validate,
        state=initial_state(config.algorithm),
        health_context=diagnosis_facts(config),
        imitation=imitation_batches(parts, built.learner.device),
        process=process,
        memory_check=parts.memory_check,
        environments=parts.runner.host,
        roles=parts.runner.roles,
        while_scoring=while_scoring,
        add_columns=[
            *(
                AnswerProbability(shaper, policy.tokenizer, built.learner, free_cache)
                for shaper in config.algorithm.shaping
                if isinstance(shaper, InformationGainShaper)
            ),
            *parts.add_columns,
        ],
    )


def _build_roles(parts: RunParts, run: Run) -> Roles:
    """Learner, reference, critic, process reward model and engine, in this process or on the cluster."""
    config, policy, engine = parts.config, parts.policy, parts.engine
    if parts.cluster is not None:
        logs, note = run.directory.path / "workers", run.display.note
        return start_roles(config, parts.base, policy, parts.weights, parts.cluster, logs, note, parts.rewards)
    before = engine_builder.find_paged_engine(engine)
    if config.rollout.mismatch is not None or config.warm_start is not None:
        engine = engine_builder.build_engine(
            policy, config.rollout
        )  # it may copy the weights, and RL starts from these
    if config.rollout.mismatch is None and config.rollout.source.name != "sync":
        engine = engine_builder.engine_with_own_weights(engine, policy, config.rollout)
    paged = engine_builder.find_paged_engine(engine)
    if paged is not None:
        paged.on_cache = lambda plan: run.display.note(plan.text)
        paged.num_contexts = before.num_contexts if before is not None else 0
    if isinstance(config.rollout.opponents, Opponents):
        engine = OpponentEngine(engine, engine_builder.build_opponents(policy, config.rollout))
    learner, reference = roles.build_learner(config, policy), roles.build_reference(config, policy, parts.base)
    if reference is not None and "kl" in parts.pipeline.loss.needs:
        learner.reference = reference.distribution
    critic, process = roles.build_critic(config, policy), build_process_reward_model(config, policy, parts.base)
    return Roles(policy, learner, reference, critic, engine, process)


def diagnosis_facts(config: TrainConfig) -> HealthContext:
    """Return the settings that a diagnosis of the gap between engine and trainer may name."""
    rollout, dtype = config.rollout, config.model.dtype
    engine = "engine" if rollout.engine == "auto" else f"{rollout.engine} engine"
    filters = {record.name for record in config.algorithm.filters}
    selection = "none" if not filters else "unlikely" if filters == {"zero_signal"} else "any"
    sampled = dtype if rollout.weights.name == "model" else f"{rollout.weights.name} weights in {dtype}"
    sampled = sampled if rollout.cache_dtype == "auto" else f"{sampled} with an {rollout.cache_dtype} cache"
    learned = dtype if config.training.layers != "fp8" else f"layers in 8 bits in {dtype}"
    return HealthContext(rollout.top_p, rollout.top_k, rollout.temperature, engine, sampled, learned, selection)


# --- Sources of rollouts --------------------------------------------------------------------------------------------------


def rollout_plan(config: TrainConfig, eos_ids: tuple[int, ...], step: int) -> RolloutPlan:
    """Return the plan of each round of a step: prompts, samples per prompt, sampling options."""
    settings = config.rollout.at(step)
    return RolloutPlan(
        prompts=settings.prompts * config.algorithm.refill.oversample,
        n=settings.n,
        sampling=sampling_options(settings, eos_ids),
        greedy=bool(config.algorithm.needs("greedy")),
        branching=branching_plan(config.algorithm.advantage),
    )


def branching_plan(advantage: Slot) -> Branching | None:
    """How the samples of an advantage share prefixes; None for plain samples."""
    if isinstance(advantage, SpoChainAdvantage):
        return ChainPlan(advantage.below, advantage.every, advantage.rollouts)
    return TreePlan(tuple(advantage.branches), advantage.segment) if isinstance(advantage, SpoTreeAdvantage) else None


def build_replay(config: TrainConfig) -> ReplayStore | None:
    """The replay store, if the algorithm replays groups."""
    return None if config.algorithm.replay is None else ReplayStore(config.algorithm.replay, config.seed)


def with_replay(config: TrainConfig, source: RolloutSource, store: ReplayStore | None) -> RolloutSource:
    """The source, wrapped to add replayed groups if the algorithm replays any."""
    replay = config.algorithm.replay
    if store is None or replay is None:
        return source
    return ReplaySource(source, store, lambda step: math.ceil(replay.share * config.rollout.at(step).prompts))


def with_opponents(
    config: TrainConfig, source: RolloutSource, built: Roles, runner: RolloutRunner, run: Run
) -> RolloutSource:
    """The source, wrapped so that earlier weights play in its games if the config says so."""
    options = config.rollout.opponents
    if not isinstance(options, Opponents):
        return source
    assert isinstance(built.engine, OpponentEngine), "built with the opponents"
    snapshots = SnapshotFolder(run.directory.path / "opponents")
    opponents = built.engine.opponents
    runner.opponents = OpponentPool(
        options,
        runner.roles,
        config.seed,
        built.policy,
        opponents,
        snapshots,
        lambda: [checkpoint.step for checkpoint in run.checkpoints.all()],
    )
    return OpponentSource(source, runner.opponents)


def build_source(
    config: TrainConfig,
    run: Run,
    stream: PromptStream,
    runner: RolloutRunner,
    rewards: Rewards,
    scored: ScoredRollouts,
) -> RolloutSource:
    """The source of new rollouts that the config names. `scored` gets each rollout when it has its score."""
    eos_ids, kind = runner.tokenizer.eos_ids, config.rollout.source

    def plans(step: int) -> RolloutPlan | None:
        return rollout_plan(config, eos_ids, step) if step <= config.training.steps else None

    source: SyncSource | AsyncSource
    if isinstance(kind, Ahead):
        source = AheadSource(stream, runner, rewards, run.journal, plans, run.display.phase, run.display.note)
    elif isinstance(kind, Async):
        limits = kind.max_staleness, kind.deadline_s
        source = AsyncSource(stream, runner, rewards, run.journal, plans, *limits, run.display.note)
    else:
        source = SyncSource(stream, runner, rewards, run.journal)
    source.on_scored = scored.add
    return source


# --- Demonstrations -------------------------------------------------------------------------------------------------------


def build_demonstrations(
    config: TrainConfig, policy: AnyPolicy, stream: PromptStream, base: Path | None
) -> tuple[FindDemonstrations, str | None]:
    """The demonstrations that join the samples of a draw, and a note about prompts without any."""
    data, each = config.data, config.data.demonstrations_per_group
    if not each:
        return no_demonstrations, None
    longest = max(stage.max_tokens for stage in config.rollout.all_stages())
    if policy.max_positions is not None:
        longest = min(longest, policy.max_positions - stream.longest())
    traces = PromptDemonstrations(data, policy.tokenizer, longest, config.seed, base)
    traces.needs_logp = getattr(config.algorithm.loss, "weight", None) == "author"
    traces.scan(stream.rows())
    return GroupDemonstrations(traces, each, policy.tokenizer), traces.report()


def imitation_batches(parts: RunParts, device: torch.device) -> ImitationBatch | None:
    """Returns the `data.demonstrations` of each mini-batch, in a seeded order, with their loss weights."""
    if not parts.imitated:
        return None
    config, each = parts.config, parts.config.data.demonstrations_per_update
    total = config.training.steps * config.training.mini_batches * config.training.epochs
    scale = config.algorithm.auxiliary.sft or 1.0  # CHORD's weight follows the step
    order = example_order(len(parts.imitated), config.seed, total * each)

    def examples(number: int) -> Batch:
        chosen = order[number * each : (number + 1) * each]
        batch = sft.pack_examples([parts.imitated[i] for i in chosen]).to(device)
        return batch.with_token(weight=scale * aggregation_weights(batch, "token-mean"))

    return examples
