"""Typed functions as tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.tools.base import ToolResult
from burnish.environments.tools.function_tool import FunctionTool

USER_FILE = '''
def repeat(word: str, times: int = 2) -> str:
    """Repeat a word.

    Args:
        word: The word.
        times: How often.
    """
    return word * times


async def record(word: str) -> dict:
    """Describe a word.

    Args:
        word: The word.
    """
    return {"word": word, "length": len(word)}
'''


def call(tool: FunctionTool, **arguments: Any) -> Any:
    return asyncio.run(tool.call(arguments))


def test_a_function_of_a_file_is_a_tool_with_its_schema(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(USER_FILE)
    tool = FunctionTool("words.py:repeat", base=tmp_path)
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "repeat",
            "description": "Repeat a word.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "The word."},
                    "times": {"type": "integer", "description": "How often."},
                },
                "required": ["word"],
            },
        },
    }
    assert (tool.name, tool.runs_in, tool.is_stateful) == ("repeat", "worker", False)
    assert call(tool, word="ab") == "abab"
    assert call(tool, word="ab", times="3") == "ababab"
    assert call(FunctionTool("words.py:record", base=tmp_path), word="ab") == '{"word": "ab", "length": 2}'


def test_wrong_arguments_are_a_text_and_do_not_reach_the_function() -> None:
    def half(number: int) -> int:
        """Halve a number.

        Args:
            number: The number.
        """
        raise AssertionError("called")

    result = call(FunctionTool(half), number="many")
    assert isinstance(result, ToolResult)
    assert result.text.startswith("Error: wrong arguments for half: 'number' must be an integer, got \"many\"")
    assert result.metrics == {"tool/wrong_arguments": 1.0}


def test_a_result_with_reward_passes_and_an_exception_is_raised() -> None:
    def pay(amount: int) -> ToolResult:
        """Pay.

        Args:
            amount: How much.
        """
        if amount < 0:
            raise ValueError("no money back")
        return ToolResult("paid", reward=0.5)

    assert call(FunctionTool(pay), amount=1) == ToolResult("paid", reward=0.5)
    with pytest.raises(ValueError, match="no money back"):
        call(FunctionTool(pay), amount=-1)


def no_hint(word) -> str:  # type: ignore[no-untyped-def]
    """Say a word.

    Args:
        word: The word.
    """
    return str(word)


def no_description(word: str, times: int) -> str:
    """Say a word.

    Args:
        word: The word.
    """
    return word * times


def no_docstring(word: str) -> str:
    return word


def any_number(*words: str) -> str:
    """Say words.

    Args:
        words: The words.
    """
    return " ".join(words)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_hint, r"parameter 'word' of no_hint has no type hint"),
        (no_description, r"no_description because the docstring has no description for the argument 'times'"),
        (no_docstring, r"no_docstring because it has no docstring"),
        (any_number, r"parameter 'words' of any_number is variadic positional"),
        (str, r"type is not a function"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused_with_its_parameter(function: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FunctionTool(function)
