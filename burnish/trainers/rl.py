"""The RL loop. Every algorithm, every placement and every source of rollouts runs through these functions.

    rollouts, batch = collect_rollouts(...)   draw prompts, sample, score, filter groups; repeat while too few groups are left
    batch = pipeline.prepare(...)             old and reference log-probs, values, process rewards, KL, advantages
    batch = pipeline.trim(...)                sample filters
    for mini_batch in ...:                    epochs and mini-batches
        learner.update(...)                   critic first, then one optimizer step of the policy
    after_step(...)                           load the new weights into the engine, advance controllers
    commit_step(...)                          metrics, journal, samples, validation, checkpoint

With slow rewards, some of this happens while they are computed (`trainers/while_scoring.py`).
`trainers/pipeline.py` holds the steps of an algorithm, `trainers/step_commit.py` what happens around a step.
`examples/one_file_grpo.py` is the same loop in one plain file.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch.autograd.profiler import record_function

from burnish.algorithms.batch_columns import (
    per_trajectory,
    replay_drift,
    sampled_sequences,
    trajectory_offsets,
    without_replayed,
)
from burnish.algorithms.correction.budget import BudgetError
from burnish.algorithms.correction.mismatch_diagnostics import surprise_metrics
from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.algorithms.template_collapse import collapse_metrics
from burnish.algorithms.terms.loss_terms import chord_weight
from burnish.config.environment import max_written_tokens
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.trajectory import pack
from burnish.rollout.runner import RolloutStopped
from burnish.rollout.scoring import RolloutBatch, refuse_silent_agents
from burnish.run.supervisor.liveness import StopOnInterrupt
from burnish.trainers import step_metrics
from burnish.trainers.assembly import rollout_plan
from burnish.trainers.context import StepResult, TrainContext
from burnish.trainers.minibatches import in_whole_batch, mini_batches, scaled_loss
from burnish.trainers.performance import learner_metrics, rollout_throughput
from burnish.trainers.pipeline import StepContext
from burnish.trainers.state import advance, entropy_coefficient
from burnish.trainers.step_commit import (
    UnscoredSteps,
    commit_step,
    mismatch_budget_error,
    note,
    profiled_step,
    save_on_stop,
    validate_before_training,
)
from burnish.training.meter import reset_peak_memory


def train(context: TrainContext) -> bool:
    """Run the steps after `context.state.step`. Returns True when all are done, False when the user asked to stop."""
    config, run = context.config, context.run
    num_steps = config.training.steps
    title = f"{config.algorithm.preset} on {run.directory.name}: {context.policy.note}"
    run.display.start(title, num_steps, context.state.step)
    validate_before_training(context)
    unscored = UnscoredSteps()
    with StopOnInterrupt(run.display.note, end_early=context.source.stop) as stop:
        try:
            for step in range(context.state.step + 1, num_steps + 1):
                is_stopping = train_step(context, step, unscored, stop)
                if is_stopping and step < num_steps:
                    return False
        except RolloutStopped:
            return False
    return True


def train_step(context: TrainContext, step: int, unscored: UnscoredSteps, stop: StopOnInterrupt) -> bool:
    """One step: rollouts, updates, commit. Returns whether the user asked to stop."""
    started = time.perf_counter()
    reset_peak_memory(context.learner.device)
    with profiled_step(context, step):
        with record_function("rollout"), save_on_stop(context):
            rollouts, batch = collect_rollouts(context, step)
            unscored.count(context, step, rollouts)
            context.source.start_next(step + 1)
        passes = None if context.while_scoring is None else context.while_scoring.passes
        # Passes that were made while rewards were computed are a part of learning, as the learner's meter counts them.
        learn_started = time.perf_counter() - (0.0 if passes is None else passes.take_seconds())
        result = learn(context, step, batch) if batch is not None else StepResult()
        after_step(context, step, rollouts, result)
        speed = learner_metrics(context.learners, learn_started) | rollout_throughput(rollouts)
    step_s = time.perf_counter() - started
    return commit_step(context, step, rollouts, result, step_s, speed, stop)


def collect_rollouts(context: TrainContext, step: int) -> tuple[RolloutBatch, Batch | None]:
    """Return the rollouts of a step and the batch of groups that the filters keep. Too few groups cause another round of sampling.

    The batch is None when there is nothing to learn from; a note says why.
    """
    config, pipeline = context.config, context.pipeline
    refill, settings = config.algorithm.refill, config.rollout.at(step)
    plan = rollout_plan(config, context.policy.tokenizer.eos_ids, step)
    max_tokens = max_written_tokens(settings.max_tokens, config.environment)
    rollouts: RolloutBatch | None = None
    shaped: Batch | None = None
    num_groups, num_wanted, most = 0, 0.0, settings.prompts
    for attempt in range(refill.rounds):
        new = context.source.next(step, plan, context.run.display.phase, attempt)
        if context.while_scoring is not None:
            context.while_scoring.finish_commit()  # the source read the round from the journal
        rollouts = new if rollouts is None else rollouts.joined(new)
        usable = rollouts.usable
        if not usable:
            continue
        most = settings.prompts * rollouts.groups_per_draw
        num_wanted = refill.enough * most
        packed = pack(usable, config.seed)
        prompts = {(draw.prompt.row.id, draw.visit): draw.prompt for draw in rollouts.draws}
        for add_columns in context.add_columns:
            packed = add_columns(packed, usable, prompts)
        shaped = pipeline.shape(packed, step, max_tokens)
        num_groups = pipeline.num_kept_groups(shaped)
        if num_groups >= num_wanted:
            break
    assert rollouts is not None
    context.scored.flush()
    if shaped is None:
        refuse_silent_agents(rollouts.trajectories, f"step {step}")
        # Environments may have failed by chance, so only failed rewards end the run.
        if step == 1 and all(t.finish != "error" for t in rollouts.failed):
            raise UserError(
                f"step 1: not one of {len(rollouts.trajectories)} samples could be scored; fix the reward and run the same command again. "
                f"First: {next((t.error for t in rollouts.failed), None)}"
            )
        note(context, step, f"no update, not one of {len(rollouts.trajectories)} samples could be scored")
        return rollouts, None
    if num_groups < num_wanted and refill.short == "error":
        raise UserError(
            f"step {step}: {refill.rounds} rounds of generation gave {num_groups} groups that the filters keep, of {num_wanted:g} wanted; "
            "raise algorithm.refill.rounds or oversample, or set algorithm.refill.short=partial to train on what there is"
        )
    batch = pipeline.select(shaped, most)
    if batch.num_sequences == 0:
        note(context, step, f"no update, {step_metrics.no_signal_text(shaped)}")
        return rollouts, None
    return rollouts, batch.to(context.learner.device)


def learn(context: TrainContext, step: int, batch: Batch) -> StepResult:
    """Train critic and policy on a batch. If an update is not made, a note gives the reason."""
    config, pipeline, state, learner = context.config, context.pipeline, context.state, context.learner
    training, critic, chord = config.training, config.algorithm.critic, config.algorithm.auxiliary.chord
    context.run.display.phase("learning")
    if learner.device.type == "cuda" and not context.source.overlaps:
        context.engine.sleep()  # frees the KV cache for the learner; the next request wakes the engine
    is_warmup = critic is not None and step <= critic.warmup_steps
    step_context = StepContext(
        learner, context.reference, context.critic, context.process, state, is_warmup, roles=context.roles
    )
    if context.while_scoring is not None and context.while_scoring.passes is not None:
        step_context.early = context.while_scoring.passes.take(batch)
    try:
        prepared = pipeline.prepare(batch, step_context)
    except BudgetError as error:
        raise mismatch_budget_error(context, step, error) from error
    for text in step_context.notes:
        note(context, step, text)
    if training.collapse_every and step % training.collapse_every == 0:
        step_context.metrics |= collapse_metrics(prepared, lambda other: learner.outputs(other, frozenset())["logp"])
    batch = pipeline.trim(prepared, step_context)
    if batch.num_sequences == 0:
        note(context, step, f"no update, {step_metrics.nothing_left_text(prepared)}")
    result = StepResult(
        batch,
        metrics=step_context.metrics,
        budget=step_context.budget,
        role_baselines=step_context.role_baselines,
        unfinished=step_context.unfinished,
    )
    sampled = sampled_sequences(prepared)
    result.num_sampled = trajectory_offsets(sampled).numel() - 1
    new = without_replayed(sampled)
    rewards = per_trajectory(new, new.sequence["reward"])
    result.reward_mean = float(rewards.mean()) if rewards.numel() else None
    loss = replace(pipeline.loss, entropy_coef=entropy_coefficient(state, config.algorithm))
    max_tokens = max_written_tokens(config.rollout.at(step).max_tokens, config.environment)
    parts = mini_batches(batch, config.algorithm, training.mini_batches, training.epochs, max_tokens)
    for number, mini in enumerate(parts, (step - 1) * training.mini_batches * training.epochs):
        context.run.display.phase(f"learning, update {len(result.updates) + 1}")
        if context.critic is not None and critic is not None:
            result.critic_updates += [context.critic.update(mini) for _ in range(critic.updates)]
        if is_warmup:
            continue
        imitation = (context.imitation(number), NllLoss()) if context.imitation is not None else None
        if imitation is not None and chord is not None:
            mu = chord_weight(step - 1, chord.peak, chord.valley, chord.warmup, chord.decay)
            mini, imitation = scaled_loss(mini, 1 - mu), (scaled_loss(imitation[0], mu), NllLoss(chord.gate))
            result.metrics["chord_mu"] = mu
        is_first = not result.updates  # its forward pass sees the policy before any update
        update = learner.update(mini, loss, pipeline.lr_scale(step), imitation, columns=is_first)
        if is_first and update.logp is not None and pipeline.compares_with_engine:
            result.metrics |= surprise_metrics(mini, update.logp, update.entropy) | replay_drift(mini, update.logp)
        if is_first and update.entropy is not None:
            known = torch.where(mini.loss_mask, update.entropy, torch.nan)
            result.entropy = in_whole_batch(known, batch, training.mini_batches)
        result.updates.append(update)
        if update.skipped:
            note(context, step, f"no update, {update.skipped}")
        elif context.reference is not None:
            context.reference.after_update(learner.model)
    observes = step == 1 and config.algorithm.auxiliary.observations is not None
    if observes and result.updates and not any("observation_nll" in update.stats for update in result.updates):
        note(
            context,
            step,
            "algorithm.auxiliary.observations selects no token of this step: no episode went on after its first answer, or the environment speaks "
            "in a role of weight 0",
        )
    result.mismatch = pipeline.mismatch(prepared, batch, result.updates, state.step)
    result.trainer_logp = pipeline.trainer_logp(batch, result.updates)
    return result


def after_step(context: TrainContext, step: int, rollouts: RolloutBatch, result: StepResult) -> None:
    """Hand the new weights to the source and the reference, and advance prompt statistics and controllers."""
    for learner in context.learners:
        learner.release()
    context.source.after_step(step, rollouts, result.batch, result.unfinished)
    context.source.load(step)
    reference = context.reference
    if reference is not None and reference.after_step(context.learner.model, step) and reference.restarts:
        context.learner.reset_optimizer()
    context.stream.observe(rollouts.trajectories)
    stats = step_metrics.mean_stats(result.updates) | result.metrics
    if result.reward_mean is not None:
        stats["reward"] = result.reward_mean
    budget, waiting = result.budget or context.state.budget, context.source.pending_draws()
    state = replace(context.state, stream=context.stream.state(), waiting=waiting, budget=budget)
    if result.role_baselines is not None:
        state = replace(state, role_baselines=result.role_baselines)
    context.state = advance(state, context.config.algorithm, stats, result.num_sampled)
