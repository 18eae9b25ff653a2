"""Where the trainer's scored rollouts come from.

A source draws prompts, has them answered and scored, and hands the result over, as often in a step as it is asked. The trainer is
the same for all; they differ in when the sampling is done and with which weights:

    SyncSource     now, with the weights that are trained                                (here)
    AheadSource    while the step before is learnt, with weights one step old             (`ahead.py`)
    AsyncSource    all the time, with weights that change in the middle of a sample       (`asynchronous.py`)

Every stage is in the journal: after a kill, what was handed over is taken from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompts import Draw, PromptStream
from burnish.rewards.rewards import Rewards
from burnish.rollout.chains import FIRST, STATES, Chain, share_values
from burnish.rollout.driver import Branching, Driver
from burnish.rollout.record import from_arrays, restore_scores, scores_to_arrays, to_arrays
from burnish.rollout.scored import GREEDY, Progress, Scored, Scoring, share_baseline
from burnish.run.journal import Journal

Ticket = list[Any]
"""A draw that no step was given yet, as a checkpoint holds it: data source, index there, visit, step it was drawn for or in."""


@dataclass(frozen=True)
class RolloutPlan:
    """What is asked of a source at once; it may differ from step to step."""

    prompts: int
    n: int
    """Samples of each prompt."""
    sampling: SamplingOptions
    greedy: bool = False
    """Whether each prompt is also answered greedily once, as the baseline of its samples."""
    branching: Branching | None = None
    """How samples branch, or are cut and valued; None of plain ones."""


Plans = Callable[[int], RolloutPlan | None]
"""What a step will ask for; None after the last one."""


class Source(Protocol):
    """What the trainer knows of a source."""

    overlaps: bool
    """Whether it samples while the learner learns."""

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> Scored:
        """The scored rollouts of one round of a step.

        A step's rounds are numbered from 0 and asked for in order; each draws new prompts.
        """

    def begin(self, step: int) -> None:
        """The step before has all its rollouts and is learnt now: what is to be made for this one may be begun."""

    def learnt(self, step: int, rollouts: Scored, batch: Batch | None, unfinished: Sequence[int] | None = None) -> None:
        """A step is learnt from its rollouts; `batch` is what of them was in its loss, None where nothing was. `unfinished` are the
        places among those that are usable whose groups have parts that only later steps would learn from, and no others come back;
        None where groups are learnt from as a whole."""

    def load(self, version: int) -> None:
        """The learner has new weights: take them."""

    def rest(self) -> None:
        """Leave engine and rewards to somebody else until `next`; called after `load`."""

    def values(self, rollouts: Scored, version: int) -> dict[str, float]:
        """Metrics of a step, whose rollouts and weights these are."""

    def waiting(self) -> list[Ticket]:
        """The draws that no step was given yet, for a checkpoint."""

    def restore(self, tickets: Sequence[Ticket], version: int) -> None:
        """Go on from a checkpoint, whose draws these are; the engine has its weights, `version`."""

    def close(self) -> None:
        """Stop whatever goes on."""


class Place(NamedTuple):
    """A round of a step and the prompts it is of: what the journal knows its rollouts by."""

    step: int
    round: int
    ids: list[str]

    def file(self, event: str) -> str:
        """The name of an attachment."""
        return f"{event}-{self.step:06d}" + (f"-r{self.round}" if self.round else "")


def group_id(draw: Draw) -> str:
    """What the journal calls a draw."""
    return f"{draw.prompt.row.id}#{draw.visit}"


class Memory:
    """The rollouts of rounds in the journal: written when they are there, read back by a later life of the run."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        # Only steps after the checkpoint that the run resumes from are asked for.
        self.earlier: dict[tuple[str, int, int], dict[str, Any]] = {}
        for event in journal.events:
            kind = event["event"]
            if kind not in ("drawn", "completed", "scored"):
                continue
            key = kind, event["step"], event.get("round", 0)
            if kind == "completed":  # of a round made again, what followed it in an earlier life did not happen
                drawn = "drawn", *key[1:]
                self.earlier = {k: e for k, e in self.earlier.items() if k[1:] < key[1:] or k == drawn}
            self.earlier[key] = event

    def keep(self, event: str, place: Place, arrays: dict[str, Any]) -> None:
        """Write arrays of a round."""
        self.journal.append(event, **place._asdict(), file=self.journal.attach(place.file(event), arrays))

    def recall(self, event: str, place: Place) -> dict[str, Any] | None:
        """The arrays of a round; None where they are not known, are damaged, or are of other prompts."""
        record = self.earlier.pop((event, place.step, place.round), None)
        if record is None or record["ids"] != place.ids:
            return None
        return self.journal.attachment(record["file"])

    def keep_all(self, place: Place, trajectories: Sequence[Trajectory]) -> None:
        """Write a round that is scored already."""
        self.keep("completed", place, to_arrays(trajectories))
        self.keep("scored", place, scores_to_arrays(trajectories))


def in_order(draws: Sequence[Draw], found: Sequence[Trajectory], rollout_s: float, reward_s: float) -> Scored:
    """Samples, greedy and continued answers and demonstrations of a round, apart."""
    continued = [t for t in found if t.sample <= FIRST]
    samples, greedy, shown = list[Trajectory](), list[Trajectory](), list[Trajectory]()
    for t in found:
        if t.sample > FIRST:
            (greedy if t.sample == GREEDY else shown if t.is_demonstration else samples).append(t)
    return Scored(list(draws), samples, rollout_s, reward_s, greedy, continued=continued, demonstrations=shown)


class SyncSource:
    """Rollouts of the policy as it is now.

    A generation that a kill cut short is made again, and gives the same tokens, because randomness belongs to the sample and not
    to the moment.
    """

    overlaps = False

    def __init__(self, stream: PromptStream, driver: Driver, rewards: Rewards, journal: Journal) -> None:
        self.stream, self.driver, self.rewards, self.journal = stream, driver, rewards, journal
        self.memory = Memory(journal)

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> Scored:
        draws, place = self._draw(step, plan, round)
        scoring = Scoring(self.driver, self.rewards, draws, progress)
        started = time.perf_counter()
        saved = self.memory.recall("completed", place)
        if saved is None:
            trajectories = generate(scoring, plan)
            self.memory.keep("completed", place, to_arrays(trajectories))
        else:
            trajectories = from_arrays(saved)
        generated = time.perf_counter()
        scores = self.memory.recall("scored", place)
        if scores is None:
            if saved is not None:
                scoring.submit(trajectories)
            collect(scoring, trajectories)
            self.memory.keep("scored", place, scores_to_arrays(trajectories))
        else:
            restore_scores(trajectories, scores)
        return in_order(draws, trajectories, generated - started, time.perf_counter() - generated)

    def _draw(self, step: int, plan: RolloutPlan, round: int) -> tuple[list[Draw], Place]:
        """New prompts, and their place in the journal, which has heard of them."""
        self.stream.at(step)
        draws = self.stream.draw(plan.prompts)
        place = Place(step, round, [group_id(draw) for draw in draws])
        self.journal.append("drawn", **place._asdict())
        return draws, place

    def begin(self, step: int) -> None:
        """Nothing is made before its weights are there."""

    def learnt(self, step: int, rollouts: Scored, batch: Batch | None, unfinished: Sequence[int] | None = None) -> None:
        """What was handed over is never asked for again."""

    def load(self, version: int) -> None:
        self.driver.engine.load(version, ())

    def rest(self) -> None:
        """Nothing goes on between two calls."""

    def values(self, rollouts: Scored, version: int) -> dict[str, float]:
        return {}

    def waiting(self) -> list[Ticket]:
        return []

    def restore(self, tickets: Sequence[Ticket], version: int) -> None:
        if tickets:
            raise UserError(
                f"cannot resume: {len(tickets)} prompts were drawn ahead, which rollout.source=sync never does"
            )

    def close(self) -> None:
        """Nothing goes on."""


def generate(scoring: Scoring, plan: RolloutPlan) -> list[Trajectory]:
    """All trajectories of a round, on their way to be scored."""
    # The greedy answers come first: their rewards are computed while the samples are drawn.
    greedy = scoring.greedy(plan.sampling) if plan.greedy else []
    samples = scoring.generate(plan.n, plan.sampling, "train", plan.branching)
    values = scoring.values(samples, plan.branching, plan.sampling) if isinstance(plan.branching, Chain) else []
    return [*greedy, *values, *samples]


def collect(scoring: Scoring, trajectories: Sequence[Trajectory]) -> None:
    """Wait for the scores of a round; its samples are told their baseline, or the values of their borders."""
    scoring.collect(trajectories)
    greedy = [t for t in trajectories if t.sample == GREEDY]
    if greedy:
        share_baseline([t for t in trajectories if t.sample != GREEDY], greedy)
    share_values([t for t in trajectories if STATES in t.metadata], [t for t in trajectories if t.sample <= FIRST])
