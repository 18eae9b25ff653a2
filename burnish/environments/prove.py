"""`Prove`: the model writes a proof, reads the checker's message if it is wrong, and tries again."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from burnish.config.errors import UserError
from burnish.data.tasks.proofs import checked_answer
from burnish.environments.base import Answer, End, Environment, Episode, Observation, RunsIn
from burnish.rewards.score_types import require_answer

RETRY_PROMPT = "The proof is wrong. {message}. Write the whole proof again, between <proof> and </proof>."


class Prove(Environment):
    """Attempts at the theorem of the row's answer, at most `environment.max_turns`. The message names the line and the reason.

    The episode earns `discount` to the number of failed attempts before the proof, and 0 without one. The state of a turn is the message
    before it, so that GiGPO compares repairs of the same error.
    """

    runs_in: ClassVar[RunsIn] = "runner"  # the kernel bounds its own work
    is_reusable: ClassVar[bool] = True

    def __init__(self, discount: float = 1.0, prompt: str = RETRY_PROMPT) -> None:
        """`{message}` in `prompt` is replaced by what the checker says."""
        if not 0 < discount <= 1:
            raise UserError(f"environment prove: discount={discount:g}; expected above 0, at most 1")
        if "{message}" not in prompt:
            raise UserError("environment prove: prompt has no {message} in it, so the model would not see the reason")
        self.discount, self.prompt = discount, prompt
        self.num_failed = 0

    async def start(self, episode: Episode) -> Observation:
        require_answer(episode.answer)
        self.theorem, self.num_failed = str(episode.answer), 0
        return Observation(state="")

    async def step(self, answer: Answer) -> Observation | End:
        is_right, message = checked_answer(answer.text, self.theorem)
        if is_right:
            return self._end(self.discount**self.num_failed)
        self.num_failed += 1
        content = self.prompt.replace("{message}", message[:1].upper() + message[1:])
        return Observation(messages=({"role": "user", "content": content},), state=message)

    async def end(self, reason: Literal["turns", "length"]) -> End:
        """No proof was found in time."""
        return self._end(0.0)

    def _end(self, reward: float) -> End:
        metrics: dict[str, Any] = {
            "proved_first": float(reward > 0 and self.num_failed == 0),
            "repaired": float(reward > 0 and self.num_failed > 0),
        }
        return End(reward=reward, success=reward > 0, metrics=metrics)
