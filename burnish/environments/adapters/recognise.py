"""The table of adapters, and a guess which of them a user's class was written for."""

from __future__ import annotations

import inspect
from typing import Any

from burnish.environments.base import Environment
from burnish.environments.tools.base import Tool

ADAPTERS = {
    "trl": "burnish.environments.adapters.trl:TrlEnvironment",
    "verl": "burnish.environments.adapters.verl:VerlEnvironment",
    "gymnasium": "burnish.environments.adapters.gymnasium:GymEnvironment",
    "skyrl_gym": "burnish.environments.adapters.skyrl_gym:SkyRLGymEnvironment",
    "textarena": "burnish.environments.adapters.textarena:TextArenaGame",
    "textarena_self_play": "burnish.environments.adapters.textarena:TextArenaSelfPlay",
    "openenv": "burnish.environments.adapters.openenv:OpenEnv",
    "openenv_client": "burnish.environments.adapters.openenv:OpenEnvWithClient",
    "science_world": "burnish.environments.adapters.science_world:ScienceWorld",
}
"""Names of adapters and their classes, as plug-in names."""


def adapter_for(cls: Any) -> str | None:
    """The adapter whose convention a class follows, by the names and parameters of its methods. None if none or more than one fits.

    - `skyrl_gym`: `init(prompt)` and `step(action)`.
    - `textarena`: `reset(num_players, ...)`, `step(action)` and `get_observation()`.
    - `gymnasium`: `reset(seed=...)` and `step` with one argument, without `get_reward`. A `reset` with `mode` is RAGEN's and is none of these.
    - `trl`: `reset`, no parameter `seed` in it, and `get_reward` or a further public method with a docstring; `step` only beside `get_reward`.
    - `openenv_client`: `_step_payload` and `_parse_result`.
    - `verl`: `create`, `execute` and `release`. It is a tool, so a YAML file must name it.
    """
    if not inspect.isclass(cls) or issubclass(cls, (Environment, Tool)):
        return None
    if _has(cls, "start") and _has(cls, "observe"):  # burnish's contract on token ids
        return None
    matches = [name for name, fits in _CHECKS.items() if fits(cls)]
    return matches[0] if len(matches) == 1 else None


def _has(cls: type, method: str) -> bool:
    return inspect.isfunction(inspect.getattr_static(cls, method, None))


def _parameters(cls: type, method: str) -> list[inspect.Parameter]:
    """The parameters of a method without `self`."""
    return list(inspect.signature(getattr(cls, method)).parameters.values())[1:]


def _names(cls: type, method: str) -> set[str]:
    return {p.name for p in _parameters(cls, method)}


def _takes_one(cls: type, method: str) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in _parameters(cls, method) if p.kind in kinds and p.default is inspect.Parameter.empty]
    return len(required) == 1


def _is_skyrl_gym(cls: type) -> bool:
    is_base = any(base.__name__ == "BaseTextEnv" for base in cls.__mro__)
    return _has(cls, "step") and _takes_one(cls, "step") and not _has(cls, "reset") and (is_base or _has(cls, "init"))


def _is_textarena(cls: type) -> bool:
    return (
        _has(cls, "reset")
        and _has(cls, "step")
        and _has(cls, "get_observation")
        and "num_players" in _names(cls, "reset")
    )


def _is_gymnasium(cls: type) -> bool:
    if not (_has(cls, "reset") and _has(cls, "step")) or _has(cls, "get_reward") or _is_textarena(cls):
        return False
    names = _names(cls, "reset")
    return "seed" in names and "mode" not in names and _takes_one(cls, "step")


def _is_trl(cls: type) -> bool:
    if not _has(cls, "reset") or {"seed", "num_players", "mode"} & _names(cls, "reset"):
        return False
    if _has(cls, "get_reward"):
        return True
    functions = dict(inspect.getmembers(cls, inspect.isfunction))
    tools = [f for name, f in functions.items() if not name.startswith("_") and name != "reset"]
    return "step" not in functions and bool(tools) and all(inspect.getdoc(tool) for tool in tools)


def _is_openenv_client(cls: type) -> bool:
    return _has(cls, "_step_payload") and _has(cls, "_parse_result")


def _is_verl_tool(cls: type) -> bool:
    is_base = any(base.__name__ == "BaseTool" for base in cls.__mro__)
    return (
        _has(cls, "execute")
        and {"instance_id", "parameters"} <= _names(cls, "execute")
        and (is_base or _has(cls, "create"))
    )


_CHECKS = {
    "skyrl_gym": _is_skyrl_gym,
    "textarena": _is_textarena,
    "gymnasium": _is_gymnasium,
    "trl": _is_trl,
    "openenv_client": _is_openenv_client,
    "verl": _is_verl_tool,
}
