"""Dialogues with images: what is appended or rewritten has the tokens and images of the whole conversation rendered at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.core.pictures import PictureSpan
from burnish.data.row import Row
from burnish.data.template import render
from burnish.environments.base import Body
from burnish.environments.chat_images import IMAGE
from burnish.environments.dialogue import ChatRenderer, Conversation
from burnish.models.tokenizer import Tokenizer
from tests.seeing_tokenizer import BLOCKS_ONLY, CHAT, scene, seeing_tokenizer

FORGETFUL = CHAT.replace(
    "{{ m.content }}{% else %}",
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}{% else %}",
)
"""Leaves the reasoning out of earlier answers, as Qwen3's does."""


def image(seed: int) -> dict[str, Any]:
    return {"type": "image", "image": scene(16, 8 * (1 + seed), seed)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


OPENING = [{"role": "user", "content": [text("Look: "), image(0), text("What is it?")]}]
NEXT = [
    [{"role": "user", "content": [image(1), text("and this? <|image_pad|> is a word")]}],
    [{"role": "user", "content": "only words"}],
    [{"role": "user", "content": [image(2), image(0)]}],
]


def placed(tokens: Any, spans: tuple[PictureSpan, ...]) -> list[Any]:
    """Tokens with the key of its image in place of each placeholder."""
    found = list(tokens)
    for span in spans:
        found[span.start : span.end] = [(span.picture.key, k) for k in range(span.picture.num_tokens)]
    return found


def said(tokenizer: Tokenizer, words: str) -> list[int]:
    return [*tokenizer.encode(words), tokenizer.eos_ids[0]]


def played(tokenizer: Tokenizer, conversation: Conversation, answers: list[str]) -> tuple[list[Any], list[bool]]:
    """The context before the next answer, with images, and which turns were branches."""
    context, branches = placed(conversation.tokens, conversation.pictures), []
    for answer, messages in zip(answers, NEXT, strict=True):
        completion = said(tokenizer, answer)
        extension = conversation.extend(completion, messages)
        own = placed(extension.tokens, extension.pictures)
        context = own if extension.is_branch else context + completion + own
        branches.append(extension.is_branch)
    return context, branches


def at_once(tokenizer: Tokenizer, answers: list[str]) -> list[Any]:
    messages: list[Any] = list(OPENING)
    for answer, following in zip(answers, NEXT, strict=True):
        messages += [{"role": "assistant", "content": answer}, *following]
    rendered = render(Row("", messages, "", None), tokenizer, Template())
    return placed(rendered.tokens, rendered.pictures)


@pytest.mark.parametrize("template", [CHAT, BLOCKS_ONLY])
def test_appended_turns_are_the_conversation_rendered_at_once(template: str) -> None:
    tokenizer = seeing_tokenizer(template)
    answers = ["A cat.", "A dog.", "Fine."]
    context, branches = played(tokenizer, ChatRenderer(tokenizer).open(OPENING), answers)
    assert branches == [False] * 3
    assert context == at_once(tokenizer, answers)
    assert sum(isinstance(token, tuple) for token in context) == 2 * (1 + 2 + 3 + 1)


def test_a_rewritten_context_has_all_images_where_they_were() -> None:
    tokenizer = seeing_tokenizer(FORGETFUL)
    answers = ["<think>hm</think>A cat.", "<think>so</think>A dog.", "<think>ah</think>Fine."]
    context, branches = played(tokenizer, ChatRenderer(tokenizer).open(OPENING), answers)
    assert branches == [True] * 3
    assert context == at_once(tokenizer, answers)


def test_without_a_chat_template_images_stand_between_the_words() -> None:
    tokenizer = seeing_tokenizer(None)
    conversation = ChatRenderer(tokenizer).open(OPENING)
    assert [span.picture.num_tokens for span in conversation.pictures] == [2]
    extension = conversation.extend([5], NEXT[0])
    (span,) = extension.pictures
    assert span.picture.num_tokens == 4
    assert tokenizer.decode(extension.tokens[span.end :]) == "and this? <|image_pad|> is a word"


def test_equal_openings_share_their_tokens_and_other_images_do_not() -> None:
    renderer = ChatRenderer(seeing_tokenizer())
    again, other = scene(16, 8, 0).copy(), scene(16, 8, 5)
    first, second, third = (
        renderer.open([{"role": "user", "content": [{"type": "image", "image": pixels}]}])
        for pixels in (scene(16, 8, 0), again, other)
    )
    assert first.tokens is second.tokens
    assert first.tokens == third.tokens
    assert first.tokens is not third.tokens
    assert first.pictures[0].picture.key == second.pictures[0].picture.key != third.pictures[0].picture.key


def test_a_fork_has_the_images_of_its_own_past() -> None:
    tokenizer = seeing_tokenizer(FORGETFUL)
    one = ChatRenderer(tokenizer).open(OPENING)
    other = one.fork()
    answer = said(tokenizer, "<think>hm</think>A cat.")
    assert len(one.extend(answer, NEXT[0]).pictures) == 2
    assert len(other.extend(answer, NEXT[2]).pictures) == 3


@pytest.mark.parametrize("template", [CHAT, FORGETFUL, None])
def test_bodies_of_messages_are_their_words_and_no_image(template: str | None) -> None:
    tokenizer = seeing_tokenizer(template)
    conversation = ChatRenderer(tokenizer, marks_bodies=True).open(OPENING)
    messages = [{"role": "user", "content": [text("left "), image(1), text("right")]}]
    extension = conversation.extend(said(tokenizer, "<think>hm</think>A cat."), messages)
    assert extension.observed is not None
    assert len(extension.observed) == len(extension.tokens)
    body = [token for token, role in zip(extension.tokens, extension.observed, strict=True) if role]
    assert tokenizer.decode(body) == "leftright"


def test_bodies_that_an_environment_names_count_an_image_as_a_character() -> None:
    tokenizer = seeing_tokenizer()
    conversation = ChatRenderer(tokenizer, marks_bodies=True).open(OPENING)
    messages = [{"role": "user", "content": [image(1), text("say right")]}]
    extension = conversation.extend(said(tokenizer, "A cat."), messages, bodies=[Body("tool", 5, 10)])
    assert extension.observed is not None
    body = [token for token, role in zip(extension.tokens, extension.observed, strict=True) if role == 1]
    assert tokenizer.decode(body) == "right"


def test_what_is_no_image_is_refused_with_its_place() -> None:
    renderer = ChatRenderer(seeing_tokenizer())
    with pytest.raises(UserError, match=r"messages\[0\].content\[1\] should be a block"):
        renderer.open([{"role": "user", "content": [text("a"), {"type": "sound"}]}])
    with pytest.raises(UserError, match="uint8"):
        renderer.open([{"role": "user", "content": [{"type": "image", "image": np.zeros((4, 4, 3))}]}])
    with pytest.raises(UserError, match="system message of a dialogue has an image"):
        renderer.open([{"role": "system", "content": [image(0)]}, *OPENING])


def test_a_stand_in_that_a_user_wrote_is_no_image() -> None:
    conversation = ChatRenderer(seeing_tokenizer()).open([{"role": "user", "content": f"a{IMAGE}b"}])
    assert conversation.pictures == ()


def test_a_model_that_reads_text_refuses_images(tmp_path: Any) -> None:
    from tests.made_tokenizers import byte_level

    tokenizer = byte_level(eos="<|im_end|>", chat_template=CHAT, additional_special_tokens=["<|im_start|>"])
    with pytest.raises(UserError, match="reads text only"):
        ChatRenderer(tokenizer).open(OPENING)
