"""`RunningTrajectory`: a trajectory that has not ended, as a forest of token nodes that grows.

Each conversation of an episode is a `TokenPath`: the nodes from a root to the place where the model writes next. A context that no longer
continues what was sampled starts a branch from the last node that it shares with the old path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from burnish.core.engine import SamplingOptions
from burnish.core.pictures import PictureSpan, distinct_tokens, shifted
from burnish.core.routed_experts import padded_record
from burnish.core.trajectory import TokenNode, TurnSpan
from burnish.data.prompt_stream import PromptSample

if TYPE_CHECKING:
    from burnish.environments.base import TokenEnvironment
    from burnish.environments.dialogue import Conversation
    from burnish.environments.host import Session
    from burnish.gateway.session import AgentSession
    from burnish.rollout.opponents import OpponentGame


@dataclass(eq=False, slots=True)
class PartialTurn:
    """The tokens of the turn that the model is writing. Requests may be interrupted, so a turn may come in several parts."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    """Whether the model sampled the token. Answers that continue a given prefix begin with tokens that it did not sample."""
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    experts: np.ndarray | None = None
    """The engine's experts of the whole context and this turn, by the first request that computed a token; None if not recorded."""

    def append(self, tokens: Sequence[int], logp: Sequence[float] | None = None, version: int = -1) -> None:
        """Add tokens: sampled ones with their log-probs, others without."""
        self.tokens.extend(tokens)
        self.sampled.extend([logp is not None] * len(tokens))
        self.logp.extend(logp if logp is not None else [0.0] * len(tokens))
        self.version.extend([version] * len(tokens))

    def drop_last(self, count: int) -> None:
        """Remove the last tokens."""
        for column in (self.tokens, self.sampled, self.logp, self.version):
            del column[len(column) - count :]
        if self.experts is not None:  # the last token left will be computed again, for the token behind it
            left = len(self.experts) - count
            self.experts = padded_record(self.experts[: left - 1], left)

    def copy(self) -> PartialTurn:
        """Return a copy that grows on its own."""
        return PartialTurn(list(self.tokens), list(self.sampled), list(self.logp), list(self.version), self.experts)


class TokenPath:
    """The nodes of one conversation, the path through them on which the model writes, and its complete turns."""

    def __init__(self) -> None:
        self.nodes: list[TokenNode] = []
        self.path: list[int] = []
        """Indices of the nodes from a root to the end."""
        self.turns: list[TurnSpan] = []
        self.state: str | None = None
        """The environment's state in which the current turn begins."""
        self.length = 0
        """Number of tokens on the path, without the current turn."""
        self.opening: tuple[int, ...] = ()
        """The tokens that the conversation began with. Samples of one prompt share the object, so that engines see that they share the prefix.

        Equal tokens with other images are another object."""
        self.opening_pictures: tuple[PictureSpan, ...] = ()
        self.conversation: Conversation | None = None
        """Turns messages into tokens; None for an environment that gives tokens."""

    def copy(self) -> TokenPath:
        """Return a copy that grows on its own. The nodes themselves never change."""
        other = TokenPath()
        other.nodes, other.path, other.turns = list(self.nodes), list(self.path), list(self.turns)
        other.state, other.length, other.opening = self.state, self.length, self.opening
        other.opening_pictures = self.opening_pictures
        other.conversation = self.conversation
        return other

    def open(self, tokens: tuple[int, ...], pictures: tuple[PictureSpan, ...] = ()) -> None:
        """Begin the conversation with its prompt."""
        self.opening, self.opening_pictures = tokens, pictures
        self.append(tokens, pictures=pictures)

    def append(
        self, tokens: Sequence[int], observed: np.ndarray | None = None, pictures: tuple[PictureSpan, ...] = ()
    ) -> None:
        """Add tokens that the model did not write, behind the path. `observed` marks the bodies of messages among them."""
        if len(tokens):
            parent = self.path[-1] if self.path else -1
            self._add(TokenNode(parent, np.array(tokens, dtype=np.int64), observed=observed, pictures=pictures))

    def append_turn(self, turn: PartialTurn) -> int:
        """Add a complete turn of the model behind the path. Returns the index of its last sampled node."""
        num_given = turn.sampled.index(True) if True in turn.sampled else len(turn.tokens)
        self.append(turn.tokens[:num_given])
        self._add_records(turn.experts)
        if num_given == len(turn.tokens):
            return len(self.nodes) - 1  # nothing was sampled
        node = TokenNode(
            self.path[-1] if self.path else -1,
            np.array(turn.tokens[num_given:], dtype=np.int64),
            np.array(turn.logp[num_given:], dtype=np.float32),
            np.array(turn.version[num_given:], dtype=np.int32),
        )
        if turn.experts is not None:
            node.experts = padded_record(turn.experts[self.length :], len(node.tokens))
        self._add(node)
        return len(self.nodes) - 1

    def _add_records(self, experts: np.ndarray | None) -> None:
        """Give the nodes that were only read the experts of the first request that read them."""
        at = 0
        for node in [self.nodes[index] for index in self.path] if experts is not None else ():
            own = slice(at, at := at + len(node.tokens))
            if experts is not None and not node.is_sampled and node.experts is None:
                node.experts = padded_record(experts[own], len(node.tokens))

    def branch(
        self, tokens: Sequence[int], observed: np.ndarray | None = None, pictures: tuple[PictureSpan, ...] = ()
    ) -> None:
        """Continue with a context that does not continue the path: fork behind the nodes that both begin with."""
        context, shared, at = np.array(distinct_tokens(tokens, pictures), dtype=np.int64), 0, 0
        for index in self.path:
            node = self.nodes[index]
            own = np.array(distinct_tokens(node.tokens.tolist(), node.pictures), dtype=np.int64)
            if not np.array_equal(context[at : at + len(own)], own):
                break
            shared, at = shared + 1, at + len(own)
        self.path, self.length = self.path[:shared], at
        later = shifted((span for span in pictures if span.start >= at), -at)
        self.append(tokens[at:], None if observed is None else observed[at:], later)

    def restart(self, tokens: Sequence[int], pictures: tuple[PictureSpan, ...] = ()) -> None:
        """Continue with a conversation of its own: another root."""
        self.path, self.length = [], 0
        self.open(tuple(tokens), pictures)

    def tokens(self) -> list[int]:
        """Return all tokens on the path."""
        return [token for index in self.path for token in self.nodes[index].tokens.tolist()]

    def pictures(self) -> tuple[PictureSpan, ...]:
        """Return all images on the path; starts count from its first token."""
        found, at = list[PictureSpan](), 0
        for index in self.path:
            found += shifted(self.nodes[index].pictures, at)
            at += len(self.nodes[index].tokens)
        return tuple(found)

    def prompt_length(self) -> int:
        """Return how many tokens of the path are the conversation's prompt.

        A branch may have rewritten the end of the prompt: a template that opens a turn with `<think>` leaves it out of earlier turns.
        """
        tokens = np.array(distinct_tokens(self.tokens(), self.pictures())[: len(self.opening)], dtype=np.int64)
        opening = np.array(distinct_tokens(self.opening, self.opening_pictures)[: len(tokens)], dtype=np.int64)
        differ = np.flatnonzero(tokens != opening)
        return int(differ[0]) if len(differ) else len(tokens)

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among the first sampled tokens of its nodes; None before the first."""
        versions = [int(n.version[0]) for n in self.nodes if n.version is not None and len(n.version)]
        return min((version for version in versions if version >= 0), default=None)

    def _add(self, node: TokenNode) -> None:
        self.nodes.append(node)
        self.path.append(len(self.nodes) - 1)
        self.length += len(node.tokens)


@dataclass(eq=False, slots=True)
class RunningTrajectory:
    """A trajectory that has not ended: in the engine, paused between two requests, or waiting for its environment."""

    draw: PromptSample
    sample: int
    key: int
    """Random key of its sampling."""
    stream: str
    """Stream of its random numbers: train, eval or baseline."""
    first_sampling: SamplingOptions
    sampling: SamplingOptions
    """The options of its requests: `first_sampling` with the stop strings of its environment."""
    priority: int = 0
    """Higher numbers are sampled first."""
    paths: dict[str | None, TokenPath] = field(default_factory=lambda: {None: TokenPath()})
    """One for each role of a game of several players; otherwise one, under None."""
    role: str | None = None
    """The role that writes next."""
    game: OpponentGame | None = None
    """Only in a game against earlier weights of the policy: who plays what."""
    turn: PartialTurn = field(default_factory=PartialTurn)
    environment: TokenEnvironment | None = None
    """Only for environments that work on tokens."""
    session: Session | None = None
    """Only for environments that work on messages."""
    agent: AgentSession | None = None
    """Only for agents: the model calls of the episode."""
    oldest_call: int | None = None
    """Only for agents: the oldest weights that sampled a token of its calls, also of one that is not complete."""
    main_turn: int | None = None
    """Only for agents that have ended: the last turn of the main branch."""
    end_reward: float = 0.0
    """Only for agents that have ended: the reward of the episode as a whole, which that turn has."""
    finish: Literal["turns", "length"] | None = None
    """Why the runner ended the episode, while the environment is asked for its last word."""
    num_turns: int = 0
    num_sampled: int = 0
    """Tokens that the model sampled, in all turns."""
    num_requests: int = 0
    num_retries: int = 0
    """How often the episode was started again after a failure of its own."""
    num_deaths: int = 0
    """How often it was started again because its process died with others in it."""
    is_dropped: bool = False
    """The trajectory is no longer wanted; a late reply of its environment is ignored."""
    events: list[dict[str, str]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    tree_path: tuple[int, ...] = ()
    """Only in a tree of answers: the child index at each level."""
    branch_points: list[int] = field(default_factory=list)
    """Only in a tree of answers: positions in the context at which its path branched."""

    @property
    def current(self) -> TokenPath:
        """The conversation in which the model writes."""
        return self.paths[self.role]

    @property
    def label(self) -> str:
        """Its name among the trajectories of the prompt."""
        return ".".join(map(str, (self.sample, *self.tree_path)))

    @property
    def num_partial(self) -> int:
        """Tokens of the current turn that earlier requests sampled or a prefix gave."""
        return len(self.turn.tokens)

    @property
    def length(self) -> int:
        """Number of tokens of the current context."""
        return self.current.length + self.num_partial

    @property
    def oldest(self) -> int | None:
        """The version of its first sampled token; None before that."""
        versions = [path.oldest_version for path in self.paths.values()]
        versions += [version for version in self.turn.version[:1] if version >= 0]
        versions.append(self.oldest_call)
        return min((version for version in versions if version is not None), default=None)

    def context(self) -> list[int]:
        """Return all tokens of the current context."""
        return self.current.tokens() + self.turn.tokens

    def child(self, number: int, key: int) -> RunningTrajectory:
        """Return a copy that grows on its own, as the child of a node in a tree of answers."""
        return replace(
            self,
            key=key,
            tree_path=(*self.tree_path, number),
            paths={role: path.copy() for role, path in self.paths.items()},
            turn=self.turn.copy(),
            branch_points=list(self.branch_points),
            events=list(self.events),
            metrics=dict(self.metrics),
        )

    def begin_again(self) -> None:
        """Forget everything that was sampled. The same key gives the same random numbers again."""
        self.paths, self.role, self.turn = {None: TokenPath()}, None, PartialTurn()
        self.sampling, self.finish = self.first_sampling, None
        self.session, self.agent, self.environment = None, None, None
        self.oldest_call = self.main_turn = None
        self.num_turns = self.num_sampled = 0
        self.metrics = {}

    def add_event(self, kind: str, what: str, message: str, traceback: str = "") -> None:
        """Record something that went wrong."""
        self.events.append({"kind": kind, "what": what, "message": message, "traceback": traceback})

    def add_metrics(self, numbers: Any) -> None:
        """Add numbers to the metrics of the episode."""
        for name, value in numbers.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
