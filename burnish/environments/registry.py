"""Builds the environment that a config names: a built-in one, one of another library through its adapter, or a class from a user's file."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from burnish.config.data import Template
from burnish.config.environment import AGENT, AGENT_OPTIONS, SINGLE_TURN, TOOLS
from burnish.config.environment import Environment as EnvironmentConfig
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import check_options, is_plugin, load_plugin
from burnish.data.template import template_kind
from burnish.environments import token_dialogue
from burnish.environments.adapters.recognise import ADAPTERS, adapter_for
from burnish.environments.agent_command import AgentCommand
from burnish.environments.base import AgentProgram, Environment, MakeEnvironment, SingleTurn
from burnish.environments.dialogue import ChatRenderer
from burnish.environments.games import GAMES
from burnish.environments.guess_number import GuessNumber
from burnish.environments.host import EnvironmentHost, EnvironmentKind
from burnish.environments.tools.call_formats import ParsedCall, call_format, detect_format
from burnish.environments.tools.tag_environment import TagEnvironment
from burnish.environments.tools.tool_environment import ToolEnvironment
from burnish.environments.tools.tool_registry import TAG_SYSTEMS, tool_environment_maker
from burnish.environments.workers import ObjectSpec, ObjectWorkers, WorkerLimits
from burnish.models.tokenizer import Tokenizer

BUILT_IN = {
    **{name: f"{game.__module__}:{game.__name__}" for name, game in GAMES.items()},
    "mem_agent": "burnish.environments.mem_agent:MemAgent",
    "deep_retrieval": "burnish.environments.deep_retrieval:DeepRetrieval",
    "absolute_zero": "burnish.environments.absolute_zero:AbsoluteZero",
    "multi_turn_correction": "burnish.environments.self_correction:SelfCorrection",
    "describe": "burnish.environments.describe:DescribeThenAnswer",
    "prove": "burnish.environments.prove:Prove",
}
"""Environments on messages, by name."""
TOKEN_ENVIRONMENTS: dict[str, type[Any]] = {SINGLE_TURN: SingleTurn, "guess_number": GuessNumber}
MESSAGE_KEYS = ("tools", "call_format", "max_calls", "history", "workers", "deadline_s", "memory_gib", "retries")
"""Settings that only environments on messages have."""
MAX_WORKERS = 8
MAX_COMMANDS = 64
"""Programs of agents that run at once, unless the config says otherwise."""
EPISODE_DEADLINES = 4
"""A step of an environment with tools may take this many deadlines of a tool: a call, its second try on another worker, and waiting."""
MakeObjectWorkers = Callable[[], ObjectWorkers]


def environment_names() -> list[str]:
    """All names that `environment.name` takes besides classes in files."""
    return [*TOKEN_ENVIRONMENTS, TOOLS, *TAG_SYSTEMS, *BUILT_IN, *ADAPTERS]


def environment_class(name: str, base: Any = None) -> Any:
    """Return the class that plays an environment. For a user's class of another library, that class itself."""
    if name == TOOLS:
        return ToolEnvironment
    if name == AGENT:
        return AgentProgram
    return TagEnvironment if name in TAG_SYSTEMS else _class_of(name, base)


def environment_factory(config: EnvironmentConfig, tokenizer: Tokenizer, base: Any = None) -> MakeEnvironment:
    """Return a function that builds an environment on tokens. `base` is the folder of relative plug-in paths."""
    cls = _class_of(config.name, base)
    unused = [key for key in MESSAGE_KEYS if getattr(config, key) != getattr(EnvironmentConfig(), key)]
    if unused:
        raise UserError(
            f"environment.{unused[0]} has no effect on {config.name}, which works on tokens and calls no tools: leave it out"
        )
    check_options(cls, config.options, f"environment {config.name}")
    return lambda prompt: cls(prompt, tokenizer, **config.options)


def environment_of(
    config: EnvironmentConfig, tokenizer: Tokenizer, base: Any = None, make_workers: MakeObjectWorkers | None = None
) -> tuple[MakeEnvironment | None, EnvironmentHost | None]:
    """Return the factory of an environment on tokens, or the host of one on messages. Names and options are checked here.

    `make_workers` replaces the worker processes of this machine, such as by actors.
    """
    if _is_on_tokens(_class_of(config.name, base)):
        return environment_factory(config, tokenizer, base), None
    return None, EnvironmentHost(environment_kind(config, tokenizer, base), make_workers or local_workers(config))


def environment_renderer(
    config: EnvironmentConfig, tokenizer: Tokenizer, template: Template, marks_bodies: bool = False
) -> ChatRenderer:
    """Return what turns messages into tokens for an environment."""
    if config.name != TOOLS:
        return ChatRenderer(tokenizer, template, config.history, marks_bodies=marks_bodies)
    written = call_format(config.call_format if config.call_format != "auto" else detect_format(tokenizer))

    def parse(text: str) -> tuple[str, str | None, Sequence[Any]] | None:
        found = written.parse(text)
        is_readable = all(isinstance(call, ParsedCall) for call in found.calls)
        return (found.content, found.reasoning, found.calls) if is_readable else None

    return ChatRenderer(tokenizer, template, config.history, parse, marks_bodies)


def local_workers(config: EnvironmentConfig) -> MakeObjectWorkers:
    """Return a function that starts the worker processes of a config."""
    return lambda: ObjectWorkers(num_workers(config), worker_limits(config), deadline_s=config.deadline_s)


def num_workers(config: EnvironmentConfig) -> int:
    """Return the number of worker processes on one machine."""
    return config.workers or min(MAX_WORKERS, os.cpu_count() or 1)


def worker_limits(config: EnvironmentConfig) -> WorkerLimits:
    """Return the limits of a worker process."""
    return WorkerLimits(config.memory_gib, unresponsive_s=config.deadline_s)


def environment_kind(config: EnvironmentConfig, tokenizer: Tokenizer, base: Any = None) -> EnvironmentKind:
    """Return the configured environment on messages, after checking its options."""
    name = config.name
    if name == AGENT:
        return _agent_kind(config, base)
    takes_tools = name == TOOLS or name in TAG_SYSTEMS
    if config.tools and not takes_tools:
        raise UserError(
            f"environment.tools has no effect on {name}: only {', '.join((TOOLS, *TAG_SYSTEMS))} have tools"
        )
    if takes_tools:
        make, aclose = tool_environment_maker(config, tokenizer, base, num_workers(config))
        deadline_s = EPISODE_DEADLINES * config.deadline_s
        return EnvironmentKind(
            name, "loop", make_with_workers=make, aclose=aclose, deadline_s=deadline_s, tells_void_turns=True
        )
    cls, options, path = _class_of(name, base), dict(config.options), BUILT_IN.get(name) or ADAPTERS.get(name) or name
    if is_plugin(name) and (adapter := adapter_for(cls)) is not None:
        cls, path, options = _import(ADAPTERS[adapter]), ADAPTERS[adapter], {"target": name, **options}
    options |= _tool_settings(config, tokenizer, _parameters(cls))
    check_options(cls, options, f"environment {name}")
    shared = {
        "is_reusable": cls.is_reusable,
        "takes_truncated": cls.takes_truncated,
        "roles": cls.roles_with(options),
        "correct_at": cls.correct_at,
        "tells_void_turns": cls.tells_void_turns,
        "deadline_s": config.deadline_s,
        "has_own_deadlines": cls.has_own_deadlines,
    }
    folder = None if base is None else str(base)
    if cls.runs_in == "worker" or is_plugin(name):
        return EnvironmentKind(name, "worker", spec=ObjectSpec(path, options, folder), **shared)
    extra = {"base": folder} if "base" in _parameters(cls) else {}
    return EnvironmentKind(name, cls.runs_in, make=lambda: cls(**options, **extra), **shared)


def _agent_kind(config: EnvironmentConfig, base: Any) -> EnvironmentKind:
    """Return the kind of an agent that calls the model itself."""
    if config.tools:
        raise UserError("environment.tools has no effect on an agent, which brings its own: leave it out")
    folder = None if base is None else str(base)
    own = {name: value for name, value in config.options.items() if name not in AGENT_OPTIONS}
    common: dict[str, Any] = {"is_agent": True, "deadline_s": config.deadline_s}
    if isinstance(config.agent, str):
        load_plugin(config.agent, base)  # an error in the file is one of the start, not of an episode
        # Half of the threads: agents of training may wait for the engine in their threads while validation needs its own.
        most = num_workers(config) * WorkerLimits().max_threads // 2
        options = {"target": config.agent, "options": own}
        spec = ObjectSpec("burnish.environments.agent_function:AgentFunction", options, folder)
        return EnvironmentKind(AGENT, "worker", spec=spec, max_open=most, **common)
    command, variables = config.agent or [], {name: str(value) for name, value in own.items()}

    def make() -> AgentCommand:
        return AgentCommand(command, folder, config.memory_gib, variables)

    make()  # raises if there is no such program
    most = config.workers or MAX_COMMANDS
    return EnvironmentKind(AGENT, "loop", make=make, has_own_deadlines=True, max_open=most, **common)


def never_tells_success(config: EnvironmentConfig, base: Any = None) -> bool:
    """Whether no episode of an environment will say whether it is correct. If False, it may depend on the episode or on the rewards."""
    cls = environment_class(config.name, base)
    if is_plugin(config.name) and (adapter := adapter_for(cls)) is not None:
        cls = _import(ADAPTERS[adapter])
    if getattr(cls, "correct_at", None) is not None:
        return False
    if _is_on_tokens(cls):  # with rewards of its own, the configured reward does not judge the episode
        return bool(getattr(cls, "gives_rewards", False))
    return not getattr(cls, "gives_success", True)


def _tool_settings(config: EnvironmentConfig, tokenizer: Tokenizer, parameters: set[str]) -> dict[str, Any]:
    """Return the settings of tool calls for an adapter that takes them; settings that it does not take are errors."""
    found: dict[str, Any] = {}
    if {"format", "max_calls"} <= parameters:  # games also have a format, of their answers
        written = config.call_format if config.call_format != "auto" else detect_format(tokenizer)
        found["format"] = config.options.get("format", written)
    elif config.call_format != "auto":
        raise UserError(
            f"environment.call_format has no effect on {config.name}, which reads no tool calls: leave it out"
        )
    if config.max_calls is not None:
        if "max_calls" not in parameters:
            raise UserError(f"environment.max_calls has no effect on {config.name}: leave it out")
        found["max_calls"] = config.max_calls
    return found


def check_template_for_turns(
    config: EnvironmentConfig, tokenizer: Tokenizer, template: Template, base: Any = None
) -> list[str]:
    """Check that messages can be appended to answers with the chat template, before anything is sampled. Returns notes for the user.

    Environments on tokens whose module does not import `Dialogue` are not checked: they build their own tokens.
    """
    if config.max_turns == 1:
        return []
    if template.prerendered and tokenizer.has_chat_template:
        raise UserError(
            "environment.max_turns is above 1 and template.kind is prerendered: replies would follow the model's answers without the markup "
            "of the chat template; give messages or plain prompts in the rows, which the template renders, or set environment.max_turns=1"
        )
    cls = _class_of(config.name, base)
    if not _is_on_tokens(cls):
        found = environment_renderer(config, tokenizer, template).check()
        notes = [f"chat template: {note}" for note in found.notes]
        if found.rewrites:
            what = "the trajectory branches" if config.history == "as_template" else "the sampled tokens are kept"
            notes.append(
                f"the chat template rewrites earlier turns ({'; '.join(found.rewrites)}): {what} (environment.history={config.history})"
            )
        return notes
    if template_kind(tokenizer, template) == "plain":
        return []
    module_values = vars(sys.modules[cls.__module__]).values()
    if any(value is token_dialogue or value is token_dialogue.Dialogue for value in module_values):
        token_dialogue.check_template_appends(tokenizer)
    return []


def _class_of(name: str, base: Any) -> Any:
    """Return the class that a name stands for. For a user's class of another library, that class itself."""
    if name in TOKEN_ENVIRONMENTS:
        return TOKEN_ENVIRONMENTS[name]
    if name in (TOOLS, AGENT) or name in TAG_SYSTEMS:
        return Environment
    if name in BUILT_IN or name in ADAPTERS:
        return _import(BUILT_IN.get(name) or ADAPTERS[name])
    if not is_plugin(name):
        raise unknown_name_error("environment", name, [*environment_names(), "path/to/file.py:Class"])
    cls = load_plugin(name, base)
    is_ours = isinstance(cls, type) and issubclass(cls, Environment)
    if is_ours or _is_on_tokens(cls) or adapter_for(cls) is not None:
        return cls
    raise UserError(
        f"environment {name}: no convention of environments fits. Expected a subclass of burnish.environments.base.Environment, a class "
        "with start() and observe(completion, text), or a class of TRL, gymnasium, skyrl-gym or TextArena (name its adapter in "
        "environment.name and the class in environment.options.target if it is not recognised)"
    )


def _is_on_tokens(cls: Any) -> bool:
    return all(callable(getattr(cls, method, None)) for method in ("start", "observe"))


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _parameters(cls: Any) -> set[str]:
    return set(inspect.signature(cls).parameters)
