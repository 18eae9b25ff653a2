"""OpenEnv's wire, against a small server that speaks it, and against OpenEnv's own where it is installed."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.adapters.openenv import OpenEnv, OpenEnvError, OpenEnvWithClient, SessionQueue, socket_url
from burnish.environments.base import End, Environment, Observation
from tests.environments.adapters.episodes import USER_FILES, answer, contents, episode


class EchoServer:
    """Echoes messages, gives the length as reward, and is done at `stop`. It grants `capacity` sessions at once."""

    def __init__(self, capacity: int = 100) -> None:
        self.capacity = capacity
        self.num_active = 0
        self.most_active = 0
        self.num_refused = 0
        self.frames: list[dict[str, Any]] = []

    async def serve(self, socket: Any) -> None:
        if self.num_active >= self.capacity:
            self.num_refused += 1
            data = {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": self.capacity}
            await socket.send(json.dumps({"type": "error", "data": data}))
            return
        self.num_active += 1
        self.most_active = max(self.most_active, self.num_active)
        try:
            async for text in socket:
                frame = json.loads(text)
                self.frames.append(frame)
                if frame["type"] == "close":
                    return
                await socket.send(json.dumps(self.reply(frame)))
        finally:
            self.num_active -= 1

    def reply(self, frame: dict[str, Any]) -> dict[str, Any]:
        if frame["type"] == "reset":
            data = {"observation": {"echoed_message": f"seed {frame['data']['seed']}"}, "reward": None, "done": False}
            return {"type": "observation", "data": data}
        message = frame["data"].get("message")
        if message is None:
            return error("VALIDATION_ERROR", "no message")
        if message == "crash":
            return error("EXECUTION_ERROR", "it crashed")
        reward = None if message.startswith("none") else len(message) / 10
        observation = {"echoed_message": message, "inner": {"length": len(message)}}
        return {
            "type": "observation",
            "data": {"observation": observation, "reward": reward, "done": "stop" in message},
        }


def error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


@asynccontextmanager
async def serving(server: EchoServer) -> AsyncIterator[str]:
    pytest.importorskip("websockets")
    from websockets.asyncio.server import serve

    async with serve(server.serve, "127.0.0.1", 0) as running:
        port = next(iter(running.sockets)).getsockname()[1]
        yield f"http://127.0.0.1:{port}"


def with_server(server: EchoServer, use: Callable[[str], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with serving(server) as url:
            return await use(url)

    return asyncio.run(run())


async def played(environment: Environment, *texts: str, **columns: Any) -> list[Observation | End]:
    try:
        seen: list[Observation | End] = [await environment.start(episode(**columns))]
        for text in texts:
            seen.append(await environment.step(answer(text)))
        return seen
    finally:
        await environment.close()


def test_frames_rewards_and_end():
    server = EchoServer()

    async def use(url: str) -> list[Observation | End]:
        return await played(OpenEnv(url, observation_key="echoed_message"), "hello", "stop", seed=7, level=2)

    seen = with_server(server, use)
    assert contents(seen[0]) == ["seed 7"]
    assert contents(seen[1]) == ["hello"]
    assert seen[1].reward == 0.5
    assert seen[2] == End(reward=0.4, text="stop")
    assert server.frames == [
        {"type": "reset", "data": {"level": 2, "seed": 7, "episode_id": "rows/0#0.0"}},
        {"type": "step", "data": {"message": "hello"}},
        {"type": "step", "data": {"message": "stop"}},
        {"type": "close"},
    ]
    assert server.num_active == 0


def test_full_server_makes_episodes_wait():
    server = EchoServer(capacity=3)

    async def use(url: str) -> list[Any]:
        return await asyncio.gather(*(played(OpenEnv(url), "a", "bb", "stop") for _ in range(20)))

    results = with_server(server, use)
    assert all(seen[-1] == End(reward=0.4, text=seen[-1].text) for seen in results)
    assert server.most_active == 3
    assert 0 < server.num_refused <= 20


def test_server_that_others_fill_is_tried_until_the_limit():
    async def use(url: str) -> None:
        await played(OpenEnv(url, capacity_wait_s=0.0), "x")

    with pytest.raises(TimeoutError, match="none of its sessions belong to this process"):
        with_server(EchoServer(capacity=0), use)


def test_without_rewards_the_configured_reward_scores():
    seen = with_server(EchoServer(), lambda url: played(OpenEnv(url), "none", "none stop"))
    assert seen[1].reward == 0.0
    assert seen[2].reward is None


def test_errors_of_the_server_fail_the_episode_with_their_code():
    server = EchoServer()
    with pytest.raises(OpenEnvError, match="EXECUTION_ERROR: it crashed"):
        with_server(server, lambda url: played(OpenEnv(url), "crash"))
    with pytest.raises(OpenEnvError, match="VALIDATION_ERROR: no message"):
        with_server(server, lambda url: played(OpenEnv(url, action_key="text"), "x"))
    with pytest.raises(UserError, match=r"no 'inner.size' \(has: echoed_message\)"):
        with_server(server, lambda url: played(OpenEnv(url, observation_key="inner.size"), "x"))
    assert server.num_active == 0


def test_json_actions_that_cannot_be_read_are_observations():
    seen = with_server(
        EchoServer(),
        lambda url: played(
            OpenEnv(url, action="json"), 'So {"message": "hi"}', '{"massage": "hi"}', "hello", "{broken}"
        ),
    )
    assert json.loads(contents(seen[1])[0]) == {"echoed_message": "hi", "inner": {"length": 2}}
    assert contents(seen[2]) == ["The action is not valid: no message"]
    assert [contents(item)[0].partition(":")[0] for item in seen[3:]] == [
        "The answer has no JSON object that can be read"
    ] * 2


def test_client_class_of_a_user_says_how_actions_and_results_look():
    def use(url: str) -> Awaitable[list[Observation | End]]:
        return played(OpenEnvWithClient(url, client="echo_client.py:Echo", base=USER_FILES), "hey", "stop")

    seen = with_server(EchoServer(), use)
    assert OpenEnvWithClient.runs_in == "worker"
    assert contents(seen[1]) == ["hey"]
    assert seen[2] == End(reward=0.4, text="stop")


def test_no_server_is_said():
    pytest.importorskip("websockets")
    with pytest.raises(ConnectionError, match=r"no OpenEnv server answers at ws://127.0.0.1:9/ws"):
        asyncio.run(played(OpenEnv("http://127.0.0.1:9/")))


def test_queue_lets_in_as_many_as_the_server_grants():
    async def run() -> tuple[int, int]:
        queue = SessionQueue()
        for _ in range(5):
            await queue.enter()
        await queue.refused(None)  # four were granted
        waiting = [asyncio.create_task(queue.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        opened_before = queue.num_open
        await queue.leave()
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        done = sum(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        return opened_before, done

    assert asyncio.run(run()) == (4, 1)


def test_addresses():
    assert socket_url("https://host/env/") == "wss://host/env/ws"
    assert socket_url("ws://host:8000/ws") == "ws://host:8000/ws"
    with pytest.raises(UserError, match="url should be"):
        socket_url("host:8000")


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets", None)
    monkeypatch.setitem(sys.modules, "websockets.asyncio.client", None)
    with pytest.raises(UserError, match=r"needs the package 'websockets'.*burnish\[openenv\]"):
        asyncio.run(played(OpenEnv("ws://127.0.0.1:9")))


def test_server_of_openenv_itself():
    pytest.importorskip("openenv")
    uvicorn = pytest.importorskip("uvicorn")
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment as ServerEnvironment
    from openenv.core.env_server.types import Action, State
    from openenv.core.env_server.types import Observation as ServerObservation

    class Say(Action):
        message: str

    class Heard(ServerObservation):
        echoed_message: str

    class Echo(ServerEnvironment):  # type: ignore[type-arg]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Heard:
            return Heard(echoed_message=f"seed {seed} level {row.get('level')}")

        def step(self, action: Say, **options: Any) -> Heard:
            return Heard(echoed_message=action.message, reward=len(action.message) / 10, done="stop" in action.message)

        @property
        def state(self) -> State:
            return State()

    async def run() -> tuple[list[Any], list[Any]]:
        app = create_app(Echo, Say, Heard, max_concurrent_envs=2)
        server = uvicorn.Server(uvicorn.Config(app, port=0, host="127.0.0.1", log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"ws://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        plain = [OpenEnv(url, observation_key="echoed_message") for _ in range(6)]
        many = await asyncio.gather(*(played(e, "hello", "stop", seed=3, level=9) for e in plain))
        client = OpenEnvWithClient(url, client="echo_client.py:Echo", base=USER_FILES)
        one = await played(client, "hello", "stop")
        server.should_exit = True
        await serving
        return many, one

    many, one = asyncio.run(run())
    assert [contents(seen[0]) for seen in many] == [["seed 3 level 9"]] * 6
    assert [seen[-1] for seen in [*many, one]] == [End(reward=0.4, text="stop")] * 7
