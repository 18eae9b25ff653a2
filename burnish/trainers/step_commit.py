"""Functions around a step of the RL loop: validation, metrics, samples, journal, checkpoints, and the errors that end a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from burnish.algorithms.correction.budget import BudgetError
from burnish.algorithms.correction.mismatch_diagnostics import surprise_metrics, symptom_metrics
from burnish.config.consistency import always_gives_verdicts
from burnish.config.errors import UserError
from burnish.rollout.runner import RolloutStopped
from burnish.rollout.scoring import RolloutBatch
from burnish.run.checkpoint.checkpoints import score_by
from burnish.run.metrics import held_out_figures, read_metrics
from burnish.run.run import Run
from burnish.run.supervisor.liveness import StopOnInterrupt
from burnish.trainers import step_metrics
from burnish.trainers.context import StepResult, TrainContext, snapshot
from burnish.trainers.episode_rows import record_new_events
from burnish.trainers.performance import draft_metrics, worker_metrics
from burnish.training.profiler import profiled

MAX_UNSCORED_STEPS = 3
"""Steps in a row without a scored sample after which a run ends with an error: later steps would learn nothing either."""


def validate_before_training(context: TrainContext) -> None:
    """Measure the policy before step 1, and check that `run.best_by` is among the measured metrics."""
    config, run = context.config, context.run
    context.has_accuracy = always_gives_verdicts(config) or was_accuracy_measured(run)
    if context.state.step == 0 and config.validation.before and config.data.validation:
        measured = context.validate(0)
        check_best_metric(context, measured)
        run.commit(0, measured, [])


def commit_step(
    context: TrainContext,
    step: int,
    rollouts: RolloutBatch,
    result: StepResult,
    step_s: float,
    speed: dict[str, float],
    stop: StopOnInterrupt,
) -> bool:
    """Write the metrics, samples and journal of a step; validate and save a checkpoint when they are due.

    With slow rewards, a step that validates is put off into the next step, where it is written while rewards are computed.
    Returns whether the user asked to stop. That is read once, so that a run that stops has saved its last step.
    """
    metrics = collect_metrics(context, step, rollouts, result, step_s, speed)
    for line in context.health.check(step, metrics, context.health_context):
        context.run.display.note(line)
    write = partial(write_step, context, step, rollouts, result, metrics, stop)
    if context.while_scoring is None or stop.requested or not is_validated(context, step) or is_last(context, step):
        return write()
    # A run that stops meanwhile saves at once: a validation may take longer than it is given.
    context.while_scoring.put_off(lambda validates: write(validates and not stop.requested))
    return False


def is_last(context: TrainContext, step: int) -> bool:
    """Whether the run ends with a step."""
    return step == context.config.training.steps


def is_validated(context: TrainContext, step: int) -> bool:
    """Whether the policy is measured after a step."""
    every = context.config.validation.every
    return is_last(context, step) or bool(every and step % every == 0)


def write_step(
    context: TrainContext,
    step: int,
    rollouts: RolloutBatch,
    result: StepResult,
    metrics: dict[str, Any],
    stop: StopOnInterrupt,
    validates: bool = True,
) -> bool:
    """Measure the policy if that is due, and write the step. The weights must be those after it. Returns whether the run stops."""
    config, run = context.config, context.run
    ends, score = is_last(context, step), None
    if not validates:
        note(context, step, "its validation is left out, because the run stops")
    elif is_validated(context, step):
        measured = context.validate(step)
        metrics |= measured
        score = checkpoint_score(context, measured)
        if measured and score is None:
            note(context, step, f"this checkpoint has no score: {missing_score_text(context, measured)}")
    if ends or step == 1 or step % config.run.samples_every == 0:
        run.samples(step, "train", step_metrics.sample_rows(rollouts, result, context.policy.tokenizer))
    worst = step_metrics.worst_token_rows(rollouts, result.mismatch.worst, context.policy.tokenizer)
    run.worst_tokens.append(step, worst)
    note_failed_rewards(context, step, rollouts)
    record_new_events(run, step, rollouts.trajectories)
    run.commit(
        step, metrics, step_metrics.used_trajectory_ids(rollouts, result.batch), step_metrics.prompt_visits(rollouts)
    )
    is_stopping = stop.requested or run.stop_requested
    is_measured_best = config.run.keep_best and score is not None
    is_due = is_stopping or ends or is_measured_best or step % config.run.save_every == 0
    # A step without scores is not saved: once the reward is fixed, the run resumes from the last step with scores.
    if is_due and has_scored_sample(rollouts):
        run.checkpoint(step, lambda stage: snapshot(context, stage), *(score or (None, None)))
    if is_stopping or ends:
        run.wait()
    return is_stopping


def collect_metrics(
    context: TrainContext, step: int, rollouts: RolloutBatch, result: StepResult, step_s: float, speed: dict[str, float]
) -> dict[str, Any]:
    """All metrics of a step, except those of validation."""
    is_shaped = bool(context.config.algorithm.shaping)
    metrics = step_metrics.training_metrics(rollouts, result, step_s, is_shaped) | speed
    metrics |= context.source.metrics(rollouts, step - 1) | context.stream.metrics()
    if context.config.data.demonstrations_per_group:
        metrics |= step_metrics.demonstration_metrics(rollouts)
    metrics |= draft_metrics(context.engine)
    if context.environments is not None:
        metrics |= worker_metrics(context.environments)
    if context.memory_check is not None:
        metrics |= context.memory_check.after(context.learner.updates, metrics, context.run.display.note)
    return metrics


def note_failed_rewards(context: TrainContext, step: int, rollouts: RolloutBatch) -> None:
    """Tell the user of samples whose reward timed out or failed."""
    num_late, num_samples = step_metrics.num_timed_out(rollouts), len(rollouts.trajectories)
    if num_late and 2 * num_late >= num_samples:
        note(
            context,
            step,
            f"{num_late} of {num_samples} samples took a reward longer than reward.timeout_s={context.config.reward.timeout_s:g} and count "
            "as wrong; unless the answers themselves never end, raise it (it limits one call, which may score many samples)",
        )
    if failed := rollouts.failed:
        note(context, step, f"{len(failed)} samples could not be scored and are not used; first: {failed[0].error}")


def note(context: TrainContext, step: int, text: str) -> None:
    """Tell the user something about a step."""
    context.run.display.note(f"step {step}: {text}")


def profiled_step(context: TrainContext, step: int) -> AbstractContextManager[None]:
    """The profiler, in the step it was asked for."""
    if step != context.profile_step:
        return nullcontext()
    return profiled(context.run.directory.path, f"step {step}", context.run.display.note)


# --- Stopping and failing -------------------------------------------------------------------------------------------------


@contextmanager
def save_on_stop(context: TrainContext) -> Iterator[None]:
    """Write and save the last finished step if the user stops the run while the next one samples. The weights have not changed since.

    After an error a step that was put off is written, without the validation that was due.
    """
    try:
        yield
    except RolloutStopped:
        finish_put_off_step(context)
        save_last_step(context)
        raise
    except Exception:  # whatever it is, it is raised again below
        finish_put_off_step(context)
        raise


def finish_put_off_step(context: TrainContext) -> None:
    """Write the step before, if that was put off, in a run that stops."""
    if context.while_scoring is not None:
        with suppress(RolloutStopped):  # the run stops already
            context.while_scoring.finish_commit(validates=False)


def save_last_step(context: TrainContext) -> None:
    """Save the last finished step, unless it is saved already."""
    if context.state.step > context.run.saved_step:
        context.run.checkpoint(context.state.step, lambda stage: snapshot(context, stage), None)
        context.run.wait()


def has_scored_sample(rollouts: RolloutBatch) -> bool:
    """Whether a new sample of a step has a reward."""
    return any(t.reward is not None for t in rollouts.trajectories)


class UnscoredSteps:
    """Counts steps in a row without a scored sample, and ends the run after too many."""

    def __init__(self) -> None:
        self.num_steps = 0

    def count(self, context: TrainContext, step: int, rollouts: RolloutBatch) -> None:
        """Count a step. At the first unscored one, save the step before it: once the reward is fixed, the run resumes there."""
        if has_scored_sample(rollouts):
            self.num_steps = 0
            return
        if self.num_steps == 0:
            save_last_step(context)
        self.num_steps += 1
        if self.num_steps >= MAX_UNSCORED_STEPS or step == context.config.training.steps:
            steps = f"{self.num_steps} steps in a row" if self.num_steps > 1 else "this step"
            raise UserError(
                f"step {step}: not one sample could be scored in {steps}, so the run stops here; fix the reward and run "
                f"the same command again: failed scores are computed anew. First: {next((t.error for t in rollouts.failed), None)}"
            )


def mismatch_budget_error(context: TrainContext, step: int, error: BudgetError) -> UserError:
    """The error of a mismatch budget that no correction meets, with the likely cause of the gap.

    The step is not finished, so the health check has not seen its metrics.
    """
    batch = error.batch
    outputs = context.learner.outputs(batch, frozenset({"entropy"}))
    metrics = symptom_metrics(batch, context.state.step) | surprise_metrics(batch, outputs["logp"], outputs["entropy"])
    cause = context.health.explain(metrics, context.health_context)
    return UserError(f"step {step}: {error}; likely cause: {cause}")


# --- The best checkpoint --------------------------------------------------------------------------------------------------


def was_accuracy_measured(run: Run) -> bool:
    """Whether an earlier validation of this run had an accuracy, by its metrics or by the scores of its checkpoints."""
    names = {name for row in read_metrics(run.directory.metrics) for name in row}
    names |= {c.metric.removeprefix("-") for c in run.checkpoints.all() if c.metric is not None}
    return "accuracy" in held_out_figures(names).values()


def best_metric(context: TrainContext) -> str:
    """The metric that chooses the best checkpoint: `run.best_by`, or the first mode's accuracy, or its mean reward if rewards are graded.

    It does not change between validations. If every reward call of a validation times out, there is no accuracy; its mean reward must not
    be compared with the accuracy of others.
    """
    mode = next(iter(context.config.validation.modes))
    figure = "accuracy" if context.has_accuracy else "reward_mean"
    return context.config.run.best_by or f"validation/{mode}/{figure}"


def checkpoint_score(context: TrainContext, measured: dict[str, float]) -> tuple[float, str] | None:
    """The score that a validation gives a checkpoint, with its metric. None where that metric was not measured."""
    context.has_accuracy = context.has_accuracy or "accuracy" in held_out_figures(measured).values()
    return score_by(best_metric(context), measured)


def check_best_metric(context: TrainContext, measured: dict[str, float]) -> None:
    """Refuse a `run.best_by` that validation does not measure. An accuracy that later validations may have gets a note."""
    if not measured or checkpoint_score(context, measured) is not None:
        return
    mode, _, last = best_metric(context).rpartition("/")
    if last == "accuracy" and context.has_accuracy and f"{mode}/reward_mean" in measured:
        note(context, 0, missing_score_text(context, measured))
    else:
        raise UserError(missing_score_text(context, measured))


def missing_score_text(context: TrainContext, measured: dict[str, float]) -> str:
    """Why a validation gave no score to choose the best checkpoint by."""
    wanted, hint = best_metric(context), ""
    if wanted.endswith("/accuracy") and context.has_accuracy:
        late = f"no sample has a verdict, as when every call takes longer than reward.timeout_s={context.config.reward.timeout_s:g}"
        hint = f" ({late}; run.best_by={wanted.removesuffix('accuracy')}reward_mean would choose by the mean reward)"
    elif wanted.endswith("/accuracy"):
        hint = " (the reward is graded, so there is no accuracy: reward.parts[].correct_at would say what is correct)"
    return f"run.best_by: {wanted} was not measured{hint}; measured are {', '.join(sorted(measured))}"
