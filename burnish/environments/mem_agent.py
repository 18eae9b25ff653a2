"""`MemAgent`: reads a long text section by section and keeps a memory that the model rewrites (2507.02259).

Every section is a conversation of its own: the problem, the memory so far and the section, answered by an updated memory. A last conversation
has the problem and the memory only. All conversations belong to one trajectory, so the reward of the final answer trains all of them.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from burnish.config.errors import UserError
from burnish.environments.base import Answer, End, Environment, Episode, Observation, RunsIn

NO_MEMORY = "There is no memory yet."
SECTION_PROMPT = (
    "You read a long text in sections to solve a problem. You see one section at a time, and of the earlier ones only your memory.\n\n"
    "<problem>\n{problem}\n</problem>\n\n<memory>\n{memory}\n</memory>\n\n<section>\n{section}\n</section>\n\n"
    "Write the updated memory: keep what helps with the problem and add what this section contributes."
)
ANSWER_PROMPT = (
    "You have read a long text. Solve the problem with your memory of it.\n\n"
    "<problem>\n{problem}\n</problem>\n\n<memory>\n{memory}\n</memory>\n\n"
    "Put the final answer in \\boxed{{}}."
)


class MemAgent(Environment):
    """The model reads a long text (column `context`) in sections and keeps a memory of it. The configured reward scores the last answer.

    `chunk_chars` is the size of a section. The paper uses 5,000 tokens a section, 1,024 tokens for a memory, and 8,192 tokens of context;
    a token is about four characters of English.
    """

    runs_in: ClassVar[RunsIn] = "runner"

    def __init__(self, chunk_chars: int = 20_000, column: str = "context", max_memory_chars: int = 8_000) -> None:
        if chunk_chars < 1:
            raise UserError(f"environment mem_agent: chunk_chars={chunk_chars}; expected a positive number")
        self.chunk_chars, self.column, self.max_memory_chars = chunk_chars, column, max_memory_chars
        self.problem, self.memory = "", NO_MEMORY
        self.sections: list[str] = []
        self.next_section = 0

    async def start(self, episode: Episode) -> Observation:
        text = episode.extra.get(self.column)
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"environment mem_agent: row {episode.id} has no text in column {self.column!r}")
        prompt = episode.prompt
        self.problem = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        self.sections = split_text(text, self.chunk_chars)
        self.memory, self.next_section = NO_MEMORY, 0
        return Observation(messages=self._next_messages())

    async def step(self, answer: Answer) -> Observation | End:
        if self.next_section > len(self.sections):
            return End(metrics={"sections": float(len(self.sections))})
        self.memory = answer.text.strip()[: self.max_memory_chars] or NO_MEMORY
        return Observation(messages=self._next_messages(), new_conversation=True)

    async def end(self, reason: Literal["turns", "length"]) -> End:
        """The configured reward scores what the model wrote last."""
        return End(metrics={"sections_unread": float(max(0, len(self.sections) - self.next_section))})

    def _next_messages(self) -> tuple[dict[str, str], ...]:
        index, self.next_section = self.next_section, self.next_section + 1
        if index < len(self.sections):
            text = SECTION_PROMPT.format(problem=self.problem, memory=self.memory, section=self.sections[index])
        else:
            text = ANSWER_PROMPT.format(problem=self.problem, memory=self.memory)
        return ({"role": "user", "content": text},)


def split_text(text: str, chunk_chars: int) -> list[str]:
    """Split a text into sections of at most `chunk_chars` characters, at line breaks or spaces where possible."""
    sections, rest = list[str](), text.strip()
    while len(rest) > chunk_chars:
        window = rest[: chunk_chars + 1]
        cut = max(window.rfind("\n"), window.rfind(" "))
        cut = cut if cut > chunk_chars // 2 else chunk_chars
        sections.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return [*sections, rest] if rest else sections
