"""What the adapters share: loading a user's class, messages from a row, checks on what user code returns, and a random state of its own."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

from burnish.config.errors import UserError
from burnish.config.extras import install_hint
from burnish.config.plugins import load_plugin
from burnish.data.row import Message
from burnish.environments.base import Episode
from burnish.environments.image_values import IMAGE_TYPES, joined_content

PromptPlace = Literal["observation", "row_first"]
"""What the model reads first: the environment's observation alone, or the prompt of the row and then the observation."""


def load_target(target: str, base: str | None, packages: Mapping[str, str]) -> Any:
    """The class or function that `target` names (`path/to/file.py:name` or `package.module:name`).

    `packages` are modules that such files import, each with the pip package that has it. The error for a missing one names the package.
    """
    try:
        return load_plugin(target, base)
    except UserError as error:
        cause = error.__cause__
        module = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        if module in packages:
            raise UserError(f"{error}. The file needs that package here: pip install {packages[module]}") from cause
        raise


def missing_package(what: str, package: str, extra: str | None = None) -> UserError:
    """The error for an adapter whose package is not installed."""
    command = install_hint(extra) if extra else f"pip install {package}"
    return UserError(f"{what} needs the package {package!r}, which is not installed: {command}")


def install_stand_ins(package: str, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Put modules with these names and values into `sys.modules`, unless the package is installed or was put there before.

    Other modules of the package stay missing: importing them says that there is no such module.
    """
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        return
    for name, values in contents.items():
        module = ModuleType(name, f"Stand-in of burnish for a module of {package}.")
        module.__path__ = []
        vars(module).update(values)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


async def awaited(value: Any) -> Any:
    """The value, awaited if it is a coroutine: most conventions allow both."""
    return await value if inspect.isawaitable(value) else value


def accepts(function: Any, name: str) -> bool:
    """Whether a function takes a keyword argument of this name, by name or through `**kwargs`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


# --- rows and messages ------------------------------------------------------------------------------------------------------


def row_columns(episode: Episode) -> dict[str, Any]:
    """The columns of the row, with `prompt`, and `answer` if the row has one."""
    columns = {"prompt": episode.prompt, **episode.extra}
    if episode.answer is not None:
        columns.setdefault("answer", episode.answer)
    return columns


def prompt_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """The prompt as messages. A plain text is one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]


def opening_messages(episode: Episode, text: str | list[Message], place: PromptPlace) -> tuple[Message, ...]:
    """The conversation up to the model's first turn. `text` is the content of the observation.

    With `row_first`, the observation follows the row's last user message after an empty line, so that roles alternate.
    """
    if place == "observation":
        return ({"role": "user", "content": text},)
    messages = prompt_messages(episode.prompt)
    if messages and messages[-1]["role"] == "user":
        before = checked_content(messages[-1]["content"], "the row's last message")
        messages[-1]["content"] = joined_content(before, text, "\n\n")
    else:
        messages.append({"role": "user", "content": text})
    return tuple(messages)


def user_message(content: str | list[Message]) -> tuple[Message, ...]:
    return ({"role": "user", "content": content},)


def checked_content(content: Any, where: str) -> str | list[Message]:
    """The content of a message: a text, or a list of parts if there is an image among them. Other parts are refused."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        kinds = {part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content}
        if kinds <= {"text"}:
            return "".join(str(part["text"]) for part in content)
        if kinds <= {"text", *IMAGE_TYPES}:
            return content
        others = sorted(map(str, kinds - {"text", *IMAGE_TYPES}))
        raise UserError(f"{where} has content parts of type {', '.join(others)}; the model reads text and images only")
    raise UserError(f"{where} should be text or a list of parts, got {type(content).__name__}")


# --- what user code returns -------------------------------------------------------------------------------------------------


def finite(value: Any, where: str) -> float:
    """The value as a finite float. None, NaN and infinity are errors that name their place, because a reward must never be guessed."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} returned {value!r} as the reward; it should be a number") from error
    if not math.isfinite(number):
        raise ValueError(f"{where} returned the reward {number}; it should be finite")
    return number


def numbers(values: Any, prefix: str = "") -> dict[str, float]:
    """The finite numbers among the values of a mapping, for metrics. Other values (texts, lists) are no metrics."""
    if not isinstance(values, Mapping):
        return {}
    found = {}
    for key, value in values.items():
        item = getattr(value, "item", None)
        if callable(item) and getattr(value, "shape", None) == ():  # a scalar of numpy
            value = item()
        if isinstance(value, (bool, int, float)) and math.isfinite(value):
            found[f"{prefix}{key}"] = float(value)
    return found


def json_text(value: Any) -> str:
    """A text as it is, anything else as JSON, or as Python prints it if JSON has no form for it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# --- random state -----------------------------------------------------------------------------------------------------------


class OwnRandomState:
    """A state of the global generators of `random` and numpy that belongs to one object.

    Some libraries draw from the global generators and seed them in `reset`. Two episodes in one process would disturb each other. Inside
    `with state.active():` the generators continue this object's sequence; afterwards they are as before. The block must not await.
    """

    _lock = threading.RLock()  # a process has one global generator, whatever thread draws from it

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy: Any = None
        self._seed = seed % 2**32

    @contextmanager
    def active(self) -> Iterator[None]:
        numpy_random = getattr(sys.modules.get("numpy"), "random", None)
        with self._lock:
            python_before = random.getstate()
            numpy_before = numpy_random.get_state() if numpy_random is not None else None
            random.setstate(self._python)
            if numpy_random is not None:
                if self._numpy is None:
                    numpy_random.seed(self._seed)
                else:
                    numpy_random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python = random.getstate()
                random.setstate(python_before)
                if numpy_random is not None:
                    self._numpy = numpy_random.get_state()
                    numpy_random.set_state(numpy_before)
