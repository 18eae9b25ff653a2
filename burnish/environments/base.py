"""The contract of environments: one object plays one episode with the model, turn by turn.

An environment speaks in messages; the runner turns them into tokens and keeps the sampled tokens exactly. `start` opens the episode, each
`step` takes the model's answer and returns the next observation or the end, and `close` frees what the object holds.

What the model causes (a wrong move, a bad tool call) is an observation, and is trained on. What the machinery causes (an exception, a hang,
a dead process) fails the episode: it is tried again with the same seed, and then leaves the loss and the group statistics.

An older contract on token ids, `TokenEnvironment`, also works. It runs between two steps of the engine, so it must be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:  # a worker process imports this module, and must load neither torch nor numpy
    import numpy as np

    from burnish.core.pictures import PictureSpan
    from burnish.data.prompt_pool import Prompt
    from burnish.data.row import Message
    from burnish.models.tokenizer import Tokenizer

RunsIn = Literal["runner", "loop", "worker"]
"""Where the methods of an object run.

- `runner`: between two steps of the engine, without a deadline. Only for built-in code that takes microseconds and never waits.
- `loop`: in the event loop of the runner's process. Only for built-in code that waits (for tools, for a server) and computes little.
- `worker`: in a worker process, with a deadline for each call and a memory limit. All code of users runs there.
"""


@dataclass(frozen=True)
class Episode:
    """What an environment knows about its episode. All values are plain data, because it may be sent to another process."""

    id: str
    """`<row id>#<visit>.<sample>`"""
    seed: int
    """The column `seed` of the row if it has one; otherwise derived from the run's seed, the row and the visit. All samples of a group
    have the same seed. The episode must be a function of options, row and seed."""
    prompt: str | list[Message]
    """The prompt of the row."""
    answer: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    """All other columns of the row."""
    data_source: str = ""
    sample: int = 0
    """Index among the samples of the group."""
    is_training: bool = True

    @property
    def images(self) -> list[np.ndarray]:
        """The images of the prompt in order, uint8 [height, width, 3] each, at the size in which they were given."""
        from burnish.data.images import ImageInput, media_of

        messages = [] if isinstance(self.prompt, str) else self.prompt
        return [item.load() for item in media_of(messages) if isinstance(item, ImageInput)]


@dataclass(frozen=True)
class Answer:
    """One completion of the model, as text."""

    text: str
    """The text without control tokens."""
    raw_text: str
    """The text with control tokens such as `[TOOL_CALLS]` or `<|python_tag|>`, without the token that ended the turn."""
    finish: Literal["stop", "length"] = "stop"
    """`length`: the answer was cut off at `max_tokens`. Only environments with `takes_truncated` see such answers."""
    num_tokens: int = 0
    turn: int = 0
    """Index of the turn, from 0."""


class Body(NamedTuple):
    """The part of an observation that is what a tool or a user said, without markup around it."""

    role: str
    """Who said it: tool, user or system."""
    start: int
    """Its first character in the content of the message, or in the text. In a content of blocks an image counts as one character."""
    end: int
    message: int = 0
    """Index of the message."""


def filled(form: str, result: str, role: str = "tool", message: int = 0, at: int = 0) -> tuple[str, list[Body]]:
    """Return a form with its `{result}` filled in, and the bodies in it. `at` is where the form begins in its message."""
    pieces = form.split("{result}")
    bodies, start = list[Body](), at
    for piece in pieces[:-1]:
        start += len(piece)
        bodies.append(Body(role, start, start + len(result), message))
        start += len(result)
    return result.join(pieces), bodies


@dataclass(frozen=True)
class Observation:
    """What the model reads next. Give `messages`, or `text`, or at the start neither (the model then reads the row's prompt)."""

    messages: tuple[Message, ...] | None = None
    """Messages to append. At the start: the whole conversation up to the model's first turn.

    A content with images is a list of blocks: `{"type": "text", "text": "..."}` and `{"type": "image", "image": value}`. The value is a uint8
    array [height, width, 3], a PIL image, or the bytes or the path of a file."""
    text: str | None = None
    """Text to append behind the answer inside the same assistant turn, as `<information>` of Search-R1 is."""
    reward: float = 0.0
    """Reward of the answer before this observation."""
    state: str | None = None
    """The state before the model's next answer. GiGPO compares turns of a group that begin in equal states, so the text must not contain
    counters. Report it in every turn or in none."""
    tools: tuple[dict[str, Any], ...] | None = None
    """Only at the start: JSON schemas of the tools, for the chat template."""
    stop: tuple[str, ...] | None = None
    """Only at the start: strings that end an answer, in addition to `rollout.stop`."""
    new_conversation: bool = False
    """`messages` are a conversation of their own: the model does not see earlier turns (MemAgent). The trajectory gets another root."""
    role: str | None = None
    """Who answers next, in a game of several players. Each role has a conversation and a trajectory of its own."""
    bodies: tuple[Body, ...] | None = None
    """Which characters are what a tool or a user said (`algorithm.auxiliary.observations`). None: the contents of messages, with their roles;
    of a text what is between its tags, as said by a tool."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to add to the episode's metrics."""
    events: tuple[Event, ...] = ()
    """What went wrong before this observation, to be counted and reported."""


@dataclass(frozen=True)
class End:
    """The end of an episode."""

    reward: float | None = None
    """Reward of the last answer. The reward of the episode is the sum over its turns. None: the configured reward scores the episode, and
    no turn may have had a reward."""
    success: bool | None = None
    """Whether the episode counts as correct in accuracy, pass@k and filters. None: compare the reward with `correct_at`."""
    rewards: Mapping[str, float] | None = None
    """Only in a game of several players: the reward of each role for its last answer. A role that had a turn must be in it. With `reward`
    instead, the role that answered last gets it, and the others have what their turns earned."""
    text: str | None = None
    """What the environment said last. Shown in samples and report; the model does not read it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    call_rewards: Mapping[str, float] | None = None
    """Only of an agent program: rewards of single model calls, by the id of their answer. They count towards the reward of the episode."""
    answer: str | None = None
    """Only of an agent program: what the configured reward reads. None: the last answer of the model in the main conversation."""
    successes: Mapping[str, bool] | None = None
    """Only with several roles, in place of `success`: whether the answer of each role is correct. A role that is not in it has no accuracy."""
    record: Mapping[str, Any] | None = None
    """Plain data for the task that the row comes from, where its later rows depend on it (`GrowingTask.observe`)."""


@dataclass(frozen=True)
class AgentTask:
    """What an agent program gets: its episode, and an address of the model that is its own."""

    episode: Episode
    base_url: str
    """Where it calls the model. It ends in `/v1`."""
    api_key: str


@dataclass(frozen=True)
class Event:
    """Something that went wrong in an episode. The report shows an example of each kind."""

    kind: str
    """Such as `tool_raised`, `tool_timed_out`, `tool_unknown`, `tool_malformed`, `tool_cut`, `reset_failed`, `step_failed`,
    `step_timed_out`, `worker_died`, `no_reply`, `bad_reply`."""
    what: str
    """The tool or method that failed."""
    message: str
    traceback: str = ""


class EpisodeFailed(Exception):
    """The machinery failed, not the model: the episode is tried again, and then leaves the loss and the group statistics."""

    def __init__(self, kind: str, message: str, traceback: str = "", is_suspect: bool = True) -> None:
        super().__init__(message)
        self.kind, self.message, self.traceback = kind, message, traceback
        self.is_suspect = is_suspect
        """Whether the episode itself may be the only cause. One whose process died with others in it is started again anyway."""


class Environment:
    """Base class of environments. `__init__` takes the options of the config; one object plays one episode.

    With `is_reusable`, an object is started again for another episode after `close`; `start` must then reset everything.
    """

    runs_in: ClassVar[RunsIn] = "worker"
    is_reusable: ClassVar[bool] = False
    takes_truncated: ClassVar[bool] = False
    """Whether `step` also gets answers that were cut off at `max_tokens`. Otherwise such an answer ends the episode."""
    roles: ClassVar[tuple[str, ...]] = ()
    """The roles of a game of several players, each of which the model plays. Copies of one role are named `solve#0`, `solve#1`, ...: they
    count as one in metrics and baselines of roles."""
    has_own_deadlines: ClassVar[bool] = False
    """Whether the object bounds its own waits. Only for built-in code, such as an adapter that queues until a server has room."""
    correct_at: ClassVar[float | None] = None
    """An episode with at least this reward counts as correct. None: episodes have no accuracy, unless `End.success` says so."""
    gives_success: ClassVar[bool] = True
    """Whether `End.success` may be given. If not, algorithms that need the accuracy are refused at the start, unless there is `correct_at`."""

    tells_void_turns: ClassVar[bool] = False
    """Whether it counts, in the metric `void_turns`, answers with neither a complete call nor a final answer (filter void_turns)."""

    @classmethod
    def roles_with(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the roles of an environment with these options."""
        return tuple(cls.roles)

    async def start(self, episode: Episode) -> Observation:
        """Begin an episode and return what the model reads first."""
        raise NotImplementedError

    async def step(self, answer: Answer) -> Observation | End:
        """Take the model's answer."""
        raise NotImplementedError

    async def end(self, reason: Literal["turns", "length"]) -> End:
        """The runner ends the episode: turns are spent, or no further answer fits. By default the configured reward scores it."""
        return End()

    async def close(self) -> None:
        """Free what the object holds. Called once after each episode, whatever happened."""


class AgentProgram:
    """Base class of agents that call the model themselves, through the recording endpoint. One object plays one episode."""

    async def play(self, task: AgentTask) -> End:
        """Play the episode to its end. `End.reward` may be None: the configured reward then scores the episode."""
        raise NotImplementedError

    async def interrupt(self) -> None:
        """End `play` soon: the episode took too long or is no longer wanted."""

    async def close(self) -> None:
        """Free what the object holds. Called once after each episode, whatever happened."""


# --- The contract on token ids ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Tokens to append to the trajectory. The model writes its next completion after them."""

    tokens: tuple[int, ...]
    state: str | None = None
    """The state before the model's next completion, as `Observation.state`."""
    reward: float = 0.0
    """Reward of the completion before this turn."""
    pictures: tuple[PictureSpan, ...] = ()
    """The images among the tokens, in order."""


@dataclass(frozen=True)
class Done:
    """The end of a trajectory."""

    reward: float | None = None
    """Reward of the last completion. The trajectory's reward is the sum over its turns.

    With None the configured reward scores the trajectory. An earlier turn with a reward is then an error."""


class TokenEnvironment(Protocol):
    """Responds to the completions of one trajectory in tokens, synchronously, in the runner's process.

    A class may have two more attributes:

    - `gives_rewards = True`: a truncated trajectory (too many turns or tokens) keeps the rewards of its turns. By default the configured
      reward scores it.
    - `correct_at`: a trajectory with at least this reward counts as correct in accuracy, pass@k and filters by accuracy. By default
      trajectories have no accuracy.
    """

    def start(self) -> Turn:
        """Return the prompt."""

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        """Return the turn after the model's last completion, or the end. The completion is given as tokens and as text."""


class SingleTurn:
    """The model answers once: the default, without an environment."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.prompt = prompt

    def start(self) -> Turn:
        return Turn(self.prompt.start, pictures=self.prompt.pictures)

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        return Done()


MakeEnvironment = Callable[["Prompt"], TokenEnvironment]
"""Builds the environment of one trajectory of a prompt."""
