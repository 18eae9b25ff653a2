"""Text is text: what keeps `<|im_end|>` in a user's message from becoming the token that ends a turn.

A tokenizer finds its special tokens anywhere in a text, also where a data row, a judged answer or a client wrote their names. So
every name of a control token in such a text gets a mark behind its first character before the template is rendered. The
template's own control tokens have no mark. `encode` hands a text with marks to a copy of the tokenizer that looks for control
tokens first and takes the marks out afterwards, in its normalizer. The marked name is then split like any other text, and
decodes to exactly what was written. A text without such a name is never touched.

Control tokens are all added tokens that are `special`, the end tokens, and other added tokens in angle or square brackets that stand
in the chat template (`<｜User｜>` of some models). Plain tags such as `<think>` or `</tool_call>` that are not special are not
among them: models write and read them inside messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from burnish.config.errors import UserError

# Two code points that Unicode sets aside for use inside a program: no text to be exchanged has them. One that does keeps them: its
# own ESCAPE is written as ESCAPE OWN.
ESCAPE, HIDDEN, OWN = "\ufdd0", "\ufdd1", "\ufdd2"
MARK = ESCAPE + HIDDEN
MARKUP, TAG = re.compile(r"<\S+>|\[\S+\]"), re.compile(r"</?[A-Za-z][\w-]*>")
UNLIKELY = -1e6
"""Score of a control token as a piece of text, in a unigram model."""


class ControlTokens:
    """The control tokens of a tokenizer of transformers, and texts in which their names are marked."""

    def __init__(self, inner: Any, end_ids: Iterable[int]) -> None:
        self._inner = inner
        template = json.dumps(inner.chat_template or "", ensure_ascii=False)
        added = inner.added_tokens_decoder
        ids = {i for i, token in added.items() if token.special or i in set(end_ids)} | set(inner.all_special_ids)
        markup = {
            i: t.content for i, t in added.items() if MARKUP.fullmatch(t.content) and not TAG.fullmatch(t.content)
        }
        ids |= {i for i, name in markup.items() if _quoted(name) in template}
        names = {i: added[i].content if i in added else inner.convert_ids_to_tokens(i) for i in ids}
        # A name of one character cannot be broken by a mark.
        self.ids = {i for i, name in names.items() if len(name) > 1}
        self.names = sorted((names[i] for i in self.ids), key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")

    def literal(self, text: str) -> str:
        """A text with a mark in every name of a control token; the same object where it has none."""
        if ESCAPE in text:
            text = text.replace(ESCAPE, ESCAPE + OWN)
        while self._pattern.search(text):  # names may overlap: breaking one can leave another
            text = self._pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
        return text

    def literal_values(self, value: Any) -> Any:
        """The same for all texts in a tree of plain values, keys included.

        Any other object becomes the name of its type: a template must not reach the methods of an image or a file.
        """
        if isinstance(value, str):
            return self.literal(str.__str__(value))
        if isinstance(value, dict):
            return {self.literal_values(key): self.literal_values(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.literal_values(item) for item in value]
        return value if value is None or isinstance(value, bool | int | float) else f"<{type(value).__name__}>"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text with marks: control tokens are those without."""
        tokens: list[int] = self._unmarking.encode(text, add_special_tokens=False).ids
        if sum(token in self.ids for token in tokens) != len(self._pattern.findall(text)):
            found = self._pattern.search(shown(text))
            raise UserError(
                f"the text holds {found[0] if found else 'a name'!r}, a control token of this tokenizer, which cannot write it as plain "
                "text; remove it from the text"
            )
        return tokens

    @cached_property
    def _unmarking(self) -> Any:
        """A copy of the tokenizer that drops marks after it has looked for control tokens."""
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
                token["normalized"] = False  # else it is looked for again behind the normalizer
        if state["model"].get("type") == "Unigram":
            pieces = state["model"]["vocab"]
            state["model"]["vocab"] = [[text, UNLIKELY if text in names else score] for text, score in pieces]
        steps = [_replace(MARK, ""), _replace(ESCAPE + OWN, ESCAPE)]
        steps += [state["normalizer"]] if state["normalizer"] else []
        state["normalizer"] = {"type": "Sequence", "normalizers": steps}
        state["truncation"] = state["padding"] = None
        return Tokenizer.from_str(json.dumps(state))


def is_marked(text: str) -> bool:
    """Whether `literal` has changed a text."""
    return ESCAPE in text


def shown(text: str) -> str:
    """A text as it was before it was marked."""
    return text.replace(MARK, "").replace(ESCAPE + OWN, ESCAPE) if ESCAPE in text else text


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _quoted(text: str) -> str:
    """A text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
