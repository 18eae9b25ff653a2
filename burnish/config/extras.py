"""Packages beyond the core install that a config asks for: which of them are not here, and how to get them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from burnish.config.named_files import AnyConfig, sources_of
from burnish.config.schema import TrainConfig

GYM = "reasoning-gym/"


def missing_extras(config: AnyConfig) -> Iterator[str]:
    """What a config needs and this Python does not have, each with the command that installs it."""
    for key, module, install in dict.fromkeys(_needed(config)):
        if not _is_installed(module):
            yield f"{key} needs {module}, which is not installed: pip install {install}"


def _needed(config: AnyConfig) -> Iterator[tuple[str, str, str]]:
    """The key that asks for a package, the module it imports, and what to install."""
    for name in config.run.trackers:
        yield f"run.trackers={name}", name, "'burnish[track]'"
    for source in sources_of(config):
        if source.task is not None and source.task.startswith(GYM):
            yield f"task {source.task}", "reasoning_gym", "'burnish[tasks]'"
    if not isinstance(config, TrainConfig):
        return
    for part in config.reward.parts:
        if "math" in (part.name, part.options.get("checker")):
            yield f"reward {part.name}", "math_verify", "'burnish[math]'"
    if config.placement.name == "ray":
        yield "placement=ray", "ray", "'burnish[ray]'"
    if config.rollout.engine == "vllm" and (config.rollout.vllm is None or config.rollout.vllm.url is None):
        yield "rollout.engine=vllm", "vllm", "vllm (docs/engines.md)"


def _is_installed(module: str) -> bool:
    """Whether a module can be found; one that a program has blocked (`sys.modules[name] = None`) cannot."""
    try:
        return find_spec(module) is not None
    except ValueError:
        return False
