"""burnish: reinforcement-learning post-training for language models.

    run = burnish.train(model="models/qwen", data=rows, reward=score)     # docs/python.md

Importing this package is cheap: torch, transformers and the engines load only when something asks for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.api.commands import load_config, prefer, reward, reward_model, sft, tool, train
    from burnish.api.evaluation_call import Evaluation, evaluate
    from burnish.api.loop_policy import Policy
    from burnish.api.run_handle import Run
    from burnish.config.errors import UserError
    from burnish.core.batch import Batch
    from burnish.core.trajectory import Trajectory, pack
    from burnish.environments.base import End, Environment, Observation
    from burnish.evaluation.strategies.solving import Solution

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "End",
    "Environment",
    "Evaluation",
    "Observation",
    "Policy",
    "Run",
    "Solution",
    "Trajectory",
    "UserError",
    "evaluate",
    "load_config",
    "pack",
    "prefer",
    "reward",
    "reward_model",
    "sft",
    "tool",
    "train",
]

_MODULES = {
    "api.commands": ("load_config", "prefer", "reward", "reward_model", "sft", "tool", "train"),
    "api.evaluation_call": ("Evaluation", "evaluate"),
    "api.loop_policy": ("Policy",),
    "api.run_handle": ("Run",),
    "config.errors": ("UserError",),
    "core.batch": ("Batch",),
    "core.trajectory": ("Trajectory", "pack"),
    "environments.base": ("End", "Environment", "Observation"),
    "evaluation.strategies.solving": ("Solution",),
}
"""Where each name comes from. Its module is imported when the name is first used."""
_SOURCES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module 'burnish' has no attribute {name!r}")
    value = getattr(import_module(f"burnish.{_SOURCES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
