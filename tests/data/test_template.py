from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.data.template import render, render_text
from burnish.models.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think %}(hm){% endif %}{% endif %}"
)
LETTERS = "".join(map(chr, range(32, 127))) + "\n"
SHARED = Path(__file__).parents[2] / "../shared/data"


def plain_tokenizer() -> Tokenizer:
    return Tokenizer.from_characters(LETTERS)


def chat_tokenizer() -> Tokenizer:
    inner = Tokenizer.from_characters(LETTERS)._inner
    inner.chat_template = CHATML
    return Tokenizer(inner)


def row(prompt: Any = "1+1?") -> Row:
    return Row("s/0", prompt, "s", "2", {})


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "template", "expected"),
    [
        (plain_tokenizer, "1+1?", {}, "1+1?"),
        (plain_tokenizer, "{x} {prompt}", {"text": "Q: {prompt} {y}"}, "Q: {x} {prompt} {y}"),
        (plain_tokenizer, MESSAGES, {}, "be brief\n1+1?"),
        (chat_tokenizer, "1+1?", {"kind": "plain"}, "1+1?"),
        (chat_tokenizer, "1+1?", {}, "<user>1+1?;<assistant>"),
        (chat_tokenizer, "{x}", {"kind": "chat", "system": "{s}"}, "<system>{s};<user>{x};<assistant>"),
        (chat_tokenizer, MESSAGES, {"kwargs": {"think": True}}, "<system>be brief;<user>1+1?;<assistant>(hm)"),
    ],
)
def test_rendered_text_and_tokens(tokenizer: Any, prompt: Any, template: dict[str, Any], expected: str) -> None:
    made = tokenizer()
    assert render_text(row(prompt), made, Template(**template)) == expected
    assert render(row(prompt), made, Template(**template)).tokens == made.encode(expected)


def test_r1_zero_asks_for_tags_and_ends_with_the_assistant() -> None:
    text = render_text(row(), plain_tokenizer(), Template(kind="plain", text="r1-zero"))
    assert text.startswith("A conversation between User and Assistant.")
    assert text.endswith("User: 1+1?\nAssistant:")


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "template", "message"),
    [
        (plain_tokenizer, "x", {"kind": "chat"}, "the tokenizer has no chat template"),
        (plain_tokenizer, "x", {"system": "s"}, r"template\.system is for chat templates"),
        (chat_tokenizer, "x", {"kind": "plain", "kwargs": {"think": True}}, r"template\.kwargs is for chat"),
        (chat_tokenizer, "x", {"text": "r1-zero"}, r"set template\.kind=plain"),
        (chat_tokenizer, "x", {"kwargs": {"thinking": True}}, r"template\.kwargs\.thinking has no effect"),
        (chat_tokenizer, "x", {"kwargs": {"add_generation_prompt": False}}, "has no effect"),
        (chat_tokenizer, MESSAGES, {"system": "s"}, "the row has its own system message"),
        (plain_tokenizer, "x", {"text": "r1zero"}, "did you mean 'r1-zero'"),
    ],
)
def test_options_that_do_not_apply_are_errors(
    tokenizer: Any, prompt: Any, template: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        render(row(prompt), tokenizer(), Template(**template))


def test_a_plain_prompt_begins_with_the_tokenizers_own_start_token() -> None:
    directory = SHARED / "models/stories260k"
    if not directory.is_dir():
        pytest.skip("the stories260k tokenizer is not on this machine")
    tokenizer = Tokenizer.load(directory)
    assert render(row("Once"), tokenizer, Template()).tokens == tokenizer._inner.encode("Once")
