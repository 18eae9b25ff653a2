"""Two tokenizers of the same text: which tokens spell the same, and where both cut the text at the same byte.

The smallest unit is the byte, because a token may end inside a character (byte-level BPE, the byte tokens of SentencePiece). Rules:

- A token of text spells its bytes. `Ġthe` and `▁the` both spell ` the`, so they are the same entry of the vocabulary. If several tokens
  of a vocabulary spell the same, the lowest id that is not a byte token is the entry.
- Markup is the same if its name is. The first end token of each side is the same entry, whatever its name.
- An end token of the policy makes a group with the teacher's end token. Other markup makes a group with the teacher's token of that
  name. If the teacher has none, it does not read this token, and the token is in no group.
- The teacher reads an answer up to the first bytes that are no UTF-8 or that its tokenizer cannot spell, or changes (NFC). The tokens
  from there on are in no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from burnish.config.errors import UserError
from burnish.models.kernels.aligned_groups import SharedVocabulary
from burnish.models.tokenizer import Tokenizer

META_SPACE = "\u2581"
END = ("end", b"")
Key = tuple[str, bytes]
"""What makes two tokens of two vocabularies the same entry: its kind (text, markup, end), and its bytes or name."""


class Spelling:
    """The bytes that the tokens of a tokenizer stand for. `what` names the tokenizer in errors."""

    def __init__(self, tokenizer: Tokenizer, what: str) -> None:
        self.tokenizer = tokenizer
        pipeline = tokenizer.pipeline()
        if pipeline is None:
            raise UserError(
                f"{what} has no tokenizer.json, so the bytes of its tokens are unknown: save it as a fast tokenizer"
            )
        steps = _steps(pipeline["decoder"])
        kinds = {step["type"] for step in steps}
        if not kinds & {"ByteLevel", "Metaspace", "Fuse"}:
            raise UserError(
                f"{what} decodes with {', '.join(sorted(kinds)) or 'no decoder'}, whose tokens do not spell a text by themselves: loss gold "
                "needs a byte-level, SentencePiece or character tokenizer on both sides"
            )
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._has_meta_space = "Metaspace" in kinds or any(
            step["type"] == "Replace" and step["pattern"].get("String") == META_SPACE for step in steps
        )
        self._drops_first_space = any(
            (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            or (step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)
            for step in steps
        )
        vocabulary = pipeline["model"]["vocab"]
        pieces = (
            vocabulary.items()
            if isinstance(vocabulary, dict)
            else ((piece, i) for i, (piece, _) in enumerate(vocabulary))
        )
        self.pieces: dict[int, str] = {int(i): piece for piece, i in pieces}
        self._added = {int(token["id"]): str(token["content"]) for token in pipeline["added_tokens"]}
        self.pieces.update(self._added)
        self._bytes: dict[int, bytes | None] = {}

    @property
    def end(self) -> int | None:
        """The token that ends an answer."""
        return self.tokenizer.eos_ids[0] if self.tokenizer.eos_ids else None

    @cached_property
    def markup(self) -> dict[str, int]:
        """Markup by its name."""
        return {name: token for token, name in self._added.items() if self.tokenizer.is_control(token)}

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token of text; None for markup, and for ids that no token has."""
        if token not in self._bytes:
            self._bytes[token] = self._spell(token)
        return self._bytes[token]

    def _spell(self, token: int) -> bytes | None:
        piece = self.pieces.get(token)
        if piece is None or token in self.tokenizer.eos_ids or self.tokenizer.is_control(token):
            return None
        if token in self._added:
            return piece.encode()
        if self._is_byte_level:
            table = _byte_of_character()
            return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
        if self._is_byte_token(piece):
            return bytes([int(piece[3:5], 16)])
        return (piece.replace(META_SPACE, " ") if self._has_meta_space else piece).encode()

    def _is_byte_token(self, piece: str) -> bool:
        return self._has_byte_tokens and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")

    def of_text(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token of a piece of text, without the space that the decoder drops in front."""
        found = [self.bytes_of(token) or b"" for token in tokens]
        if self._drops_first_space and found and found[0].startswith(b" "):
            found[0] = found[0][1:]
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, up to the first character that a character tokenizer does not have."""
        if self.tokenizer.is_character_level:
            text = "".join(takewhile(self._characters.__contains__, text))
        return self.tokenizer.encode(self.tokenizer.literal(text))

    @cached_property
    def _characters(self) -> frozenset[str]:
        return frozenset(piece for piece in self.pieces.values() if len(piece) == 1)

    def keys(self, num_rows: int) -> dict[Key, int]:
        """The id of each entry of the vocabulary that the model has a row for."""
        ids = sorted(i for i in self.pieces if i < num_rows)
        ids.sort(key=lambda i: self._is_byte_token(self.pieces[i]))
        found: dict[Key, int] = {}
        for i in ids:
            spelled = self.bytes_of(i)
            if i == self.end:
                key = END
            elif spelled is None:
                key = "markup", self.pieces[i].encode()
            else:
                key = "text", spelled
            found.setdefault(key, i)
        return found


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder, with sequences of steps unfolded."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


@cache
def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(256 + k): b for k, b in enumerate(hidden)}


def shared_vocabulary(student: Spelling, teacher: Spelling, student_rows: int, teacher_rows: int) -> SharedVocabulary:
    """The entries that two vocabularies share, and the others. Rows of a head without a token are in neither."""
    own, other = student.keys(student_rows), teacher.keys(teacher_rows)
    shared = [(i, other[key]) for key, i in own.items() if key in other]
    pairs = torch.tensor(sorted(shared), dtype=torch.long).reshape(-1, 2)
    rest = [
        torch.tensor(sorted({i for i in side.pieces if i < rows} - set(ids)), dtype=torch.long)
        for side, rows, ids in (
            (student, student_rows, pairs[:, 0].tolist()),
            (teacher, teacher_rows, pairs[:, 1].tolist()),
        )
    ]
    return SharedVocabulary(pairs[:, 0], pairs[:, 1], *rest)


class Alignment(NamedTuple):
    """An answer in the tokens of both sides. Groups are numbered from 0; -1 is a token in none."""

    student_groups: list[int]
    teacher_tokens: list[int]
    teacher_groups: list[int]


def align(tokens: Sequence[int], student: Spelling, teacher: Spelling) -> Alignment:
    """The answer as the teacher's tokenizer writes it, and the smallest groups of tokens that spell the same."""
    own, read, read_groups = [-1] * len(tokens), list[int](), list[int]()
    start = num = 0
    while start < len(tokens):
        if student.bytes_of(tokens[start]) is None:
            partner = _partner(tokens[start], student, teacher)
            if partner is not None:
                own[start] = num
                read.append(partner)
                read_groups.append(num)
                num += 1
            start += 1
            continue
        stop = start
        while stop < len(tokens) and student.bytes_of(tokens[stop]) is not None:
            stop += 1
        spelled = student.of_text(tokens[start:stop])
        text = _valid_text(b"".join(spelled))
        written = teacher.encode(text)
        groups = matching_groups(spelled, teacher.of_text(written))
        for i, j, k, m in groups:
            own[start + i : start + j] = [num] * (j - i)
            read += written[k:m]
            read_groups += [num] * (m - k)
            num += 1
        if not groups or groups[-1][1] < stop - start:
            break  # what follows would be behind another text
        start = stop
    return Alignment(own, read, read_groups)


def _partner(token: int, student: Spelling, teacher: Spelling) -> int | None:
    """The teacher's markup for markup of the student."""
    named = teacher.markup.get(student.pieces.get(token, ""))
    if token in student.tokenizer.eos_ids:
        return named if named in teacher.tokenizer.eos_ids else teacher.end
    return named


def _valid_text(spelled: bytes) -> str:
    """The text up to the first bytes that are no character."""
    try:
        return spelled.decode()
    except UnicodeDecodeError as error:
        return spelled[: error.start].decode()


def matching_groups(left: Sequence[bytes], right: Sequence[bytes]) -> list[tuple[int, int, int, int]]:
    """(start, stop) on the left and on the right of the smallest groups with the same bytes, up to the first difference."""
    groups: list[tuple[int, int, int, int]] = []
    i = k = 0
    while i < len(left) and k < len(right):
        first, other, a, b = i, k, left[i], right[k]
        i, k = i + 1, k + 1
        while len(a) != len(b):
            if len(a) < len(b):
                if i == len(left):
                    return groups
                a, i = a + left[i], i + 1
            else:
                if k == len(right):
                    return groups
                b, k = b + right[k], k + 1
        if a != b:
            return groups
        groups.append((first, i, other, k))
    return groups
