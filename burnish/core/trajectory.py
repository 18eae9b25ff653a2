"""`Trajectory`: one sample with its tokens and its reward. `pack` turns scored trajectories into a `Batch`.

The rollout driver creates a trajectory, the reward completes it, and `pack` is called once per step. All token data are
numpy arrays, so that a trajectory can be sent to another process or stored in a file without torch.

The tokens of a trajectory are a forest of nodes. A plain answer is a chain of two nodes: the prompt and the answer. A context that
was rewritten forks behind the last node that both versions share, or is a root of its own. A learner reads whole sequences, so each
path from a root to a leaf is a sequence. Paths share nodes, but each sampled token is an action in one of them only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.batch import Batch, Ragged
from burnish.core.observations import observed_columns
from burnish.core.pictures import PictureSpan, check_spans, shifted
from burnish.core.random_keys import fold, hash_text, to_int64
from burnish.core.routed_experts import expert_columns
from burnish.core.segments import offsets_from_lengths

TrajectoryFinish = Literal["stop", "length", "turns", "aborted", "error"]
"""Why a trajectory ended: an end token or the environment, too many tokens, too many turns, an abort, or a failed environment."""

# Keys of `Trajectory.metadata`.
OFF_POLICY = "off-policy"
"""True for a demonstration: something other than the policy wrote the sample."""
NO_LOGP = "no log-probs"
"""True for a demonstration whose author reported no log-probs."""
VOID_TURNS = "void_turns"
"""Turns with neither a call nor a final answer; only of environments that count them."""
NUMERIC_METADATA = ("greedy_reward", "prompt_value", "budget", "use", VOID_TURNS)
"""Numbers that `pack` turns into sequence columns of the same name."""
SEGMENT_STARTS = "borders"
"""Only for an answer that is cut into segments: the position at which each segment starts."""
SEGMENT_VALUES = "border_values"
"""The estimated value of the state before each segment. Also the name of the ragged column."""
TREE_NODES = "nodes"
"""Only for a path of a tree of answers: names of its nodes, from the root's child to the leaf. Also the name of the ragged column."""
TREE_NODE_ENDS = "ends"
"""The position at which the edge into each node ends."""
SHARED_TOKENS = "shared_tokens"
"""Number of tokens of a path that are on edges of an earlier path of its tree, and are counted there."""
STEP_REWARDS = "step_rewards"
"""(position of the last token, reward) of each step of the only sequence. Also the name of the token column."""
ROLE = "role"
"""Only in a game of several players: the player whose trajectory it is. Samples of one prompt are compared within a role.

Players of equal roles have a number behind `#`: `solver#1` and `solver#2` are two players of the role `solver`."""
EPISODE = "episode"
"""Only in a game of several players: index of the game among those of its draw. Its players have it in common."""
PLAYERS = "players"
"""Only in a game of several players: how many of them had a turn, which is how many trajectories the game became."""
OPPONENT = "opponent"
"""Only of a game against earlier weights of the policy: their version. The trajectory is that of the policy's player."""
EVENTS = "events"
"""What went wrong in the episode: a list of {kind, what, message, traceback}."""
NO_CALLS = "no_calls"
"""The kind of event of an agent that ended without a model call."""
LAST_WORDS = "last_words"
"""What the environment said at the end. The model did not read it."""
SCORED_TEXT = "scored_text"
"""Only of an agent: the text that the configured reward reads, which is the agent's own answer or the last one of its main conversation."""
MAIN_TURN = "main_turn"
"""Only of an agent: index of the last turn of its main conversation."""
BRANCH_CREDIT = "branch_credit"
"""Only of an agent whose branches are compared on their own: the part of the main turn's reward that is the episode's."""
EPISODE_METRICS = "episode_metrics"
"""Numbers that the environment measured, by name."""
RECORD = "record"
"""What the episode made for the task that its row comes from (`End.record`), as plain data. Only the first trajectory of an episode has it."""


def role_name(player: str) -> str:
    """Return the role of a player: `solver` for the player `solver#2`."""
    return player.partition("#")[0]


def role_key(name: str) -> int:
    """Return the int64 that stands for a role in the column `role_ids`. It is the same in every run."""
    return to_int64(hash_text(name))


@dataclass(slots=True)
class TokenNode:
    """A run of tokens that the model sampled in one turn, or that it only read. Forks happen between nodes."""

    parent: int
    """Index of the node before it, which is smaller than its own; -1 for a root."""
    tokens: np.ndarray  # int64
    logp: np.ndarray | None = None  # float32
    """Log-probs under the distribution that the tokens were sampled from. None: the model did not sample the node."""
    version: np.ndarray | None = None  # int32
    """Version of the weights that sampled each token, if the model sampled the node."""
    is_trained: bool = True
    """False takes the tokens of a sampled node out of the loss: a retried answer, a cut stream, a call beside the task."""
    observed: np.ndarray | None = None  # int8
    """Only of a node that was read: which of its tokens are the body of a message, by the number of its role (`core/observations.py`)."""
    experts: np.ndarray | None = None  # int16
    """The experts that computed each token in the engine (`core/routed_experts.py`); None if they were not recorded."""
    pictures: tuple[PictureSpan, ...] = ()
    """The images of a node that was read, in order; `start` counts from the node's first token."""

    @property
    def is_sampled(self) -> bool:
        return self.logp is not None


@dataclass
class TokenSequence:
    """Tokens, with columns of the same length. Log-probs and versions are 0 and -1 if a token is no action."""

    tokens: np.ndarray  # int64
    action_mask: np.ndarray  # bool: whether the model wrote the token, and no earlier sequence of the trajectory has it
    behaviour_logp: np.ndarray  # float32: log-prob under the distribution that the token was sampled from
    version: np.ndarray  # int32: version of the weights that sampled the token
    loss_mask: np.ndarray  # bool: the actions of nodes that are trained
    pictures: tuple[PictureSpan, ...] = ()
    """The images among the tokens, in order."""

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())


class TurnSpan(NamedTuple):
    """One turn of the model."""

    node: int
    """Index of the node that holds its tokens."""
    state: str | None = None
    """The state that the environment reported before the turn; None if it reports no states."""
    reward: float = 0.0
    """The environment's reward for the turn."""


class NodePlace(NamedTuple):
    """Where a node is in the sequences of its trajectory."""

    sequence: int
    """Index of the first sequence through the node."""
    start: int
    """Position of its first token in that sequence."""


@dataclass
class Trajectory:
    """One sample: its tokens, why it ended, and its reward."""

    prompt_id: str
    visit: int
    """How often the run had drawn the prompt before."""
    sample: int
    """Index among the samples of the draw; negative for greedy and continued answers, which are not trained on."""
    nodes: list[TokenNode]
    """All tokens. A parent comes before its children. Do not change the list once `sequences` was read."""
    finish: TrajectoryFinish
    completion: str
    reward: float | None = None
    """None if the sample is not scored yet, or if scoring failed. Then it is in no loss and in no group statistics."""
    accuracy: float | None = None
    """1 for a correct answer, 0 for a wrong one; None if the reward is graded: a number without a threshold for correct answers."""
    parts: dict[str, float] = field(default_factory=dict)
    """The value of each part of the reward, by name."""
    error: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    turns: list[TurnSpan] = field(default_factory=list)
    """The turns of all branches, in the order in which they were played; empty if they were not recorded."""

    @property
    def id(self) -> str:
        return f"{self.group_id}.{self.sample}"

    @property
    def group_id(self) -> str:
        """Name of the samples that it is compared with: equal prompt and visit, and in a game of several players equal role."""
        name = f"{self.prompt_id}#{self.visit}"
        return f"{name}/{role_name(self.role)}" if self.role is not None else name

    @property
    def place_in_draw(self) -> tuple[str, int]:
        """Sort key among the trajectories of one draw. It keeps groups together."""
        return self.role or "", self.sample

    @property
    def role(self) -> str | None:
        return self.metadata.get(ROLE)

    @property
    def is_demonstration(self) -> bool:
        return bool(self.metadata.get(OFF_POLICY))

    @property
    def has_logp(self) -> bool:
        """Whether `behaviour_logp` holds real log-probs. Those of some demonstrations are unknown."""
        return not self.metadata.get(NO_LOGP)

    @property
    def truncated(self) -> bool:
        return self.finish not in ("stop", "error")

    @property
    def num_actions(self) -> int:
        return sum(len(node.tokens) for node in self.nodes if node.is_sampled)

    @cached_property
    def paths(self) -> list[list[int]]:
        """The nodes of each sequence, from a root to a leaf, in the order of the leaves.

        A path whose sampled nodes are all in earlier paths is left out. If no node was sampled, the first path stays.
        """
        for index, node in enumerate(self.nodes):
            if node.parent >= index:
                raise ValueError(f"{self.id}: node {index} has the parent {node.parent}, which does not come before it")
        if empty := [k for k, node in enumerate(self.nodes) if node.is_sampled and not len(node.tokens)]:
            raise ValueError(f"{self.id}: node {empty[0]} was sampled but has no tokens; leave such nodes out")
        inner = {node.parent for node in self.nodes}
        every = [self._path(leaf) for leaf in range(len(self.nodes)) if leaf not in inner]
        owned, kept = set[int](), list[list[int]]()
        for path in every:
            new = {index for index in path if self.nodes[index].is_sampled} - owned
            owned |= new
            kept += [path] if new else []
        return kept or every[:1] or [[]]

    @cached_property
    def node_places(self) -> dict[int, NodePlace]:
        """The first place of each node that is in a sequence. Every sampled node is in one."""
        places: dict[int, NodePlace] = {}
        for number, path in enumerate(self.paths):
            ends = accumulate((len(self.nodes[index].tokens) for index in path), initial=0)
            for index, start in zip(path, ends, strict=False):
                places.setdefault(index, NodePlace(number, start))
        return places

    @cached_property
    def sequences(self) -> list[TokenSequence]:
        """One sequence for each of `paths`. A sampled token is an action in the first path through it, and context in later ones."""
        return [self._sequence(number, path) for number, path in enumerate(self.paths)]

    @property
    def turn_places(self) -> list[NodePlace]:
        """Where each turn begins."""
        return [self.node_places[span.node] for span in self.turns]

    def _path(self, leaf: int) -> list[int]:
        path = [leaf]
        while (parent := self.nodes[path[-1]].parent) >= 0:
            path.append(parent)
        return path[::-1]

    def _sequence(self, number: int, path: Sequence[int]) -> TokenSequence:
        nodes = [self.nodes[index] for index in path]
        tokens = _concatenate([node.tokens for node in nodes], np.int64)
        action_mask, loss_mask = np.zeros(len(tokens), dtype=bool), np.zeros(len(tokens), dtype=bool)
        logp, version = np.zeros(len(tokens), dtype=np.float32), np.full(len(tokens), -1, dtype=np.int32)
        pictures: list[PictureSpan] = []
        start = 0
        for index, node in zip(path, nodes, strict=True):
            if node.pictures:
                check_spans(node.pictures, len(node.tokens), f"{self.id}, node {index}")
                pictures += shifted(node.pictures, start)
            span = slice(start, start := start + len(node.tokens))
            if node.logp is not None and self.node_places[index].sequence == number:
                action_mask[span], loss_mask[span], logp[span] = True, node.is_trained, node.logp
                version[span] = -1 if node.version is None else node.version
        return TokenSequence(tokens, action_mask, logp, version, loss_mask, tuple(pictures))


def chain_nodes(
    tokens: np.ndarray,
    action_mask: np.ndarray,
    behaviour_logp: np.ndarray,
    version: np.ndarray,
    starts: Iterable[int] = (),
    pictures: Sequence[PictureSpan] = (),
) -> list[TokenNode]:
    """Return one sequence as a chain of nodes: runs of sampled and of other tokens, in turn. A new node also begins at each of `starts`."""
    changes = (np.flatnonzero(action_mask[1:] != action_mask[:-1]) + 1).tolist()
    borders = sorted({0, len(tokens), *changes, *(start for start in starts if 0 < start < len(tokens))})
    nodes: list[TokenNode] = []
    for start, end in zip(borders, borders[1:], strict=False):
        node = TokenNode(len(nodes) - 1, np.asarray(tokens[start:end], dtype=np.int64))
        node.pictures = shifted((span for span in pictures if start <= span.start < end), -start)
        if action_mask[start]:
            node.logp = np.asarray(behaviour_logp[start:end], dtype=np.float32)
            node.version = np.asarray(version[start:end], dtype=np.int32)
        nodes.append(node)
    return nodes


def with_accuracy(trajectories: Iterable[Trajectory]) -> list[tuple[Trajectory, float]]:
    """Return the scored trajectories that have an accuracy, each with its accuracy.

    A reward call that timed out counts as wrong. If only such calls have an accuracy, the reward is graded, and the list is empty.
    """
    found = [(t, t.accuracy) for t in trajectories if t.reward is not None and t.accuracy is not None]
    return found if any(not t.metadata.get("timed_out") for t, _ in found) else []


def pack(trajectories: Sequence[Trajectory], seed: int = 0) -> Batch:
    """Pack scored trajectories into one batch.

    Sequence columns:

    - `group_ids` (equal prompt and visit, and in a game of several players equal role);
    - `trajectory_ids` (index into `trajectories`): the sequences of one trajectory have its reward in common, which counts once;
    - `key`: a random key that depends on the run's seed and the sample, not on the other sequences of the batch;
    - `reward`, `accuracy`, `truncated`, and `part/<name>` for each part of a reward;
    - `greedy_reward` (reward of the prompt's greedy answer), `prompt_value` (value estimated before training), `budget` (number of tokens the prompt asked for) and `use`
      (0 for a new sample, k when a sample is used again for the k-th time), if any trajectory has them in its metadata;
    - `demonstration` (the policy did not write it), if any trajectory is one;
    - `role_ids` (`role_key` of the role) and `episode_ids` (equal numbers for the players of one game), if any trajectory has a role;
    - `answer_ids`, if the branches of a trajectory count on their own (`BRANCH_CREDIT`): a number for each of them. Its `reward` is then
      that of the episode and of its own turns.

    A missing number is nan. Token columns: `action_mask`, `loss_mask` (the actions of nodes that are trained), `behaviour_logp`, `version`. If the environment reports
    states or rewards turns before the last, there are ragged columns `turn_start` (position in the sequence), `turn_state` (equal
    numbers for equal states) and `turn_reward`. A turn is in the sequence in which its tokens are actions.
    `segment_and_tree_columns`, `step_reward_columns`, `observed_columns` and `expert_columns` add theirs. If a token node has images, there are
    `picture_starts`, `picture_keys` and the images themselves, each once.
    """
    unscored = [t.id for t in trajectories if t.reward is None]
    if unscored:
        raise ValueError(f"{len(unscored)} trajectories have no reward and cannot be packed, first {unscored[0]}")
    owners = [t for t in trajectories for _ in t.sequences]  # [S]
    trajectory_ids = [index for index, t in enumerate(trajectories) for _ in t.sequences]
    keys = [to_int64(_sequence_key(seed, t, k)) for t in trajectories for k in range(len(t.sequences))]
    sequences = [s for t in trajectories for s in t.sequences]
    groups: dict[str, int] = {}
    group_ids = [groups.setdefault(t.group_id, len(groups)) for t in owners]

    def token_column(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name) for s in sequences]))

    loss_mask = token_column("loss_mask")
    extra_token_columns, extra_ragged = segment_and_tree_columns(owners, group_ids)
    if "loss_mask" in extra_token_columns:
        extra_token_columns["loss_mask"] &= loss_mask
    batch = Batch(
        tokens=token_column("tokens"),
        offsets=offsets_from_lengths(torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int64)),
        token={
            "action_mask": token_column("action_mask"),
            "loss_mask": loss_mask,
            "behaviour_logp": token_column("behaviour_logp"),
            "version": token_column("version"),
        }
        | extra_token_columns
        | step_reward_columns(trajectories)
        | observed_columns(trajectories)
        | expert_columns(trajectories),
        sequence={
            "group_ids": torch.tensor(group_ids, dtype=torch.int64),
            "trajectory_ids": torch.tensor(trajectory_ids, dtype=torch.int64),
            "key": torch.tensor(keys, dtype=torch.int64),
            "reward": torch.tensor([r for t in trajectories for r in branch_rewards(t)], dtype=torch.float64),
            "accuracy": torch.tensor([_nan_if_none(t.accuracy) for t in owners], dtype=torch.float64),
            "truncated": torch.tensor([t.truncated for t in owners], dtype=torch.bool),
        }
        | _optional_columns(owners),
        ragged=_turn_columns(trajectories) | extra_ragged,
    )
    return batch.with_pictures([s.pictures for s in sequences])


def branch_rewards(trajectory: Trajectory) -> list[float]:
    """Return the reward of each sequence: that of the trajectory, or with `BRANCH_CREDIT` the episode's and that of its own turns."""
    t, num = trajectory, len(trajectory.sequences)
    assert t.reward is not None
    if num == 1 or BRANCH_CREDIT not in t.metadata:
        return [t.reward] * num
    own = [span.reward for span in t.turns]
    own[t.metadata[MAIN_TURN]] -= t.metadata[BRANCH_CREDIT]
    found = [t.reward - sum(own)] * num
    for place, reward in zip(t.turn_places, own, strict=True):
        found[place.sequence] += reward
    return found


def segment_and_tree_columns(
    trajectories: Sequence[Trajectory], group_ids: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    """Return the token and ragged columns of segmented answers, or of answers that are paths of a tree; else none.

    Each trajectory must have one sequence.

    - Segments: the token column `segment_ids` is -1 outside of all segments. The ragged column is `SEGMENT_VALUES`.
    - Trees: the ragged column `TREE_NODES` has equal numbers for equal nodes. Paths with the same beginning share edges, and
      each edge is trained once: `segment_ids` is the edge's index in `TREE_NODES` in the first sequence that has the edge.
      In all other sequences it is -1, and `loss_mask` is False there: the tokens are context only.
    """
    if any(TREE_NODES in t.metadata or SEGMENT_STARTS in t.metadata for t in trajectories):
        _require_one_sequence(trajectories, "advantages of segments and trees (SPO)")
    if any(TREE_NODES in t.metadata for t in trajectories):
        return _tree_columns(trajectories, group_ids)
    if any(SEGMENT_STARTS in t.metadata for t in trajectories):
        return _segment_columns(trajectories)
    return {}, {}


def step_reward_columns(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return `step_rewards` [N], which moves rewards from the last token to the step that earned them; {} if there are no steps.

    A trajectory's reward includes the sum of its step rewards, and is placed on its last action token by default. The column has each
    step's reward at the step's last token, and minus their sum at the last action token of the trajectory. Add it to the default.
    """
    if not any(STEP_REWARDS in t.metadata for t in trajectories):
        return {}
    _require_one_sequence([t for t in trajectories if STEP_REWARDS in t.metadata], "rewards of steps")
    moved = []
    for t in trajectories:
        columns = [np.zeros(len(s.tokens)) for s in t.sequences]
        if steps := t.metadata.get(STEP_REWARDS):
            (sequence,), (column,) = t.sequences, columns
            column[np.flatnonzero(sequence.action_mask)[-1:]] -= sum(value for _, value in steps)
            for position, value in steps:
                column[position] += value
        moved += columns
    return {STEP_REWARDS: torch.from_numpy(np.concatenate(moved))}


def tree_node_names(sample: int, path: Sequence[int]) -> list[str]:
    """Return the names of the nodes on the path to a leaf: the prompt's sample, then the child index at each level."""
    return list(accumulate((str(k) for k in (sample, *path)), lambda above, child: f"{above}.{child}"))


def _optional_columns(owners: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return the sequence columns that exist only if a trajectory has their values."""
    demonstrations = [t.is_demonstration for t in owners]
    columns = {"demonstration": torch.tensor(demonstrations)} if any(demonstrations) else {}
    if any(BRANCH_CREDIT in t.metadata and len(t.sequences) > 1 for t in owners):
        is_first = [k == 0 or t is not owners[k - 1] or BRANCH_CREDIT in t.metadata for k, t in enumerate(owners)]
        columns["answer_ids"] = torch.tensor(is_first).cumsum(0)
    if any(t.role is not None for t in owners):
        episodes: dict[tuple[str, int, int], int] = {}
        names = [(t.prompt_id, t.visit, t.metadata.get(EPISODE, t.sample)) for t in owners]
        columns["role_ids"] = torch.tensor([role_key(role_name(t.role or "")) for t in owners])
        columns["episode_ids"] = torch.tensor([episodes.setdefault(name, len(episodes)) for name in names])
    parts = sorted({name for t in owners for name in t.parts})
    numbers = {f"part/{name}": [_nan_if_none(t.parts.get(name)) for t in owners] for name in parts}
    for name in NUMERIC_METADATA:
        if any(name in t.metadata for t in owners):
            numbers[name] = [_nan_if_none(t.metadata.get(name)) for t in owners]
    return columns | {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers.items()}


def _turn_columns(trajectories: Sequence[Trajectory]) -> dict[str, Ragged]:
    """Return the turns of every sequence; {} if there are neither states nor rewards before the last turn."""
    has_states = all(span.state is not None for t in trajectories for span in t.turns)
    has_states = has_states and any(t.turns for t in trajectories)
    has_rewards = any(span.reward for t in trajectories for span in t.turns[:-1])
    if not has_states and not has_rewards:
        return {}
    spans, starts, lengths = list[TurnSpan](), list[int](), list[int]()
    for t in trajectories:
        placed = sorted(zip(t.turn_places, t.turns, strict=True), key=lambda one: one[0])
        starts += [place.start for place, _ in placed]
        spans += [span for _, span in placed]
        counts = Counter(place.sequence for place, _ in placed)
        lengths += [counts[k] for k in range(len(t.sequences))]
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    columns = {"turn_start": torch.tensor(starts, dtype=torch.int64)}
    if has_rewards:
        columns["turn_reward"] = torch.tensor([span.reward for span in spans], dtype=torch.float64)
    if has_states:
        states = [to_int64(hash_text(str(span.state))) for span in spans]
        columns["turn_state"] = torch.tensor(states, dtype=torch.int64)
    return {name: Ragged(values, offsets) for name, values in columns.items()}


def _sequence_key(seed: int, trajectory: Trajectory, number: int) -> int:
    t, role = trajectory, trajectory.role
    return fold(seed, t.prompt_id, t.visit, t.sample, number, *(() if role is None else (role,)))


def _require_one_sequence(trajectories: Sequence[Trajectory], what: str) -> None:
    """Raise if a trajectory has several sequences, because the positions of `what` would be ambiguous."""
    if several := [t for t in trajectories if len(t.sequences) > 1]:
        raise UserError(
            f"{what} need trajectories of one sequence, but the context of {several[0].id} was rewritten and it has "
            f"{len(several[0].sequences)}; choose another advantage or reward, or environment.history=keep"
        )


def _segment_columns(trajectories: Sequence[Trajectory]) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    segment_ids = [_segment_ids(t, t.metadata[SEGMENT_STARTS]) for t in trajectories]
    values = [value for t in trajectories for value in t.metadata[SEGMENT_VALUES]]
    lengths = torch.tensor([len(t.metadata[SEGMENT_STARTS]) for t in trajectories], dtype=torch.int64)
    ragged = Ragged(torch.tensor(values, dtype=torch.float64), offsets_from_lengths(lengths))
    return {"segment_ids": torch.from_numpy(np.concatenate(segment_ids))}, {SEGMENT_VALUES: ragged}


def _tree_columns(
    trajectories: Sequence[Trajectory], group_ids: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    node_ids: dict[tuple[int, str], int] = {}
    segment_ids, nodes = [], list[int]()
    for t, group in zip(trajectories, group_ids, strict=True):
        starts = [t.metadata["prompt_length"], *t.metadata[TREE_NODE_ENDS][:-1]]
        edges = _segment_ids(t, starts)
        for index, name in enumerate(t.metadata[TREE_NODES]):
            if (group, name) in node_ids:  # an earlier sequence trains this edge
                edges[edges == index] = -1
            nodes.append(node_ids.setdefault((group, name), len(node_ids)))
        segment_ids.append(edges)
    lengths = torch.tensor([len(t.metadata[TREE_NODES]) for t in trajectories], dtype=torch.int64)
    ragged = Ragged(torch.tensor(nodes, dtype=torch.int64), offsets_from_lengths(lengths))
    ids = torch.from_numpy(np.concatenate(segment_ids))
    return {"segment_ids": ids, "loss_mask": ids >= 0}, {TREE_NODES: ragged}


def _segment_ids(trajectory: Trajectory, starts: Sequence[int]) -> np.ndarray:
    """Return the segment of each token; -1 before the first segment and for tokens that the model did not write."""
    (sequence,) = trajectory.sequences
    ids = np.searchsorted(np.array(starts, dtype=np.int64), np.arange(len(sequence.tokens)), side="right") - 1
    return np.where(sequence.action_mask, ids, -1)


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)


def _nan_if_none(value: float | None) -> float:
    return float("nan") if value is None else value
