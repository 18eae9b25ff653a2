"""Samples answers with shared prefixes, for SPO (2505.23564): chains of segments, and trees.

Chain: an answer is cut into segments where the policy was unsure (`algorithms/advantages/spo.py`). A border is the start of a segment.
New answers continue from every border and are scored like any other; their mean reward is the value of the border. Samples with a
common prefix share these answers. The random keys depend on the border state (a hash of the answer so far) and an index, not on
the sample.

Tree: a prompt has n children of `segment` tokens. Each unfinished child has `branches[0]` children of its own, and so on; the last level
runs to the end of the answer. An answer that ends early is a leaf. Every path from the prompt to a leaf is a trajectory, whose metadata
lists its nodes (`core/trajectory.py`). Children of a node are submitted together with equal prompts, so that an engine computes their
prefix once. The random key of an edge is folded from its parent's key and its index among the siblings.
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
    tree_node_names,
)
from burnish.data.prompt_stream import PromptSample
from burnish.rollout.in_flight import InFlightTrajectories
from burnish.rollout.running_trajectory import RunningTrajectory, TokenPath

if TYPE_CHECKING:
    from burnish.rollout.runner import RolloutRunner


BORDER_STATES, BORDER_STATE = "border_states", "state"
"""Metadata keys: the states before a sample's segments, and the state that a continued answer starts from."""
FIRST_CONTINUED_SAMPLE = -2
"""Sample index of the first continued answer. The next ones count down, so that none equals the index of a sample or greedy answer."""


@dataclass(frozen=True)
class ChainPlan:
    """How answers are cut into segments, and how many continued answers estimate the value of a border."""

    below: float
    """Tokens sampled with a smaller probability are cut points."""
    every: int
    """A segment begins at every k-th cut point."""
    rollouts: int
    """Answers continued from each border."""


@dataclass(frozen=True)
class AnswerPrefix:
    """The first tokens of an answer, which another answer continues."""

    draw: PromptSample
    sample: int
    tokens: tuple[int, ...]
    key: int
    state: str


def cut_into_segments(samples: Sequence[Trajectory], chain: ChainPlan) -> None:
    """Write the segment starts and the states before them into each sample's metadata."""
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
    """Return a hash of the answer up to each of the positions. Equal tokens give equal hashes."""
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
    """Return the prefixes to continue, `chain.rollouts` for each border. Borders of a prompt with equal states are listed once."""
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
    """Unfinished answers that start after given prefixes."""

    def add_prefix(self, prefix: AnswerPrefix, sampling: SamplingOptions) -> None:
        """Add a paused answer that continues a prefix. `sampling.max_tokens` includes the prefix."""
        failed = self.add(prefix.draw, prefix.sample, sampling, "baseline")
        assert not failed, "the environment started without an error for the sample itself"
        active = self.paused[-1]
        active.key = prefix.key
        active.turn.append(prefix.tokens)  # without log-probs: only the tokens that follow count as actions
        active.num_sampled = len(prefix.tokens)


def attach_border_values(samples: Sequence[Trajectory], continued: Sequence[Trajectory]) -> None:
    """Write the value of each border into the samples: the mean reward of the answers continued from it.

    If a border has no scored answer, its samples fail too.
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


@dataclass(frozen=True)
class TreePlan:
    """The shape of a tree below the samples of a prompt."""

    branches: tuple[int, ...]
    """Children of each node, level by level."""
    segment: int
    """Tokens of an edge, except at the last level."""

    def leaf(self, sample: int, path: tuple[int, ...]) -> int:
        """Return the index of the leaf at the end of a path. An answer that ends early has the index that its first descendant would have."""
        for level, width in enumerate(self.branches):
            sample = sample * width + (path[level] if level < len(path) else 0)
        return sample

    @property
    def leaves(self) -> int:
        """Return the largest number of answers per sample of a prompt."""
        return prod(self.branches)


class TreeTrajectories(InFlightTrajectories):
    """Unfinished answers that branch after each segment."""

    def __init__(self, runner: RolloutRunner, tree: TreePlan) -> None:
        super().__init__(runner)
        self.tree = tree

    def take(self, completion: Completion) -> list[Trajectory]:
        active = self.running[completion.id]
        if completion.finish != "length" or active.num_partial + len(completion.tokens) >= active.sampling.max_tokens:
            return super().take(completion)
        del self.running[completion.id]
        self._record(active, completion)
        active.branch_points.append(active.length)
        num_children = self.tree.branches[len(active.tree_path)]
        self.paused += [active.child(k, fold(active.key, k)) for k in range(num_children)]
        return []

    def _request(self, active: RunningTrajectory) -> Request:
        request = super()._request(active)
        will_branch = len(active.tree_path) < len(self.tree.branches)
        if will_branch and self.tree.segment < request.sampling.max_tokens:
            request = replace(request, sampling=replace(request.sampling, max_tokens=self.tree.segment))
        return replace(request, may_continue=will_branch)

    def _trajectory(self, active: RunningTrajectory, path: TokenPath, *args: Any, **options: Any) -> Trajectory:
        trajectory = super()._trajectory(active, path, *args, **options)
        starts = [trajectory.metadata["prompt_length"], *active.branch_points]
        ends = [*active.branch_points, path.length]
        names = active.tree_path
        # An edge is counted in the first path through it only: the path with child index 0 at all later levels.
        shared = [end - start for k, (start, end) in enumerate(zip(starts, ends, strict=True)) if any(names[k:])]
        trajectory.sample = self.tree.leaf(active.sample, names)
        trajectory.metadata |= {
            TREE_NODES: tree_node_names(active.sample, names),
            TREE_NODE_ENDS: ends,
            SHARED_TOKENS: sum(shared),
        }
        return trajectory
