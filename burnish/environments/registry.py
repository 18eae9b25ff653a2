"""Builds the environment that a config names: a built-in one, or a class from a user's file."""

from __future__ import annotations

import sys
from typing import Any

from burnish.config.data import Template
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import check_options, is_plugin, load_plugin
from burnish.config.rollout import Environment as EnvironmentConfig
from burnish.data.template import template_kind
from burnish.environments.base import MakeEnvironment, SingleTurn
from burnish.models.tokenizer import Tokenizer


def environment_factory(config: EnvironmentConfig, tokenizer: Tokenizer, base: Any = None) -> MakeEnvironment:
    """Return a function that builds the environment of a prompt. `base` is the folder of relative plug-in paths."""
    cls = _environment_class(config.name, base)
    check_options(cls, config.options, f"environment {config.name}")
    return lambda prompt: cls(prompt, tokenizer, **config.options)


def check_template_for_turns(
    config: EnvironmentConfig, tokenizer: Tokenizer, template: Template, base: Any = None
) -> None:
    """Raise if an environment of several turns meets a chat template that cannot append messages. Called before anything is sampled.

    Environments whose module does not import `Dialogue` are not checked: they build their own tokens.
    """
    from burnish.environments import dialogue

    if config.max_turns == 1:
        return
    if template.prerendered and tokenizer.has_chat_template:
        raise UserError(
            "environment.max_turns is above 1 and data.prerendered is true: replies would follow the model's answers without the markup "
            "of the chat template; give messages or plain prompts in the rows, which the template renders, or set environment.max_turns=1"
        )
    if template_kind(tokenizer, template) == "plain":
        return
    module_values = vars(sys.modules[_environment_class(config.name, base).__module__]).values()
    if any(value is dialogue or value is dialogue.Dialogue for value in module_values):
        dialogue.check_template_appends(tokenizer)


def _environment_class(name: str, base: Any) -> Any:
    from burnish.environments.guess_number import GuessNumber

    built_in = {"single_turn": SingleTurn, "guess_number": GuessNumber}
    if name in built_in:
        return built_in[name]
    if not is_plugin(name):
        raise unknown_name_error("environment", name, [*built_in, "path/to/file.py:Class"])
    cls = load_plugin(name, base)
    for method in ("start", "observe"):
        if not callable(getattr(cls, method, None)):
            raise UserError(
                f"environment {name}: the class has no method {method!r} (needs start() and observe(completion, text))"
            )
    return cls
