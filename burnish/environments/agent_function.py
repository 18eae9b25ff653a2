"""`AgentFunction`: a user's function or class that calls the model through a base URL, played in a worker process.

The function says by the names of its parameters what it wants, so that agents written for other systems run unchanged:

    def run(row, base_url, api_key): ...                                        a plain function; it runs in a thread
    async def run(row, client): ...                                             with an `openai` client that is ready to use
    class Agent: async def run(self, data, base_url=, api_key=, http_client=)   AReaL's convention
    async def run_agent(base_url, prompt, request_kwargs, metadata, **kw)       miles' convention; its base URL has no `/v1`

It returns a reward (a number), a dictionary with `reward` and perhaps `metrics` and `answer`, AReaL's {response id: reward}, or nothing: the
configured reward then scores the last answer.
"""

from __future__ import annotations

import functools
import inspect
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from burnish.config.errors import UserError
from burnish.config.extras import install_hint
from burnish.config.plugins import load_plugin
from burnish.environments.base import AgentProgram, AgentTask, End, Episode

ROW_NAMES = ("row", "data", "task", "example")
"""Parameters that get the row as a dictionary."""
RESULT_KEYS = ("reward", "success", "metrics", "answer")
"""Keys of a dictionary that an agent returns or prints. All others are ignored."""
MODEL_NAME = "policy"
"""The model's name for clients that must give one. The endpoint takes any."""


class AgentFunction(AgentProgram):
    """Calls the agent's function with what its parameters ask for. A class is built anew for each episode, with `options`."""

    def __init__(self, target: str, options: dict[str, Any] | None = None, base: str | None = None) -> None:
        found = load_plugin(target, base)
        self.target = target
        if inspect.isclass(found):
            made = found(**(options or {}))
            self._function, self._options = getattr(made, "run", None), dict[str, Any]()
            if not callable(self._function):
                raise UserError(f"environment.agent={target}: the class has no method run()")
        else:
            self._function, self._options = found, dict(options or {})
        if not callable(self._function):
            raise UserError(f"environment.agent={target} is not callable; expected a function, or a class with run()")
        self._clients: list[Any] = []

    def play(self, task: AgentTask) -> Any:  # not `async`: a plain agent blocks, so the worker calls it in a thread
        """Call the agent and read what it returns. Returns the end, or a coroutine that gives it."""
        function = self._function
        assert function is not None
        result = function(**self._arguments(function, task))
        return self._awaited(result) if inspect.isawaitable(result) else self._read(result)

    async def _awaited(self, result: Any) -> End:
        return self._read(await result)

    def _read(self, result: Any) -> End:
        return read_result(result, f"{self.target} returned")

    async def close(self) -> None:
        """Close the clients that were made for the agent."""
        for client in self._clients:
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing

    def _arguments(self, function: Callable[..., Any], task: AgentTask) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters
        is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        row = row_columns(task.episode)
        is_miles = {"base_url", "prompt"} <= set(parameters)
        known: dict[str, Any] = dict.fromkeys(ROW_NAMES, row) | {
            "base_url": task.base_url.removesuffix("/v1") if is_miles else task.base_url,
            "api_key": task.api_key,
            "model": MODEL_NAME,
            "seed": task.episode.seed,
            "prompt": messages_of(task.episode),
            "metadata": row,
            "request_kwargs": {},
            "http_client": None,
        }
        wanted = {name: value for name, value in known.items() if name in parameters}
        if "client" in parameters:
            wanted["client"] = self._client(task, inspect.iscoroutinefunction(function))
        if not is_miles and not any(name in parameters for name in ROW_NAMES):
            first = next(iter(parameters), None)
            if (
                first is not None
                and parameters[first].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
                and first not in wanted
            ):
                wanted[first] = row  # its own name for the row
        wanted |= {name: value for name, value in self._options.items() if name in parameters or is_open}
        missing = [
            name
            for name, p in parameters.items()
            if p.default is inspect.Parameter.empty
            and p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            and name not in wanted
        ]
        if missing:
            raise UserError(
                f"environment.agent={self.target} has the parameter {missing[0]!r}; an agent may ask for "
                f"{', '.join([*known, 'client'])}, or for a name of environment.options"
            )
        return wanted

    def _client(self, task: AgentTask, is_async: bool) -> Any:
        try:
            import openai
        except ImportError as error:
            raise UserError(
                f"environment.agent={self.target} asks for a client, which needs the package openai: {install_hint('agents')}"
            ) from error
        kind: Any = openai.AsyncOpenAI if is_async else openai.OpenAI
        http: Any = openai.DefaultAsyncHttpxClient if is_async else openai.DefaultHttpxClient
        # Every client would read all certificates of the machine, which takes 50 ms.
        http_client = http(verify=_certificates(), timeout=None)
        client = kind(base_url=task.base_url, api_key=task.api_key, http_client=http_client, timeout=None)
        self._clients.append(client)
        return client


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the certificates that the clients of this process share."""
    return ssl.create_default_context()


def row_columns(episode: Episode) -> dict[str, Any]:
    """Return the row of an episode as a dictionary: its own columns, then prompt, answer, data source, id, seed and sample."""
    fixed = {
        "prompt": episode.prompt,
        "answer": episode.answer,
        "data_source": episode.data_source,
        "id": episode.id,
        "seed": episode.seed,
        "sample": episode.sample,
        "is_training": episode.is_training,
    }
    return fixed | {name: value for name, value in episode.extra.items() if name not in fixed}


def messages_of(episode: Episode) -> list[dict[str, Any]]:
    """Return the prompt of an episode as chat messages."""
    if isinstance(episode.prompt, str):
        return [{"role": "user", "content": episode.prompt}]
    return [dict(message) for message in episode.prompt]


def read_result(result: Any, what: str) -> End:
    """Return the end of an episode from what its agent returned or printed. Raises if it is no reward, dictionary or nothing."""
    if result is None or isinstance(result, End):
        return result or End()
    if isinstance(result, bool | int | float):
        return End(reward=float(result))
    if not isinstance(result, Mapping):
        raise TypeError(
            f"{what} {type(result).__name__}; expected a number, a dictionary with 'reward', {{response id: reward}}, or None"
        )
    is_per_call = bool(result) and not any(key in result for key in RESULT_KEYS)
    if is_per_call and all(_is_number(value) for value in result.values()):
        return End(reward=0.0, call_rewards={str(name): float(value) for name, value in result.items()})
    reward, success, answer = result.get("reward"), result.get("success"), result.get("answer")
    if reward is not None and not _is_number(reward):
        raise TypeError(f"{what} the reward {reward!r}; expected a number")
    if success is not None and not isinstance(success, bool):
        raise TypeError(f"{what} success={success!r}; expected true or false")
    metrics = result.get("metrics") or {}
    if not isinstance(metrics, Mapping) or not all(_is_number(value) for value in metrics.values()):
        raise TypeError(f"{what} metrics that are no dictionary of numbers")
    return End(
        reward=None if reward is None else float(reward),
        success=success,
        text=None if answer is None else str(answer),
        answer=None if answer is None else str(answer),
        metrics={str(name): float(value) for name, value in metrics.items()},
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)
