"""Tools by name, and the command that tries them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.tools.base import Tool
from burnish.environments.tools.built_in import BUILT_IN, make_tool, tool_class

USER_FILE = """
from burnish.environments.tools.base import Tool
from burnish.environments.tools.values import tool_schema


class Echo(Tool):
    is_stateful = True

    def __init__(self, times=1):
        self.times = times
        self.schema = tool_schema("echo", "Repeat.", {"text": {"type": "string"}}, ["text"])

    async def start(self, episode, arguments):
        self.before = arguments["before"]

    async def call(self, arguments):
        return self.before + arguments["text"] * self.times

    async def end(self):
        return 0.5
"""


def test_every_built_in_name_leads_to_a_tool_class_with_a_docstring() -> None:
    for name in BUILT_IN:
        found = tool_class(name)
        assert issubclass(found, Tool)
        assert found.__doc__


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("calculater", {}, "did you mean 'calculator'"),
        ("calculator", {"max_char": 5}, "unknown option 'max_char'; did you mean 'max_chars'"),
        ("search", {}, "missing a required argument: 'corpus'"),
        ("table_lookup", {"path": "none.csv"}, r"there is no file .*folder/none.csv"),
        ("none.py:f", {}, "no such file"),
    ],
)
def test_a_mistake_is_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_tool(name, options, base="folder")


def test_the_command_plays_an_episode_with_a_class_of_a_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FILE)
    command = [sys.executable, "-m", "burnish.environments.tools.built_in", "mine.py:Echo", '{"text": "ab"}']
    command += ["--options", json.dumps({"times": 2}), "--row", json.dumps({"before": "> "})]
    root = str(Path(__file__).parents[3])
    ended = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith('> {"text": "ab"}\n> abab\nreward of the episode: 0.5\n')
