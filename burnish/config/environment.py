"""Config section for environments: which one responds to completions, its tools and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from burnish.config.plugins import PLUGIN_FORMS, is_plugin
from burnish.config.records import Record, name_to_record
from burnish.config.yaml_text import parse_yaml

if TYPE_CHECKING:
    from burnish.config.schema import TrainConfig

SINGLE_TURN, GUESS_NUMBER, SELF_CORRECTION = "single_turn", "guess_number", "multi_turn_correction"
ABSOLUTE_ZERO = "absolute_zero"
"""The environment, and the task of the same name, in which the model proposes and solves tasks of its own."""
DEFAULT_ATTEMPTS = 8
"""Attempts of absolute_zero at each proposed task."""
TOOLS = "tools"
"""The environment whose answers call tools in the format of the model's chat template."""
AGENT = "agent"
"""The environment of agents that call the model themselves, through the recording endpoint."""
AGENT_DEFAULTS = {"name": AGENT, "max_turns": 32, "history": "keep"}
"""What an agent has where the config says nothing."""
TRAIN_CALLS, CREDIT = "train_calls", "credit"
AGENT_OPTIONS: dict[str, tuple[str, ...]] = {TRAIN_CALLS: ("all", "main"), CREDIT: ("episode", "branch")}
"""The options of agents that are not arguments of their own, with their values. The first is the default."""
TAG_ENVIRONMENTS = ("tags", "search_r1", "research", "retool", "torl")
"""Environments whose answers call tools with tags."""
GAME_TURNS = {
    GUESS_NUMBER: 3,
    "sokoban": 5,
    "frozen_lake": 5,
    "bandit": 1,
    "game_2048": 50,
    "tic_tac_toe": 5,
    "tic_tac_toe_self_play": 9,
    "kuhn_poker": 3,
    "propose_sum": 5,
    "alphabet_sort": 3,
    "tabletop": 6,
}
"""Games whose environment and task have the same name, with a usual number of turns."""


class ToolEntry(Record):
    """A tool that the model may call."""

    name: str
    """A built-in tool (python, python_session, calculator, search, search_http, table_lookup, image_crop, image_zoom, mcp) or `path/to/file.py:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the tool."""


class Environment(Record):
    """The environment that responds to completions."""

    name: str = SINGLE_TURN
    """single_turn; tools, for answers with tool calls; a game or a system by its name (`burnish environments` lists them); or
    `path/to/file.py:Class` (`package.module:Class`)."""
    agent: str | list[str] | None = None
    """An agent that calls the model itself, through a base URL of its own: `path/to/file.py:function`, a class with run(), or the words of a
    command (`command: [python, agent.py]` is short for it), which is started for each episode with OPENAI_BASE_URL in its environment."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment. Of an agent: arguments of the function, or variables of the command's environment; `train_calls`, all (the
    default) or main: main trains only the model calls that lead to the last one, without titles, summaries and sub-agents; and `credit`,
    episode (the default) or branch: branch compares each branch of an episode on its own, with the episode's reward and those of its own calls."""
    max_turns: int = Field(1, ge=1)
    """Maximum number of completions of one trajectory. A trajectory whose environment asks for more is cut off (counted as `rollout/out_of_turns`).
    guess_number, and algorithms that compare states, need 2 or more. Agents: the model calls of one episode, 32 unless given."""
    max_tokens: int | None = Field(None, ge=2)
    """Maximum number of tokens of one trajectory, with prompt and observations. A turn that might exceed it is not started. A prompt whose
    first turn might exceed it is an error. A sample fails if its environment adds text to the prompt and the first turn might then exceed it.
    null: the positions of the model."""
    tools: list[Annotated[ToolEntry, BeforeValidator(name_to_record)]] = Field(default_factory=list)
    """The tools of the environment: names, or records with a name and options."""
    call_format: str = "auto"
    """How the model writes tool calls: hermes, qwen3_coder, llama3, mistral, gemma3, smollm2 and others; auto follows the chat template."""
    max_calls: int | None = Field(None, ge=1)
    """Maximum number of tool calls of one trajectory. A further call is answered with an error text."""
    history: Literal["as_template", "keep"] = "as_template"
    """What happens if the chat template writes earlier turns differently once a message is added (Qwen3 drops thinking). as_template: the
    model reads what the template writes, and the trajectory branches. keep: the turn is appended behind the sampled tokens."""
    workers: int | None = Field(None, ge=1)
    """Worker processes for environments and tools from files; null: one per core, at most 8. Commands that run at once; null: 64."""
    deadline_s: float = Field(60.0, gt=0)
    """Time limit of one call of an environment or a tool."""
    memory_gib: float = Field(4.0, gt=0)
    """Address space of one worker process."""
    retries: int = Field(1, ge=0)
    """How often an episode starts again after its environment failed. Then the sample leaves the loss and the group statistics."""

    @model_validator(mode="before")
    @classmethod
    def _agent_defaults(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "command" in value:
            if value.get("agent"):
                raise ValueError("agent and command exclude each other: leave one of them out")
            value = {key: item for key, item in value.items() if key != "command"} | {"agent": value["command"]}
        return AGENT_DEFAULTS | value if value.get("agent") else value

    @model_validator(mode="after")
    def _agent_fits(self) -> Environment:
        if isinstance(self.agent, str) and not is_plugin(self.agent):
            raise ValueError(f"environment.agent={self.agent}: expected {PLUGIN_FORMS}, or the words of a command")
        if bool(self.agent) != (self.name == AGENT):
            raise ValueError(
                f"environment.name={self.name} is no agent: leave out environment.agent"
                if self.agent
                else "environment.name=agent needs environment.agent"
            )
        for option, values in AGENT_OPTIONS.items() if self.name == AGENT else ():
            if (given := self.agent_option(option)) not in values:
                raise ValueError(f"environment.options.{option}={given!r}: expected {' or '.join(values)}")
        return self

    def agent_option(self, name: str) -> Any:
        """Return an option of agents, one of `AGENT_OPTIONS`."""
        return self.options.get(name, AGENT_OPTIONS[name][0])


def replaces_environment(overrides: Sequence[str]) -> bool:
    """Return whether overrides give a whole environment: `environment={...}` with a name, an agent or a command."""
    sections = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == "environment"]
    given = [parse_yaml(text, f"environment={text}") for text in sections]
    return any(isinstance(one, dict) and {"name", "agent", "command"} & one.keys() for one in given)


def max_written_tokens(max_tokens: int, environment: Environment) -> int:
    """The most tokens that the model can write in one episode, with at most `max_tokens` in a completion.

    Penalties on length and the horizon of Dr.GRPO both count in it. A trajectory is its length over all turns.
    """
    written = max_tokens * environment.max_turns
    return written if environment.max_tokens is None else min(written, environment.max_tokens)


def check_turns(environment: Environment) -> None:
    """Refuse a game of several turns with a single turn."""
    usual = GAME_TURNS.get(environment.name, 1)
    if usual > 1 and environment.max_turns == 1:
        raise ValueError(
            f"environment {environment.name} is a game of several turns, but environment.max_turns=1 ends it after the first answer: set "
            f"environment.max_turns, such as {usual}"
        )


def check_game_task(environment: Environment, task: str | None, what: str) -> None:
    """Refuse a game without the rows of its task, and rows of a game without its environment. `what` names the data source.

    A user's class may play the rows of a game, which hold its seeds.
    """
    if task in GAME_TURNS and environment.name != task and not is_plugin(environment.name):
        raise ValueError(
            f"task {task} is a game: set environment.name={task} and environment.max_turns={GAME_TURNS[task]}; environment "
            f"{environment.name} cannot play it"
        )
    if environment.name in GAME_TURNS and task != environment.name:
        raise ValueError(
            f"environment {environment.name} needs rows of the task {environment.name}, but data has {what}"
        )


def check_self_made_tasks(config: TrainConfig) -> None:
    """Refuse absolute_zero without the rows of its task, rows without it, too few turns, and sources that sample ahead.

    Validation may have rows of a file or a plug-in: held-out tasks of the user.
    """
    environment = config.environment
    trained, held_out = ([source.task for source in data] for data in (config.data.train, config.data.validation))
    if environment.name != ABSOLUTE_ZERO:
        if ABSOLUTE_ZERO in [*trained, *held_out] and not is_plugin(environment.name):
            raise ValueError(
                f"rows of the task {ABSOLUTE_ZERO} need environment.name={ABSOLUTE_ZERO}, which plays them"
            )
        return
    if other := [task for task in [*trained, *filter(None, held_out)] if task != ABSOLUTE_ZERO]:
        raise ValueError(
            f"environment {ABSOLUTE_ZERO} needs rows of the task {ABSOLUTE_ZERO}, but data has {other[0] or 'a file'}"
        )
    attempts = environment.options.get("attempts", DEFAULT_ATTEMPTS)
    if isinstance(attempts, int) and environment.max_turns < attempts + 1:
        raise ValueError(
            f"environment {ABSOLUTE_ZERO} has a turn for the proposer and one for each of {attempts} attempts, but environment.max_turns="
            f"{environment.max_turns}: set it to {attempts + 1}"
        )
    if config.rollout.source.name != "sync":
        raise ValueError(
            f"task {ABSOLUTE_ZERO} makes its rows from the tasks of the steps before, so they cannot be drawn ahead: set rollout.source=sync"
        )
    if [part.name for part in config.reward.parts] != ["task"]:
        raise ValueError(
            f"reward.parts has no effect: environment {ABSOLUTE_ZERO} gives the rewards itself; leave it out"
        )


def check_environment_fits(config: TrainConfig) -> None:
    """Refuse an environment that does not match the data, and settings that have no effect."""
    environment = config.environment
    check_self_made_tasks(config)
    if environment.name == SINGLE_TURN and environment.max_turns != 1:
        raise ValueError("environment.max_turns has no effect on single_turn, which ends after one completion")
    if environment.max_tokens is not None and environment.max_turns == 1:
        raise ValueError(
            "environment.max_tokens has no effect with environment.max_turns=1: rollout.max_tokens limits a completion"
        )
    for source in [*config.data.train, *config.data.validation]:
        check_game_task(environment, source.task, str(source.task or source.path or source.plugin))
    check_turns(environment)
    if environment.name in GAME_TURNS and [part.name for part in config.reward.parts] != ["task"]:
        raise ValueError(
            f"reward.parts has no effect: environment {environment.name} gives the rewards itself; leave it out"
        )
    needs_turns = ", ".join(config.algorithm.needs("turns"))
    if needs_turns and environment.max_turns == 1:
        raise ValueError(
            f"{needs_turns} estimates from turn to turn, but environment.max_turns=1 gives each sample one turn: use gae, or an "
            "environment of several turns with its environment.max_turns"
        )
    needs_states = ", ".join(config.algorithm.needs("states"))
    if needs_states and environment.name == SINGLE_TURN:
        raise ValueError(
            f"{needs_states} compares turns that begin in the same state, but single_turn has one turn per sample: "
            "give an environment that reports its state, such as guess_number, or use grpo"
        )
    if needs_states and environment.max_turns == 1:
        raise ValueError(
            f"{needs_states} compares turns that begin in the same state, but environment.max_turns=1 leaves each sample only "
            "its first turn: set environment.max_turns to the most turns that the environment may ask for, or use grpo"
        )
