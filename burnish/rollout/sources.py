"""Where the trainer's scored rollouts come from.

`SyncSource` draws prompts, generates with the current weights, scores, and hands the result over. Every stage is in
the journal: after a kill, what was complete is taken from there; a generation that was cut short is made again, and
gives the same tokens, because randomness belongs to the sample and not to the moment.
"""

from __future__ import annotations

import time
from typing import Any

from burnish.core.engine import SamplingOptions
from burnish.data.prompts import PromptStream
from burnish.rewards.rewards import Rewards
from burnish.rollout.driver import Driver
from burnish.rollout.record import from_arrays, restore_scores, scores_to_arrays, to_arrays
from burnish.rollout.scored import Progress, Scored, Scoring
from burnish.run.journal import Journal


class SyncSource:
    """Rollouts of the policy as it is now."""

    def __init__(
        self,
        stream: PromptStream,
        driver: Driver,
        rewards: Rewards,
        sampling: SamplingOptions,
        prompts: int,
        n: int,
        journal: Journal,
    ) -> None:
        self.stream, self.driver, self.rewards, self.sampling = stream, driver, rewards, sampling
        self.prompts, self.n, self.journal = prompts, n, journal
        # What an earlier life of this run finished; only steps after the checkpoint it resumes from are asked for.
        self.earlier: dict[tuple[str, int], dict[str, Any]] = {
            (e["event"], e["step"]): e for e in journal.events if e["event"] in ("completed", "scored")
        }

    def next(self, step: int, progress: Progress) -> Scored:
        """The scored rollouts of one step."""
        draws = self.stream.draw(self.prompts)
        ids = [f"{d.prompt.row.id}#{d.visit}" for d in draws]
        scoring = Scoring(self.driver, self.rewards, draws, progress)
        self.journal.append("drawn", step=step, ids=ids)
        started = time.perf_counter()
        saved = self._recalled("completed", step, ids)
        if saved is None:
            trajectories = scoring.generate(self.n, self.sampling, "train")
            self._remember("completed", step, ids, to_arrays(trajectories))
        else:
            trajectories = from_arrays(saved)
        generated = time.perf_counter()
        scores = self._recalled("scored", step, ids)
        if scores is None:
            if saved is not None:
                scoring.submit(trajectories)
            scoring.collect(trajectories)
            self._remember("scored", step, ids, scores_to_arrays(trajectories))
        else:
            restore_scores(trajectories, scores)
        return Scored(draws, trajectories, generated - started, time.perf_counter() - generated)

    def _remember(self, event: str, step: int, ids: list[str], arrays: dict[str, Any]) -> None:
        self.journal.append(event, step=step, ids=ids, file=self.journal.attach(f"{event}-{step:06d}", arrays))

    def _recalled(self, event: str, step: int, ids: list[str]) -> dict[str, Any] | None:
        record = self.earlier.pop((event, step), None)
        if record is None or record["ids"] != ids:
            return None
        return self.journal.attachment(record["file"])
