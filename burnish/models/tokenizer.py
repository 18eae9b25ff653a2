"""Text to token ids and back: the one tokenizer everything else talks to.

A thin wrapper around a `transformers` tokenizer, loaded from a directory or made from an alphabet for the built-in
tasks. `transformers` is imported on first use only, so that importing this module stays cheap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from burnish.config.errors import UserError
from burnish.config.yaml_text import read_json_object
from burnish.models import chat_template
from burnish.models.model_families import FAMILIES
from burnish.run.checkpoint.snapshot import BytesFile, Content, write_contents

# --- Text is text: what keeps `<|im_end|>` in a user's message from becoming the token that ends a turn.
#
# A tokenizer finds its special tokens anywhere in a text, also where a data row, a judged answer or a client wrote their names. So
# every name of a control token in such a text gets a mark behind its first character before the template is rendered. The
# template's own control tokens have no mark. `encode` hands a text with marks to a copy of the tokenizer that looks for control
# tokens first and takes the marks out afterwards, in its normalizer. The marked name is then split like any other text, and
# decodes to exactly what was written. A text without such a name is never touched.
#
# Control tokens are all added tokens that are `special`, the end tokens, and other added tokens in angle or square brackets that stand
# in the chat template (`<｜User｜>` of some models). Plain tags such as `<think>` or `</tool_call>` that are not special are not
# among them: models write and read them inside messages.

# Two code points that Unicode sets aside for use inside a program: no text to be exchanged has them. One that does keeps them: its
# own ESCAPE is written as ESCAPE OWN.
ESCAPE, HIDDEN, OWN = "\ufdd0", "\ufdd1", "\ufdd2"
MARK = ESCAPE + HIDDEN
MARKUP, TAG = re.compile(r"<\S+>|\[\S+\]"), re.compile(r"</?[A-Za-z][\w-]*>")
CONTROL_TOKEN_SCORE = -1e6
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
        ids |= {i for i, name in markup.items() if _json_escaped(name) in template}
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
            found = self._pattern.search(unmarked(text))
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
            state["model"]["vocab"] = [
                [text, CONTROL_TOKEN_SCORE if text in names else score] for text, score in pieces
            ]
        steps = [_replace(MARK, ""), _replace(ESCAPE + OWN, ESCAPE)]
        steps += [state["normalizer"]] if state["normalizer"] else []
        state["normalizer"] = {"type": "Sequence", "normalizers": steps}
        state["truncation"] = state["padding"] = None
        return Tokenizer.from_str(json.dumps(state))


def is_marked(text: str) -> bool:
    """Whether `literal` has changed a text."""
    return ESCAPE in text


def unmarked(text: str) -> str:
    """A text as it was before it was marked."""
    return text.replace(MARK, "").replace(ESCAPE + OWN, ESCAPE) if ESCAPE in text else text


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _json_escaped(text: str) -> str:
    """A text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


PAD, EOS = "<pad>", "<eos>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
GENERATION_CONFIG = "generation_config.json"
REPLACEMENT_CHARACTER = "\ufffd"  # what a decoder writes for bytes that are not yet a character
MAX_CHARACTER_BYTES = 4
"""Bytes, and so tokens, of one character at most."""
MAX_PENDING_TOKENS = 16
"""Tokens that may wait for the end of a character: more of them are no text, and decoding them all for each new one would take ever longer."""


class Tokenizer:
    """Encodes, decodes and renders chats. Everything is token ids in plain lists."""

    def __init__(self, inner: Any, generation_config: dict[str, Any] | None = None, needs_bos: bool = False) -> None:
        self._inner = inner
        self._generation_config = generation_config or {}
        self._alphabet = _alphabet(inner)
        self._special_ids = frozenset(inner.all_special_ids) | {
            i for i, token in inner.added_tokens_decoder.items() if token.special
        }
        self._before = [] if self._alphabet is not None else _prefix_ids(inner)
        if needs_bos and inner.bos_token_id is not None and self._before[:1] != [inner.bos_token_id]:
            self._before = [inner.bos_token_id, *self._before]
        self.eos_ids: tuple[int, ...] = _eos_ids(inner.eos_token_id, self._generation_config)
        """Tokens that end a completion: the tokenizer's own first, then those of generation_config.json."""
        self.pad_id: int = _first(inner.pad_token_id, *self.eos_ids, 0)
        self.vocab_size: int = len(inner)
        self._contents: list[Content] | None = None  # as it is saved; it never changes

    @property
    def has_chat_template(self) -> bool:
        return self._inner.chat_template is not None

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self._inner, self.eos_ids)

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face directory; nothing is fetched from the network."""
        directory = Path(directory)
        if not directory.is_dir():
            raise UserError(f"no tokenizer at {directory}: it is not a directory")
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(
                f"no tokenizer in {directory}: expected one of {', '.join(TOKENIZER_FILES)}; "
                "copy the tokenizer files of the model there (tokenizer.json and tokenizer_config.json)"
            )
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # type: ignore[attr-defined]  # mypy leaves out transformers.models

        # tokenizer.json says everything about splitting; AutoTokenizer would for some model types (qwen2) rather
        # build the family's usual pre-tokenizer, and lose every character of a tokenizer that is not of that kind.
        loader: Any = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
        try:
            inner = loader.from_pretrained(
                str(directory),
                local_files_only=True,
                trust_remote_code=False,
                **_mistral_regex_option(directory, loader),
            )
        except Exception as error:  # files that others wrote, read by libraries that raise anything for a damaged one
            check_remote_code(directory, error)
            raise UserError(f"the tokenizer in {directory} does not load: {_one_line(error)}") from error
        for word in ("fix_mistral_regex", "trust_remote_code"):  # to the loader, no part of the tokenizer that is saved
            inner.init_kwargs.pop(word, None)
        return cls(inner, _read_generation_config(directory / GENERATION_CONFIG), _needs_bos(directory / "config.json"))

    @classmethod
    def from_characters(cls, alphabet: str) -> Tokenizer:
        """One token per character of the alphabet, plus `<pad>` and `<eos>`."""
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend
        from transformers import PreTrainedTokenizerFast

        if len(set(alphabet)) != len(alphabet):
            raise UserError(f"the alphabet {alphabet!r} has a character twice")
        backend = Backend(models.WordLevel({text: i for i, text in enumerate([PAD, EOS, *alphabet])}))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        return cls(
            PreTrainedTokenizerFast(
                tokenizer_object=backend, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
            )
        )

    def save(self, directory: str | Path) -> None:
        """Write files that `transformers.AutoTokenizer` loads unchanged."""
        write_contents(Path(directory), self.contents())

    def contents(self) -> Sequence[Content]:
        """The same as data: a thread that writes it does not meet the one that encodes.

        The end tokens of generation_config.json travel along, unless the directory already says its own: a
        checkpoint that forgot them would never stop.
        """
        if self._contents is None:
            with TemporaryDirectory() as folder:
                self._inner.save_pretrained(folder)
                files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
                self._contents = [BytesFile(str(path.relative_to(folder)), path.read_bytes()) for path in files]
            if self._generation_config:
                text = json.dumps(self._generation_config, indent=2) + "\n"
                self._contents.append(BytesFile(GENERATION_CONFIG, text, if_absent=True))
        return self._contents

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer puts before a text (its BOS), never an end token.

        Names of control tokens become these tokens, except in what `literal` has marked. Text that a user, a data row or a model
        wrote goes through `literal` first.
        """
        text = _check_encodable(text)
        if self._alphabet is not None:
            for character in unmarked(text):
                if character not in self._alphabet:
                    raise UserError(
                        f"the character {character!r} in {text[:80]!r} is not in this tokenizer's alphabet "
                        f"{''.join(sorted(self._alphabet))!r}"
                    )
        if is_marked(text):
            tokens = self._control.encode(text)
        else:
            tokens = self._inner.encode(text, add_special_tokens=False)
        return self._before + tokens if special else tokens

    def encode_prerendered(self, text: str) -> list[int]:
        """Token ids of a prompt that a user rendered: its control tokens are parsed, and BOS is added only where it has none."""
        if self._alphabet is not None:
            return self.encode(text)  # which names a character that it does not know
        tokens: list[int] = self._inner.encode(_check_encodable(text), add_special_tokens=False)
        return tokens if tokens[: len(self._before)] == self._before else self._before + tokens

    def literal(self, text: str) -> str:
        """A text for `encode` in which names of control tokens are plain text; see `models/tokenizer.py`."""
        return self._control.literal(text)

    @staticmethod
    def shown(text: str) -> str:
        """What `literal` or `chat_text` made, as people should see it: without marks."""
        return unmarked(text)

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids, without tidying of spaces."""
        return str(
            self._inner.decode(list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        )

    def pieces(self, tokens: Sequence[int], skip_special: bool = True) -> list[str]:
        """The text each token adds; joined they are `decode(tokens, skip_special)`.

        A character whose bytes are spread over several tokens belongs to the last of them.
        """
        pieces: list[str] = []
        window, shown = 0, 0  # tokens[window:shown] is context for decoders that treat a text's first token specially
        for end in range(1, len(tokens) + 1):
            before = self.decode(tokens[window:shown], skip_special)
            text = self.decode(tokens[window:end], skip_special)
            known = end
            if text.endswith(REPLACEMENT_CHARACTER) and end < len(tokens):
                known = end - MAX_CHARACTER_BYTES if end - shown > MAX_PENDING_TOKENS else shown
                part = self.decode(tokens[window:known], skip_special)
                text, known = (part, known) if text.startswith(part) else (before, shown)
            pieces.append(text[len(before) :])
            if known > shown:
                window, shown = shown, known
        return pieces

    @property
    def is_of_characters(self) -> bool:
        """Whether every token but markup is one character, and a text with any other character is refused."""
        return self._alphabet is not None

    def pipeline(self) -> dict[str, Any] | None:
        """The steps from a text to token ids, as tokenizer.json writes them; None for a tokenizer that is not made of such steps."""
        backend = getattr(self._inner, "backend_tokenizer", None)
        return None if backend is None else dict(json.loads(backend.to_str()))

    def is_special(self, token: int) -> bool:
        """Whether a token is markup (end of turn, padding) rather than text."""
        return token in self._special_ids

    def means_the_same_as(self, other: Tokenizer) -> bool:
        """Whether every token id stands for the same text in both, so that ids of one can be given to the other's model."""
        return bool(self._inner.get_vocab() == other._inner.get_vocab()) and self._special_ids == other._special_ids

    def difference_to(self, other: Tokenizer) -> str:
        """What differs first where ids do not stand for the same text in both, in words; empty where they do."""
        mine, theirs = self._inner.get_vocab(), other._inner.get_vocab()
        if mine == theirs:
            return "" if self._special_ids == other._special_ids else "other tokens are markup"
        ours = {token: text for text, token in theirs.items()}
        token, text = next(((i, t) for t, i in mine.items() if ours.get(i) != t), (-1, ""))
        first = f", and token {token} is {text!r} instead of {ours.get(token)!r}" if token >= 0 else ""
        return f"{len(mine):,} tokens instead of {len(theirs):,}{first}"

    def chat_template_mentions(self, variable: str) -> bool:
        """Whether the chat template knows a variable; one it does not know would be ignored without a word."""
        return re.search(rf"\b{re.escape(variable)}\b", str(self._inner.chat_template or "")) is not None

    def chat_text(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Messages as the chat template writes them, for `encode`; `kwargs` are the template's own variables.

        Names of control tokens in messages and variables are marked as plain text: `shown` takes the marks out.
        """
        if not self.has_chat_template:
            raise UserError(
                "this tokenizer has no chat template: use template.kind=plain, or add a chat template to it"
            )
        try:
            source = self._inner.get_chat_template(None, kwargs.get("tools"))
        except ValueError as error:  # several templates, none of which is the default
            raise UserError(f"this tokenizer's chat template cannot be chosen: {error}") from error
        if not messages:
            raise UserError("the chat template is asked to write a conversation of no messages")
        given = {**self._inner.special_tokens_map, **self._control.literal_values(kwargs)}
        given["add_generation_prompt"] = add_generation_prompt
        return chat_template.render(source, self._control.literal_values(messages), given)

    def chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of messages up to where the assistant starts to speak."""
        return self.encode(self.chat_text(messages, **kwargs))


def check_remote_code(directory: Path, error: BaseException) -> None:
    """The error for a directory that wants to run code of its own, where that is why transformers did not load it."""
    for name in ("tokenizer_config.json", "config.json"):
        wanted = read_json_object(directory / name).get("auto_map") if (directory / name).is_file() else None
        for_tokenizer = (
            isinstance(wanted, dict) and "AutoTokenizer" in wanted and not (directory / "tokenizer.json").is_file()
        )
        if wanted and (for_tokenizer or "trust_remote_code" in str(error)):
            classes = ", ".join(map(str, wanted.values() if isinstance(wanted, dict) else [wanted]))
            raise UserError(
                f"{directory / name} asks to run Python code of the directory ({classes}), which burnish never does: use a model that "
                "transformers knows by itself, or save its tokenizer as tokenizer.json"
            ) from error


def _one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}"


def _check_encodable(text: str) -> str:
    """A text that can be written as bytes; half of a surrogate pair (`\\ud800` in JSON) is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = text[max(0, error.start - 20) : error.start]
        raise UserError(
            f"the text has half of a surrogate pair ({text[error.start]!r}) at character {error.start + 1}, behind {where!r}: "
            "it is no character and cannot be tokenised; remove it"
        ) from error
    return text


def _alphabet(inner: Any) -> frozenset[str] | None:
    """The characters a character tokenizer knows (also after loading it from its files); None for any other."""
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "WordLevel":
        return None
    words = set(inner.get_vocab()) - set(inner.all_special_tokens)
    return frozenset(words) if all(len(w) == 1 for w in words) else None


def _prefix_ids(inner: Any) -> list[int]:
    """What the tokenizer puts before a text; what some put after it (an end token) has no place in a prompt."""
    bare: list[int] = inner.encode("a", add_special_tokens=False)
    full: list[int] = inner.encode("a", add_special_tokens=True)
    starts = (k for k in range(len(full) - len(bare) + 1) if full[k : k + len(bare)] == bare)
    return full[: next(starts, 0)]


def _eos_ids(own: int | None, generation_config: dict[str, Any]) -> tuple[int, ...]:
    more = generation_config.get("eos_token_id")
    listed = more if isinstance(more, list) else [more]
    return tuple(dict.fromkeys(i for i in (own, *listed) if i is not None))


def _first(*choices: int | None) -> int:
    return next(c for c in choices if c is not None)


def _mistral_regex_option(directory: Path, loader: Any) -> dict[str, bool]:
    """What keeps transformers from warning of Mistral's faulty pattern in a tokenizer of another family.

    It takes every directory whose config.json does not say its transformers version for one of Mistral's.
    """
    config = directory / "config.json"
    kind = read_json_object(config).get("model_type", "") if config.is_file() else ""
    is_suspect = any(name in kind for name in ("mistral", "ministral", "voxtral", "pixtral"))
    return {} if is_suspect or loader.__name__ == "AutoTokenizer" else {"fix_mistral_regex": False}


def _needs_bos(config: Path) -> bool:
    """Whether the model beside a tokenizer is of a family whose texts begin with BOS, whatever the tokenizer's files say."""
    family = FAMILIES.get(read_json_object(config).get("model_type", "")) if config.is_file() else None
    return family is not None and family.needs_bos


def _read_generation_config(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
