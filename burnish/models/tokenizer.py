"""The tokenizer: a wrapper of a `transformers` tokenizer, from a directory or from an alphabet for the built-in tasks.

Names of control tokens in text from outside stay text (`control_tokens.py`). The tokenizer of a vision-language model has the model's
image processor. `transformers` is imported on first use only, so that importing this module stays cheap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from burnish.config.errors import UserError
from burnish.config.yaml_text import read_json_object
from burnish.models import chat_template
from burnish.models.control_tokens import ControlTokens, is_marked, unmarked
from burnish.models.model_families import FAMILIES
from burnish.run.checkpoint.snapshot import BytesFile, Content, write_contents

if TYPE_CHECKING:
    from burnish.models.vision.interfaces import ImageProcessor

PAD, EOS = "<pad>", "<eos>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
GENERATION_CONFIG = "generation_config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that describe how a model's images are resized."""
VISION_FRAME = ("<|vision_start|>", "<|vision_end|>")
REPLACEMENT_CHARACTER = "\ufffd"
"""What a decoder writes for bytes that are not yet a whole character."""
MAX_CHARACTER_BYTES = 4
"""Bytes, and so tokens, of one character at most."""
MAX_PENDING_TOKENS = 16
"""Tokens that may wait for the end of a character. More are not text, and decoding all of them for each new token would become slow."""


class Tokenizer:
    """Encodes, decodes and renders chats. Token ids are plain lists."""

    def __init__(
        self,
        inner: Any,
        generation_config: dict[str, Any] | None = None,
        needs_bos: bool = False,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self._inner = inner
        self.image_processor = image_processor
        """Resizes images and writes their placeholder tokens; None for a model that reads text only."""
        self._generation_config = generation_config or {}
        # These classes add nothing to the decoding of `tokenizers` but checks of each token, which take most of its time.
        is_plain = type(inner).__name__ in ("PreTrainedTokenizerFast", "TokenizersBackend")
        self._backend = inner.backend_tokenizer if is_plain else None
        self._alphabet = _alphabet(inner)
        self._special_ids = frozenset(inner.all_special_ids) | {
            i for i, token in inner.added_tokens_decoder.items() if token.special
        }
        self._prefix = [] if self._alphabet is not None else _prefix_ids(inner)
        if needs_bos and inner.bos_token_id is not None and self._prefix[:1] != [inner.bos_token_id]:
            self._prefix = [inner.bos_token_id, *self._prefix]
        self.eos_ids: tuple[int, ...] = _eos_ids(inner.eos_token_id, self._generation_config)
        """Tokens that end a completion: the tokenizer's own first, then those of generation_config.json."""
        self.pad_id: int = _first(inner.pad_token_id, *self.eos_ids, 0)
        self.vocab_size: int = len(inner)
        self._contents: list[Content] | None = None  # its saved files, which never change
        self._more_files: dict[str, str] = {}

    @property
    def has_chat_template(self) -> bool:
        return self._inner.chat_template is not None

    @cached_property
    def _control(self) -> ControlTokens:
        marks = () if self.image_processor is None else self._media_marks(self.image_processor)
        return ControlTokens(self._inner, (*self.eos_ids, *marks))

    @staticmethod
    def _media_marks(processor: ImageProcessor) -> set[int]:
        """Tokens that stand for images: their names in a text are text, also if the tokenizer has them as plain tags (`<image>`)."""
        marks = {processor.image_mark, processor.video_mark, *processor.placeholder_tokens}
        return {token for token in marks if token is not None}

    @classmethod
    def load(cls, directory: str | Path, image_pixels: Sequence[int] | None = None) -> Tokenizer:
        """Load the tokenizer of a Hugging Face directory; nothing is fetched from the network.

        `image_pixels` are the fewest and most pixels of a resized image; None has the limits of the directory's processor.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise UserError(f"no tokenizer at {directory}: it is not a directory")
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(
                f"no tokenizer in {directory}: expected one of {', '.join(TOKENIZER_FILES)}; "
                "copy the tokenizer files of the model there (tokenizer.json and tokenizer_config.json)"
            )
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # type: ignore[attr-defined]  # mypy leaves out transformers.models

        # tokenizer.json defines the splitting completely. For some model types (qwen2) AutoTokenizer would build the
        # family's usual pre-tokenizer instead, which loses the characters of a character-level tokenizer.
        loader: Any = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
        try:
            inner = loader.from_pretrained(
                str(directory),
                local_files_only=True,
                trust_remote_code=False,
                **_mistral_regex_option(directory, loader),
            )
        except Exception as error:  # the libraries raise anything for a damaged file
            check_remote_code(directory, error)
            raise UserError(f"the tokenizer in {directory} does not load: {_one_line(error)}") from error
        for word in ("fix_mistral_regex", "trust_remote_code"):  # options of the loader that must not be saved
            inner.init_kwargs.pop(word, None)
        processor = _load_processor(directory, image_pixels)
        if processor is not None and inner.chat_template is None:
            inner.chat_template = _processor_template(directory)
        generation_config = _read_generation_config(directory / GENERATION_CONFIG)
        return cls(inner, generation_config, _needs_bos(directory / "config.json"), processor)

    @classmethod
    def from_characters(
        cls,
        alphabet: str,
        marks: Sequence[str] = (),
        chat_template: str | None = None,
        more_files: Mapping[str, str] | None = None,
    ) -> Tokenizer:
        """One token per character of the alphabet behind `<pad>`, `<eos>` and other special tokens (`marks`).

        `more_files` are saved with it, by name.
        """
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend
        from transformers import PreTrainedTokenizerFast

        if len(set(alphabet)) != len(alphabet):
            raise UserError(f"the alphabet {alphabet!r} has a character twice")
        backend = Backend(models.WordLevel({text: i for i, text in enumerate([PAD, EOS, *marks, *alphabet])}))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        special = {"additional_special_tokens": list(marks)} if marks else {}
        inner = PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False, **special
        )
        inner.chat_template = chat_template
        tokenizer = cls(inner)
        tokenizer._more_files = dict(more_files or {})
        return tokenizer

    def save(self, directory: str | Path) -> None:
        """Write files that `transformers.AutoTokenizer` loads."""
        write_contents(Path(directory), self.contents())

    def contents(self) -> Sequence[Content]:
        """The files of `save` as data, so that a writer thread does not use the tokenizer while another thread encodes.

        They include the end tokens of generation_config.json, unless the directory has its own; without them a model
        loaded from a checkpoint would not stop.
        """
        if self._contents is None:
            with TemporaryDirectory() as folder:
                self._inner.save_pretrained(folder)
                files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
                self._contents = [BytesFile(str(path.relative_to(folder)), path.read_bytes()) for path in files]
            self._contents += [BytesFile(name, text, if_absent=True) for name, text in self._more_files.items()]
            if self._generation_config:
                text = json.dumps(self._generation_config, indent=2) + "\n"
                self._contents.append(BytesFile(GENERATION_CONFIG, text, if_absent=True))
        return self._contents

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text; `special` adds the tokens that start a text (BOS), never an end token.

        Names of control tokens become these tokens unless `literal` has marked them. Text from a user, a data row or a
        model must go through `literal` first.
        """
        text = _check_encodable(text)
        if self._alphabet is not None:
            # A chat template writes names of control tokens, whose characters need not be in the alphabet.
            for character in unmarked(self._control.without_names(text) if self.has_chat_template else text):
                if character not in self._alphabet:
                    raise UserError(
                        f"the character {character!r} in {text[:80]!r} is not in this tokenizer's alphabet "
                        f"{_shortened(''.join(sorted(self._alphabet)))}"
                    )
        if is_marked(text):
            tokens = self._control.encode(text)
        else:
            tokens = self._inner.encode(text, add_special_tokens=False)
        return self._prefix + tokens if special else tokens

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text as `encode` gives them, and the first and last character (exclusive) of each token in the text.

        The marks of `literal` count as characters. Raises for a tokenizer without tokenizer.json, which does not know.
        """
        backend = self._control.unmarking if is_marked(text) else getattr(self._inner, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"a {type(self._inner).__name__} does not tell which characters a token stands for, which algorithm.auxiliary.observations "
                "needs: save the tokenizer with a tokenizer.json"
            )
        found = backend.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def encode_prerendered(self, text: str) -> list[int]:
        """Token ids of a prompt that the user has rendered: control tokens are parsed, and BOS is added if it is missing."""
        if self._alphabet is not None:
            return self.encode(text)  # reports characters outside the alphabet
        tokens: list[int] = self._inner.encode(_check_encodable(text), add_special_tokens=False)
        return tokens if tokens[: len(self._prefix)] == self._prefix else self._prefix + tokens

    def literal(self, text: str) -> str:
        """Mark the names of control tokens in a text, so that `encode` treats them as plain text."""
        return self._control.literal(text)

    @staticmethod
    def unmarked(text: str) -> str:
        """A result of `literal` or `chat_text` without marks, for people to read."""
        return unmarked(text)

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids, without clean-up of spaces."""
        if self._backend is not None:
            return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special))
        return str(
            self._inner.decode(list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        )

    def pieces(self, tokens: Sequence[int], skip_special: bool = True) -> list[str]:
        """The text that each token adds; joined they equal `decode(tokens, skip_special)`.

        A character whose bytes span several tokens belongs to the last of them.
        """
        plain = self.plain_pieces
        known_texts = [*(plain[token] for token in tokens), None]
        pieces: list[str] = []
        # tokens[window:shown] is context, since decoders treat the first token of a text specially
        window, shown = 0, 0
        while (end := len(pieces) + 1) <= len(tokens):
            if shown == len(pieces) and known_texts[shown] is not None:
                stop = known_texts.index(None, shown)
                pieces += cast(list[str], known_texts[shown:stop])
                window, shown = stop - 1, stop
                continue
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

    @cached_property
    def plain_pieces(self) -> Mapping[int, str | None]:
        """The text of each token that adds the same text wherever it stands after whole characters; None for other tokens."""
        return PlainPieces(self._backend, self._special_ids)

    @property
    def is_character_level(self) -> bool:
        """Whether every token but markup is one character; `encode` then raises for characters outside the alphabet."""
        return self._alphabet is not None

    def pipeline(self) -> dict[str, Any] | None:
        """The contents of tokenizer.json: the steps from text to token ids; None for a tokenizer without one."""
        backend = getattr(self._inner, "backend_tokenizer", None)
        return None if backend is None else dict(json.loads(backend.to_str()))

    def has_special(self, tokens: Iterable[int]) -> bool:
        """Whether one of the tokens is markup."""
        return not self._special_ids.isdisjoint(tokens)

    def is_special(self, token: int) -> bool:
        """Whether a token is markup (end of turn, padding) rather than text."""
        return token in self._special_ids

    def is_control(self, token: int) -> bool:
        """Whether a token is markup whose name `literal` keeps out of texts; also `<｜User｜>`, which is not special."""
        return token in self._special_ids or token in self._control.ids

    def find_control(self, text: str) -> int | None:
        """Where the first control token stands in a rendered text; None if it has none."""
        return self._control.find(text)

    def special_ids(self, names: Iterable[str]) -> frozenset[int]:
        """Ids of the special tokens among some names."""
        return frozenset(self._special_names[name] for name in names if name in self._special_names)

    def special_names_in(self, text: str) -> list[str]:
        """The names of special tokens that stand in a text."""
        return [name for name in self._special_names if name in text]

    @cached_property
    def _special_names(self) -> dict[str, int]:
        """The special tokens by their names. Reading a vocabulary of 150,000 tokens takes 0.2 s, too long for each row of a file."""
        return {str(self._inner.convert_ids_to_tokens(token)): token for token in self._special_ids}

    def ends_with_control(self, text: str) -> bool:
        """Whether a rendered text ends with a control token."""
        return text.endswith(tuple(self._control.names))

    def has_same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether every token id stands for the same text in both, so that ids of one are valid for the other's model."""
        return bool(self._inner.get_vocab() == other._inner.get_vocab()) and self._special_ids == other._special_ids

    def difference_to(self, other: Tokenizer) -> str:
        """The first difference between two vocabularies, in words; empty if `has_same_vocabulary`."""
        mine, theirs = self._inner.get_vocab(), other._inner.get_vocab()
        if mine == theirs:
            return "" if self._special_ids == other._special_ids else "other tokens are markup"
        ours = {token: text for text, token in theirs.items()}
        token, text = next(((i, t) for t, i in mine.items() if ours.get(i) != t), (-1, ""))
        first = f", and token {token} is {text!r} instead of {ours.get(token)!r}" if token >= 0 else ""
        return f"{len(mine):,} tokens instead of {len(theirs):,}{first}"

    def chat_template_mentions(self, variable: str) -> bool:
        """Whether the chat template uses a variable; one that it does not use would be ignored silently."""
        return re.search(rf"\b{re.escape(variable)}\b", str(self._inner.chat_template or "")) is not None

    def chat_template_source(self) -> str:
        """The source of the chat template for prompts with tools; empty without a template."""
        templates = self._inner.chat_template
        if isinstance(templates, dict):  # named templates: transformers takes `tool_use` where there are tools
            return str(templates.get("tool_use") or templates.get("default") or "")
        return str(templates or "")

    def chat_template_searches(self) -> tuple[str, ...]:
        """The texts that the chat template searches for in messages (`chat_template.searched_texts`)."""
        template = self._inner.chat_template or ""
        sources = template.values() if isinstance(template, dict) else [template]
        return tuple(dict.fromkeys(text for source in sources for text in chat_template.searched_texts(str(source))))

    def chat_text(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Messages rendered by the chat template, for `encode`; `kwargs` are variables of the template.

        Names of control tokens in messages and variables are marked as plain text; `unmarked` removes the marks.
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
            raise UserError("the chat template needs at least one message, got none")
        given = {**self._inner.special_tokens_map, **self._control.literal_values(kwargs)}
        given["add_generation_prompt"] = add_generation_prompt
        if self._needs_blocks:
            messages = [_as_blocks(message) for message in messages]
        text = chat_template.render(source, self._control.literal_values(messages), given)
        for name, (before, after) in self._texts_around_marks.items():
            text = text.replace(name, before + name + after)  # text of a message has no unmarked name
        return text

    @cached_property
    def _texts_around_marks(self) -> dict[str, tuple[str, str]]:
        """Texts that stand before and after the mark of an image or a video, by the mark's name."""
        around = {} if self.image_processor is None else self.image_processor.texts_around
        return {str(self._inner.convert_ids_to_tokens(mark)): texts for mark, texts in around.items()}

    @cached_property
    def _needs_blocks(self) -> bool:
        """Whether the chat template reads contents as lists of blocks only. Such a template (SmolVLM's) drops a plain text."""
        if self.image_processor is None:
            return False
        source, word = self.chat_template_source(), "needle"

        def is_written(content: Any) -> bool:
            try:
                given = {**self._inner.special_tokens_map, "add_generation_prompt": True}
                return word in chat_template.render(source, [{"role": "user", "content": content}], given)
            except UserError:
                return False

        return not is_written(word) and is_written([{"type": "text", "text": word}])

    def media_mark(self, kind: str) -> str:
        """What stands for an image or a video in a text that no chat template renders. Qwen's models have it between two tokens."""
        assert self.image_processor is not None
        mark = self.image_processor.image_mark if kind == "image" else self.image_processor.video_mark
        if mark is None:
            raise UserError("this model reads images, but no videos")
        name = str(self._inner.convert_ids_to_tokens(mark))
        vocabulary = self._inner.get_vocab()
        is_framed = all(frame in vocabulary for frame in VISION_FRAME)
        before, after = self._texts_around_marks.get(name, VISION_FRAME if is_framed else ("", ""))
        return before + name + after

    def chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of messages up to the start of the assistant's turn."""
        return self.encode(self.chat_text(messages, **kwargs))


class PlainPieces(dict[int, "str | None"]):
    """The texts of tokens that do not depend on their neighbours, each computed when it is first asked for.

    Byte-level and character-level decoders join what the tokens stand for. Of their tokens only special ones and those with a part of a
    character are None. Other decoders, which strip or join spaces, give None for every token.
    """

    def __init__(self, backend: Any, special_ids: Container[int]) -> None:
        super().__init__()
        self._special_ids = special_ids
        is_plain = type(getattr(backend, "decoder", None)).__name__ in ("ByteLevel", "Fuse")
        self._backend = backend if is_plain else None

    def __missing__(self, token: int) -> str | None:
        piece = None
        if self._backend is not None and token not in self._special_ids:
            piece = self._backend.decode([token], skip_special_tokens=False) or None
            if piece is not None and REPLACEMENT_CHARACTER in piece:
                piece = None
        self[token] = piece
        return piece


def check_remote_code(directory: Path, error: BaseException) -> None:
    """Raise if transformers did not load a directory because it needs to run Python code of its own."""
    for name in ("tokenizer_config.json", "config.json"):
        wanted = read_json_object(directory / name).get("auto_map") if (directory / name).is_file() else None
        for_tokenizer = (
            isinstance(wanted, dict) and "AutoTokenizer" in wanted and not (directory / "tokenizer.json").is_file()
        )
        if wanted and (for_tokenizer or "trust_remote_code" in str(error)):
            classes = ", ".join(map(str, wanted.values() if isinstance(wanted, dict) else [wanted]))
            raise UserError(
                f"{directory / name} asks to run Python code of the directory ({classes}), which burnish never does: use a model that "
                "transformers supports by itself, or save its tokenizer as tokenizer.json"
            ) from error


def _one_line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return message if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {message}"


def _shortened(alphabet: str) -> str:
    """An alphabet in a message: whole if a line holds it."""
    return repr(alphabet) if len(alphabet) <= 100 else f"of {len(alphabet):,} characters, {alphabet[:60]!r} and others"


def _check_encodable(text: str) -> str:
    """Raise if a text cannot be encoded as UTF-8: half of a surrogate pair (`\\ud800` in JSON) is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = text[max(0, error.start - 20) : error.start]
        raise UserError(
            f"the text has half of a surrogate pair ({text[error.start]!r}) at character {error.start + 1}, behind {where!r}: "
            "it is not a character and cannot be tokenised; remove it"
        ) from error
    return text


def _alphabet(inner: Any) -> frozenset[str] | None:
    """The alphabet of a character-level tokenizer, also after loading it from its files; None for any other."""
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "WordLevel":
        return None
    words = set(inner.get_vocab()) - set(inner.all_special_tokens)
    return frozenset(words) if all(len(w) == 1 for w in words) else None


def _prefix_ids(inner: Any) -> list[int]:
    """The tokens that a tokenizer puts before a text. What some put after it (an end token) must not be in a prompt."""
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
    """Loader option that prevents a false warning about Mistral's faulty pattern in tokenizers of other families.

    transformers warns for every directory whose config.json does not state its transformers version.
    """
    config = directory / "config.json"
    kind = read_json_object(config).get("model_type", "") if config.is_file() else ""
    is_suspect = any(name in kind for name in ("mistral", "ministral", "voxtral", "pixtral"))
    return {} if is_suspect or loader.__name__ == "AutoTokenizer" else {"fix_mistral_regex": False}


def _needs_bos(config: Path) -> bool:
    """Whether the model of a directory belongs to a family whose texts always begin with BOS."""
    family = FAMILIES.get(read_json_object(config).get("model_type", "")) if config.is_file() else None
    return family is not None and family.needs_bos


def _load_processor(directory: Path, image_pixels: Sequence[int] | None) -> ImageProcessor | None:
    """The image processor of a directory; None for a text model, without importing any of it."""
    config = read_json_object(directory / "config.json") if (directory / "config.json").is_file() else {}
    if "vision_config" not in config and not any((directory / name).is_file() for name in PROCESSOR_FILES):
        return None
    from burnish.models.vision.processors import MODEL_LIMITS, PixelLimits, load_processor

    return load_processor(directory, MODEL_LIMITS if image_pixels is None else PixelLimits(*image_pixels))


def _processor_template(directory: Path) -> str | None:
    """The chat template of older vision-language directories, which is not among the tokenizer's files."""
    path = directory / "chat_template.json"
    found = read_json_object(path).get("chat_template") if path.is_file() else None
    return found if isinstance(found, str) else None


def _as_blocks(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _read_generation_config(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
