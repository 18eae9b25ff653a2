"""Renders a row's prompt to text and tokens: with the tokenizer's chat template, or with a plain template for base models.

Only the chat template writes control tokens. Text of rows, users and models stays text, even if it contains the name of a control token
(`models/tokenizer.py`), unless `template.kind=prerendered` says that the prompt is rendered already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from burnish.config.errors import UserError, did_you_mean
from burnish.data.row import Message, Row

if TYPE_CHECKING:
    from burnish.config.data import Template
    from burnish.models.tokenizer import Tokenizer

PROMPT_PLACEHOLDER = "{prompt}"
NAMED_TEMPLATES = {
    # DeepSeek-R1 (2501.12948), table 1, with a line break where the table runs the turns together.
    "r1-zero": (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
        "assistant first thinks about the reasoning process in the mind and then provides the user with the answer. "
        "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, "
        "respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        "User: {prompt}\nAssistant:"
    ),
}


def render(row: Row, tokenizer: Tokenizer, template: Template) -> list[int]:
    """The prompt tokens of a row."""
    text = render_text(row, tokenizer, template)
    return tokenize_rendered(text, tokenizer, template)


def render_text(row: Row, tokenizer: Tokenizer, template: Template) -> str:
    """The prompt text of a row, for `tokenize_rendered`; `tokenizer.shown` makes it readable."""
    if template.prerendered:
        return prerendered_text(row.prompt, "prompt")
    if template_kind(tokenizer, template) == "plain":
        return plain_text(row.prompt, template, tokenizer)
    return tokenizer.chat_text(with_system(as_messages(row.prompt, "user"), template), **template.kwargs)


def tokenize_rendered(text: str, tokenizer: Tokenizer, template: Template) -> list[int]:
    """Tokenize a rendered text. A chat template writes its own BOS; a plain text gets the tokenizer's."""
    if template.prerendered:
        return tokenizer.encode_prerendered(text)
    return tokenizer.encode(text, special=template_kind(tokenizer, template) == "plain")


def prerendered_text(value: str | list[Message], what: str) -> str:
    """Check that a prerendered prompt or completion is text."""
    if not isinstance(value, str):
        raise UserError(
            f"template.kind=prerendered needs texts that are rendered already, but the {what} is a list of messages"
        )
    return value


def template_kind(tokenizer: Tokenizer, template: Template) -> Literal["chat", "plain"]:
    """The kind of template for this tokenizer. Options of the other kind are errors, so that none is silently ignored."""
    if (
        template.prerendered
        or template.kind == "plain"
        or (template.kind == "auto" and not tokenizer.has_chat_template)
    ):
        unused = [key for key in ("system", "kwargs") if getattr(template, key)]
        if unused:
            why = "kind is plain" if template.kind == "plain" else "the tokenizer has no chat template"
            raise UserError(f"template.{unused[0]} is for chat templates and has no effect here: {why}")
        return "plain"
    if not tokenizer.has_chat_template:
        raise UserError("template.kind=chat, but the tokenizer has no chat template; use kind=plain with a text")
    if template.text != PROMPT_PLACEHOLDER:
        raise UserError(
            "template.text has no effect with the tokenizer's chat template; set template.kind=plain to use it"
        )
    for key in template.kwargs:
        if key in ("messages", "add_generation_prompt") or not tokenizer.chat_template_mentions(key):
            raise UserError(
                f"template.kwargs.{key} has no effect: the chat template has no variable of that name to set"
            )
    return "chat"


def plain_text(prompt: str | list[Message], template: Template, tokenizer: Tokenizer) -> str:
    """Fill the prompt into the plain template. Not with `str.format`, so that braces in either survive."""
    text = NAMED_TEMPLATES.get(template.text, template.text)
    if PROMPT_PLACEHOLDER not in text:
        raise UserError(
            f"template.text {template.text!r} contains no {PROMPT_PLACEHOLDER} and is not a known template name"
            f"{did_you_mean(template.text, NAMED_TEMPLATES)} (known: {', '.join(NAMED_TEMPLATES)})"
        )
    return text.replace(PROMPT_PLACEHOLDER, tokenizer.literal(prompt_as_text(prompt)))


def prompt_as_text(prompt: str | list[Message]) -> str:
    """A prompt as one text; the contents of messages are joined by line breaks."""
    return prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)


def with_suffix(prompt: str | list[Message], suffix: str, where: str) -> str | list[Message]:
    """A prompt with a text appended to the last user message."""
    if isinstance(prompt, str):
        return prompt + suffix
    last = max((i for i, m in enumerate(prompt) if m["role"] == "user"), default=None)
    if last is None:
        raise UserError(f"{where}: no message has the role user, so {suffix!r} cannot be appended to one")
    asked = {**prompt[last], "content": prompt[last]["content"] + suffix}
    return [*prompt[:last], asked, *prompt[last + 1 :]]


def as_messages(value: str | list[Message], role: str) -> list[Message]:
    """A text as one message of this role; messages unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def with_system(messages: list[Message], template: Template) -> list[Message]:
    """The messages with the config's system message first. A row with its own system message is an error."""
    if template.system is None:
        return messages
    if messages[0]["role"] == "system":
        raise UserError(
            "the row has its own system message, and template.system would be a second one: remove one of them"
        )
    return [{"role": "system", "content": template.system}, *messages]
