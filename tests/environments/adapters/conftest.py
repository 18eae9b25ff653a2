"""The stand-ins for other libraries' modules belong to worker processes: a test that installs them leaves none behind."""

import sys
from collections.abc import Iterator

import pytest

from burnish.environments.adapters import verl_modules

USER_MODULES = ("verl_tool",)


@pytest.fixture(autouse=True)
def no_stand_ins_stay() -> Iterator[None]:
    before = set(sys.modules)
    path = list(sys.path)
    yield
    for name in set(sys.modules) - before:
        top = name.partition(".")[0]
        if top in ("verl", "openenv", *USER_MODULES) or name.startswith("burnish_plugin_"):
            del sys.modules[name]
    sys.path[:] = path
    verl_modules.FUNCTION_TOOL_REGISTRY.clear()
