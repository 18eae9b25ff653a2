"""`SelfCorrection`: the model answers, is asked to look for an error, and answers again (SCoRe, 2409.12917)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from burnish.config.errors import UserError, unknown_name_error
from burnish.environments.base import Answer, End, Environment, Episode, Observation, RunsIn
from burnish.rewards.score_types import PartResult
from burnish.rewards.verifiers import VERIFIERS

CORRECTION_PROMPT = "There may be an error in the solution above. Read it again step by step, correct it if necessary, and state the final answer again."


class SelfCorrection(Environment):
    """Two attempts at the row's prompt. With r1 and r2 the verifier's values of the attempts, the episode earns

        r2 + alpha (r2 - r1),

    so that a correction is worth more than a right first attempt, and a right answer that becomes wrong costs. The paper uses alpha = 10
    in its second stage. The episode is correct if the second attempt is.
    """

    runs_in: ClassVar[RunsIn] = "worker"  # a verifier may take long over a hostile answer
    is_reusable: ClassVar[bool] = True

    def __init__(
        self, verifier: str = "math", alpha: float = 10.0, prompt: str = CORRECTION_PROMPT, **options: Any
    ) -> None:
        """`options` are the verifier's."""
        if verifier not in VERIFIERS:
            raise unknown_name_error("verifier", verifier, list(VERIFIERS))
        if alpha < 0:
            raise UserError(f"environment multi_turn_correction: alpha={alpha:g}; expected 0 or more")
        self.verifier, self.alpha, self.prompt, self.options = VERIFIERS[verifier], alpha, prompt, options
        self.values: list[float] = []

    async def start(self, episode: Episode) -> Observation:
        self.gold, self.extra, self.values = episode.answer, episode.extra, []
        return Observation()

    async def step(self, answer: Answer) -> Observation | End:
        found = self.verifier(answer.text, self.gold, self.extra, **self.options)
        value = found.value if isinstance(found, PartResult) else found
        self.values.append(float(value or 0.0))
        if len(self.values) == 1:
            return Observation(messages=({"role": "user", "content": self.prompt},))
        return self._end()

    async def end(self, reason: Literal["turns", "length"]) -> End:
        """An attempt that was cut off is worth nothing."""
        return self._end()

    def _end(self) -> End:
        first, second = [*self.values, 0.0, 0.0][:2]
        return End(
            reward=second + self.alpha * (second - first),
            success=second > 0,
            metrics={
                "first_correct": float(first > 0),
                "corrected": float(first <= 0 < second),
                "spoiled": float(second <= 0 < first),
            },
        )
