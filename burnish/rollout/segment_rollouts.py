"""Answers cut into segments, and the values of the states between them (SPO-chain, 2505.23564).

A sample is cut where the policy was unsure (`algorithms/advantages/spo.py`). From every border answers are continued and scored
like any other; their mean reward is the border's value. Samples that have a beginning in common share the answers continued from
it. The random keys of those follow from the state, the tokens of the answer so far, and their number: not from the sample that came
there, nor from who else did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from burnish.algorithms.advantages.spo import cutpoints
from burnish.core.batch import Batch
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import fold, sample_key
from burnish.core.segments import offsets_from_lengths
from burnish.core.trajectory import (
    SEGMENT_STARTS,
    SEGMENT_VALUES,
    SHARED_TOKENS,
    TREE_NODE_ENDS,
    TREE_NODES,
    Trajectory,
    TrajectoryFinish,
    tree_node_names,
)
from burnish.data.prompt_stream import PromptSample
from burnish.rollout.in_flight import InFlightTrajectories, RunningTrajectory

if TYPE_CHECKING:
    from burnish.rollout.runner import RolloutRunner


BORDER_STATES, BORDER_STATE = "border_states", "state"
"""In the metadata: of a sample the names of the states before its segments, of an answer the state it was continued from."""
FIRST_CONTINUED_SAMPLE = -2
"""The sample index of the first answer continued for a value; the next ones count down, so that none is a sample's or the greedy one's."""


@dataclass(frozen=True)
class ChainPlan:
    """How answers are cut and valued."""

    below: float
    """Tokens that were sampled with a smaller probability are cut points."""
    every: int
    """A segment begins with every so-manieth of them."""
    rollouts: int
    """Answers continued from each border."""


@dataclass(frozen=True)
class AnswerPrefix:
    """The first tokens of an answer, to be continued."""

    draw: PromptSample
    sample: int
    tokens: tuple[int, ...]
    key: int
    state: str


def cut_into_segments(samples: Sequence[Trajectory], chain: ChainPlan) -> None:
    """Write into each sample where its segments start and which states are before them."""
    sequences = [sample.sequences[-1] for sample in samples]
    columns = {
        name: torch.from_numpy(np.concatenate([getattr(s, name) for s in sequences]))
        for name in ("tokens", "action_mask", "behaviour_logp")
    }
    offsets = offsets_from_lengths(torch.tensor([len(s.tokens) for s in sequences]))
    _, starts = cutpoints(Batch(columns.pop("tokens"), offsets, columns), chain.below, chain.every)
    bounds, firsts = starts.offsets.tolist(), offsets.tolist()
    for k, sample in enumerate(samples):
        places = [place - firsts[k] for place in starts.values[bounds[k] : bounds[k + 1]].tolist()]
        sample.metadata |= {SEGMENT_STARTS: places, BORDER_STATES: _border_states(sample, places)}


def _border_states(sample: Trajectory, places: Sequence[int]) -> list[str]:
    """A name for the answer up to each of the places, equal for equal tokens."""
    tokens, at, digest = sample.sequences[-1].tokens, sample.metadata["prompt_length"], hashlib.blake2b(digest_size=8)
    names = []
    for place in places:
        digest.update(tokens[at:place].astype("<i8").tobytes())
        names.append(digest.copy().hexdigest())
        at = place
    return names


def border_prefixes(
    samples: Sequence[Trajectory], draws: Sequence[PromptSample], chain: ChainPlan, seed: int
) -> list[AnswerPrefix]:
    """What is to be continued for the values of all borders of the samples, every state of a prompt once."""
    of_draw = {(draw.prompt.row.id, draw.visit): draw for draw in draws}
    found: list[AnswerPrefix] = []
    seen: dict[tuple[str, int], dict[str, None]] = {}
    for sample in samples:
        name = sample.prompt_id, sample.visit
        known, prompt = seen.setdefault(name, {}), sample.metadata["prompt_length"]
        for place, state in zip(sample.metadata[SEGMENT_STARTS], sample.metadata[BORDER_STATES], strict=True):
            if state in known:
                continue
            number, known[state] = FIRST_CONTINUED_SAMPLE - chain.rollouts * len(known), None
            tokens = tuple(sample.sequences[-1].tokens[prompt:place].tolist())
            for k in range(chain.rollouts):
                key = fold(sample_key(seed, "baseline", *name, k), int(state, 16))
                found.append(AnswerPrefix(of_draw[name], number - k, tokens, key, state))
    return found


class ContinuedTrajectories(InFlightTrajectories):
    """Answers on their way whose first tokens are given."""

    def add_beginning(self, beginning: AnswerPrefix, sampling: SamplingOptions) -> None:
        """An answer that goes on from there, set aside; `sampling` is that of a whole answer."""
        failed = self.add(beginning.draw, beginning.sample, sampling, "baseline")
        assert failed is None, "the environment has started for the sample already"
        one = self.aside[-1]
        one.key = beginning.key
        one.append(beginning.tokens)  # as context: what this answer adds is counted, not what it begins with
        one.drawn = one.partial = len(beginning.tokens)


def attach_border_values(samples: Sequence[Trajectory], continued: Sequence[Trajectory]) -> None:
    """Write the values of its borders into each sample: the mean rewards of the answers continued from there.

    Where none of a border's could be scored the sample cannot be judged, and counts as failed too.
    """
    rewards: dict[tuple[str, int, str], list[float]] = {}
    for answer in continued:
        of_state = rewards.setdefault((answer.prompt_id, answer.visit, answer.metadata[BORDER_STATE]), [])
        if answer.reward is not None:
            of_state.append(answer.reward)
    for sample in samples:
        found = [rewards[sample.prompt_id, sample.visit, state] for state in sample.metadata[BORDER_STATES]]
        if all(found):
            sample.metadata[SEGMENT_VALUES] = [sum(values) / len(values) for values in found]
        elif sample.reward is not None:
            failed = next(t for t in continued if t.reward is None)
            sample.reward = sample.accuracy = None
            sample.error = f"not one answer continued from one of its borders could be scored: {failed.error}"


# --- Trees of answers: each node's tokens are continued several times, so that answers share their beginnings (SPO-tree, 2505.23564).
#
# A prompt has n children of `segment` tokens; each that has not ended has `branches[0]` children of its own, and so on. The edges of
# the last level go on to the end of the answer. An answer that ends earlier is a leaf where it ends. What comes out are the paths
# from the prompt to the leaves, as trajectories: whole answers, whose metadata says which nodes they pass (`core/trajectory.py`).
#
# The children of a node are requests with equal prompts, submitted together: an engine computes what they begin with once. The
# random key of an edge is folded from that of the edge above it and its place among its siblings: it follows from the path alone.

COPIED_LISTS = ("context", "action", "logp", "version", "turns", "ends")
"""What every child goes on with on its own."""


@dataclass(frozen=True)
class TreePlan:
    """The shape of a tree below the samples of a prompt."""

    branches: tuple[int, ...]
    """Children of each node, level by level."""
    segment: int
    """Tokens of an edge, except on the last level."""

    def leaf(self, sample: int, path: tuple[int, ...]) -> int:
        """A number for the answer at the end of a path, in the order of the tree; an answer that ends early has the first of those
        that its continuations would have had."""
        for level, width in enumerate(self.branches):
            sample = sample * width + (path[level] if level < len(path) else 0)
        return sample

    @property
    def leaves(self) -> int:
        """Answers of one sample of a prompt, at most."""
        return prod(self.branches)


class TreeTrajectories(InFlightTrajectories):
    """Answers on their way that branch."""

    def __init__(self, driver: RolloutRunner, tree: TreePlan) -> None:
        super().__init__(driver)
        self.tree = tree

    def take(self, completion: Completion) -> Trajectory | None:
        one = self.running[completion.id]
        if completion.finish != "length" or one.partial + len(completion.tokens) >= one.sampling.max_tokens:
            return super().take(completion)
        del self.running[completion.id]
        self._record(one, completion)
        one.ends.append(len(one.context))
        self.aside += [self._child(one, k) for k in range(self.tree.branches[len(one.path)])]
        return None

    def _child(self, one: RunningTrajectory, number: int) -> RunningTrajectory:
        lists: dict[str, Any] = {name: list(getattr(one, name)) for name in COPIED_LISTS}
        return replace(one, key=fold(one.key, number), path=(*one.path, number), **lists)

    def _request(self, one: RunningTrajectory) -> Request:
        request = super()._request(one)
        goes_on = len(one.path) < len(self.tree.branches)
        if goes_on and self.tree.segment < request.sampling.max_tokens:
            request = replace(request, sampling=replace(request.sampling, max_tokens=self.tree.segment))
        return replace(request, goes_on=goes_on)

    def _trajectory(self, one: RunningTrajectory, finish: TrajectoryFinish, *args: Any, **options: Any) -> Trajectory:
        trajectory = super()._trajectory(one, finish, *args, **options)
        starts, ends = [one.prompt_length, *one.ends], [*one.ends, len(one.context)]
        # What all children of a node begin with is counted with the path of its first child.
        shared = [end - start for k, (start, end) in enumerate(zip(starts, ends, strict=True)) if any(one.path[k:])]
        trajectory.sample = self.tree.leaf(one.sample, one.path)
        trajectory.metadata |= {
            TREE_NODES: tree_node_names(one.sample, one.path),
            TREE_NODE_ENDS: ends,
            SHARED_TOKENS: sum(shared),
        }
        return trajectory
