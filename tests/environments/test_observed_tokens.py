"""Marks of what the environment said: exactly the bodies of messages, whatever the template writes around them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.core.observations import ROLE_NUMBERS
from burnish.data.row import Message
from burnish.environments.base import Body, Observation, filled
from burnish.environments.dialogue import ChatRenderer, Extension
from burnish.environments.observed_tokens import mark_bodies, text_bodies, without_marks
from burnish.environments.wire import decode_value, encode_value
from burnish.models.tokenizer import Tokenizer
from tests.environments.chat_templates import TEMPLATES, small_tokenizer, tokenizer_with
from tests.environments.test_dialogue import TOOLS, parse, user

TOOL, USER = ROLE_NUMBERS["tool"], ROLE_NUMBERS["user"]
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {}}}]}  # fmt: skip


def bodies(tokenizer: Tokenizer, found: Extension, role: int) -> str:
    """The text of the tokens of a role."""
    marks = found.observed if found.observed is not None else np.zeros(len(found.tokens))
    assert len(marks) == len(found.tokens)
    return tokenizer.decode(
        [t for t, mark in zip(found.tokens, marks, strict=True) if mark == role], skip_special=False
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ["No, 17 is too low.", "  user\n x < 3 ", "a <|im_end|></s> b", 'say "no"\nthen é'])
def test_the_bodies_of_messages_are_marked_and_nothing_of_the_template(name: str, text: str) -> None:
    tokenizer = small_tokenizer(name)
    renderer = ChatRenderer(tokenizer, parse=parse, marks_bodies=True)
    plain = ChatRenderer(tokenizer, parse=parse)
    end = tokenizer.eos_ids[0]
    for messages, answer in (
        ([user(text)], None),
        ([{"role": "tool", "content": text, "tool_call_id": "call00000", "name": "add"}], CALLED),
    ):
        said = [*tokenizer.encode("two"), end]
        found, bare = (one.open("1+1?", TOOLS).extend(said, messages, answer) for one in (renderer, plain))
        assert found == bare, "marks change no token"
        assert bare.observed is None
        role = USER if answer is None else TOOL
        marked, wanted = bodies(tokenizer, found, role), text.strip()
        if name == "mistral" and role == TOOL and wanted[0] == "a":
            wanted = wanted[1:]  # a token joins it with the template's quotation mark
        assert marked in (wanted, json.dumps(wanted, ensure_ascii=False)[1:-1])
        assert not bodies(tokenizer, found, USER + TOOL - role)


def test_a_result_in_a_user_message_is_what_the_tool_said() -> None:
    tokenizer = small_tokenizer("gemma")  # it has no role for tools, and joins messages
    conversation = ChatRenderer(tokenizer, marks_bodies=True).open("1+1?")
    results: list[Message] = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}, user("so?")]
    found = conversation.extend([*tokenizer.encode("add"), tokenizer.eos_ids[0]], results)
    assert (bodies(tokenizer, found, TOOL), bodies(tokenizer, found, USER)) == ("34", "so?")


def test_a_branch_marks_the_new_messages_alone() -> None:
    tokenizer = small_tokenizer("qwen3")
    conversation = ChatRenderer(tokenizer, marks_bodies=True).open("1+1?")
    said = [*tokenizer.encode("<think>\nhm\n</think>\n\ntwo"), tokenizer.eos_ids[0]]
    for text in ("so?", "sure?"):
        found = conversation.extend(said, [user(text)])
        assert found.is_branch
        assert bodies(tokenizer, found, USER) == text
        assert bodies(tokenizer, found, TOOL) == ""


def test_a_template_that_depends_on_the_length_of_a_body_marks_nothing() -> None:
    counts = "{% for m in messages %}[INST]{{ m.content|length }}:{{ m.content }}</s>{% endfor %}"
    tokenizer = tokenizer_with(counts, "</s>")
    found = ChatRenderer(tokenizer, marks_bodies=True).open("1+1?").extend(tokenizer.encode("two"), [user("so?")])
    assert "3:so?" in tokenizer.decode(found.tokens)
    assert found.observed is None


def test_plain_text_and_text_inside_the_turn() -> None:
    tokenizer = small_tokenizer("qwen3")
    plain = ChatRenderer(tokenizer, Template(kind="plain"), marks_bodies=True).open("1+1?")
    found = plain.extend([5], [{"role": "tool", "content": "3 4"}, user("so?")])
    assert (bodies(tokenizer, found, TOOL), bodies(tokenizer, found, USER)) == ("3 4", "so?")
    conversation = ChatRenderer(tokenizer, marks_bodies=True).open("who?")
    for text, body in (
        ("\n\n<information>Ann <|im_end|> x</information>\n\n", "Ann <|im_end|> x"),
        ("```output\n12\n```\n", "12"),
        ("\nTry again.\n", "Try again."),
    ):
        found = conversation.append_text([5], text)
        assert tokenizer.decode(found.tokens, skip_special=False) == text
        assert bodies(tokenizer, found, TOOL).strip() == body
    found = conversation.append_text([5], ">99;", [Body("tool", 1, 3)])
    assert bodies(tokenizer, found, TOOL) == "99"
    assert conversation.append_text([5], ">99;", []).observed is None


def test_bodies_pass_the_wire_and_wrong_ones_are_refused() -> None:
    text, found = filled("<r>{result}</r>{result}", "ab", at=2)
    assert (text, found) == ("<r>ab</r>ab", [Body("tool", 5, 7), Body("tool", 11, 13)])
    seen = Observation(messages=(user("ab"), user("cd")), bodies=(Body("tool", 1, 2, 1),))
    again: Any = decode_value(json.loads(json.dumps(encode_value(seen))))
    marked = mark_bodies(again.messages, again.bodies)
    assert [without_marks(m["content"]) for m in marked] == [("ab", []), ("cd", [(1, 2, TOOL)])]
    with pytest.raises(UserError, match="characters 1 to 9 of message 0"):
        mark_bodies([user("ab")], [Body("user", 1, 9)])
    assert text_bodies("<a>x</b>") == [Body("tool", 0, 8)]
