"""Python in the sandbox as a tool, stateless and as a session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.tools import python_tool
from burnish.environments.tools.base import ToolResult
from burnish.environments.tools.python_tool import PythonSession, PythonTool, close_sandboxes
from burnish.sandbox.client import RunLost
from burnish.sandbox.sessions import CellResult, Session
from tests.sandbox.conftest import namespaces  # noqa: F401 - skips these tests where there is no sandbox


@pytest.fixture(autouse=True)
def end_sandboxes() -> Iterator[None]:
    yield
    close_sandboxes()


def text_of(result: ToolResult | str) -> str:
    return result.text if isinstance(result, ToolResult) else result


def calls(tool: PythonTool, *codes: str) -> list[Any]:
    async def play() -> list[Any]:
        results = [await tool.call({"code": code}) for code in codes]
        await tool.close()
        return results

    return asyncio.run(play())


def test_a_stateless_tool_forgets_and_a_session_remembers() -> None:
    codes = ("x = 20\nprint('set')", "```python\nx + 1\n```", "pass")
    first, second, third = calls(PythonTool(errors="last_line"), *codes)
    assert (first, text_of(second), third) == ("set", "NameError: name 'x' is not defined", "(no output)")
    assert second.metrics == {"tool/code_raised": 1.0}
    assert calls(PythonSession(), *codes) == ["set", "21", "(no output)"]


def test_code_that_fails_can_cost_a_reward() -> None:
    tool = PythonTool(error_reward=-0.5)
    failed, fine = calls(tool, "1 / 0", "1 / 2")
    missing: Any = asyncio.run(tool.call({}))
    assert (failed.reward, fine, missing.reward) == (-0.5, "0.5", -0.5)
    assert failed.text.splitlines()[0] == "Traceback (most recent call last):"
    assert missing.metrics == {"tool/wrong_arguments": 1.0}


def test_a_session_says_when_its_variables_are_lost_and_goes_on() -> None:
    results = calls(PythonSession(timeout_s=0.3), "x = 1", "while True: pass", "x", "import os; os._exit(0)", "x", "2")
    assert [text_of(result).splitlines()[-1] for result in results] == [
        "(no output)",
        "Error: the code was stopped after 0.3 s",
        "1",
        "Error: the code was ended: its process ended. All variables are lost",
        "NameError: name 'x' is not defined",
        "2",
    ]


def test_a_session_that_was_cut_off_from_outside_says_so_in_the_next_result() -> None:
    async def play() -> list[str]:
        tool = PythonSession(timeout_s=60)
        await tool.call({"code": "x = 1"})
        late = asyncio.create_task(tool.call({"code": "while True: pass"}))
        await asyncio.wait([late], timeout=0.3)
        late.cancel()  # as the deadline of a call does
        with pytest.raises(asyncio.CancelledError):
            await late
        results = [await tool.call({"code": code}) for code in ("'x' in globals()", "2")]
        await tool.close()
        return [text_of(result) for result in results]

    assert asyncio.run(play()) == [f"{python_tool.RESTARTED}\nFalse", "2"]


def test_parallel_calls_of_a_session_run_in_their_order() -> None:
    async def play() -> list[str]:
        tool = PythonSession()
        codes = ["x = [1]", "x.append(2)", "x"]
        results = await asyncio.gather(*(tool.call({"code": code}) for code in codes))
        await tool.close()
        return [text_of(result) for result in results]

    assert asyncio.run(play()) == ["(no output)", "(no output)", "[1, 2]"]


def test_long_output_is_cut_with_a_mark() -> None:
    (text,) = calls(PythonTool(max_output_chars=10), "print('é' * 1000)")
    assert text.startswith("éééééé\n... (")
    assert text.endswith("\néééé")


def test_a_program_that_breaks_the_sandbox_runs_once_more_and_then_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    async def lose(self: Session, *arguments: Any) -> CellResult:
        ran.append(arguments)
        raise RunLost("gone")

    monkeypatch.setattr(Session, "run", lose)
    (result,) = calls(PythonTool(), "1")
    assert len(ran) == 2
    assert result.text == "Error: the code was ended: the sandbox broke while it ran"


def test_without_a_sandbox_only_unsafe_runs_and_warns() -> None:
    with pytest.warns(UserWarning, match="run on this machine as you"):
        tool = PythonSession(sandbox="unsafe")
    assert calls(tool, "x = 1", "import os\nx, os.path.exists('/proc')") == ["(no output)", "(1, True)"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s"),
        ({"memory_gib": 0.01}, "memory_gib"),
        ({"max_running": 0}, "max_running"),
        ({"errors": "none"}, "errors must be one of traceback, last_line"),
        ({"sandbox": "docker"}, "sandbox must be one of namespaces, unsafe"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PythonTool(**options)


def test_tools_of_one_loop_share_a_sandbox_and_a_closed_loop_loses_its() -> None:
    calls(PythonTool(), "1")
    calls(PythonSession(), "1")
    assert len(python_tool._sandboxes) == 1
