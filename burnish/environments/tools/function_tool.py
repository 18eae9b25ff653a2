"""A typed Python function with a Google docstring as a tool.

    def population(city: str, year: int = 2020) -> int:
        \"\"\"Return how many people live in a city.

        Args:
            city: Name of the city.
            year: Year of the count.
        \"\"\"

The schema is what `transformers.utils.get_json_schema` makes of it, as for TRL's `tools=`. A missing type hint or description is an error
before anything runs. Arguments are checked against the schema before the function is called.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.plugins import load_plugin
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.values import WrongArguments, check_arguments, error_result, tool_result

EXAMPLE = '''
def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: The word to look up.
    """'''


class FunctionTool(Tool):
    """Calls a function, sync or async. What it returns becomes text; what it raises becomes an error text by the environment.

    A function may return an image, a list of texts and images, or a `ToolResult`, which also holds a reward and metrics.
    """

    def __init__(self, target: str | Callable[..., Any], base: str | Path | None = None) -> None:
        """`target` is a function, or `path/to/file.py:function` (relative to `base`) or `package.module:function`."""
        self.function = load_plugin(target, base) if isinstance(target, str) else target
        where = target if isinstance(target, str) else getattr(target, "__qualname__", repr(target))
        self.schema = function_schema(self.function, where)

    async def call(self, arguments: dict[str, Any]) -> ToolResult | str:
        """Check the arguments and call the function. A sync function runs in this thread, one call at a time."""
        result = self._called(arguments)
        if inspect.isawaitable(result):
            result = await result
        return tool_result(result)

    def _called(self, arguments: dict[str, Any]) -> Any:
        try:
            checked = check_arguments(self.schema, arguments)
        except WrongArguments as error:
            return error_result(str(error), "wrong_arguments")
        return self.function(**checked)


class BlockingFunctionTool(FunctionTool):
    """Calls a sync function. `call` is a plain method, so a worker process runs each call in a thread of its own."""

    def call(self, arguments: dict[str, Any]) -> ToolResult | str:  # type: ignore[override]
        result = self._called(arguments)
        return tool_result(result)


_schema_lock = threading.Lock()


def function_schema(function: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a function; UserError if a type hint or description is missing.

    `transformers` imports torch for parameters of type `torch.Tensor`, which no tool can take. In every worker process that would take
    seconds and hundreds of megabytes, so it is told that there is no torch.
    """
    import transformers.utils.chat_template_utils as schemas
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    if inspect.isclass(function) or not callable(function) or not hasattr(function, "__name__"):
        raise UserError(f"tool {where}: {type(function).__name__} is not a function; a tool looks like this:{EXAMPLE}")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise UserError(
                f"tool {where}: parameter {parameter.name!r} of {function.__name__} is {parameter.kind.description}, which a schema cannot "
                "describe; a tool takes named parameters only"
            )
        if parameter.annotation is inspect.Parameter.empty:
            raise UserError(
                f"tool {where}: parameter {parameter.name!r} of {function.__name__} has no type hint, and the model must know its type; "
                f"write it as `{parameter.name}: str` or with the right type"
            )
    try:
        with _schema_lock:
            is_torch_available, schemas.is_torch_available = schemas.is_torch_available, lambda: False
            try:
                schema: dict[str, Any] = schemas.get_json_schema(function)
            finally:
                schemas.is_torch_available = is_torch_available
    except (TypeHintParsingException, DocstringParsingException, NameError, ValueError) as error:
        words = " ".join(str(argument) for argument in error.args)
        raise UserError(f"tool {where}: {words}. A tool needs a description of each parameter:{EXAMPLE}") from error
    if not schema["function"].get("description"):
        raise UserError(f"tool {where}: the docstring of {function.__name__} does not say what the function does")
    schema["function"].pop("return", None)  # what it returns is text, and templates do not show it
    return schema
