"""How a row's prompt becomes text and tokens: the tokenizer's chat template, or a plain text for base models.

Control tokens stand only where the chat template puts them. What rows, users and models say is text, also where it holds the name
of such a token (`models/tokenizer.py`), unless `template.prerendered` says that the prompt was rendered before.
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
    """The tokens a model continues to answer a row."""
    text = render_text(row, tokenizer, template)
    return tokenize_rendered(text, tokenizer, template)


def render_text(row: Row, tokenizer: Tokenizer, template: Template) -> str:
    """The text a model continues to answer a row, for `tokens_of`; `tokenizer.shown` makes it readable."""
    if template.prerendered:
        return prerendered_text(row.prompt, "prompt")
    if template_kind(tokenizer, template) == "plain":
        return plain_text(row.prompt, template, tokenizer)
    return tokenizer.chat_text(with_system(as_messages(row.prompt, "user"), template), **template.kwargs)


def tokenize_rendered(text: str, tokenizer: Tokenizer, template: Template) -> list[int]:
    """Tokens of a rendered text: a chat template writes its own BOS, a plain text gets the tokenizer's."""
    if template.prerendered:
        return tokenizer.encode_prerendered(text)
    return tokenizer.encode(text, special=template_kind(tokenizer, template) == "plain")


def prerendered_text(value: str | list[Message], what: str) -> str:
    """A prompt or completion that was rendered before the run."""
    if not isinstance(value, str):
        raise UserError(
            f"template.prerendered takes texts that are rendered already, and the {what} is a list of messages"
        )
    return value


def template_kind(tokenizer: Tokenizer, template: Template) -> Literal["chat", "plain"]:
    """Which kind applies to this tokenizer; options of the other kind are errors, so that none is ever ignored."""
    if (
        template.prerendered
        or template.kind == "plain"
        or (template.kind == "auto" and not tokenizer.has_chat_template)
    ):
        unused = [key for key in ("system", "kwargs") if getattr(template, key)]
        if unused:
            why = "kind is plain" if template.kind == "plain" else "the tokenizer has no chat template"
            raise UserError(f"template.{unused[0]} belongs to chat templates and has no effect here: {why}")
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
    """The plain template with the prompt put in as text, so that braces in either survive."""
    text = NAMED_TEMPLATES.get(template.text, template.text)
    if PROMPT_PLACEHOLDER not in text:
        raise UserError(
            f"template.text {template.text!r} has no {PROMPT_PLACEHOLDER} in it and is not a known name"
            f"{did_you_mean(template.text, NAMED_TEMPLATES)} (known: {', '.join(NAMED_TEMPLATES)})"
        )
    return text.replace(PROMPT_PLACEHOLDER, tokenizer.literal(prompt_as_text(prompt)))


def prompt_as_text(prompt: str | list[Message]) -> str:
    """A prompt as one text: messages are their contents, a line each."""
    return prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)


def with_suffix(prompt: str | list[Message], suffix: str, where: str) -> str | list[Message]:
    """A prompt with a text behind what the user says last."""
    if isinstance(prompt, str):
        return prompt + suffix
    last = max((i for i, m in enumerate(prompt) if m["role"] == "user"), default=None)
    if last is None:
        raise UserError(f"{where}: no message is the user's, so there is none to put {suffix!r} behind")
    asked = {**prompt[last], "content": prompt[last]["content"] + suffix}
    return [*prompt[:last], asked, *prompt[last + 1 :]]


def as_messages(value: str | list[Message], role: str) -> list[Message]:
    """A text as one message of a role; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def with_system(messages: list[Message], template: Template) -> list[Message]:
    """The config's system message before a row's messages; a row that brings its own leaves no room for it."""
    if template.system is None:
        return messages
    if messages[0]["role"] == "system":
        raise UserError("the row has its own system message, and template.system would be a second one: unset one")
    return [{"role": "system", "content": template.system}, *messages]
