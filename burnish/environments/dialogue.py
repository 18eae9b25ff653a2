"""Token-exact dialogues: `Dialogue.reply` returns the tokens that append a message to a completion and open the next assistant turn.

Only the text between two completions is tokenised: the end of the assistant's turn, the message, and the start of the next assistant turn.
To render and tokenise the whole conversation again could change sampled tokens.
"""

from __future__ import annotations

import functools

from burnish.config.errors import UserError
from burnish.data.prompt_pool import Prompt
from burnish.models.tokenizer import Tokenizer

ANSWER_PLACEHOLDER = "ANSWER"
"""The assistant's answer in the short conversations that are rendered to find out what the template writes."""


class Dialogue:
    """A conversation that begins with a prompt, in the prompt's format: the tokenizer's chat template or plain text."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, role: str = "user") -> None:
        self.tokenizer, self.role, self.is_chat = tokenizer, role, prompt.is_chat
        if self.is_chat:
            check_template_appends(tokenizer)
        self.opening = self._opening(prompt.text) if prompt.is_chat else ""
        """Text that the template writes before an assistant turn. Some templates write none (`[INST] .. [/INST]`)."""

    def _opening(self, prompt: str) -> str:
        """Return the end of the prompt from the assistant marker on. It includes what `data.template.kwargs` add after the marker."""
        messages = [{"role": "user", "content": "?"}]
        without = self.tokenizer.chat_text(messages, add_generation_prompt=False)
        opening = self.tokenizer.chat_text(messages)[len(without) :]
        marker = opening.strip()
        if not marker:
            return opening
        at = prompt.rfind(marker)
        if at < 0:
            raise UserError(
                f"the chat template opens the assistant's turn with {marker!r}, which this prompt does not contain, so an environment cannot "
                "tell how the next turn begins; leave out data.template.kwargs, or set data.template.kind=plain"
            )
        return prompt[at:]

    def reply(self, completion: list[int], text: str) -> tuple[int, ...]:
        """Return the tokens that append a message to a completion."""
        if not self.is_chat:
            return tuple(self.tokenizer.encode(self.tokenizer.literal(text)))
        ending, message = self._rendered(text)
        tokens = self.tokenizer.encode(ending + message + self.opening)
        # The model has usually sampled the token that ends its turn; it must not appear twice.
        has_ended = bool(completion) and completion[-1] == tokens[0] and self.tokenizer.is_special(tokens[0])
        return tuple(tokens[1:] if has_ended else tokens)

    def _rendered(self, text: str) -> tuple[str, str]:
        """Return the text that ends the assistant's turn, and the text of the message after it."""
        return _appended_text(self.tokenizer, {"role": self.role, "content": text})


@functools.lru_cache(maxsize=8)
def check_template_appends(tokenizer: Tokenizer) -> None:
    """Raise if the chat template changes earlier turns when a message is added, as Qwen3's does."""
    _appended_text(tokenizer, {"role": "user", "content": "?"})


def _appended_text(tokenizer: Tokenizer, message: dict[str, str]) -> tuple[str, str]:
    """Return what the template writes after an answer: the end of the assistant's turn, and the message."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER_PLACEHOLDER}]
    before = tokenizer.chat_text(messages, add_generation_prompt=False)
    after = tokenizer.chat_text([*messages, message], add_generation_prompt=False)
    if not after.startswith(before) or ANSWER_PLACEHOLDER not in before:
        raise UserError(
            "the chat template rewrites earlier text when a message is added (Qwen3's does, with thinking), so an environment of "
            "several turns cannot append to the sampled tokens; set data.template.kind=plain, or give the model's directory a "
            "chat template that only appends"
        )
    return before[before.rindex(ANSWER_PLACEHOLDER) + len(ANSWER_PLACEHOLDER) :], after[len(before) :]
