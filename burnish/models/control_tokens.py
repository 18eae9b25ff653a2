"""Control tokens: which tokens of a tokenizer are markup, and how their names stay text in what users and models write.

`<|im_end|>` in a user's message must not become the token that ends a turn. A tokenizer finds its control
tokens anywhere in a text, also where a data row, a judged answer or a client wrote their names. So `literal` inserts a
mark after the first character of every such name in text from outside, before the template is rendered. The template's own
control tokens have no mark. `encode` passes a marked text to a copy of the tokenizer that looks for control tokens first
and removes the marks afterwards, in its normalizer. The marked name is then split like other text and decodes to exactly
what was written. A text without such a name is unchanged.

Control tokens are added tokens that are `special`, the end tokens, and other added tokens in angle or square brackets that
are in the chat template (such as `<｜User｜>`). Plain tags such as `<think>` or `</tool_call>` that are not special are not
control tokens: models read and write them inside messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from burnish.config.errors import UserError

# Unicode noncharacters, reserved for use inside a program. A text that contains them anyway is preserved: its own ESCAPE is
# written as ESCAPE OWN.
ESCAPE, HIDDEN, OWN = "\ufdd0", "\ufdd1", "\ufdd2"
MARK = ESCAPE + HIDDEN
MARKUP, TAG = re.compile(r"<\S+>|\[\S+\]"), re.compile(r"</?[A-Za-z][\w-]*>")
CONTROL_TOKEN_SCORE = -1e6
"""Score of a control token as a piece of text in a unigram model: too low to be chosen."""


class ControlTokens:
    """The control tokens of a transformers tokenizer; marks and encodes texts that contain their names."""

    def __init__(self, inner: Any, end_ids: Iterable[int]) -> None:
        self._inner = inner
        template = json.dumps(inner.chat_template or "", ensure_ascii=False)
        added = inner.added_tokens_decoder
        ids = {i for i, token in added.items() if token.special or i in set(end_ids)} | set(inner.all_special_ids)
        markup = {
            i: t.content for i, t in added.items() if MARKUP.fullmatch(t.content) and not TAG.fullmatch(t.content)
        }
        ids |= {i for i, name in markup.items() if _json_escaped(name) in template}
        names = {i: added[i].content if i in added else inner.convert_ids_to_tokens(i) for i in ids}
        # A name of one character cannot be split by a mark.
        self.ids = {i for i, name in names.items() if len(name) > 1}
        self.names = sorted((names[i] for i in self.ids), key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")

    def literal(self, text: str) -> str:
        """Mark every name of a control token in a text; returns the same object if there is none."""
        if ESCAPE in text:
            text = text.replace(ESCAPE, ESCAPE + OWN)
        while self._pattern.search(text):  # names may overlap: marking one can leave another
            text = self._pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
        return text

    def without_names(self, text: str) -> str:
        """Remove every unmarked name of a control token from a text."""
        return self._pattern.sub("", text)

    def find(self, text: str) -> int | None:
        """The position of the first unmarked name in a text."""
        found = self._pattern.search(text)
        return None if found is None else found.start()

    def literal_values(self, value: Any) -> Any:
        """Apply `literal` to all texts in a tree of plain values, keys included.

        Any other object becomes the name of its type, because a template must not call methods of an image or a file.
        """
        if isinstance(value, str):
            return self.literal(str.__str__(value))
        if isinstance(value, dict):
            return {self.literal_values(key): self.literal_values(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.literal_values(item) for item in value]
        return value if value is None or isinstance(value, bool | int | float) else f"<{type(value).__name__}>"

    def encode(self, text: str) -> list[int]:
        """Token ids of a marked text: only unmarked names become control tokens."""
        tokens: list[int] = self.unmarking.encode(text, add_special_tokens=False).ids
        if sum(token in self.ids for token in tokens) != len(self._pattern.findall(text)):
            found = self._pattern.search(unmarked(text))
            raise UserError(
                f"the text holds {found[0] if found else 'a name'!r}, a control token of this tokenizer, which cannot write it as plain "
                "text; remove it from the text"
            )
        return tokens

    @cached_property
    def unmarking(self) -> Any:
        """A copy of the tokenizer that removes marks after it has looked for control tokens."""
        from tokenizers import Tokenizer

        backend = getattr(self._inner, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"the text holds the name of a control token, which a {type(self._inner).__name__} cannot write as plain text; remove "
                "it from the text, or save the tokenizer with a tokenizer.json"
            )
        state = json.loads(backend.to_str())
        names = set(self.names)
        for token in state["added_tokens"]:
            if token["content"] in names:
                token["normalized"] = False  # otherwise it would also be matched after the normalizer
        if state["model"].get("type") == "Unigram":
            pieces = state["model"]["vocab"]
            state["model"]["vocab"] = [
                [text, CONTROL_TOKEN_SCORE if text in names else score] for text, score in pieces
            ]
        steps = [_replace(MARK, ""), _replace(ESCAPE + OWN, ESCAPE)]
        steps += [state["normalizer"]] if state["normalizer"] else []
        state["normalizer"] = {"type": "Sequence", "normalizers": steps}
        state["truncation"] = state["padding"] = None
        return Tokenizer.from_str(json.dumps(state))


def is_marked(text: str) -> bool:
    """Whether a text has marks or escapes of `literal`."""
    return ESCAPE in text


def unmarked(text: str) -> str:
    """A marked text as it was before `literal`."""
    return text.replace(MARK, "").replace(ESCAPE + OWN, ESCAPE) if ESCAPE in text else text


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _json_escaped(text: str) -> str:
    """A text as it appears inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
