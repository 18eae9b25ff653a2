"""burnish.environments.registry"""

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
    """A function that makes the environment of one prompt: built in, or a class from a user's file."""
    kind = _environment_class(config.name, base)
    check_options(kind, config.options, f"environment {config.name}")
    return lambda prompt: kind(prompt, tokenizer, **config.options)


def check_template_for_turns(
    config: EnvironmentConfig, tokenizer: Tokenizer, template: Template, base: Any = None
) -> None:
    """Refuse an environment of several turns with a chat template that cannot go on, before anything is sampled.

    An environment that makes its tokens without `Dialogue` may go on in its own way.
    """
    from burnish.environments import dialogue

    if config.max_turns == 1:
        return
    if template.prerendered and tokenizer.has_chat_template:
        raise UserError(
            "environment.max_turns is above 1 and data.prerendered is true: replies would stand behind the model's answers without the markup "
            "of the chat template; give messages or plain prompts in the rows, which the template renders, or set environment.max_turns=1"
        )
    if template_kind(tokenizer, template) == "plain":
        return
    known = vars(sys.modules[_environment_class(config.name, base).__module__]).values()
    if any(value is dialogue or value is dialogue.Dialogue for value in known):
        dialogue.check_template_appends(tokenizer)


def _environment_class(name: str, base: Any) -> Any:
    from burnish.environments.guess_number import GuessNumber  # which is made of what is here

    built_in = {"single_turn": SingleTurn, "guess_number": GuessNumber}
    if name in built_in:
        return built_in[name]
    if not is_plugin(name):
        raise unknown_name_error("environment", name, [*built_in, "path/to/file.py:Class"])
    kind = load_plugin(name, base)
    for method in ("start", "observe"):
        if not callable(getattr(kind, method, None)):
            raise UserError(
                f"environment {name}: the class has no method {method!r} (needs start() and observe(completion, text))"
            )
    return kind
