"""Renders a row's prompt to text and tokens: with the tokenizer's chat template, or with a plain template for base models.

Only the chat template writes control tokens. Text of rows, users and models stays text, even if it contains the name of a control token
(`models/tokenizer.py`), unless `template.kind=prerendered` says that the prompt is rendered already. The template writes one mark for
each image of a message, and `place_pictures` replaces it by the image's placeholder tokens. Nothing expands them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from burnish.config.errors import UserError, did_you_mean
from burnish.core.pictures import PictureSpan, shifted
from burnish.data.images import Media, VideoInput, content_text, media_of, with_text
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


class RenderedPrompt(NamedTuple):
    """The prompt of a row as a model reads it."""

    text: str
    """For people: as the template wrote it, with one mark for each image."""
    tokens: list[int]
    pictures: tuple[PictureSpan, ...] = ()
    """The images among the tokens, in order."""

    def text_tokens(self, reader: str) -> list[int]:
        """The tokens for a reader that takes no images. A prompt with images is an error that names the reader."""
        if self.pictures:
            raise UserError(f"the prompt has images, and {reader} reads text only: leave such rows out, or turn it off")
        return self.tokens


def render(row: Row, tokenizer: Tokenizer, template: Template) -> RenderedPrompt:
    """Render the prompt of a row. Each image has its placeholder tokens in `tokens`."""
    media = media_for(as_messages(row.prompt, "user"), tokenizer)
    text = render_text(row, tokenizer, template)
    waiting = iter(media)
    tokens, pictures = place_pictures(tokenize_rendered(text, tokenizer, template), waiting, tokenizer)
    check_all_placed(waiting, len(media))
    return RenderedPrompt(tokenizer.unmarked(text), tokens, pictures)


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


def place_pictures(
    tokens: list[int], media: Iterator[Media], tokenizer: Tokenizer
) -> tuple[list[int], tuple[PictureSpan, ...]]:
    """Replace the marks of images and videos by their placeholder tokens, once. Each mark takes the next of `media`.

    Text that only contains the name of a mark has no such token. `check_all_placed` looks for media without a mark.
    """
    processor = tokenizer.image_processor
    if processor is None:
        return tokens, ()
    marks = {processor.image_mark, processor.video_mark}
    if marks.isdisjoint(tokens):
        return tokens, ()
    found: list[int] = []
    pictures: list[PictureSpan] = []
    for token in tokens:
        if token not in marks:
            found.append(token)
            continue
        item = next(media, None)
        if item is None or (token == processor.video_mark) != isinstance(item, VideoInput):
            kind = "nothing" if item is None else "a video" if isinstance(item, VideoInput) else "an image"
            raise UserError(
                f"the rendered prompt has a mark {tokenizer.decode([token], skip_special=False)!r} that stands for {kind}; the chat "
                "template should write one mark for each image and each video, in their order"
            )
        if isinstance(item, VideoInput):
            expansion = processor.video(item.load(), item.frames_per_second)
        else:
            expansion = processor.image(item.load())
        pictures += shifted(expansion.pictures, len(found))
        found += expansion.tokens
    return found, tuple(pictures)


def media_for(messages: list[Message], tokenizer: Tokenizer) -> list[Media]:
    """The images and videos of messages, for a model that can see them."""
    media = media_of(messages)
    if media and tokenizer.image_processor is None:
        is_given = "an image is" if len(media) == 1 else f"{len(media)} images are"
        raise UserError(
            f"{is_given} given, but this model reads text only: use a vision-language model, or leave such rows out"
        )
    return media


def check_all_placed(media: Iterator[Media], num_media: int) -> None:
    """Raise a UserError if images or videos of a prompt are left, because the template wrote no mark for them."""
    num_left = sum(1 for _ in media)
    if num_left:
        raise UserError(
            f"the chat template of this model wrote {num_media - num_left} marks for {num_media} images and videos: it has no place for "
            "images in such messages, or reads no videos"
        )


def prerendered_text(value: str | list[Message], what: str) -> str:
    """Check that a prerendered prompt or completion is text."""
    if not isinstance(value, str):
        raise UserError(
            f"template.kind=prerendered needs texts that are rendered already, but the {what} is a list of messages (a row with images "
            "always is)"
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
    return text.replace(PROMPT_PLACEHOLDER, _literal_prompt(prompt, tokenizer))


def _literal_prompt(prompt: str | list[Message], tokenizer: Tokenizer) -> str:
    """A prompt as `prompt_as_text` has it, for `encode`: only what stands for an image is a control token."""
    contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return "\n".join(literal_content(content, tokenizer) for content in contents)


def literal_content(content: str | list[Message], tokenizer: Tokenizer) -> str:
    """The content of a message for a text without a chat template. A block of an image becomes the model's own mark."""
    if isinstance(content, str):
        return tokenizer.literal(content)
    return "".join(
        tokenizer.literal(block["text"]) if block["type"] == "text" else tokenizer.media_mark(block["type"])
        for block in content
    )


def prompt_as_text(prompt: str | list[Message]) -> str:
    """A prompt as one text; the contents of messages are joined by line breaks, and `<image>` stands for an image."""
    return prompt if isinstance(prompt, str) else "\n".join(content_text(m["content"]) for m in prompt)


def with_suffix(prompt: str | list[Message], suffix: str, where: str) -> str | list[Message]:
    """A prompt with a text appended to the last user message."""
    if isinstance(prompt, str):
        return prompt + suffix
    last = max((i for i, m in enumerate(prompt) if m["role"] == "user"), default=None)
    if last is None:
        raise UserError(f"{where}: no message has the role user, so {suffix!r} cannot be appended to one")
    asked = {**prompt[last], "content": with_text(prompt[last]["content"], suffix)}
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
