"""Where the trainer's scored rollouts come from.

`SyncSource` draws prompts, generates with the current weights, scores, and hands the result over, as often in a step
as it is asked. Every stage is in the journal: after a kill, what was complete is taken from there; a generation that
was cut short is made again, and gives the same tokens, because randomness belongs to the sample and not to the moment.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from burnish.core.engine import SamplingOptions
from burnish.data.prompts import PromptStream
from burnish.rewards.rewards import Rewards
from burnish.rollout.driver import Driver
from burnish.rollout.record import from_arrays, restore_scores, scores_to_arrays, to_arrays
from burnish.rollout.scored import GREEDY, Progress, Scored, Scoring, share_baseline
from burnish.run.journal import Journal


@dataclass(frozen=True)
class RolloutPlan:
    """What is asked of a source at once; it may differ from step to step."""

    prompts: int
    n: int
    """Samples of each prompt."""
    sampling: SamplingOptions
    greedy: bool = False
    """Whether each prompt is also answered greedily once, as the baseline of its samples."""


class _Place(NamedTuple):
    """A round of a step and the prompts it drew: what the journal knows its rollouts by."""

    step: int
    round: int
    ids: list[str]

    def file(self, event: str) -> str:
        return f"{event}-{self.step:06d}" + (f"-r{self.round}" if self.round else "")


class SyncSource:
    """Rollouts of the policy as it is now."""

    def __init__(self, stream: PromptStream, driver: Driver, rewards: Rewards, journal: Journal) -> None:
        self.stream, self.driver, self.rewards, self.journal = stream, driver, rewards, journal
        # What an earlier life of this run finished; only steps after the checkpoint it resumes from are asked for.
        self.earlier: dict[tuple[str, int, int], dict[str, Any]] = {
            (e["event"], e["step"], e.get("round", 0)): e
            for e in journal.events
            if e["event"] in ("completed", "scored")
        }

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> Scored:
        """The scored rollouts of one round of a step.

        A step's rounds are numbered from 0 and asked for in order; each draws new prompts.
        """
        self.stream.at(step)
        draws = self.stream.draw(plan.prompts)
        place = _Place(step, round, [f"{d.prompt.row.id}#{d.visit}" for d in draws])
        scoring = Scoring(self.driver, self.rewards, draws, progress)
        self.journal.append("drawn", **place._asdict())
        started = time.perf_counter()
        saved = self._recalled("completed", place)
        if saved is None:
            # The greedy answers come first: their rewards are computed while the samples are drawn.
            greedy = scoring.greedy(plan.sampling) if plan.greedy else []
            trajectories = [*greedy, *scoring.generate(plan.n, plan.sampling, "train")]
            self._remember("completed", place, to_arrays(trajectories))
        else:
            trajectories = from_arrays(saved)
        generated = time.perf_counter()
        samples = [t for t in trajectories if t.sample != GREEDY]
        greedy = [t for t in trajectories if t.sample == GREEDY]
        scores = self._recalled("scored", place)
        if scores is None:
            if saved is not None:
                scoring.submit(trajectories)
            scoring.collect(trajectories)
            if greedy:
                share_baseline(samples, greedy)
            self._remember("scored", place, scores_to_arrays(trajectories))
        else:
            restore_scores(trajectories, scores)
        return Scored(draws, samples, generated - started, time.perf_counter() - generated, greedy)

    def _remember(self, event: str, place: _Place, arrays: dict[str, Any]) -> None:
        self.journal.append(event, **place._asdict(), file=self.journal.attach(place.file(event), arrays))

    def _recalled(self, event: str, place: _Place) -> dict[str, Any] | None:
        record = self.earlier.pop((event, place.step, place.round), None)
        if record is None or record["ids"] != place.ids:
            return None
        return self.journal.attachment(record["file"])
