"""Why a run stopped because engine and trainer are too far apart: the step is not finished, so the health check had no say."""

from __future__ import annotations

from burnish.algorithms.correction.budget import BudgetError
from burnish.algorithms.correction.surprise import surprise
from burnish.algorithms.correction.symptoms import symptoms
from burnish.config.errors import UserError
from burnish.trainers.job import Job


def explained(job: Job, step: int, error: BudgetError) -> UserError:
    """The error of a budget that no correction holds, with the likely cause of the gap and what to try."""
    batch = error.batch
    outputs = job.learner.outputs(batch, frozenset({"entropy"}))
    seen = symptoms(batch, job.state.step) | surprise(batch, outputs["logp"], outputs["entropy"])
    return UserError(f"step {step}: {error}; likely cause: {job.health.explain(seen, job.facts)}")
