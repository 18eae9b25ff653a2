"""The RL loop. Every algorithm, every place to run, every kind of rollout source goes through these lines.

    rollouts = gather(...)        from the source: prompts drawn, sampled, scored; group filters; again while they leave too few groups
    batch = prepare(...)          old and reference log-probs, values, process rewards, KL, advantages
    batch = trim(...)             sample filters
    for mini_batch in ...:        epochs and mini-batches
        update(...)               critic, then policy: exactly one optimizer step of the policy
    run.commit(...)               metrics, journal, samples, checkpoint

`examples/one_file_grpo.py` is the same loop in one plain file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch.autograd.profiler import record_function

from burnish.algorithms.batch_columns import is_replayed, replay_drift, sampled_sequences, without_replayed
from burnish.algorithms.correction.budget import BudgetError
from burnish.algorithms.correction.mismatch_diagnostics import surprise_metrics, symptom_metrics
from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.config.consistency import always_gives_verdicts
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids
from burnish.core.trajectory import pack
from burnish.rollout.runner import RolloutStopped
from burnish.rollout.scoring import RolloutBatch
from burnish.run.checkpoint.checkpoints import score_by
from burnish.run.metrics import held_out_figures, read_metrics
from burnish.run.run import Run
from burnish.run.supervisor.liveness import StopOnInterrupt
from burnish.trainers import step_metrics
from burnish.trainers.assembly import rollout_plan
from burnish.trainers.context import StepResult, TrainContext, snapshot
from burnish.trainers.minibatches import mini_batches
from burnish.trainers.performance import learner_metrics, rollout_throughput
from burnish.trainers.pipeline import AlgorithmPipeline
from burnish.trainers.state import advance, entropy_coefficient
from burnish.trainers.step_metrics import demonstration_metrics
from burnish.training.meter import reset_peak_memory
from burnish.training.profiler import profiled

# --- Why a run stopped because engine and trainer are too far apart: the step is not finished, so the health check had no say.


def mismatch_budget_error(job: TrainContext, step: int, error: BudgetError) -> UserError:
    """The error of a budget that no correction holds, with the likely cause of the gap and what to try."""
    batch = error.batch
    outputs = job.learner.outputs(batch, frozenset({"entropy"}))
    seen = symptom_metrics(batch, job.state.step) | surprise_metrics(batch, outputs["logp"], outputs["entropy"])
    return UserError(f"step {step}: {error}; likely cause: {job.health.explain(seen, job.facts)}")


MAX_UNSCORED_STEPS = 3
"""A run ends with an error after so many steps in a row without one scored sample: no step after them would learn anything either."""


def train(job: TrainContext) -> bool:
    """Train from `job.state.step` on. True when all steps are done, False when the user asked to stop."""
    config, run = job.config, job.run
    total = config.training.steps
    run.display.start(f"{config.algorithm.preset} on {run.directory.name}: {job.policy.note}", total, job.state.step)
    job.has_accuracy = always_gives_verdicts(config) or was_accuracy_measured(run)
    if job.state.step == 0 and config.validation.before and config.data.validation:
        measured = job.validate(0)
        check_best_metric(job, measured)
        run.commit(0, measured, [])
    with StopOnInterrupt(run.display.note, end_early=job.source.stop) as stop:
        try:
            return run_steps(job, stop)
        except RolloutStopped:
            return False


def run_steps(job: TrainContext, stop: StopOnInterrupt) -> bool:
    """The steps that are left; False when the user asked to stop."""
    config, run, num_unscored = job.config, job.run, 0
    total = config.training.steps
    for step in range(job.state.step + 1, total + 1):
        started = time.perf_counter()
        reset_peak_memory(job.learner.device)
        with profiled_step(job, step):
            with record_function("rollout"), save_on_stop(job):
                rollouts, batch = collect_rollouts(job, step)
                if not has_scored_sample(rollouts) and num_unscored == 0:
                    save_last_step(job)
                num_unscored = count_unscored(rollouts, step, num_unscored, total)
                job.source.begin(step + 1)
            learning = time.perf_counter()
            learned = learn(job, step, batch) if batch is not None else StepResult()
            after_step(job, step, rollouts, learned)
            speed = learner_metrics(job.learners, learning) | rollout_throughput(rollouts)
        is_shaped = bool(config.algorithm.shaping)
        values = step_metrics.training_metrics(rollouts, learned, time.perf_counter() - started, is_shaped) | speed
        values |= job.source.values(rollouts, step - 1)
        values |= demonstration_metrics(rollouts) if config.data.demonstrations_per_group else {}
        if job.memory is not None:
            values |= job.memory.after(job.learner.updates, values, run.display.note)
        for line in job.health.check(step, values, job.facts):
            run.display.note(line)
        stopping = commit_step(job, step, values, rollouts, learned, stop)
        if stopping and step < total:
            return False
    return True


@contextmanager
def save_on_stop(job: TrainContext) -> Iterator[None]:
    """Save the last step that is done if the user asks to stop while the next one samples: no weights have changed since."""
    try:
        yield
    except RolloutStopped:
        save_last_step(job)
        raise


def save_last_step(job: TrainContext) -> None:
    """Save the last step that is done, before the next one changes anything."""
    if job.state.step > job.run.saved_step:
        job.run.checkpoint(job.state.step, lambda stage: snapshot(job, stage), None)
        job.run.wait()


def collect_rollouts(job: TrainContext, step: int) -> tuple[RolloutBatch, Batch | None]:
    """Rollouts of a step and the batch the group filters leave, generated again while that is too small.

    The batch is None when there is nothing to learn from; a note says why.
    """
    refill, settings = job.config.algorithm.refill, job.config.rollout.at(step)
    plan = rollout_plan(job.config, job.policy.tokenizer.eos_ids, step)
    rollouts: RolloutBatch | None = None
    shaped: Batch | None = None
    num_groups, enough = 0, refill.enough * settings.prompts
    for attempt in range(refill.rounds):
        fresh = job.source.next(step, plan, job.run.display.phase, attempt)
        rollouts = fresh if rollouts is None else rollouts.joined(fresh)
        usable = rollouts.usable
        if not usable:
            continue
        longest = settings.max_tokens * job.config.environment.max_turns
        shaped = job.recipe.shape(pack(usable, job.config.seed), step, longest)
        num_groups = num_kept_groups(shaped, job.recipe)
        if num_groups >= enough:
            break
    assert rollouts is not None
    if shaped is None:
        # An environment may have lost all of them by chance.
        if step == 1 and all(t.finish != "error" for t in rollouts.failed):
            raise UserError(
                f"step 1: not one of {len(rollouts.trajectories)} samples could be scored; mend the reward and run the same command again. "
                f"First: {next((t.error for t in rollouts.failed), None)}"
            )
        note(job, step, f"no update, not one of {len(rollouts.trajectories)} samples could be scored")
        return rollouts, None
    if num_groups < enough and refill.short == "error":
        raise UserError(
            f"step {step}: {refill.rounds} rounds of generation gave {num_groups} groups that the filters keep, of {enough:g} wanted; "
            "raise algorithm.refill.rounds or oversample, or set algorithm.refill.short=partial to train on what there is"
        )
    batch = job.recipe.select(shaped, settings.prompts)
    if batch.num_sequences == 0:
        note(job, step, f"no update, {step_metrics.no_signal_text(shaped)}")
        return rollouts, None
    return rollouts, batch.to(job.learner.device)


def has_scored_sample(rollouts: RolloutBatch) -> bool:
    """Whether a step has one new sample with a reward."""
    return any(t.reward is not None for t in rollouts.trajectories)


def count_unscored(rollouts: RolloutBatch, step: int, earlier: int, total: int) -> int:
    """Steps in a row, this one included, without one scored sample; the error for too many of them, and for such a last step."""
    if has_scored_sample(rollouts):
        return 0
    if earlier + 1 >= MAX_UNSCORED_STEPS or step == total:
        steps = f"{earlier + 1} steps in a row" if earlier else "this step"
        raise UserError(
            f"step {step}: not one sample could be scored in {steps}, so the run stops here; mend the reward and run "
            f"the same command again: failed scores are computed anew. First: {next((t.error for t in rollouts.failed), None)}"
        )
    return earlier + 1


def num_kept_groups(batch: Batch, recipe: AlgorithmPipeline) -> int:
    """New groups that the group filters keep."""
    return compact_ids(batch.sequence["group_ids"][recipe.wanted(batch) & ~is_replayed(batch)])[1]


def learn(job: TrainContext, step: int, batch: Batch) -> StepResult:
    """One batch through the algorithm and the learners; whenever no update is made a note says why."""
    config, recipe, state = job.config, job.recipe, job.state
    job.run.display.phase("learning")
    if job.learner.device.type == "cuda" and not job.source.overlaps:
        job.engine.sleep()  # its cache is the learner's memory now; the next request takes it back
    critic = config.algorithm.critic
    warming = critic is not None and step <= critic.warmup_steps
    try:
        whole, stats, budget, notes = recipe.prepare(
            batch, job.learner, job.reference, job.critic, state, warming, job.process
        )
    except BudgetError as error:
        raise mismatch_budget_error(job, step, error) from error
    for text in notes:
        note(job, step, text)
    batch = recipe.trim(whole, stats)
    learned = StepResult(batch, prepared=stats, num_prepared=sampled_sequences(whole).num_sequences, budget=budget)
    learned.unfinished = recipe.unfinished(whole)
    rewards = without_replayed(sampled_sequences(whole)).sequence["reward"]
    learned.reward = float(rewards.mean()) if rewards.numel() else None
    if batch.num_sequences == 0:
        note(job, step, f"no update, {step_metrics.nothing_left_text(whole)}")
    loss = replace(recipe.loss, entropy_coef=entropy_coefficient(state, config.algorithm))
    horizon, training = config.rollout.at(step).max_tokens, config.training
    parts = mini_batches(batch, config.algorithm, training.mini_batches, training.epochs, horizon)
    for number, mini in enumerate(parts, (step - 1) * training.mini_batches * training.epochs):
        job.run.display.phase(f"learning, update {len(learned.updates) + 1}")
        if job.critic is not None and critic is not None:
            learned.critic_updates += [job.critic.update(mini) for _ in range(critic.updates)]
        if warming:
            continue
        imitated = (job.demonstrations(number), NllLoss()) if job.demonstrations is not None else None
        is_first = not learned.updates  # its forward pass saw the policy before it moved
        update = job.learner.update(mini, loss, recipe.lr_scale(step), imitated, columns=is_first)
        if is_first and update.logp is not None:
            learned.prepared |= surprise_metrics(mini, update.logp, update.entropy) | replay_drift(mini, update.logp)
        learned.updates.append(update)
        if update.skipped:
            note(job, step, f"no update, {update.skipped}")
        elif job.reference is not None:
            job.reference.after_update(job.learner.model)
    learned.mismatch = recipe.mismatch(whole, batch, learned.updates, state.step)
    learned.trainer_logp = recipe.trainer_logp(batch, learned.updates)
    return learned


def after_step(job: TrainContext, step: int, rollouts: RolloutBatch, learned: StepResult) -> None:
    """What follows the updates of a step: the engine's version, the reference, prompt statistics, controllers."""
    for learner in job.learners:
        learner.release()
    job.source.learnt(step, rollouts, learned.batch, learned.unfinished)
    job.source.load(step)
    if job.reference is not None and job.reference.after_step(job.learner.model, step) and job.reference.restarts:
        job.learner.reset_optimizer()
    job.stream.observe(rollouts.trajectories)
    stats = step_metrics.mean_stats(learned.updates) | learned.prepared
    if learned.reward is not None:
        stats["reward"] = learned.reward
    budget, waiting = learned.budget or job.state.budget, job.source.waiting()
    state = replace(job.state, stream=job.stream.state(), waiting=waiting, budget=budget)
    job.state = advance(state, job.config.algorithm, stats, learned.num_prepared)


def commit_step(
    job: TrainContext,
    step: int,
    values: dict[str, Any],
    rollouts: RolloutBatch,
    learned: StepResult,
    stop: StopOnInterrupt,
) -> bool:
    """Validation when it is due, samples, metrics and journal, a checkpoint when it is due.

    Whether the user asked to stop is read once, so that a run that stops has saved; returns what was read.
    """
    config, run = job.config, job.run
    due = config.validation.every and step % config.validation.every == 0
    score = None
    if due or step == config.training.steps:
        measured = job.validate(step)
        values |= measured
        score = checkpoint_score(job, measured)
        if measured and score is None:
            note(job, step, f"this checkpoint has no score: {missing_score_text(job, measured)}")
    if step % config.run.samples_every == 0 or step in (1, config.training.steps):
        rows = step_metrics.sample_rows(rollouts, learned.batch, job.policy.tokenizer, learned.trainer_logp)
        run.samples(step, "train", rows)
    run.worst_tokens.append(step, step_metrics.worst_token_rows(rollouts, learned.mismatch.worst, job.policy.tokenizer))
    late = step_metrics.num_timed_out(rollouts)
    if late and 2 * late >= len(rollouts.trajectories):
        note(
            job,
            step,
            f"{late} of {len(rollouts.trajectories)} samples took a reward longer than reward.timeout_s={config.reward.timeout_s:g} and count "
            "as wrong; where it is not the answers that are endless, raise that (it is for a call, which may be of many samples)",
        )
    for failed in rollouts.failed[:1]:
        note(job, step, f"{len(rollouts.failed)} samples could not be scored and are not used; first: {failed.error}")
    run.commit(
        step, values, step_metrics.used_trajectory_ids(rollouts, learned.batch), step_metrics.prompt_visits(rollouts)
    )
    stopping = stop.requested
    measured_best = config.run.keep_best and score is not None
    is_due = stopping or step == config.training.steps or measured_best or step % config.run.save_every == 0
    if is_due and has_scored_sample(
        rollouts
    ):  # else the last scored step was saved: a run whose reward was mended goes on from there
        run.checkpoint(step, lambda stage: snapshot(job, stage), *(score or (None, None)))
    if stopping or step == config.training.steps:
        run.wait()
    return stopping


def was_accuracy_measured(run: Run) -> bool:
    """Whether an earlier validation of this run had an accuracy, by its metrics or by the scores of its checkpoints."""
    names = {name for row in read_metrics(run.directory.metrics) for name in row}
    names |= {c.metric.removeprefix("-") for c in run.checkpoints.all() if c.metric is not None}
    return "accuracy" in held_out_figures(names).values()


def best_metric(job: TrainContext) -> str:
    """The metric that the best checkpoint is chosen by: `run.best_by`, or the first mode's accuracy, or its mean reward if rewards are graded.

    It never depends on one validation alone: one in which every call timed out has no accuracy, and its mean reward must not be compared.
    """
    mode = next(iter(job.config.validation.modes))
    return job.config.run.best_by or f"validation/{mode}/{'accuracy' if job.has_accuracy else 'reward_mean'}"


def checkpoint_score(job: TrainContext, measured: dict[str, float]) -> tuple[float, str] | None:
    """The score that a validation gives a checkpoint, with its metric; None where that was not measured."""
    job.has_accuracy = job.has_accuracy or "accuracy" in held_out_figures(measured).values()
    return score_by(best_metric(job), measured)


def check_best_metric(job: TrainContext, measured: dict[str, float]) -> None:
    """Refuse, before the first step, a `run.best_by` that validation does not measure. A missing accuracy that later ones may have gets a note."""
    if not measured or checkpoint_score(job, measured) is not None:
        return
    mode, _, last = best_metric(job).rpartition("/")
    if last == "accuracy" and job.has_accuracy and f"{mode}/reward_mean" in measured:
        note(job, 0, missing_score_text(job, measured))
    else:
        raise UserError(missing_score_text(job, measured))


def missing_score_text(job: TrainContext, measured: dict[str, float]) -> str:
    """Why a validation gave no score to choose the best checkpoint by."""
    wanted, hint = best_metric(job), ""
    if wanted.endswith("/accuracy") and job.has_accuracy:
        late = f"no sample has a verdict, as when every call takes longer than reward.timeout_s={job.config.reward.timeout_s:g}"
        hint = f" ({late}; run.best_by={wanted.removesuffix('accuracy')}reward_mean would choose by the mean reward)"
    elif wanted.endswith("/accuracy"):
        hint = " (the reward is graded, so there is no accuracy: reward.parts[].correct_at would say what is correct)"
    return f"run.best_by: {wanted} was not measured{hint}; measured are {', '.join(sorted(measured))}"


def profiled_step(job: TrainContext, step: int) -> AbstractContextManager[None]:
    """The profiler, in the step it was asked for."""
    if step != job.profile:
        return nullcontext()
    return profiled(job.run.directory.path, f"step {step}", job.run.display.note)


def note(job: TrainContext, step: int, text: str) -> None:
    """A line for the user about a step."""
    job.run.display.note(f"step {step}: {text}")
