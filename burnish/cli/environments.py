"""`burnish environments`: the table of environments, tools and adapters; with a name, its options and how an episode begins."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import textwrap
from pathlib import Path
from typing import Any

from burnish.config.environment import AGENT, AGENT_DEFAULTS, AGENT_OPTIONS, GAME_TURNS
from burnish.config.extras import install_hint
from burnish.config.plugins import is_plugin
from burnish.config.yaml_text import printable

WIDTH = 120
AGENT_SUMMARY = "A function or a program that calls the model through a base URL of its own, with any client of OpenAI's or Anthropic's API."
AGENT_DETAILS = (
    "environment.agent: path/to/file.py:function, or a class with run(); its parameters name what it gets: row, client, base_url, api_key",
    "environment.command: [program, argument, ...], with OPENAI_BASE_URL and OPENAI_API_KEY in its environment and the row on standard input",
    f"environment.max_turns: the model calls of one episode, {AGENT_DEFAULTS['max_turns']} unless given",
    "the agent returns, or prints as its last line, a reward or {reward, success, metrics, answer}; nothing: the configured reward scores",
    f"its answer. It needs the extra [agents]: {install_hint('agents')}",
)
OWN_OPTIONS = "any other"
NO_OPTIONS = ("self", "base", "prompt", "tokenizer")
"""Parameters of classes that are no options: burnish sets them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        help="print the options of this environment (or of path/to/file.py:Class), and how an episode begins",
    )


def run(args: argparse.Namespace) -> int:
    print(printable(describe(args.name) if args.name else table()))
    return 0


def table() -> str:
    """All environments, tools and adapters, one line each."""
    from burnish.environments.adapters.recognise import ADAPTERS
    from burnish.environments.registry import BUILT_IN, TOKEN_ENVIRONMENTS, TOOLS
    from burnish.environments.tools.built_in import BUILT_IN as BUILT_IN_TOOLS
    from burnish.environments.tools.built_in import MCP, tool_class
    from burnish.environments.tools.tool_registry import TAG_SYSTEMS

    others = [name for name in (*TOKEN_ENVIRONMENTS, *BUILT_IN) if name not in GAME_TURNS]
    sections = {
        "games, with a task of the same name (environment.name and data.train={task: NAME})": list(GAME_TURNS),
        "other environments": others,
        "with tools (environment.tools names them)": [TOOLS, *TAG_SYSTEMS],
        "programs that call the model themselves (environment.agent or environment.command names one)": [AGENT],
        "of other libraries (environment.options.target names the class, file or game)": list(ADAPTERS),
    }
    width = 2 + max(len(name) for names in sections.values() for name in names) + 2
    lines = []
    for title, names in sections.items():
        lines += [title, *(line for name in names for line in _entry(name, summary(name), width)), ""]
    lines.append("tools")
    for name in BUILT_IN_TOOLS:
        lines += _entry(name, first_sentence(tool_class(name)), width)
    lines += _entry(MCP, "All tools of an MCP server.", width)
    lines += [
        "",
        "your own: environment.name=path/to/file.py:Class, environment.tools=[path/to/file.py:function], "
        "environment.agent=path/to/file.py:function",
    ]
    return "\n".join([*lines, "`burnish environments NAME` prints one of them in full"])


def describe(name: str) -> str:
    """One environment: what it is, its options with their defaults, its turns, and an example of what the model reads first."""
    from burnish.environments.adapters.recognise import adapter_for
    from burnish.environments.registry import environment_class

    if name == AGENT:
        return agent_text()
    cls = environment_class(name, Path.cwd())
    lines = [name, *textwrap.wrap(summary(name), WIDTH), ""]
    if is_plugin(name) and (adapter := adapter_for(cls)) is not None:
        lines += [f"a class that the adapter {adapter} plays: `burnish environments {adapter}` prints its options"]
        return "\n".join(lines)
    if name in GAME_TURNS:
        lines.append(f"environment.max_turns: {GAME_TURNS[name]} is usual")
    if roles := getattr(cls, "roles", ()):
        lines.append(f"players: {', '.join(roles)}; each sample gives one trajectory for each of them that had a turn")
    where = getattr(cls, "runs_in", "runner")
    runs_in = {"runner": "between two steps of the engine", "loop": "in the event loop of the runner's process"}
    lines.append(f"runs {runs_in.get('worker' if is_plugin(name) else where, 'in worker processes')}")
    options = option_defaults(name, cls)
    lines += ["", "environment.options"] if options else ["", "no options"]
    width = max(map(len, options), default=0)
    lines += [f"  {key:<{width}}  {value}" for key, value in options.items()]
    example = opening(name, cls)
    if example is not None:
        lines += ["", "what the model reads first (the first test row):", "", textwrap.indent(example, "  ")]
    return "\n".join(lines)


def agent_text() -> str:
    """What agents get and give, and their options."""
    width = max(len(option) for option in (*AGENT_OPTIONS, OWN_OPTIONS))
    lines = [AGENT, *textwrap.wrap(AGENT_SUMMARY, WIDTH), "", *AGENT_DETAILS, "", "environment.options"]
    values = {option: f"{values[0]} (or {', '.join(values[1:])})" for option, values in AGENT_OPTIONS.items()}
    values[OWN_OPTIONS] = "arguments of the function, or variables of the command's environment"
    return "\n".join([*lines, *(f"  {option:<{width}}  {text}" for option, text in values.items())])


def summary(name: str) -> str:
    """What an environment is, in one sentence."""
    if name == AGENT:
        return AGENT_SUMMARY
    from burnish.environments.registry import environment_class
    from burnish.environments.tools.tag_environment import PRESET_SUMMARIES

    return PRESET_SUMMARIES.get(name) or first_sentence(environment_class(name, Path.cwd()))


def first_sentence(cls: Any) -> str:
    """The first sentence of a class's own docstring."""
    text = " ".join((vars(cls).get("__doc__") or "").split())
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def option_defaults(name: str, cls: Any) -> dict[str, str]:
    """The options of an environment and their defaults as text."""
    from burnish.environments.registry import TOOLS
    from burnish.environments.tools.tag_environment import PRESETS, TagOptions
    from burnish.environments.tools.tool_environment import ToolEnvironment
    from burnish.environments.tools.tool_registry import ENVIRONMENT_OPTIONS, TAG_SYSTEMS

    if name not in (TOOLS, *TAG_SYSTEMS):
        return _parameters(cls)
    shared = _parameters(ToolEnvironment)
    if name == TOOLS:
        return {key: shared[key] for key in (*ENVIRONMENT_OPTIONS, "tools_in_template")}
    found = {key: shared[key] for key in ENVIRONMENT_OPTIONS if key != "max_parallel_calls"}
    preset = PRESETS.get(name)
    for entry in dataclasses.fields(TagOptions):
        value = entry.default if preset is None else getattr(preset, entry.name)
        found[entry.name] = "(required)" if value is dataclasses.MISSING else _value(value)
    return found


def opening(name: str, cls: Any) -> str | None:
    """What the model reads first in the first test row of a built-in game; None for any other environment."""
    from burnish.data.tasks.registry import TASKS, make_task
    from burnish.environments.base import Episode
    from burnish.environments.games import GAMES
    from burnish.environments.host import run_now

    if name not in TASKS:
        return None
    row = make_task(name, {}, 0).row("test", 0)
    if name not in GAMES:
        return str(row.prompt)
    seed = row.extra.get("seed", 0)
    found = run_now(cls().start(Episode(row.id, seed, row.prompt, row.answer, row.extra, is_training=False)))
    return "\n".join(str(message["content"]) for message in found.messages or ())


def _parameters(cls: Any) -> dict[str, str]:
    found = {}
    for key, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found["..."] = "further options, passed on"
        elif key not in NO_OPTIONS and parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            found[key] = "(required)" if parameter.default is inspect.Parameter.empty else _value(parameter.default)
    return found


def _value(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)


def _entry(name: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(f"  {name:<{width - 2}}{text}", WIDTH, subsequent_indent=" " * width, break_on_hyphens=False)


def _imported(path: str) -> Any:
    import importlib

    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
