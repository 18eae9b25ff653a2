"""Dialogues as tokens: what to put behind a completion so that the model reads the next message and may answer it.

What the model wrote stays as it is. Only the text between two completions is tokenised: what the template writes to end the
assistant's turn, the message, and what it writes before the assistant speaks again. So no token that was sampled is ever another
one when the model reads it, which rendering and tokenising the whole conversation again would not promise.
"""

from __future__ import annotations

import functools

from burnish.config.errors import UserError
from burnish.data.prompt_pool import Prompt
from burnish.models.tokenizer import Tokenizer

ANSWER_PLACEHOLDER = "ANSWER"  # stands for what the assistant said


class Dialogue:
    """The conversation that a prompt begins, in the template it was rendered with: the tokenizer's, or none at all."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, role: str = "user") -> None:
        self.tokenizer, self.role, self.is_chat = tokenizer, role, prompt.is_chat
        if self.is_chat:
            check_template_appends(tokenizer)
        self.opening = self._opening(prompt.text) if prompt.is_chat else ""
        """What the template writes before the assistant speaks; nothing where the user's message ends with it (`[INST] .. [/INST]`)."""

    def _opening(self, prompt: str) -> str:
        asked = [{"role": "user", "content": "?"}]
        without = self.tokenizer.chat_text(asked, add_generation_prompt=False)
        opening = self.tokenizer.chat_text(asked)[len(without) :]
        mark = opening.strip()
        if not mark:
            return opening
        at = prompt.rfind(mark)  # what follows it is of the run's own template variables
        if at < 0:
            raise UserError(
                f"the chat template opens the assistant's turn with {mark!r}, which this prompt has nowhere, so an environment cannot "
                "tell how the next turn begins; leave out data.template.kwargs, or set data.template.kind=plain"
            )
        return prompt[at:]

    def reply(self, completion: list[int], text: str) -> tuple[int, ...]:
        """The tokens of a message behind a completion."""
        if not self.is_chat:
            return tuple(self.tokenizer.encode(self.tokenizer.literal(text)))
        ending, message = self._rendered(text)
        tokens = self.tokenizer.encode(ending + message + self.opening)
        # The model has mostly written the token that ends its turn itself.
        has_ended = bool(completion) and completion[-1] == tokens[0] and self.tokenizer.is_special(tokens[0])
        return tuple(tokens[1:] if has_ended else tokens)

    def _rendered(self, text: str) -> tuple[str, str]:
        """What the template writes behind the assistant's words, and the message after it."""
        return _appended_text(self.tokenizer, {"role": self.role, "content": text})


@functools.lru_cache(maxsize=8)
def check_template_appends(tokenizer: Tokenizer) -> None:
    """Refuse a chat template that writes earlier turns in another way when a message follows, as Qwen3's does."""
    _appended_text(tokenizer, {"role": "user", "content": "?"})


def _appended_text(tokenizer: Tokenizer, message: dict[str, str]) -> tuple[str, str]:
    """What the template writes to end the assistant's turn, and the message behind it."""
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER_PLACEHOLDER}]
    before = tokenizer.chat_text(said, add_generation_prompt=False)
    after = tokenizer.chat_text([*said, message], add_generation_prompt=False)
    if not after.startswith(before) or ANSWER_PLACEHOLDER not in before:
        raise UserError(
            "the chat template rewrites earlier text when a message is added (Qwen3's does, with thinking), so an environment of "
            "several turns cannot go on behind what the model wrote; set data.template.kind=plain, or give the model's directory a "
            "chat template that only adds"
        )
    return before[before.rindex(ANSWER_PLACEHOLDER) + len(ANSWER_PLACEHOLDER) :], after[len(before) :]
