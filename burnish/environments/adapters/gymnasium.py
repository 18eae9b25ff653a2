"""Environments with gymnasium's interface, of text or images: those of gymnasium itself, of GEM, and plain classes with `reset` and `step`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from burnish.config.errors import UserError, did_you_mean
from burnish.data.row import Message
from burnish.environments.adapters.user_code import (
    OwnRandomState,
    PromptPlace,
    accepts,
    finite,
    load_target,
    missing_package,
    numbers,
    opening_messages,
    user_message,
)
from burnish.environments.adapters.user_thread import UserThread
from burnish.environments.base import Answer, End, Environment, Episode, Observation
from burnish.environments.image_values import content_with_images, image_digest, is_image
from burnish.rewards.verifiers import last_boxed

ActionForm = Literal["text", "last_number", "boxed"]
Library = Literal["gymnasium", "gem"]
PIP_NAMES = {"gymnasium": "gymnasium", "gem": "gem-llm"}
WHOLE_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w]|\.\d)")


class SeenObservation(NamedTuple):
    """An observation as the content of a message, and as a text that is equal for equal observations."""

    content: str | list[Message]
    text: str


class GymEnvironment(Environment):
    """Plays an environment with `reset(seed=...) -> (obs, info)` and `step(action) -> (obs, reward, terminated, truncated, info)`.

    Accepts:

    - `id` with `library: gymnasium` or `gem` (`gymnasium.make`, `gem.make`), or `target`, a class or factory of yours. `make_options`
      go to it.
    - Observations that are texts, or images (uint8 arrays [height, width, 3]). With `observation: render`, what `render()` returns is the
      observation instead (`render_mode: ansi` or `rgb_array`). `info["suffix"]` follows the text, and precedes the image.
    - Actions that are texts (`action: text`, the whole answer, as GEM wants it), or that a parser takes from the answer: `last_number`,
      or `boxed`, the inside of the last `\\boxed{...}`. A `Discrete` action space needs one of the last two.
    - The reward of each step, which is the reward of the answer. `info["success"]` is the success of the episode.
    - `prompt: row_first` puts the row's prompt before the first observation. `state: true` also reports observations as states, for GiGPO;
      they must not contain counters. `row_options: true` passes the row's columns to `reset(options=...)`.

    An answer without a valid action is not given to the environment: the model reads why, and the turn has reward `invalid_reward`.

    The environment has its own state of the global random generators, because GEM's environments seed and use these.

    Refuses: observations that are neither texts nor images, actions that are neither text nor `Discrete`, rewards that are not finite.
    """

    def __init__(
        self,
        id: str | None = None,
        *,
        target: str | None = None,
        library: Library = "gymnasium",
        make_options: Mapping[str, Any] | None = None,
        action: ActionForm = "text",
        observation: Literal["obs", "render"] = "obs",
        prompt: PromptPlace = "observation",
        state: bool = False,
        row_options: bool = False,
        invalid_reward: float = 0.0,
        base: str | None = None,
    ) -> None:
        if (id is None) == (target is None):
            raise UserError("gym environment: give either id (of gymnasium or GEM) or target (path/to/file.py:Class)")
        if action not in ("text", "last_number", "boxed"):
            raise UserError(f"gym environment: action should be text, last_number or boxed, got {action!r}")
        if observation not in ("obs", "render"):
            raise UserError(f"gym environment: observation should be obs or render, got {observation!r}")
        options = dict(make_options or {})
        self.name = target or str(id)
        if target is not None:
            self.make = partial(load_target(target, base, PIP_NAMES), **options)
        else:
            self.make = partial(registered(self.name, library), **options)
        self.action = action
        self.observation = observation
        self.prompt: PromptPlace = prompt
        self.reports_state = state
        self.row_options = row_options
        self.invalid_reward = invalid_reward
        self.thread = UserThread()
        self.random = OwnRandomState(0)
        self.env: Any = None
        self.success: bool | None = None

    async def start(self, episode: Episode) -> Observation:
        seen: SeenObservation = await self.thread.run(self._reset, episode)
        state = seen.text if self.reports_state else None
        return Observation(messages=opening_messages(episode, seen.content, self.prompt), state=state)

    async def step(self, answer: Answer) -> Observation | End:
        observation: Observation | End = await self.thread.run(self._step, answer)
        return observation

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return End(reward=0.0, success=self.success)

    async def close(self) -> None:
        if self.env is not None:
            env, self.env = self.env, None
            if callable(getattr(env, "close", None)):
                await self.thread.call(env.close)

    def _make(self) -> None:
        self.env = self.make()
        self.space = getattr(self.env, "action_space", None)
        self.is_discrete = hasattr(self.space, "n")
        if self.is_discrete and self.action == "text":
            raise UserError(
                f"gym environment {self.name}: its actions are numbers ({self.space}): set action=last_number or action=boxed"
            )
        is_space = callable(getattr(self.space, "sample", None))  # GEM's Sokoban has a list of words instead
        if is_space and not self.is_discrete and type(self.space).__name__ != "Text":
            raise UserError(
                f"gym environment {self.name}: its actions are {self.space}; only texts and Discrete are possible"
            )

    def _reset(self, episode: Episode) -> SeenObservation:
        self.random = OwnRandomState(episode.seed)
        self.success = None
        arguments: dict[str, Any] = {"seed": episode.seed % 2**31}
        with self.random.active():
            self._make()
        if self.row_options:
            if not accepts(self.env.reset, "options"):
                raise UserError(f"gym environment {self.name}: row_options is set, but reset takes no options")
            arguments["options"] = dict(episode.extra)
        with self.random.active():
            returned = self.env.reset(**arguments)
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise UserError(
                    f"gym environment {self.name}: reset should return (obs, info), got {type(returned).__name__}"
                )
            return self._seen(*returned)

    def _step(self, answer: Answer) -> Observation | End:
        action, problem = self._parse(answer.text)
        if problem is not None:
            state = self._last.text if self.reports_state else None
            return Observation(
                messages=user_message(problem), reward=self.invalid_reward, state=state, metrics={"invalid_actions": 1}
            )
        with self.random.active():
            returned = self.env.step(action)
            if not isinstance(returned, tuple) or len(returned) != 5:
                raise UserError(
                    f"gym environment {self.name}: step should return (obs, reward, terminated, truncated, info); an environment of the "
                    "old gym with four values needs a wrapper"
                )
            obs, reward, terminated, truncated, info = returned
            seen = self._seen(obs, info)
        number = finite(reward, f"{self.name}.step")
        if isinstance(info, Mapping) and info.get("success") is not None:
            self.success = bool(info["success"])
        metrics = numbers(info)
        if terminated or truncated:
            return End(reward=number, success=self.success, text=seen.text, metrics=metrics)
        return Observation(
            messages=user_message(seen.content),
            reward=number,
            state=seen.text if self.reports_state else None,
            metrics=metrics,
        )

    def _seen(self, obs: Any, info: Any) -> SeenObservation:
        said = self.env.render() if self.observation == "render" else obs
        suffix = str((info.get("suffix") if isinstance(info, Mapping) else None) or "")
        if is_image(said):
            self._last = SeenObservation(content_with_images(suffix, [said]), f"image {image_digest(said)}{suffix}")
        elif isinstance(said, str):
            self._last = SeenObservation(said + suffix, said + suffix)
        else:
            raise UserError(
                f"gym environment {self.name}: the observation is {type(said).__name__}, but the model reads text or images (uint8 arrays "
                "[height, width, 3]). Wrap the environment so that it returns one of them, or set observation=render with "
                "make_options={render_mode: ansi} if it renders text, or {render_mode: rgb_array} if it renders images"
            )
        return self._last

    def _parse(self, text: str) -> tuple[Any, str | None]:
        """The action in an answer, or why there is none."""
        found: str | None = text
        if self.action == "boxed":
            found = last_boxed(text)
            if found is None:
                return None, "No action found: put it in \\boxed{}."
        elif self.action == "last_number":
            all_numbers = WHOLE_NUMBER.findall(text)
            if not all_numbers:
                return None, "No action found: answer with a whole number."
            found = all_numbers[-1]
        if not self.is_discrete:
            return found, None
        assert self.space is not None
        first = int(getattr(self.space, "start", 0))
        last = first + int(self.space.n) - 1
        if found is None or WHOLE_NUMBER.fullmatch(found.strip()) is None or not first <= int(found) <= last:
            return None, f"{found!r} is not an action: answer with a whole number from {first} to {last}."
        return int(found), None


def registered(name: str, library: Library) -> Callable[..., Any]:
    """The function that builds a registered environment of gymnasium or GEM."""
    if library not in PIP_NAMES:
        raise UserError(f"gym environment: library should be gymnasium or gem, got {library!r}")
    try:
        module = importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise missing_package(
            f"environment {name!r}", PIP_NAMES[library], "gym" if library == "gymnasium" else None
        ) from error
    if library == "gem":
        from gem.envs.registration import ENV_REGISTRY

        importlib.import_module("gem.envs")  # registers the environments
        if name not in ENV_REGISTRY:
            hint = "; the level is part of a game's id, such as game:Sudoku-v0-hard"
            raise UserError(f"GEM has no environment {name!r}{did_you_mean(name, ENV_REGISTRY)}{hint}")
    else:
        try:
            module.spec(name)
        except module.error.UnregisteredEnv as error:
            raise UserError(f"gymnasium has no environment {name!r}: {error}") from error
    return partial(module.make, name)
