"""`Dialogue`: a conversation on token ids, for environments of the contract on tokens (`TokenEnvironment`)."""

from __future__ import annotations

import functools

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.data.prompt_pool import Prompt
from burnish.environments.chat_shapes import ANSWER, USER, Shape
from burnish.environments.dialogue import ChatRenderer
from burnish.models.tokenizer import Tokenizer


class Dialogue:
    """A conversation on token ids. It appends whatever the template would rewrite (`keep`)."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, role: str = "user") -> None:
        self.tokenizer, self.role, self.is_chat = tokenizer, role, prompt.is_chat
        if self.is_chat:
            self._renderer = _appending_renderer(tokenizer)
            self._transition = self._renderer.transition((USER,), ANSWER, (Shape(role),))
            self._default = _opening(tokenizer)
            self.opening = self._opening_of(prompt.text)
            """Text that opens the assistant's turn in this prompt. Some templates write none (`[INST] .. [/INST]`)."""

    def _opening_of(self, prompt: str) -> str:
        """Return the end of the prompt from the assistant marker on. It includes what `data.template.kwargs` add after the marker."""
        marker = self._default.strip()
        if not marker:
            return self._default
        at = prompt.rfind(marker)
        if at < 0:
            raise UserError(
                f"the chat template opens the assistant's turn with {marker!r}, which this prompt does not contain, so an environment cannot "
                "tell how the next turn begins; leave out data.template.kwargs, or set data.template.kind=plain"
            )
        return prompt[at:]

    def reply(self, completion: list[int], text: str) -> tuple[int, ...]:
        """Return the tokens that append a message to a completion and open the next turn."""
        if not self.is_chat:
            return tuple(self.tokenizer.encode(self.tokenizer.literal(text)))
        after = self._transition.text_after([{"role": self.role, "content": text}])
        after = after.removesuffix(self._default) + self.opening
        return self._renderer.tokens_after(completion, after, self._transition.has_end_token)


def _opening(tokenizer: Tokenizer) -> str:
    """Return what the template writes to open an assistant turn, without variables."""
    messages = [{"role": "user", "content": "?"}]
    return tokenizer.chat_text(messages)[len(tokenizer.chat_text(messages, add_generation_prompt=False)) :]


@functools.lru_cache(maxsize=8)
def _appending_renderer(tokenizer: Tokenizer) -> ChatRenderer:
    return ChatRenderer(tokenizer, Template(kind="chat"), history="keep")


@functools.lru_cache(maxsize=8)
def check_template_appends(tokenizer: Tokenizer) -> None:
    """Raise if `Dialogue` cannot append messages with this chat template."""
    _appending_renderer(tokenizer).transition((USER,), ANSWER, (USER,)).rendered_after(
        [{"role": "user", "content": "?"}]
    )
