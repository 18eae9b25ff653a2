"""Environments written for skyrl-gym: `init(prompt)`, `step(action)` with a dictionary, `get_metrics`, `close`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Literal

from burnish.config.errors import UserError
from burnish.data.row import Message
from burnish.environments.adapters.user_code import finite, load_target, missing_package, numbers, prompt_messages
from burnish.environments.adapters.user_thread import UserThread
from burnish.environments.base import Answer, End, Environment, Episode, Observation

PACKAGES = {"skyrl_gym": "skyrl-gym"}


class SkyRLGymEnvironment(Environment):
    """Plays a text environment of skyrl-gym.

    Accepts:

    - `id`, made by `skyrl_gym.make`, or `target`, a class with `__init__(env_config, extras)`. Without both, the row's column `env_class`
      is the id.
    - `env_config` from the options. `extras` are the columns of the row; `max_turns` of the options is added where the row has none. A row
      without `reward_spec` whose answer is known gets `reward_spec.ground_truth` from it.
    - `init(prompt)`, which returns the messages that the model reads first.
    - `step(action)`, which returns `observations` (messages), `reward` and `done`. The reward of a step is the reward of the answer.
    - `get_metrics()` at the end of the episode.

    Refuses a `postprocessed_action` that differs from the answer: it would replace text that the model sampled by text it never wrote, and
    the log-probs would be wrong. Let the environment cut or read the action on its own side instead. Stop strings can end answers early.
    """

    gives_success = False

    def __init__(
        self,
        id: str | None = None,
        *,
        target: str | None = None,
        env_config: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        base: str | None = None,
    ) -> None:
        if id is not None and target is not None:
            raise UserError(
                "skyrl-gym environment: give id (of skyrl_gym.make) or target (path/to/file.py:Class), not both"
            )
        self.id = id
        self.name = target or id or "the row's env_class"
        self.cls = load_target(target, base, PACKAGES) if target is not None else None
        self.env_config = dict(env_config or {})
        self.max_turns = max_turns
        self.thread = UserThread()
        self.env: Any = None

    async def start(self, episode: Episode) -> Observation:
        extras: dict[str, Any] = dict(episode.extra)
        if episode.answer is not None:
            extras.setdefault("reward_spec", {"method": "rule", "ground_truth": episode.answer})
        if self.max_turns is not None:
            extras.setdefault("max_turns", self.max_turns)
        extras.setdefault("data_source", episode.data_source)
        self.env = await self.thread.run(self._make, extras)
        returned = await self.thread.call(self.env.init, prompt_messages(episode.prompt))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise UserError(f"skyrl-gym environment {self.name}: init should return (messages, info)")
        return Observation(messages=self._messages(returned[0], "init"))

    async def step(self, answer: Answer) -> Observation | End:
        output = await self.thread.call(self.env.step, answer.text)
        if not isinstance(output, Mapping) or not {"observations", "reward", "done"} <= set(output):
            raise UserError(
                f"skyrl-gym environment {self.name}: step should return a dictionary with observations, reward and done, "
                f"got {sorted(output) if isinstance(output, Mapping) else type(output).__name__}"
            )
        replaced = output.get("postprocessed_action")
        if replaced is not None and replaced != answer.text:
            raise UserError(
                f"skyrl-gym environment {self.name} returned a postprocessed_action that is not the model's answer. It would replace "
                "sampled text by text that the model never wrote, and training would use wrong log-probs. Return None, and set "
                "rollout.stop if answers should end at a tag"
            )
        reward = finite(output["reward"], f"{self.name}.step")
        metrics = numbers(output.get("metadata"))
        if output["done"]:
            return End(reward=reward, metrics={**metrics, **await self._metrics()})
        return Observation(messages=self._messages(output["observations"], "step"), reward=reward, metrics=metrics)

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return End(reward=0.0, metrics=await self._metrics())

    async def close(self) -> None:
        if self.env is not None:
            env, self.env = self.env, None
            await self.thread.call(env.close)

    def _make(self, extras: dict[str, Any]) -> Any:
        if self.cls is not None:
            return self.cls(env_config=self.env_config, extras=extras)
        name = self.id or extras.get("env_class")
        if name is None:
            raise UserError("skyrl-gym environment: give id or target, or rows with a column env_class")
        try:
            library = importlib.import_module("skyrl_gym")
        except ModuleNotFoundError as error:
            if error.name != "skyrl_gym":
                raise
            raise missing_package(f"skyrl-gym environment {name!r}", "skyrl-gym") from error
        return library.make(name, env_config=self.env_config, extras=extras)

    async def _metrics(self) -> dict[str, float]:
        get_metrics = getattr(self.env, "get_metrics", None)
        return numbers(await self.thread.call(get_metrics)) if callable(get_metrics) else {}

    def _messages(self, messages: Any, method: str) -> tuple[Message, ...]:
        if not isinstance(messages, (list, tuple)) or not messages:
            raise UserError(
                f"skyrl-gym environment {self.name}: {method} should return a list of messages for the model, got {messages!r}"
            )
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
                raise UserError(
                    f"skyrl-gym environment {self.name}: {method} returned {message!r}; expected a message with role and text content"
                )
        return tuple(dict(m) for m in messages)
