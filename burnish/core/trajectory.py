"""What one sample did, and how many of them become a batch.

A trajectory is made by the rollout driver, completed by the reward, and packed once. Everything about tokens is a
numpy array, so a trajectory can cross a process or lie in a file without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.core.batch import Batch, Ragged
from burnish.core.random_keys import fold, hash_text, to_int64
from burnish.core.segments import offsets_from_lengths

TrajectoryFinish = Literal["stop", "length", "turns", "aborted", "error"]
OFF_POLICY = "off-policy"  # metadata of what somebody else than the policy wrote: a demonstration
NO_LOGP = "no log-probs"  # of one whose author does not say how likely its tokens were
NUMERIC_METADATA = ("greedy_reward", "budget", "use")  # metadata that becomes a sequence column


@dataclass
class TokenSequence:
    """Tokens with who wrote them, how likely the sampler thought them, and which weights it had."""

    tokens: np.ndarray  # int64
    action_mask: np.ndarray  # bool: the model wrote it
    behaviour_logp: np.ndarray  # float32: log-prob under the sampling distribution; 0 where not written by the model
    version: np.ndarray  # int32: policy version that wrote it; -1 where not written by the model

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())


class TurnSpan(NamedTuple):
    """One turn of the model: its tokens are those it wrote from `start` on, up to the next turn or the end."""

    start: int
    """Where in the sequence it begins."""
    state: str | None = None
    """What the environment said the model acted in; None of an environment that reports no states."""
    reward: float = 0.0
    """What the environment gave for it."""


@dataclass
class Trajectory:
    """One sample: its tokens (several sequences when an agent's context was rewritten), its end, its reward."""

    prompt_id: str
    visit: int
    sample: int
    sequences: list[TokenSequence]
    finish: TrajectoryFinish
    completion: str
    reward: float | None = None
    """None: not scored yet, or the scorer failed; then it has no place in the loss or in group statistics."""
    accuracy: float | None = None
    """1 for a correct answer, 0 for a wrong one; None where the reward does not tell the two apart."""
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    turns: list[TurnSpan] = field(default_factory=list)
    """Of its last sequence, in order; empty where nobody wrote them down."""

    @property
    def id(self) -> str:
        return f"{self.prompt_id}#{self.visit}.{self.sample}"

    @property
    def is_demonstration(self) -> bool:
        return bool(self.metadata.get(OFF_POLICY))

    @property
    def has_logp(self) -> bool:
        """Whether `behaviour_logp` is known, or only stands for numbers that nobody has."""
        return not self.metadata.get(NO_LOGP)

    @property
    def truncated(self) -> bool:
        return self.finish not in ("stop", "error")

    @property
    def num_actions(self) -> int:
        return sum(s.num_actions for s in self.sequences)


def with_accuracy(trajectories: Iterable[Trajectory]) -> list[tuple[Trajectory, float]]:
    """The scored trajectories whose reward tells correct from wrong, each with its accuracy.

    A call that timed out counts as wrong. Where no other call gave an accuracy the reward is graded, and there is none at all.
    """
    found = [(t, t.accuracy) for t in trajectories if t.reward is not None and t.accuracy is not None]
    return found if any(not t.metadata.get("timed_out") for t, _ in found) else []


def pack(trajectories: Sequence[Trajectory], seed: int = 0) -> Batch:
    """Scored trajectories as one batch.

    Sequence columns: `group_ids` (same prompt and visit), `trajectory_ids` (index into the list), `key` (random
    identity under the run's seed, whatever the sequence is packed with), `reward`, `accuracy`, `truncated`, a `part/<name>` for every part of
    a reward, and where any trajectory has them in its metadata `greedy_reward` (of its prompt's greedy answer),
    `budget` (tokens it was asked for) and `use` (0 where it is new, k where it comes back for the k-th time); nan where
    a trajectory has no such value; `demonstration` (the policy did not write it), where any is one. Token columns: both masks, `behaviour_logp`, `version`. Ragged columns, where an
    environment reported states or gave rewards to turns before the last: `turn_start` (in the sequence), `turn_state` (equal
    for equal states), `turn_reward`; and those of `core/trajectory.py`, where answers are cut into
    segments or are the paths of a tree.
    """
    unscored = [t.id for t in trajectories if t.reward is None]
    if unscored:
        raise ValueError(f"{len(unscored)} trajectories have no reward and cannot be packed, first {unscored[0]}")
    owners = [(index, t) for index, t in enumerate(trajectories) for _ in t.sequences]
    keys = [
        to_int64(fold(seed, t.prompt_id, t.visit, t.sample, k)) for t in trajectories for k in range(len(t.sequences))
    ]
    sequences = [s for t in trajectories for s in t.sequences]
    groups: dict[tuple[str, int], int] = {}
    group_ids = [groups.setdefault((t.prompt_id, t.visit), len(groups)) for _, t in owners]

    def tokens_of(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name) for s in sequences]))

    def per_sequence(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    mask = tokens_of("action_mask")
    of_tokens, ragged = segment_and_tree_columns([t for _, t in owners], group_ids)
    return Batch(
        tokens=tokens_of("tokens"),
        offsets=offsets_from_lengths(per_sequence([len(s.tokens) for s in sequences], torch.int64)),
        token={
            "action_mask": mask,
            "loss_mask": mask.clone(),
            "behaviour_logp": tokens_of("behaviour_logp"),
            "version": tokens_of("version"),
        }
        | of_tokens
        | step_reward_columns(trajectories),
        sequence={
            "group_ids": per_sequence(group_ids, torch.int64),
            "trajectory_ids": per_sequence([i for i, _ in owners], torch.int64),
            "key": per_sequence(keys, torch.int64),
            "reward": per_sequence([t.reward for _, t in owners], torch.float64),
            "accuracy": per_sequence([_nan_if_none(t.accuracy) for _, t in owners], torch.float64),
            "truncated": per_sequence([t.truncated for _, t in owners], torch.bool),
        }
        | _demonstration_column(owners)
        | {
            name: per_sequence(values, torch.float64)
            for name, values in _optional_columns([t for _, t in owners]).items()
        },
        ragged=_turn_columns(trajectories) | ragged,
    )


def _optional_columns(owners: Sequence[Trajectory]) -> dict[str, list[float]]:
    """The columns that depend on what the trajectories carry."""
    parts = sorted({name for t in owners for name in t.parts})
    columns = {f"part/{name}": [_nan_if_none(t.parts.get(name)) for t in owners] for name in parts}
    given = [name for name in NUMERIC_METADATA if any(name in t.metadata for t in owners)]
    return columns | {name: [_nan_if_none(t.metadata.get(name)) for t in owners] for name in given}


def _demonstration_column(owners: Sequence[tuple[int, Trajectory]]) -> dict[str, Tensor]:
    """`demonstration`: which sequences the policy did not write; nothing where it wrote all."""
    shown = [t.is_demonstration for _, t in owners]
    return {"demonstration": torch.tensor(shown)} if any(shown) else {}


def _turn_columns(trajectories: Sequence[Trajectory]) -> dict[str, Ragged]:
    """The turns of every sequence; nothing where they say no more than masks and outcomes."""
    spans = [span for t in trajectories for span in t.turns]
    has_states = bool(spans) and all(span.state is not None for span in spans)
    has_rewards = any(span.reward for t in trajectories for span in t.turns[:-1])
    if not has_states and not has_rewards:
        return {}
    lengths = [count for t in trajectories for count in [0] * (len(t.sequences) - 1) + [len(t.turns)]]
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    columns = {"turn_start": torch.tensor([span.start for span in spans], dtype=torch.int64)}
    if has_rewards:
        columns["turn_reward"] = torch.tensor([span.reward for span in spans], dtype=torch.float64)
    if has_states:
        states = [to_int64(hash_text(str(span.state))) for span in spans]
        columns["turn_state"] = torch.tensor(states, dtype=torch.int64)
    return {name: Ragged(values, offsets) for name, values in columns.items()}


def _nan_if_none(value: float | None) -> float:
    return float("nan") if value is None else value


# --- Answers that are cut into segments, or share their beginnings as the paths of a tree: what a batch knows of them.
#
# A trajectory says it in its metadata; `branch_columns` makes columns of it, one sequence a trajectory.
#
# - A chain: `borders`, the place in the sequence with which each of its segments starts, and `border_values`, the value of the
#   state before each. Token column `segment_ids` (-1 outside of all segments), ragged column `border_values`.
# - A path of a tree: `nodes`, the names of the nodes from the root's child to the leaf, and `ends`, where in the sequence the edge
#   into each ends. Ragged column `nodes`, equal numbers for equal nodes. Paths that begin alike hold the same edges, and one of
#   them trains each: `segment_ids` is the place of the edge in `nodes` where the first sequence that has it holds it, and -1 in
#   all others, which keep its tokens as context: they are not in their `loss_mask`.

SEGMENT_STARTS, SEGMENT_VALUES = "borders", "border_values"
TREE_NODES, TREE_NODE_ENDS = "nodes", "ends"
SHARED_TOKENS = "shared_tokens"
"""Tokens of a path that its tree counts with another path, in its metadata."""


def segment_and_tree_columns(
    trajectories: Sequence[Trajectory], group_ids: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    """Token and ragged columns of the trajectories, [N] and by sequence; none where they are neither chains nor paths."""
    if any(TREE_NODES in t.metadata for t in trajectories):
        return _tree_columns(trajectories, group_ids)
    if any(SEGMENT_STARTS in t.metadata for t in trajectories):
        return _segment_columns(trajectories)
    return {}, {}


def _segment_columns(trajectories: Sequence[Trajectory]) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    segments = [_segment_ids(t, t.metadata[SEGMENT_STARTS]) for t in trajectories]
    values = [value for t in trajectories for value in t.metadata[SEGMENT_VALUES]]
    lengths = torch.tensor([len(t.metadata[SEGMENT_STARTS]) for t in trajectories], dtype=torch.int64)
    ragged = Ragged(torch.tensor(values, dtype=torch.float64), offsets_from_lengths(lengths))
    return {"segment_ids": torch.from_numpy(np.concatenate(segments))}, {SEGMENT_VALUES: ragged}


def _tree_columns(
    trajectories: Sequence[Trajectory], group_ids: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    numbers: dict[tuple[int, str], int] = {}
    segments, nodes = [], list[int]()
    for t, group in zip(trajectories, group_ids, strict=True):
        starts = [t.metadata["prompt_length"], *t.metadata[TREE_NODE_ENDS][:-1]]
        edges = _segment_ids(t, starts)
        for place, name in enumerate(t.metadata[TREE_NODES]):
            if (group, name) in numbers:
                edges[edges == place] = -1
            nodes.append(numbers.setdefault((group, name), len(numbers)))
        segments.append(edges)
    lengths = torch.tensor([len(t.metadata[TREE_NODES]) for t in trajectories], dtype=torch.int64)
    ragged = Ragged(torch.tensor(nodes, dtype=torch.int64), offsets_from_lengths(lengths))
    ids = torch.from_numpy(np.concatenate(segments))
    return {"segment_ids": ids, "loss_mask": ids >= 0}, {TREE_NODES: ragged}


def _segment_ids(trajectory: Trajectory, starts: Sequence[int]) -> np.ndarray:
    """Which of the segments with these starts each token is in; -1 before the first and where the model did not write."""
    (sequence,) = trajectory.sequences
    ids = np.searchsorted(np.array(starts, dtype=np.int64), np.arange(len(sequence.tokens)), side="right") - 1
    return np.where(sequence.action_mask, ids, -1)


def tree_node_names(sample: int, path: Sequence[int]) -> list[str]:
    """The nodes on the way to a leaf: the sample of the prompt it descends from, then which child each next node is."""
    return list(accumulate((str(k) for k in (sample, *path)), lambda above, child: f"{above}.{child}"))


# --- Rewards of an answer's steps on the tokens that end them.
#
# A trajectory says in its metadata where in its last sequence each step ends and what it earned (`STEP_REWARDS`); its reward
# has the sum. `step_columns` makes a token column of what has to move: each step's reward to its last token, the sum off the
# end of the answer, where the reward stands otherwise.

STEP_REWARDS = "step_rewards"


def step_reward_columns(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """`step_rewards` [N]: what to add to a reward that stands on last tokens; nothing where no trajectory has steps."""
    if not any(STEP_REWARDS in t.metadata for t in trajectories):
        return {}
    moved = []
    for t in trajectories:
        steps = t.metadata.get(STEP_REWARDS, ())
        columns = [np.zeros(len(s.tokens)) for s in t.sequences]
        for sequence, column in zip(t.sequences, columns, strict=True):
            column[np.flatnonzero(sequence.action_mask)[-1:]] -= sum(value for _, value in steps)
        for position, value in steps:
            columns[-1][position] += value
        moved += columns
    return {STEP_REWARDS: torch.from_numpy(np.concatenate(moved))}
