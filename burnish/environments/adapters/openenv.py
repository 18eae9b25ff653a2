"""Environments on OpenEnv servers, over their WebSocket. One socket is one session of the server, and one episode.

A server grants few sessions at once. Episodes that find it full wait here until a session ends; they do not fail.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from burnish.config.errors import UserError
from burnish.environments.adapters import openenv_modules
from burnish.environments.adapters.user_code import (
    PromptPlace,
    finite,
    json_text,
    load_target,
    missing_package,
    numbers,
    opening_messages,
    user_message,
)
from burnish.environments.base import Answer, End, Environment, Episode, Observation, RunsIn

FULL = "CAPACITY_REACHED"
BAD_ACTION = "VALIDATION_ERROR"


class OpenEnvError(Exception):
    """An error frame of the server, with its code and data."""

    def __init__(self, url: str, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code") or "UNKNOWN")
        self.data = data
        super().__init__(f"OpenEnv server {url}: {self.code}: {data.get('message')}")


class SessionQueue:
    """The sessions that this process has on a server, and how many the server grants.

    The limit is unknown until the server refuses a session; it says how many it grants. Episodes past the limit wait for one to end. Other
    processes may hold sessions too, so a waiting episode also tries again from time to time.
    """

    def __init__(self) -> None:
        self.num_open = 0
        self.limit: int | None = None
        self._changed = asyncio.Condition()

    async def enter(self) -> None:
        """Wait until a session may be open, and count it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.limit is None or self.num_open < self.limit)
            self.num_open += 1

    async def leave(self) -> None:
        async with self._changed:
            self.num_open -= 1
            self._changed.notify_all()

    async def refused(self, max_sessions: Any) -> None:
        """The server did not grant a counted session."""
        async with self._changed:
            self.num_open -= 1
            known = max_sessions if isinstance(max_sessions, int) and max_sessions > 0 else max(self.num_open, 1)
            self.limit = known
            self._changed.notify_all()

    async def wait(self, seconds: float) -> None:
        """Wait for a session to end, at most this long."""

        async def changed() -> None:
            async with self._changed:
                await self._changed.wait()

        try:
            await asyncio.wait_for(changed(), seconds)
        except TimeoutError:
            return


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, SessionQueue]] = WeakKeyDictionary()


def session_queue(url: str) -> SessionQueue:
    """The queue of a server in the running event loop."""
    queues = _queues.setdefault(asyncio.get_running_loop(), {})
    return queues.setdefault(url, SessionQueue())


class Session:
    """One socket to a server."""

    def __init__(self, url: str, socket: Any, timeout_s: float) -> None:
        self.url = url
        self.socket = socket
        self.timeout_s = timeout_s

    @classmethod
    async def open(cls, url: str, timeout_s: float) -> Session:
        try:
            from websockets.asyncio.client import connect
        except ModuleNotFoundError as error:
            raise missing_package(f"OpenEnv server {url}", "websockets", "openenv") from error
        is_local = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
        options: dict[str, Any] = {"proxy": None} if is_local else {}
        try:
            socket = await connect(url, open_timeout=timeout_s, max_size=2**27, **options)
        except (OSError, TimeoutError) as error:
            raise ConnectionError(f"no OpenEnv server answers at {url}: {error or type(error).__name__}") from error
        return cls(url, socket, timeout_s)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a frame and return the data of the reply. An error frame raises `OpenEnvError`."""
        from websockets.exceptions import ConnectionClosed

        frame = json.dumps({"type": kind, "data": data})
        with suppress(
            ConnectionClosed
        ):  # a full server says so and closes: the frame with the reason can still be read
            await self.socket.send(frame)
        try:
            text = await asyncio.wait_for(self.socket.recv(), self.timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"OpenEnv server {self.url} did not answer {kind!r} within {self.timeout_s:g} s"
            ) from error
        except ConnectionClosed as error:
            raise ConnectionError(f"OpenEnv server {self.url} closed the session during {kind!r}: {error}") from error
        reply = json.loads(text)
        if reply.get("type") == "error":
            raise OpenEnvError(self.url, reply.get("data") or {})
        if reply.get("type") != "observation":
            raise ValueError(f"OpenEnv server {self.url} answered {kind!r} with a frame of type {reply.get('type')!r}")
        found: dict[str, Any] = reply["data"]
        return found

    async def close(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            await self.socket.send(json.dumps({"type": "close"}))
        except ConnectionClosed:
            return
        finally:
            await self.socket.close()


class OpenEnv(Environment):
    """Plays an environment on an OpenEnv server at `url` (`ws://`, `http://`, with or without `/ws`).

    Accepts:

    - The row's columns, `seed` and `episode_id` go to the server's `reset`, or only the columns that `row_fields` names. The server
      keeps the arguments that its `reset` takes.
    - `action: text` sends `{action_key: answer}`. With `action: json`, the answer holds the action as a JSON object, from its first `{` to
      its last `}`. An action that the server cannot read is then an observation.
    - `observation_key` names the text in the observation, with dots for nested keys. Without it the model reads the observation as JSON.
    - The reward of each step. If no step has one, the configured reward scores the episode.
    - `prompt: row_first` puts the row's prompt before the first observation.

    A full server (`CAPACITY_REACHED`) makes the episode wait; sessions are opened up to what the server grants. If this process has no session
    open, others hold them all, and after `capacity_wait_s` the episode fails. Each reply has a limit of `timeout_s`.

    Refuses: error frames of other kinds, which fail the episode with code and message, and rewards that are not finite.
    """

    runs_in: ClassVar[RunsIn] = "loop"
    has_own_deadlines: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        *,
        action: Literal["text", "json"] = "text",
        action_key: str = "message",
        observation_key: str | None = None,
        row_fields: Sequence[str] | None = None,
        prompt: PromptPlace = "observation",
        timeout_s: float = 60.0,
        capacity_wait_s: float = 600.0,
    ) -> None:
        if action not in ("text", "json"):
            raise UserError(f"OpenEnv: action should be text or json, got {action!r}")
        self.url = socket_url(url)
        self.action = action
        self.action_key = action_key
        self.observation_key = observation_key
        self.row_fields = row_fields
        self.prompt: PromptPlace = prompt
        self.timeout_s = timeout_s
        self.capacity_wait_s = capacity_wait_s
        self.session: Session | None = None
        self.has_reward = False

    async def start(self, episode: Episode) -> Observation:
        self.has_reward = False
        payload = await self._open(self._reset_data(episode))
        text, _, is_done = self.read(payload)
        if is_done:
            raise ValueError(f"OpenEnv server {self.url}: the episode was done after reset")
        return Observation(messages=opening_messages(episode, text, self.prompt))

    async def step(self, answer: Answer) -> Observation | End:
        assert self.session is not None
        action, problem = self.write(answer.text)
        if problem is not None:
            return Observation(messages=user_message(problem), metrics={"invalid_actions": 1})
        try:
            payload = await self.session.ask("step", action)
        except OpenEnvError as error:
            if error.code == BAD_ACTION and self.action == "json":
                why = f"The action is not valid: {json_text(error.data.get('errors') or error.data.get('message'))}"
                return Observation(messages=user_message(why), metrics={"invalid_actions": 1})
            raise
        text, reward, is_done = self.read(payload)
        self.has_reward |= reward is not None
        number = None if reward is None else finite(reward, f"OpenEnv server {self.url}")
        metrics = numbers(payload.get("metadata"))
        if is_done:
            return End(reward=(number or 0.0) if self.has_reward else None, text=text, metrics=metrics)
        return Observation(messages=user_message(text), reward=number or 0.0, metrics=metrics)

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return End(reward=0.0 if self.has_reward else None)

    async def close(self) -> None:
        if self.session is not None:
            session, self.session = self.session, None
            try:
                await session.close()
            finally:
                await session_queue(self.url).leave()

    def write(self, answer: str) -> tuple[dict[str, Any], str | None]:
        """The action for the server, or why the answer has none."""
        if self.action == "text":
            return {self.action_key: answer}, None
        try:
            action = json.loads(answer[answer.find("{") : answer.rfind("}") + 1])
        except json.JSONDecodeError as error:
            return {}, f"The answer has no JSON object that can be read: {error}"
        return action, None

    def read(self, payload: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """The text, reward and end in a reply."""
        return self.text_of(payload["observation"]), payload.get("reward"), bool(payload.get("done"))

    def text_of(self, observation: Any) -> str:
        if dataclasses.is_dataclass(observation) and not isinstance(observation, type):
            observation = dataclasses.asdict(observation)
        elif hasattr(observation, "model_dump"):
            observation = observation.model_dump()
        for key in (self.observation_key or "").split(".") if self.observation_key else ():
            if not isinstance(observation, Mapping) or key not in observation:
                has = ", ".join(observation) if isinstance(observation, Mapping) else type(observation).__name__
                raise UserError(
                    f"OpenEnv server {self.url}: the observation has no {self.observation_key!r} (has: {has}); set observation_key"
                )
            observation = observation[key]
        return json_text(observation)

    def _reset_data(self, episode: Episode) -> dict[str, Any]:
        fields = episode.extra
        if self.row_fields is not None:
            missing = [key for key in self.row_fields if key not in fields]
            if missing:
                raise UserError(f"OpenEnv: row_fields names {missing[0]!r}, which episode {episode.id} does not have")
            fields = {key: fields[key] for key in self.row_fields}
        return {**fields, "seed": episode.seed, "episode_id": episode.id}

    async def _open(self, reset_data: dict[str, Any]) -> dict[str, Any]:
        """Open a session and reset it, waiting while the server is full."""
        queue = session_queue(self.url)
        waiting_since = time.monotonic()
        pause = 0.05
        while True:
            await queue.enter()
            try:
                self.session = await Session.open(self.url, self.timeout_s)
                return await self.session.ask("reset", reset_data)
            except OpenEnvError as error:
                if error.code != FULL:
                    await self.close()
                    raise
                await self._give_up(queue, error)
                if queue.num_open > 0:
                    waiting_since = time.monotonic()
                elif time.monotonic() - waiting_since > self.capacity_wait_s:
                    raise TimeoutError(
                        f"OpenEnv server {self.url} has been full for {self.capacity_wait_s:g} s, and none of its sessions belong to this process"
                    ) from error
            except BaseException:
                if self.session is None:
                    await queue.leave()
                await self.close()
                raise
            await queue.wait(pause)
            pause = min(2 * pause, 2.0)

    async def _give_up(self, queue: SessionQueue, error: OpenEnvError) -> None:
        """Close a socket that the server did not make a session."""
        session, self.session = self.session, None
        await queue.refused(error.data.get("max_sessions"))
        if session is not None:
            await session.close()


class OpenEnvWithClient(OpenEnv):
    """Plays an environment on an OpenEnv server with a user's client class, which says how actions and results look.

    Accepts a class with `_step_payload(action)` and `_parse_result(payload)`; it loads without OpenEnv (`openenv_modules`). The connection is
    burnish's: methods of the client that send something are never called. `_step_payload` gets the answer as text, or an object of
    `action_class` made with `action_key`. `observation_key` applies to the parsed observation.
    """

    runs_in = "worker"

    def __init__(
        self,
        url: str,
        *,
        client: str,
        action_class: str | None = None,
        action_key: str = "message",
        observation_key: str | None = None,
        row_fields: Sequence[str] | None = None,
        prompt: PromptPlace = "observation",
        timeout_s: float = 60.0,
        capacity_wait_s: float = 600.0,
        base: str | None = None,
    ) -> None:
        super().__init__(
            url,
            action_key=action_key,
            observation_key=observation_key,
            row_fields=row_fields,
            prompt=prompt,
            timeout_s=timeout_s,
            capacity_wait_s=capacity_wait_s,
        )
        openenv_modules.install()
        packages = {"openenv": "openenv"}
        self.client = load_target(client, base, packages)(base_url=url)
        self.action_class = load_target(action_class, base, packages) if action_class is not None else None

    def write(self, answer: str) -> tuple[dict[str, Any], str | None]:
        action = answer if self.action_class is None else self.action_class(**{self.action_key: answer})
        return dict(self.client._step_payload(action)), None

    def read(self, payload: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        result = self.client._parse_result(dict(payload))
        return self.text_of(result.observation), result.reward, bool(result.done)


def socket_url(url: str) -> str:
    """The address of the WebSocket: `http` becomes `ws`, and `/ws` is added."""
    scheme, _, rest = url.partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if scheme not in schemes or not rest:
        raise UserError(f"OpenEnv: url should be ws://host:port or http://host:port, got {url!r}")
    rest = rest.rstrip("/")
    return f"{schemes[scheme]}://{rest if rest.endswith('/ws') else rest + '/ws'}"
