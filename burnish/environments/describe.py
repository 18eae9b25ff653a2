"""`DescribeThenAnswer`: the model describes a picture and answers, then answers from its description alone (Vision-SR1, 2508.19652)."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from burnish.config.errors import UserError, unknown_name_error
from burnish.data.images import content_text
from burnish.environments.base import Answer, End, Environment, Episode, Observation, RunsIn
from burnish.rewards.score_types import PartResult
from burnish.rewards.verifiers import VERIFIERS

DESCRIPTION = re.compile(r"<description>(.*?)</description>", re.DOTALL)
FORM = re.compile(r"\s*<description>.*?</description>\s*<think>.*?</think>\s*\\boxed\{.*\}\s*", re.DOTALL)
SECOND_PROMPT = (
    "{question}\n\nYou cannot see the picture. This is what it shows:\n{description}\n\n"
    "First think about the reasoning process between <think> and </think>, then write the final answer in \\boxed{}."
)


class DescribeThenAnswer(Environment):
    """Two conversations about the row's prompt. In the first the model sees the picture, describes it and answers:

        <description>...</description><think>...</think>\\boxed{...}

    In the second it reads the question and its description, without the picture. With a1 and a2 the verifier's values of the two answers
    and f = 1 for the form above, the episode earns (1 - w) a1 + w f + a2, with w the `format_weight`: a description is worth what can be
    answered from it. An answer without a description earns a1 and f alone. The episode is correct if the first answer is.
    """

    runs_in: ClassVar[RunsIn] = "worker"  # a verifier may take long over a hostile answer
    is_reusable: ClassVar[bool] = True

    def __init__(
        self, verifier: str = "math", format_weight: float = 0.1, prompt: str = SECOND_PROMPT, **options: Any
    ) -> None:
        """`options` are the verifier's."""
        if verifier not in VERIFIERS:
            raise unknown_name_error("verifier", verifier, list(VERIFIERS))
        if not 0 <= format_weight <= 1:
            raise UserError(f"environment describe: format_weight={format_weight:g}; expected a share from 0 to 1")
        missing = next((mark for mark in ("{question}", "{description}") if mark not in prompt), None)
        if missing is not None:
            raise UserError(f"environment describe: prompt has no {missing}, without which nothing can be answered")
        self.verifier, self.format_weight, self.prompt, self.options = (
            VERIFIERS[verifier],
            format_weight,
            prompt,
            options,
        )
        self.first: float | None = None

    async def start(self, episode: Episode) -> Observation:
        self.gold, self.extra, self.first = episode.answer, episode.extra, None
        prompt = episode.prompt
        texts = (
            [prompt] if isinstance(prompt, str) else [content_text(m["content"]) for m in prompt if m["role"] == "user"]
        )
        self.question = "\n".join(texts).strip()
        return Observation()

    async def step(self, answer: Answer) -> Observation | End:
        value = self._value(answer.text)
        if self.first is not None:
            return End(value, success=self.first > 0, metrics={"from_description": float(value > 0)})
        self.first = value
        reward = (1 - self.format_weight) * value + self.format_weight * bool(FORM.fullmatch(answer.text))
        found = DESCRIPTION.search(answer.text)
        if found is None or not found[1].strip():
            return End(reward, success=value > 0, metrics={"from_description": 0.0})
        text = self.prompt.replace("{question}", self.question).replace("{description}", found[1].strip())
        return Observation(messages=({"role": "user", "content": text},), reward=reward, new_conversation=True)

    async def end(self, reason: Literal["turns", "length"]) -> End:
        """An answer that was cut off is worth nothing."""
        return End(0.0, success=bool(self.first), metrics={"from_description": 0.0})

    def _value(self, text: str) -> float:
        found = self.verifier(text, self.gold, self.extra, **self.options)
        return float((found.value if isinstance(found, PartResult) else found) or 0.0)
